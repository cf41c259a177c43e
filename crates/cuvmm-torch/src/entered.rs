//! The tags that each thread has entered, in order.
//!
//! A thread's blocks of code may end in any order, as generators and tasks do, and a garbage
//! collector may end one on another thread. So each entered tag has a token.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::fork;

thread_local! {
    /// The tags that this thread has entered, the innermost last.
    static ENTERED: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };
    /// The length of `ENTERED`, for a quick look at each allocation.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

struct Entered {
    token: u64,
    name: String,
}

/// The tokens of all entered tags. Any thread may end one.
static OPEN: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

static TOKEN: AtomicU64 = AtomicU64::new(1);

fn open() -> MutexGuard<'static, BTreeSet<u64>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enters a tag on this thread. Returns the token for [`end`].
///
/// # Errors
/// The process is a forked child.
pub(crate) fn enter(name: &str) -> Result<u64, Error> {
    fork::check()?;
    let token = TOKEN.fetch_add(1, Ordering::Relaxed);
    open().insert(token);
    entered(|entered| {
        let name = name.to_owned();
        entered.push(Entered { token, name });
    });
    Ok(token)
}

/// Ends an entered tag of any thread, innermost or not. Does nothing if it has ended, and in a
/// forked child, which allocates nothing.
pub(crate) fn end(token: u64) {
    if fork::is_child() {
        return;
    }
    open().remove(&token);
    entered(|_| {});
}

pub(crate) fn leave() {
    entered(|entered| {
        if let Some(last) = entered.pop() {
            open().remove(&last.token);
        }
    });
}

/// Calls a function with this thread's tags that have not ended. Returns `None` on a thread that is
/// ending, and in a forked child, where a lost thread may have held the lock.
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

/// Returns `true` if this thread's allocations are under a tag that has not ended.
#[inline]
pub(crate) fn is_entered() -> bool {
    DEPTH.get() > 0 && innermost().is_some()
}

/// Returns this thread's innermost tag that has not ended. An empty name stands for no tag.
pub(crate) fn innermost() -> Option<String> {
    let last = entered(|all| all.last().map(|it| it.name.clone())).flatten();
    last.filter(|name| !name.is_empty())
}
