//! Detection of forked children of a process that has used this library.
//!
//! A child has the parent's heaps in its memory, but neither its driver nor its threads: a lock
//! that another thread held at the fork stays locked. So each function checks before it takes a
//! lock. A child forked before the first use of the library can use it.
//!
//! `unsafe` is used to register the function that the C library calls in a child.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;

static WATCHED: AtomicBool = AtomicBool::new(false);
static CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    CHILD.store(true, Ordering::Relaxed);
}

/// Returns `true` in a child that was forked after [`watch`].
pub(crate) fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// Refuses to work in such a child.
pub(crate) fn check() -> Result<(), Error> {
    match is_child() {
        true => Err(Error::Forked),
        false => Ok(()),
    }
}

/// Makes children forked from now on known. The heaps also refuse to work in a child: without a
/// registration, only locks held at the fork go unnoticed.
pub(crate) fn watch() {
    if WATCHED.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: the function stores one atomic, which a forked child may do, and stays loaded: the C
    // library forgets it if the library is unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}
