//! Each thread's stack of current contexts.
//!
//! The current context outlives the thread's other variables: functions of `atexit`, and
//! destructors of a thread's variables, may call the driver after those have ended.

use std::cell::{Cell, RefCell};
use std::ptr::null_mut;

use cuvmm_sys::CUcontext;

thread_local! {
    /// The current context, or null.
    static CURRENT: Cell<CUcontext> = const { Cell::new(null_mut()) };
    /// The contexts below it, which end with the thread.
    static BELOW: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
}

/// Returns the current context, dead or alive.
pub(crate) fn top() -> Option<CUcontext> {
    Some(CURRENT.get()).filter(|context| !context.is_null())
}

/// Makes a context current, above the former one.
pub(crate) fn push(context: CUcontext) {
    if let Some(before) = top() {
        // A thread that ends has no contexts below.
        let _ = BELOW.try_with(|below| below.borrow_mut().push(before));
    }
    CURRENT.set(context);
}

pub(crate) fn pop() -> Option<CUcontext> {
    let before = top()?;
    let below = BELOW.try_with(|below| below.borrow_mut().pop());
    CURRENT.set(below.ok().flatten().unwrap_or(null_mut()));
    Some(before)
}
