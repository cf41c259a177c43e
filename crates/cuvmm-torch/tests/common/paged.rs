//! Paged caches, as `cuvmm.torch.paged_kv` asks for them.

use std::ffi::{CString, c_char, c_int, c_void};

use super::{Handle, Torch};

type Collector = Option<unsafe extern "C" fn()>;
pub(crate) type OnPressure = unsafe extern "C" fn(u64, u64);

/// The functions of paged caches.
#[derive(Clone, Copy)]
pub(crate) struct Paged {
    pub(crate) torch: Torch,
    new: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int,
    end: unsafe extern "C" fn(u64),
    pub(crate) back: unsafe extern "C" fn(u64, *const c_void, usize, c_int, Collector) -> c_int,
    try_back: unsafe extern "C" fn(u64, *const c_void, usize, c_int) -> c_int,
    request: unsafe extern "C" fn(u64, *const c_void, usize, c_int, *mut u64) -> c_int,
    done: unsafe extern "C" fn(u64) -> c_int,
    wait: unsafe extern "C" fn(u64, f64) -> c_int,
    take: unsafe extern "C" fn(u64) -> c_int,
    withdraw: unsafe extern "C" fn(u64) -> c_int,
    pub(crate) reserve: unsafe extern "C" fn(u64, u32, Collector) -> c_int,
    release: unsafe extern "C" fn(u64, *const c_void, usize, c_int) -> c_int,
    begin: unsafe extern "C" fn(u64, *mut u64) -> c_int,
    finish: unsafe extern "C" fn(u64, u64),
    can: unsafe extern "C" fn(u64, u32) -> c_int,
    pub(crate) emptiest: unsafe extern "C" fn(
        u64,
        u64,
        *const c_void,
        usize,
        c_int,
        *mut u32,
        *mut [u64; 2],
    ) -> c_int,
    record: unsafe extern "C" fn(u64, Handle) -> c_int,
    purge: unsafe extern "C" fn(u64, *mut u64) -> c_int,
    on_pressure: unsafe extern "C" fn(u64, Option<OnPressure>) -> c_int,
    stats: unsafe extern "C" fn(u64, *mut c_char, usize) -> usize,
    view: unsafe extern "C" fn(u64, u32, u32, u32, *mut c_char, usize) -> usize,
}

impl Paged {
    pub(crate) fn load() -> Self {
        let torch = Torch::load();
        Self {
            torch,
            new: torch.function("cuvmm_paged_new"),
            end: torch.function("cuvmm_paged_end"),
            back: torch.function("cuvmm_paged_back"),
            try_back: torch.function("cuvmm_paged_try_back"),
            request: torch.function("cuvmm_paged_request"),
            done: torch.function("cuvmm_paged_request_done"),
            wait: torch.function("cuvmm_paged_request_wait"),
            take: torch.function("cuvmm_paged_request_take"),
            withdraw: torch.function("cuvmm_paged_request_end"),
            reserve: torch.function("cuvmm_paged_reserve"),
            release: torch.function("cuvmm_paged_release"),
            begin: torch.function("cuvmm_paged_step_begin"),
            finish: torch.function("cuvmm_paged_step_end"),
            can: torch.function("cuvmm_paged_can_allocate"),
            emptiest: torch.function("cuvmm_paged_emptiest"),
            record: torch.function("cuvmm_paged_record"),
            purge: torch.function("cuvmm_paged_purge"),
            on_pressure: torch.function("cuvmm_paged_on_pressure"),
            stats: torch.function("cuvmm_paged_stats"),
            view: torch.function("cuvmm_paged_view"),
        }
    }

