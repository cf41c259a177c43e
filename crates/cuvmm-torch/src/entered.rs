//! The tags that each thread has entered, in order: for its allocations, or for the graphs that it
//! captures.
//!
//! A thread's blocks of code may end in any order, as generators and tasks do, and a garbage
//! collector may end one on another thread. So each entered tag has a token.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::fork;

thread_local! {
    /// The tags that this thread has entered, the innermost last.
    static ENTERED: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };
    /// The number of tags for allocations in `ENTERED`, for a quick look at each allocation.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

struct Entered {
    token: u64,
    name: String,
    is_of_graphs: bool,
}

/// The tag of memory that graphs use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OfGraphs {
    pub(crate) name: String,
    /// The contents are kept however the tag sleeps. `false` if each graph writes what it reads:
    /// then they never are.
    pub(crate) keeps: bool,
}

/// The tokens of all entered tags, with those of graphs. Any thread may end one.
static OPEN: Mutex<BTreeMap<u64, Option<OfGraphs>>> = Mutex::new(BTreeMap::new());

static TOKEN: AtomicU64 = AtomicU64::new(1);

fn open() -> MutexGuard<'static, BTreeMap<u64, Option<OfGraphs>>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enters a tag on this thread. Returns the token for [`end`].
///
/// # Errors
/// The process is a forked child.
pub(crate) fn enter(name: &str) -> Result<u64, Error> {
    begin(name, None)
}

/// Enters a tag for the graphs that this thread captures. Returns the token for [`end`].
///
/// # Errors
/// The process is a forked child.
pub(crate) fn enter_graphs(name: &str, keeps: bool) -> Result<u64, Error> {
    let name = name.to_owned();
    begin(&name.clone(), Some(OfGraphs { name, keeps }))
}

fn begin(name: &str, of_graphs: Option<OfGraphs>) -> Result<u64, Error> {
    fork::check()?;
    let token = now();
    let is_of_graphs = of_graphs.is_some();
    open().insert(token, of_graphs);
    entered(|entered| {
        entered.push(Entered {
            token,
            name: name.to_owned(),
            is_of_graphs,
        });
    });
    Ok(token)
}

/// Returns a number that is larger than the tokens of all tags entered before, and smaller than
/// those of later ones.
pub(crate) fn now() -> u64 {
    TOKEN.fetch_add(1, Ordering::Relaxed)
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
        if let Some(at) = entered.iter().rposition(|it| !it.is_of_graphs) {
            open().remove(&entered.remove(at).token);
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
        all.retain(|it| open.contains_key(&it.token));
        drop(open);
        let result = act(&mut all);
        DEPTH.set(all.iter().filter(|it| !it.is_of_graphs).count());
        result
    });
    acted.ok()
}

/// Returns `true` if this thread is under a tag for allocations that has not ended.
#[inline]
pub(crate) fn is_entered() -> bool {
    DEPTH.get() > 0 && innermost().is_some()
}

/// Returns this thread's innermost tag for allocations that has not ended. An empty name stands for
/// no tag.
pub(crate) fn innermost() -> Option<String> {
    entered_after(0)
}

/// Returns this thread's innermost tag for allocations, if it has not ended and was entered after
/// a [moment](now).
pub(crate) fn entered_after(moment: u64) -> Option<String> {
    if DEPTH.get() == 0 {
        return None;
    }
    let last = entered(|all| {
        let last = all.iter().rfind(|it| !it.is_of_graphs);
        let last = last.filter(|it| it.token > moment && !it.name.is_empty());
        last.map(|it| it.name.clone())
    });
    last.flatten()
}

/// Returns this thread's innermost tag for graphs that has not ended.
pub(crate) fn of_graphs() -> Option<OfGraphs> {
    let token = entered(|all| {
        let last = all.iter().rfind(|it| it.is_of_graphs);
        last.map(|it| it.token)
    });
    open().get(&token.flatten()?).cloned().flatten()
}

/// Returns this thread's innermost tag for graphs, or the tag for graphs that any thread entered
/// last: other threads allocate for a capture too, as those of a backward pass do.
pub(crate) fn of_graphs_anywhere() -> Option<OfGraphs> {
    let here = of_graphs();
    here.or_else(|| open().values().flatten().next_back().cloned())
}
