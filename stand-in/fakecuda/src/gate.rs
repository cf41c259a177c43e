//! Refuses calls of a forked child, and calls of a function that the driver runs in the order of a
//! stream.
//!
//! The driver's state does not survive a fork, so every call in a child answers `NOT_INITIALIZED`,
//! also `cuInit`. A lock that another thread of the parent held would stay locked in the child, so
//! a child's call must be refused before it reaches a lock.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use cuvmm_sys::CUresult;

/// The process that called `cuInit` first, or 0.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function of the program. Its calls of the driver answer `NOT_PERMITTED`.
pub(crate) fn inside(call: impl FnOnce()) {
    INSIDE.set(true);
    call();
    INSIDE.set(false);
}

/// Leaves the function of the program that this thread runs: the process ends in it.
pub(crate) fn leave() {
    INSIDE.set(false);
}

/// Returns the state, unless another process made it or a function of the program runs.
pub(crate) fn pass<T>(state: &'static OnceLock<T>) -> Result<Option<&'static T>, CUresult> {
    if !is_owner() {
        return Ok(None);
    }
    if INSIDE.get() {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    Ok(state.get())
}

/// Refuses a forked child of the process that initialized the driver.
pub(crate) fn refuse_child() -> Result<(), CUresult> {
    if is_owner() || OWNER.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    Err(CUresult::CUDA_ERROR_NOT_INITIALIZED)
}

fn is_owner() -> bool {
    OWNER.load(Ordering::Acquire) == std::process::id()
}

/// Notes the process that initializes the driver, and refuses its forked children.
pub(crate) fn init() -> Result<(), CUresult> {
    let process = std::process::id();
    let first = OWNER.compare_exchange(0, process, Ordering::AcqRel, Ordering::Acquire);
    match first {
        Ok(_) => Ok(()),
        Err(owner) if owner == process => Ok(()),
        Err(_) => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
    }
}
