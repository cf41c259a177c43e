//! A driver that panics inside of a call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm::driver::Call;
use cuvmm::driver::model::Backing;
use cuvmm::error::SleepError;
use cuvmm::sleep::Woken;

use super::Rig;

/// Lets the driver panic once, in the nth call, from 1, of those that `counts` and that this thread
/// makes in `operate` while it does not unwind. Returns the outcome, unless the operation panicked, and
/// `true` if the driver did.
pub fn panics_at<T>(
    rig: &Rig<impl Backing + 'static>,
    nth: u64,
    counts: impl Fn(Call) -> bool + Send + Sync + 'static,
    operate: impl FnOnce() -> T,
) -> (Option<T>, bool) {
    panics(rig, (nth, false), counts, operate)
}

/// Lets the driver panic as [`panics_at`] does, `behind` the call, which has been carried out, or before
/// it.
pub fn panics<T>(
    rig: &Rig<impl Backing + 'static>,
    (nth, behind): (u64, bool),
    counts: impl Fn(Call) -> bool + Send + Sync + 'static,
    operate: impl FnOnce() -> T,
) -> (Option<T>, bool) {
    let (seen, here) = (Arc::new(AtomicU64::new(0)), std::thread::current().id());
    let calls = Arc::clone(&seen);
    let watcher: Arc<dyn Fn(Call) + Send + Sync> = Arc::new(move |call| {
        if std::thread::current().id() == here
            && !std::thread::panicking()
            && counts(call)
            && calls.fetch_add(1, Ordering::SeqCst) + 1 == nth
        {
            panic!("on purpose");
        }
    });
    match behind {
        true => rig.faults.watch_behind(Some(watcher)),
        false => rig.faults.watch(Some(watcher)),
    }
    let outcome = catch_unwind(AssertUnwindSafe(operate));
    rig.faults.watch(None);
    rig.faults.watch_behind(None);
    (outcome.ok(), seen.load(Ordering::SeqCst) >= nth)
}

/// Returns the outcome of a wake. Only after a panic it may have failed, since memory may be mapped at the
/// addresses.
pub fn woken_unless_lost(outcome: Result<Woken, SleepError>, panicked: bool) -> Option<Woken> {
    if let Err(error) = &outcome {
        let is_lost = matches!(error, SleepError::Block { .. });
        assert!(panicked && is_lost, "{error:?}");
    }
    outcome.ok()
}
