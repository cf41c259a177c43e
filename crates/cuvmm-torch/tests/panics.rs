//! A panic inside the library does not leave its C functions.
//!
//! The library itself never panics on purpose. Here, linked into the program, it reports a lost
//! context to a subscriber of events that panics.
//!
//! `unsafe` is used to call the library's functions.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Cuda, Handle, over_the_stand_in};
use cuvmm_torch::{
    cuvmm_asleep, cuvmm_free, cuvmm_malloc, cuvmm_reset, cuvmm_sleep, cuvmm_stats, cuvmm_tag_enter,
    cuvmm_tag_leave, cuvmm_tag_malloc, cuvmm_wake,
};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

static PANICS: AtomicU64 = AtomicU64::new(0);

/// A subscriber that panics on each event.
struct Panics;

impl Subscriber for Panics {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        PANICS.fetch_add(1, Ordering::Relaxed);
        panic!("a subscriber that panics,\nin two lines");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

over_the_stand_in! {
    a_panic_is_an_exception_for_pytorch [] says ["internal error: panicked at"] {
        type Malloc = unsafe extern "C-unwind" fn(isize, c_int, Handle) -> *mut c_void;
        type Attempt =
            unsafe extern "C" fn(Malloc, c_long, Handle, *mut *mut c_void, *mut c_char, usize) -> c_int;
        let cuda = Cuda::load();
        let folder = tempfile::tempdir().unwrap();
        let options = ["-Wl,-soname,libc10.so"];
        let Some(c10) = common::compiled(folder.path(), "c10.cpp", "libc10.so", &options) else {
            return eprintln!("cuvmm: internal error: panicked at no compiler");
        };
        // SAFETY: the function has this type.
        let attempt = unsafe { *common::loaded(c10).get::<Attempt>("c10_attempt").unwrap() };
        tracing::subscriber::set_global_default(Panics).unwrap();
        let (mut address, mut text) = (null_mut(), [0; 8192]);
        let mut allocate = |size| {
            // SAFETY: the results are written to locals of these lengths.
            unsafe {
                attempt(cuvmm_malloc, size, null_mut(), &mut address, text.as_mut_ptr(), text.len())
            }
        };
        assert_eq!(allocate(5000), 0);
        cuda.lose();
        assert_eq!(allocate(64 << 20), 2, "c10::Error");
        // SAFETY: the text is terminated.
        let said = unsafe { CStr::from_ptr(text.as_ptr()) };
        assert!(said.to_str().unwrap().starts_with("an allocation failed"), "{said:?}");
    }

    a_panic [] says [
        "internal error: panicked at",
        "failed: the device's context is lost",
    ] {
        let cuda = Cuda::load();
        tracing::subscriber::set_global_default(Panics).unwrap();
        // SAFETY: the legacy default stream is a stream of every context.
        let address = unsafe { cuvmm_malloc(5000, 0, null_mut()) };
        assert!(!address.is_null());
        cuda.lose();
        for _ in 0..2 {
            // SAFETY: the legacy default stream is a stream of every context.
            let second = unsafe { cuvmm_malloc(64 << 20, 0, null_mut()) };
            assert!(second.is_null());
        }
        assert_eq!(PANICS.load(Ordering::Relaxed), 1);
        // The library goes on.
        // SAFETY: nothing uses the memory.
        unsafe { cuvmm_free(address, 5000, 0, null_mut()) };
        cuvmm_reset();
        // SAFETY: nothing is written to a null buffer.
        assert!(unsafe { cuvmm_stats(0, null_mut(), 0) } > 0);
    }

    a_panic_while_tags_are_moved [] says [
        "internal error: panicked at",
        "internal error: panicked at",
    ] {
        let cuda = Cuda::load();
        let allocate = |tag: &CStr| {
            // SAFETY: the text is terminated.
            let address = unsafe {
                assert_eq!(cuvmm_tag_enter(tag.as_ptr()), 0);
                cuvmm_tag_malloc(4 << 20, 0, null_mut())
            };
            cuvmm_tag_leave();
            assert!(!address.is_null());
            address.addr()
        };
        let addresses = [allocate(c"a"), allocate(c"b")];
        for (address, byte) in addresses.into_iter().zip(1..) {
            cuda.fill(address, byte, 4 << 20, null_mut());
        }
        cuda.synchronize(null_mut());
        tracing::subscriber::set_global_default(Panics).unwrap();
        // The second tag cannot sleep, and the roll-back of the first is reported.
        cuda.fail(Some("cuMemUnmap:2,cuMemMap:1"));
        // SAFETY: the text is terminated, and nothing uses the memory.
        assert_ne!(unsafe { cuvmm_sleep(c"[\"a\", \"b\"]".as_ptr(), 1) }, 0);
        // The report of the first panic panics too.
        assert_eq!(PANICS.load(Ordering::Relaxed), 2);
        cuda.fail(None);
        // Both tags are awake, and go on.
        let mut asleep = [0_u8; 3];
        // SAFETY: the buffer has this number of bytes.
        assert_eq!(unsafe { cuvmm_asleep(asleep.as_mut_ptr().cast(), asleep.len()) }, 3);
        assert_eq!(&asleep, b"[]\0");
        allocate(c"a");
        // SAFETY: the text is terminated, and nothing uses the memory.
        unsafe {
            assert_eq!(cuvmm_sleep(c"null".as_ptr(), 1), 0);
            assert_eq!(cuvmm_wake(c"null".as_ptr()), 0);
        }
        for (address, byte) in addresses.into_iter().zip(1..) {
            cuda.expect(address, byte, 4 << 20);
        }
    }
}
