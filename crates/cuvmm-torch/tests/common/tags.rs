//! Memory under tags, as `torch.cuda.MemPool` and `cuvmm.sleep` ask for it.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null_mut, without_provenance};

use super::{Handle, MIB, Torch};

pub(crate) type KeepFn = unsafe extern "C" fn(*const c_void, u64, *mut u64) -> c_int;

/// The functions of tags.
pub(crate) struct Tags {
    pub(crate) torch: Torch,
    pub(crate) malloc: unsafe extern "C" fn(isize, c_int, Handle) -> *mut c_void,
    pub(crate) free: unsafe extern "C" fn(*mut c_void, isize, c_int, Handle),
    pub(crate) enter: unsafe extern "C" fn(*const c_char) -> c_int,
    pub(crate) leave: unsafe extern "C" fn(),
    pub(crate) sleep: unsafe extern "C" fn(*const c_char, c_int) -> c_int,
    pub(crate) wake: unsafe extern "C" fn(*const c_char) -> c_int,
    pub(crate) exchange: unsafe extern "C" fn(*const c_char, *const c_char, c_int) -> c_int,
}

impl Tags {
    pub(crate) fn load() -> Self {
        let torch = Torch::load();
        Self {
            torch,
            malloc: torch.function("cuvmm_tag_malloc"),
            free: torch.function("cuvmm_tag_free"),
            enter: torch.function("cuvmm_tag_enter"),
            leave: torch.function("cuvmm_tag_leave"),
            sleep: torch.function("cuvmm_sleep"),
            wake: torch.function("cuvmm_wake"),
            exchange: torch.function("cuvmm_exchange"),
        }
    }

    /// Allocates some MiB under a tag on device 0.
    pub(crate) fn allocate(&self, tag: &str, mib: usize) -> usize {
        let tag = CString::new(tag).unwrap();
        let size = isize::try_from(mib * MIB).unwrap();
        // SAFETY: the text is terminated.
        unsafe {
            assert_eq!((self.enter)(tag.as_ptr()), 0);
            let address = (self.malloc)(size, 0, null_mut()).addr();
            (self.leave)();
            address
        }
    }

    pub(crate) fn free(&self, address: usize) {
        // SAFETY: the tests do not use memory that they have freed.
        unsafe { (self.free)(std::ptr::without_provenance_mut(address), 0, 0, null_mut()) };
    }

    /// Puts tags to sleep. Returns an error's text.
    pub(crate) fn sleep(&self, tags: &str, keep: bool) -> Result<(), String> {
        self.sleep_as(tags, c_int::from(keep))
    }

    /// Marks memory to be kept by a sleep that discards the rest. Returns the token.
    pub(crate) fn keep(&self, address: usize, size: usize) -> Result<u64, String> {
        let keep: KeepFn = self.torch.function("cuvmm_keep");
        let mut token = 0;
        // SAFETY: the token can be written.
        let code = unsafe { keep(without_provenance(address), size as u64, &raw mut token) };
        self.outcome(code).map(|()| token)
    }

    /// Puts tags to sleep and wakes others. Host memory is kept after waking with a `keep` of 1, and
    /// not with 2.
    pub(crate) fn exchange(&self, sleep: &str, wake: &str, keep: c_int) -> Result<(), String> {
        let [sleep, wake] = [sleep, wake].map(|tags| CString::new(tags).unwrap());
        // SAFETY: the texts are terminated, and the tests do not use memory that sleeps.
        self.outcome(unsafe { (self.exchange)(sleep.as_ptr(), wake.as_ptr(), keep) })
    }

    /// Puts tags to sleep. Host memory is kept after waking with a `keep` of 1, and not with 2.
    pub(crate) fn sleep_as(&self, tags: &str, keep: c_int) -> Result<(), String> {
        let tags = CString::new(tags).unwrap();
        // SAFETY: the text is terminated, and the tests do not use memory that sleeps.
        self.outcome(unsafe { (self.sleep)(tags.as_ptr(), keep) })
    }

    /// Takes host memory for tags in advance.
    pub(crate) fn prepare(&self, tags: &str) -> Result<(), String> {
        let prepare: unsafe extern "C" fn(*const c_char) -> c_int =
            self.torch.function("cuvmm_host_prepare");
        let tags = CString::new(tags).unwrap();
        // SAFETY: the text is terminated.
        self.outcome(unsafe { prepare(tags.as_ptr()) })
    }

    /// Gives host memory of tags back. Returns the MiB.
    pub(crate) fn release_host(&self, tags: &str) -> Result<u64, String> {
        let release: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int =
            self.torch.function("cuvmm_host_release");
        let (tags, mut bytes) = (CString::new(tags).unwrap(), 0);
        // SAFETY: the text is terminated, and the number is written.
        self.outcome(unsafe { release(tags.as_ptr(), &raw mut bytes) })?;
        Ok(bytes >> 20)
    }

    /// Sets the most MiB of host memory for contents.
    pub(crate) fn limit_host(&self, mib: u64) {
        let limit: unsafe extern "C" fn(u64) = self.torch.function("cuvmm_host_limit");
        // SAFETY: it may be called at any time.
        unsafe { limit(mib << 20) };
    }

    /// Returns the MiB of host memory that is kept for contents.
    pub(crate) fn host(&self) -> u64 {
        self.torch.number("cuvmm_stats", "host") >> 20
    }

    pub(crate) fn wake(&self, tags: &str) -> Result<(), String> {
        let tags = CString::new(tags).unwrap();
        // SAFETY: the text is terminated.
        self.outcome(unsafe { (self.wake)(tags.as_ptr()) })
    }

    /// Returns the tags that are asleep, as JSON.
    pub(crate) fn asleep(&self) -> String {
        let write: unsafe extern "C" fn(*mut c_char, usize) -> usize =
            self.torch.function("cuvmm_asleep");
        let mut text = [0_u8; 64];
        // SAFETY: the buffer has this number of bytes.
        let length = unsafe { write(text.as_mut_ptr().cast(), text.len()) };
        String::from_utf8(text[..length - 1].to_vec()).unwrap()
    }

    pub(crate) fn outcome(&self, code: c_int) -> Result<(), String> {
        match code {
            0 => Ok(()),
            -1 | -3 => Err(self.torch.last_error()),
            code => panic!("{code}"),
        }
    }
}
