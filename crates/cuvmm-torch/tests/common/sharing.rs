//! Publications and attachments, as the Python package asks for them.

use std::ffi::{CString, c_char, c_int};

use serde_json::{Value, json};

use super::Torch;

/// The functions of publications.
pub(crate) struct Sharing {
    pub(crate) torch: Torch,
    pub(crate) publish: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int,
    pub(crate) withdraw: unsafe extern "C" fn(*const c_char, *const c_char) -> c_int,
    pub(crate) attach: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int,
    pub(crate) attached: unsafe extern "C" fn(u64, *mut c_char, usize) -> usize,
    pub(crate) newer: unsafe extern "C" fn(u64, u64, *mut u64) -> c_int,
    pub(crate) detach: unsafe extern "C" fn(u64) -> c_int,
    pub(crate) folder: tempfile::TempDir,
}

impl Sharing {
    pub(crate) fn load() -> Self {
        Self::of(Torch::load())
    }

    pub(crate) fn of(torch: Torch) -> Self {
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

    pub(crate) fn path(&self) -> String {
        self.folder
            .path()
            .join("socket")
            .to_str()
            .unwrap()
            .to_owned()
    }

    /// Returns a request to publish bytes of the device as one tensor of bytes.
    pub(crate) fn request(&self, name: &str, address: usize, size: usize) -> Value {
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

    pub(crate) fn outcome(&self, code: c_int, number: u64) -> Result<u64, (c_int, String)> {
        match code {
            0 => Ok(number),
            code => Err((code, self.torch.last_error())),
        }
    }

    pub(crate) fn publish(&self, request: &Value) -> Result<u64, (c_int, String)> {
        let request = CString::new(request.to_string()).unwrap();
        let mut version = 0;
        // SAFETY: the tests name memory that is there.
        let code = unsafe { (self.publish)(request.as_ptr(), &mut version) };
        self.outcome(code, version)
    }

    pub(crate) fn attach(&self, name: &str, path: Option<&str>) -> Result<u64, (c_int, String)> {
        let request = json!({ "name": name, "path": path, "device": 0 }).to_string();
        let request = CString::new(request).unwrap();
        let mut number = 0;
        // SAFETY: the text is terminated.
        let code = unsafe { (self.attach)(request.as_ptr(), &mut number) };
        self.outcome(code, number)
    }

    pub(crate) fn describe(&self, number: u64) -> Value {
        let mut text = vec![0_u8; 4096];
        // SAFETY: the buffer has this number of bytes.
        let length = unsafe { (self.attached)(number, text.as_mut_ptr().cast(), text.len()) };
        serde_json::from_slice(&text[..length - 1]).unwrap()
    }

    pub(crate) fn withdraw(&self, name: &str) -> Result<u64, (c_int, String)> {
        let (name, path) = (
            CString::new(name).unwrap(),
            CString::new(self.path()).unwrap(),
        );
        // SAFETY: the texts are terminated.
        let code = unsafe { (self.withdraw)(name.as_ptr(), path.as_ptr()) };
        self.outcome(code, 0)
    }

    pub(crate) fn detach(&self, number: u64) -> Result<u64, (c_int, String)> {
        // SAFETY: the tests do not use memory that they have detached.
        let code = unsafe { (self.detach)(number) };
        self.outcome(code, 0)
    }
}
