//! The exit status of the program.
//!
//! `unsafe` is allowed here to declare the function of glibc that reports it.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

const NOT_YET: i32 = -1;

static STATUS: AtomicI32 = AtomicI32::new(NOT_YET);

unsafe extern "C" {
    /// Registers a function that is called with the status when the process ends by `exit`.
    safe fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

extern "C" fn note(status: c_int, _: *mut c_void) {
    STATUS.store(status & 0xff, Ordering::Release);
}

/// Notes the status when the process ends. The library must stay loaded until then.
pub(crate) fn watch() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // It fails for lack of memory only, and the program then keeps its status.
        let _ = on_exit(note, std::ptr::null_mut());
    });
}

/// Returns the exit status, or `None` if the process does not end by `exit`.
pub(crate) fn of_end() -> Option<i32> {
    Some(STATUS.load(Ordering::Acquire)).filter(|status| *status != NOT_YET)
}
