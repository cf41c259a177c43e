//! Publications and attachments, over the stand-in for libcuda. The Python package's tests have the
//! rest.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

use crate::common::sharing::Sharing;
use crate::common::{Cuda, MIB, over_a_driver_that_refuses, over_the_stand_in};
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::share::{Keeper, Manifest, Subscriber, Tensor};
use cuvmm::{Attachment, Device, Publisher, Region, Stream};
use serde_json::{Value, json};

fn refused<T: std::fmt::Debug>(outcome: Result<T, (i32, String)>, code: i32, text: &str) {
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

    a_publication_that_is_kept_is_attached_from_the_keeper_after_its_end [] says [] {
        let (sharing, cuda) = (Sharing::load(), Cuda::load());
        type Keep =
            unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, *mut u64) -> c_int;
        let keep: Keep = sharing.torch.function("cuvmm_publication_keep");
        let at = sharing.folder.path().join("keeper").to_str().unwrap().to_owned();
        let text = |text: &str| CString::new(text).unwrap();
        let keep = |name: &str| {
            let (name, path, at) = (text(name), text(&sharing.path()), text(&at));
            let mut version = 0;
            // SAFETY: the texts are terminated, and the result is written to a local.
            let code = unsafe { keep(name.as_ptr(), path.as_ptr(), at.as_ptr(), &mut version) };
            sharing.outcome(code, version)
        };
        let address = sharing.torch.malloc(4 << 20, null_mut());
        cuda.fill(address, 7, 4096, null_mut());
        let request = sharing.request("model", address, 4096);
        refused(keep("model"), -4, "this process has no such name");
        assert_eq!(sharing.publish(&request), Ok(1));
        refused(keep("model"), -1, "no keeper listens");
        let keeper = Keeper::bind(&at, None).unwrap();
        assert_eq!(keep("model"), Ok(1));
        let number = sharing.attach("model", Some(&at)).unwrap();
        let described = sharing.describe(number);
        assert_eq!(described["version"], 1);
        let address = usize::try_from(described["address"].as_u64().unwrap()).unwrap();
        cuda.expect(address, 7, 4096);
        assert_eq!(sharing.withdraw("model"), Ok(0));
        assert!(keeper.list().is_empty());
        refused(sharing.attach("model", Some(&at)), -4, "model");
        cuda.expect(address, 7, 4096);
        assert_eq!(sharing.detach(number), Ok(0));
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

over_the_stand_in! {
    an_empty_publication_is_within_the_limit ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let (sharing, cuda) = (Sharing::load(), Cuda::load());
        let empty = sharing.request("empty", 0, 0);
        let all = sharing.torch.malloc(64 << 20, null_mut());
        assert_ne!(all, 0);
        let before = cuda.physicals_and_mappings();
        refused(sharing.publish(&empty), -3, "no room for 2 MiB of shareable memory");
        assert_eq!(cuda.physicals_and_mappings(), before);
        assert_eq!(sharing.torch.figure("limit"), 64 << 20);
        sharing.torch.free(all, null_mut());
        assert_eq!(sharing.publish(&empty), Ok(1));
        assert_eq!(sharing.torch.figure("limit"), 62 << 20);
        assert_eq!(sharing.torch.figure("published"), 2 << 20);
        let number = sharing.attach("empty", Some(&sharing.path())).unwrap();
        assert_eq!(sharing.describe(number)["manifest"]["tensors"][0]["size"], 0);
        assert_eq!(sharing.detach(number), Ok(0));
    }
}

over_a_driver_that_refuses! {
    /// The driver refuses calls of a publication and of an attachment. Nothing is published or attached
    /// then, and nothing is left.
    a_refusal_leaves_nothing {
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
    }
}

/// While memory of a publication is being made, neither an allocation that fails nor a new limit gives
/// the heap what the publication was promised.
mod a_promise_lowers_the_limit_until_it_is_kept {
    use super::*;

    #[test]
    fn over_the_stand_in() {
        let case = concat!(module_path!(), "::in_a_process_of_its_own");
        let lines = crate::common::run_refusing(case, &[("CUVMM_TORCH_LIMIT", "64MiB")]);
        assert!(
            lines.as_ref().is_none_or(|all| all.len() == 2),
            "{lines:#?}"
        );
    }

    #[test]
    #[ignore = "needs the stand-in; `over_the_stand_in` runs it in a process of its own"]
    fn in_a_process_of_its_own() {
        crate::common::case(|| {
            let (sharing, cuda) = (Sharing::load(), Cuda::load());
            let torch = sharing.torch;
            let function = |name| -> unsafe extern "C" fn() { cuda.function(name) };
            let (hold, arrive, go) = (
                function("refuse_hold"),
                function("refuse_await"),
                function("refuse_go"),
            );
            let set: unsafe extern "C" fn(f64, i32) = torch.function("cuvmm_memory_fraction");
            // SAFETY: it may be called at any time.
            let set = |fraction| unsafe { set(fraction, 0) };
            let limit = || torch.figure("limit") / MIB as u64;
            let source = torch.malloc(24 << 20, null_mut());
            let request = sharing.request("model", source, 24 << 20);
            // SAFETY: it may be called at any time.
            unsafe { hold() };
            std::thread::scope(|scope| {
                let published = scope.spawn(|| {
                    cuda.enter(0);
                    sharing.publish(&request)
                });
                // SAFETY: the publication creates memory.
                unsafe { arrive() };
                assert_eq!(limit(), 40);
                assert_eq!(torch.malloc(40 << 20, null_mut()), 0);
                assert_eq!(limit(), 40);
                for (fraction, left) in [(0.125, 8), (0.25, 40)] {
                    set(fraction);
                    assert_eq!(limit(), left);
                }
                assert_eq!(torch.malloc(40 << 20, null_mut()), 0);
                // SAFETY: it may be called at any time.
                unsafe { go() };
                assert_eq!(published.join().unwrap(), Ok(1));
            });
            assert_eq!(limit(), 40);
            assert!(torch.figure("held") + torch.figure("published") <= 64 << 20);
            assert_eq!(sharing.withdraw("model"), Ok(0));
            assert_eq!(limit(), 64);
        });
    }
}
