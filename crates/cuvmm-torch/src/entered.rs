//! The tags that each thread has entered, in the order in which it entered them.
//!
//! Blocks of code of one thread may end in any order, as generators and tasks do, and a garbage collector may
//! end one on another thread. So each has a token.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::fork;

thread_local! {
    /// The tags that this thread has entered, the innermost last.
    static ENTERED: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };
    /// Their number, which is read at each allocation.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A tag that a thread has entered.
struct Entered {
    token: u64,
    name: String,
}

/// The tokens of all tags that threads have entered. Any thread may end one.
static OPEN: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// The next token.
static TOKEN: AtomicU64 = AtomicU64::new(1);

fn open() -> MutexGuard<'static, BTreeSet<u64>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a tag this thread's. Returns a token, by which [`end`] ends it.
///
/// # Errors
/// The process was forked from one that uses the library.
pub(crate) fn enter(name: &str) -> Result<u64, Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let token = TOKEN.fetch_add(1, Ordering::Relaxed);
    open().insert(token);
    entered(|entered| {
        let name = name.to_owned();
        entered.push(Entered { token, name });
    });
    Ok(token)
}

/// Ends what a thread has entered, which need not be the innermost, nor of this thread. Does nothing if it
/// has ended, and in a forked child, which allocates nothing.
pub(crate) fn end(token: u64) {
    if fork::is_child() {
        return;
    }
    open().remove(&token);
    entered(|_| {});
}

/// Ends the tag that this thread has entered last.
pub(crate) fn leave() {
    entered(|entered| {
        if let Some(last) = entered.pop() {
            open().remove(&last.token);
        }
    });
}

/// Calls a function with the tags that this thread has entered and none has ended. Returns `None` for a
/// thread that is ending, and in a forked child: a thread that it lacks may have held the lock.
fn entered<T>(act: impl FnOnce(&mut Vec<Entered>) -> T) -> Option<T> {
    if fork::is_child() {
        return None;
    }
    let acted = ENTERED.try_with(|all| {
        let mut all = all.borrow_mut();
        let open = open();
        all.retain(|it| open.contains(&it.token));
        drop(open);
        let result = act(&mut all);
        DEPTH.set(all.len());
        result
    });
    acted.ok()
}

/// Returns `true` if this thread has entered a tag that has not ended.
#[inline]
pub(crate) fn is_entered() -> bool {
    DEPTH.get() > 0 && entered(|all| !all.is_empty()).unwrap_or(false)
}

/// Returns the tag that this thread has entered last, of those that have not ended.
pub(crate) fn innermost() -> Option<String> {
    entered(|all| all.last().map(|it| it.name.clone())).flatten()
}
