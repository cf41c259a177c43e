//! Functions of the program that give blocks up when memory is short.
//!
//! Such a function takes the interpreter's lock, so it is called where a [collector](crate::collecting)
//! may be: on a thread that holds no lock of this library or of PyTorch, and not while a graph may be
//! captured. For other requests blocks stay as they are.
//!
//! Keeps I-103.
//!
//! `unsafe` is used to call the function.
#![allow(unsafe_code)]

use crate::{collecting, edge, fork, graphs};

/// A function that is called with a cache's number, and the bytes that a request lacks.
pub(crate) type OnPressure = unsafe extern "C" fn(u64, u64);

/// Returns `true` if the calling thread may call a function of the program.
pub(super) fn may_call() -> bool {
    // Leave is not kept: a thread that is about to capture waits for its end, with the interpreter's
    // lock perhaps.
    !fork::is_child() && edge::may_call_back() && graphs::waiting().is_some()
}

/// Calls a function, unless the thread is within one, or all have ended.
pub(super) fn call(function: OnPressure, token: u64, bytes: u64) {
    // SAFETY: its setter permits calls from any thread.
    collecting::within(|| unsafe { function(token, bytes) });
}