    /// Makes a cache of blocks of 1 MiB on device 0, in extents of a granule, with further settings.
    pub(crate) fn cache(&self, name: &str, blocks: u32, more: &str) -> Result<u64, String> {
        let group = r#"{"layers": 2, "tokens": 16, "parts": [[8, 1024, 2], [8, 1024, 2]]}"#;
        self.made(&format!(
            r#"{{"device": 0, "stream": 0, "name": "{name}", "blocks": {blocks}, "groups": [{group}],
                "extent": {} {more}}}"#,
            2 << 20
        ))
    }

    pub(crate) fn made(&self, json: &str) -> Result<u64, String> {
        let (json, mut token) = (CString::new(json).unwrap(), 0);
        // SAFETY: the text is terminated, and the token can be written.
        self.outcome(unsafe { (self.new)(json.as_ptr(), &raw mut token) })?;
        Ok(token)
    }

    /// Passes null for each argument in turn.
    pub(crate) fn refuses_null(&self, token: u64) {
        let mut written = 0;
        // SAFETY: null is allowed, and the token can be written.
        unsafe {
            assert_eq!((self.new)(std::ptr::null(), &raw mut written), -1);
            assert_eq!((self.new)(c"{}".as_ptr(), std::ptr::null_mut()), -1);
            assert_eq!((self.begin)(token, std::ptr::null_mut()), -1);
            assert_eq!((self.back)(token, std::ptr::null(), 1, 4, None), -1);
            assert_eq!((self.try_back)(token, std::ptr::null(), 1, 4), -1);
            assert_eq!(
                (self.request)(token, std::ptr::null(), 0, 4, std::ptr::null_mut()),
                -1
            );
            assert_eq!(
                (self.request)(token, std::ptr::null(), 1, 4, &raw mut written),
                -1
            );
            assert_eq!((self.release)(token, std::ptr::null(), 1, 8), -1);
            assert_eq!((self.purge)(token, std::ptr::null_mut()), 0);
        }
        assert_eq!(written, 0);
    }

    pub(crate) fn end(&self, token: u64) {
        // SAFETY: the tests do not use memory of a cache that they have ended.
        unsafe { (self.end)(token) };
    }

    pub(crate) fn back(&self, token: u64, numbers: &[i32]) -> Result<(), String> {
        // SAFETY: the slice has these numbers.
        self.outcome(unsafe { (self.back)(token, numbers.as_ptr().cast(), numbers.len(), 4, None) })
    }

    pub(crate) fn try_back(&self, token: u64, numbers: &[i32]) -> c_int {
        // SAFETY: the slice has these numbers.
        unsafe { (self.try_back)(token, numbers.as_ptr().cast(), numbers.len(), 4) }
    }

    pub(crate) fn request(&self, token: u64, numbers: &[i32]) -> Result<u64, String> {
        let (place, mut request) = (numbers.as_ptr().cast(), 0);
        // SAFETY: the slice has these numbers, and the request's can be written.
        let made = unsafe { (self.request)(token, place, numbers.len(), 4, &raw mut request) };
        self.outcome(made)?;
        Ok(request)
    }

    pub(crate) fn is_done(&self, request: u64) -> c_int {
        // SAFETY: it may be called at any time.
        unsafe { (self.done)(request) }
    }

    pub(crate) fn wait(&self, request: u64, seconds: f64) -> c_int {
        // SAFETY: it may be called at any time.
        unsafe { (self.wait)(request, seconds) }
    }

    /// Takes the blocks of a request once it was answered.
    pub(crate) fn taken(&self, request: u64) -> c_int {
        assert_eq!(self.wait(request, 600.0), 1);
        self.take(request)
    }

    pub(crate) fn take(&self, request: u64) -> c_int {
        // SAFETY: it may be called at any time.
        unsafe { (self.take)(request) }
    }

    pub(crate) fn withdraw(&self, request: u64) -> c_int {
        // SAFETY: it may be called at any time.
        unsafe { (self.withdraw)(request) }
    }

    pub(crate) fn release(&self, token: u64, numbers: &[i64]) -> Result<(), String> {
        // SAFETY: the slice has these numbers.
        self.outcome(unsafe { (self.release)(token, numbers.as_ptr().cast(), numbers.len(), 8) })
    }

    pub(crate) fn reserve(&self, token: u64, count: u32) -> Result<(), String> {
        // SAFETY: it may be called at any time.
        self.outcome(unsafe { (self.reserve)(token, count, None) })
    }

    pub(crate) fn begin_step(&self, token: u64) -> Result<u64, String> {
        let mut step = 0;
        // SAFETY: the number can be written.
        self.outcome(unsafe { (self.begin)(token, &raw mut step) })?;
        Ok(step)
    }

    pub(crate) fn end_step(&self, token: u64, step: u64) {
        // SAFETY: it may be called at any time.
        unsafe { (self.finish)(token, step) };
    }

    pub(crate) fn can_allocate(&self, token: u64, count: u32) -> c_int {
        // SAFETY: it may be called at any time.
        unsafe { (self.can)(token, count) }
    }

    pub(crate) fn record(&self, token: u64, stream: Handle) -> Result<(), String> {
        // SAFETY: the tests pass live streams.
        self.outcome(unsafe { (self.record)(token, stream) })
    }

    pub(crate) fn purge(&self, token: u64) -> u64 {
        let mut bytes = 0;
        // SAFETY: the number can be written.
        assert_eq!(unsafe { (self.purge)(token, &raw mut bytes) }, 0);
        bytes
    }

    pub(crate) fn on_pressure(&self, token: u64, function: Option<OnPressure>) {
        // SAFETY: the tests pass functions that any thread may call.
        assert_eq!(unsafe { (self.on_pressure)(token, function) }, 0);
    }

    fn json(&self, write: impl Fn(*mut c_char, usize) -> usize) -> serde_json::Value {
        let mut text = vec![0_u8; 4096];
        let length = write(text.as_mut_ptr().cast(), text.len());
        assert_ne!(length, 0, "{}", self.torch.last_error());
        serde_json::from_slice(&text[..length - 1]).unwrap()
    }

    pub(crate) fn figure(&self, token: u64, name: &str) -> u64 {
        // SAFETY: the buffer has this number of bytes.
        let stats = self.json(|text, length| unsafe { (self.stats)(token, text, length) });
        stats[name].as_u64().expect(name)
    }

    /// Returns the address and the strides in elements of a part of a layer of group 0.
    pub(crate) fn view(&self, token: u64, layer: u32, part: u32) -> (usize, [u64; 4]) {
        // SAFETY: the buffer has this number of bytes.
        let view =
            self.json(|text, length| unsafe { (self.view)(token, 0, layer, part, text, length) });
        let strides = serde_json::from_value(view["strides"].clone()).unwrap();
        let address = view["address"].as_u64().unwrap();
        (usize::try_from(address).unwrap(), strides)
    }

    /// Returns the length of the view of a part, 0 if there is none.
    pub(crate) fn view_length(&self, token: u64, group: u32, layer: u32, part: u32) -> usize {
        // SAFETY: nothing is written to a null buffer.
        unsafe { (self.view)(token, group, layer, part, std::ptr::null_mut(), 0) }
    }

    fn outcome(&self, code: c_int) -> Result<(), String> {
        match code {
            0 => Ok(()),
            -1 => Err(self.torch.last_error()),
            -3 => Err(format!("out of memory: {}", self.torch.last_error())),
            code => panic!("{code}"),
        }
    }
}
