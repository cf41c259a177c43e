//! Each thread's stack of current contexts.

use std::cell::RefCell;

use cuvmm_sys::CUcontext;

thread_local! {
    /// The contexts that were pushed on this thread. The last one is current.
    static CURRENT: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
}

/// Returns the current context, dead or alive.
pub(crate) fn top() -> Option<CUcontext> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

/// Makes a context current, above the one that was.
pub(crate) fn push(context: CUcontext) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

/// Removes the current context, and returns it.
pub(crate) fn pop() -> Option<CUcontext> {
    CURRENT.with_borrow_mut(Vec::pop)
}
