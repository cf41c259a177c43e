//! Publications and attachments, over the stand-in for libcuda. The Python package's tests have the
//! rest.
//!
//! `unsafe` is used to call the library's functions.
#![allow(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod common;

use std::ffi::{CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

use common::{Cuda, MIB, Torch, over_the_stand_in};
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::share::{Manifest, Subscriber, Tensor};
use cuvmm::{Attachment, Device, Publisher, Region, Stream};
use serde_json::{Value, json};

/// The functions of publications.
struct Sharing {
    torch: Torch,
    publish: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int,
    withdraw: unsafe extern "C" fn(*const c_char, *const c_char) -> c_int,
    attach: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int,
    attached: unsafe extern "C" fn(u64, *mut c_char, usize) -> usize,
    newer: unsafe extern "C" fn(u64, u64, *mut u64) -> c_int,
    detach: unsafe extern "C" fn(u64) -> c_int,
    folder: tempfile::TempDir,
}

impl Sharing {
    fn load() -> Self {
        let torch = Torch::load();
        Self {
            torch,
            publish: torch.function("cuvmm_publish"),
            withdraw: torch.function("cuvmm_withdraw"),
            attach: torch.function("cuvmm_attach"),
            attached: torch.function("cuvmm_attached"),
            newer: torch.function("cuvmm_newer"),
            detach: torch.function("cuvmm_detach"),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> String {
        self.folder
            .path()
            .join("socket")
            .to_str()
            .unwrap()
            .to_owned()
    }

    /// Returns a request to publish bytes of the device as one tensor of bytes.
    fn request(&self, name: &str, address: usize, size: usize) -> Value {
        json!({
            "name": name,
            "path": self.path(),
            "device": 0,
            "size": size,
            "manifest": { "tensors": [
                { "name": "it", "dtype": "U8", "shape": [size], "offset": 0, "size": size },
            ] },
            "parts": [{ "address": address, "offset": 0, "size": size, "is_host": false }],
        })
    }

    fn outcome(&self, code: c_int, number: u64) -> Result<u64, (c_int, String)> {
        match code {
            0 => Ok(number),
            code => Err((code, self.torch.last_error())),
        }
    }

    fn publish(&self, request: &Value) -> Result<u64, (c_int, String)> {
        let request = CString::new(request.to_string()).unwrap();
        let mut version = 0;
        // SAFETY: the tests name memory that is there.
        let code = unsafe { (self.publish)(request.as_ptr(), &mut version) };
        self.outcome(code, version)
    }

    fn attach(&self, name: &str, path: Option<&str>) -> Result<u64, (c_int, String)> {
        let request = json!({ "name": name, "path": path, "device": 0 }).to_string();
        let request = CString::new(request).unwrap();
        let mut number = 0;
        // SAFETY: the text is terminated.
        let code = unsafe { (self.attach)(request.as_ptr(), &mut number) };
        self.outcome(code, number)
    }

    fn describe(&self, number: u64) -> Value {
        let mut text = vec![0_u8; 4096];
        // SAFETY: the buffer has this number of bytes.
        let length = unsafe { (self.attached)(number, text.as_mut_ptr().cast(), text.len()) };
        serde_json::from_slice(&text[..length - 1]).unwrap()
    }

    fn withdraw(&self, name: &str) -> Result<u64, (c_int, String)> {
        let (name, path) = (
            CString::new(name).unwrap(),
            CString::new(self.path()).unwrap(),
        );
        // SAFETY: the texts are terminated.
        let code = unsafe { (self.withdraw)(name.as_ptr(), path.as_ptr()) };
        self.outcome(code, 0)
    }
}

fn refused<T: std::fmt::Debug>(outcome: Result<T, (c_int, String)>, code: c_int, text: &str) {
    let (found, error) = outcome.unwrap_err();
    assert!(error.contains(text), "{error}");
    assert_eq!(found, code, "{error}");
}

over_the_stand_in! {
    a_rust_program_reads_what_is_published [] says [] {
        let (sharing, cuda) = (Sharing::load(), Cuda::load());
        let stream = cuda.stream();
        let size = 3 * MIB + 100;
        let address = sharing.torch.malloc(isize::try_from(size).unwrap(), stream);
        cuda.fill(address, 6, size, stream);
        // The fill is still queued: publishing waits for it.
        assert_eq!(sharing.publish(&sharing.request("model", address, size)), Ok(1));
        let device = Device::open(Arc::new(CudaDriver::open().unwrap()), 0).unwrap();
        let mut subscriber = Subscriber::connect(sharing.path()).unwrap();
        let model = subscriber.attach("model", &Attachment::builder(&device)).unwrap();
        assert_eq!(model.view::<u8>("it").unwrap().len(), size);
        let mut bytes = vec![0; size];
        model.memory().read(&Stream::legacy(&device), 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 6));
    }

    what_a_rust_program_publishes_is_attached [] says [] {
        let (sharing, cuda) = (Sharing::load(), Cuda::load());
        let device = Device::open(Arc::new(CudaDriver::open().unwrap()), 0).unwrap();
        let shareable = cuvmm::driver::HandleTypes::POSIX_FD;
        let mut region = Region::builder(&device, 4 << 20).shareable(shareable).reserve().unwrap();
        region.commit(0..region.size()).unwrap();
        region.write(&Stream::legacy(&device), 4096, &[7; 1000]).unwrap();
        let manifest = Manifest {
            tensors: vec![Tensor {
                name: "it".to_owned(),
                dtype: "F16".to_owned(),
                shape: vec![500],
                offset: 4096,
                size: 1000,
            }],
            metadata: [("by".to_owned(), "Rust".to_owned())].into(),
        };
        let publisher = Publisher::bind(sharing.path()).unwrap();
        publisher.publish("model", manifest.clone(), region).unwrap();
        let number = sharing.attach("model", Some(&sharing.path())).unwrap();
        let described = sharing.describe(number);
        assert_eq!(described["manifest"], serde_json::to_value(&manifest).unwrap());
        assert_eq!((&described["version"], &described["device"]), (&json!(1), &json!(0)));
        let address = usize::try_from(described["address"].as_u64().unwrap()).unwrap();
        cuda.expect(address + 4096, 7, 1000);
        drop(publisher);
        let mut version = 5;
        // SAFETY: the result is written to a local.
        let code = unsafe { (sharing.newer)(number, 0, &mut version) };
        refused(sharing.outcome(code, version), -4, "no process listens");
        cuda.expect(address + 4096, 7, 1000);
        // SAFETY: nothing uses the memory.
        assert_eq!(unsafe { (sharing.detach)(number) }, 0);
    }

    wrong_requests_change_nothing [] says [] {
        let (sharing, cuda) = (Sharing::load(), Cuda::load());
        let address = sharing.torch.malloc(4 << 20, null_mut());
        let good = sharing.request("model", address, 4096);
        assert_eq!(sharing.publish(&good), Ok(1));
        let before = cuda.physicals_and_mappings();
        let changed = |path: &str, value: Value| {
            let mut request = good.clone();
            *request.pointer_mut(path).unwrap() = value;
            sharing.publish(&request)
        };
        let part = "part 0 of the publication";
        refused(changed("/parts/0/size", json!(4097)), -1, part);
        refused(changed("/parts/0/offset", json!(u64::MAX)), -1, part);
        refused(changed("/parts/0/address", json!(0)), -1, "it has no address");
        refused(changed("/name", json!("")), -1, "1 to 255 bytes");
        refused(changed("/device", json!(64)), -1, "0 to 63");
        refused(changed("/size", json!(1_u64 << 60)), -3, "out of memory");
        refused(changed("/manifest/tensors/0/offset", json!(4 << 20)), -1, "it");
        refused(changed("/parts/0/is_host", json!(1)), -1, "not understood");
        // Nothing is mapped at the address: the copy is refused.
        refused(changed("/parts/0/address", json!(4096)), -1, "CUDA_ERROR");
        refused(sharing.publish(&json!({ "name": "model" })), -1, "not understood");
        // SAFETY: null is allowed.
        let code = unsafe { (sharing.publish)(null_mut(), null_mut()) };
        assert_eq!(code, -1);
        assert_eq!(cuda.physicals_and_mappings(), before);
        let number = sharing.attach("model", Some(&sharing.path())).unwrap();
        assert_eq!(sharing.describe(number)["version"], 1);
        refused(sharing.attach("other", Some(&sharing.path())), -4, "other");
        // SAFETY: null is allowed, and no such number is attached.
        unsafe {
            assert_eq!((sharing.newer)(number, 0, null_mut()), -1);
            assert_eq!((sharing.detach)(number + 1), -1);
            assert_eq!((sharing.attached)(number + 1, null_mut(), 0), 0);
        }
        refused(sharing.withdraw("other"), -4, "this process has no such name");
        assert_eq!(sharing.withdraw("model"), Ok(0));
        refused(sharing.withdraw("model"), -4, "this process has no such name");
    }
}

/// The driver refuses calls of a publication and of an attachment. Nothing is published or attached
/// then, and nothing is left.
mod a_refusal_leaves_nothing {
    use super::*;

    #[test]
    fn over_the_stand_in() {
        let folder = tempfile::tempdir().unwrap();
        if !common::refusing_in(folder.path()) {
            return;
        }
        let case = "a_refusal_leaves_nothing::in_a_process_of_its_own";
        let path = folder.path().to_str().unwrap();
        let lines = common::run(case, &[("LD_LIBRARY_PATH", path)]);
        assert!(lines.is_empty(), "{lines:#?}");
    }

    #[test]
    #[ignore = "needs the stand-in; `over_the_stand_in` runs it in a process of its own"]
    fn in_a_process_of_its_own() {
        common::case(|| {
            let (sharing, cuda) = (Sharing::load(), Cuda::load());
            let refuse: unsafe extern "C" fn(i64, i64) = cuda.function("refuse_after");
            let address = sharing.torch.malloc(6 << 20, null_mut());
            let request = sharing.request("model", address, 6 << 20);
            let before = cuda.physicals_and_mappings();
            // SAFETY: it may be called at any time.
            let refuse = |map| unsafe { refuse(-1, map) };
            let mut refused = 0;
            loop {
                refuse(refused);
                let outcome = sharing.publish(&request);
                refuse(-1);
                let Err((_, error)) = outcome else { break };
                assert!(error.contains("CUDA_ERROR_UNKNOWN"), "{error}");
                assert_eq!(cuda.physicals_and_mappings(), before);
                let (code, _) = sharing.attach("model", Some(&sharing.path())).unwrap_err();
                assert_eq!(code, -4);
                refused += 1;
            }
            assert!(refused >= 1, "{refused}: a mapping");
            let published = cuda.physicals_and_mappings();
            let mut refused = 0;
            loop {
                refuse(refused);
                let outcome = sharing.attach("model", Some(&sharing.path()));
                refuse(-1);
                let Err((_, error)) = outcome else { break };
                assert!(error.contains("CUDA_ERROR_UNKNOWN"), "{error}");
                assert_eq!(cuda.physicals_and_mappings(), published);
                refused += 1;
            }
            assert!(refused >= 1, "{refused}: a mapping");
        });
    }
}
