//! The layer around each C function: its name, injected faults, absence in old drivers, and the
//! time that a call takes.
//!
//! The layer knows functions by name only, so a new function needs no line here.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_sys::{CUresult, CudaVersion};

use crate::gate;
use crate::listed::is_absent;
use crate::settings::{self, Planned};

/// The shortest sleep. For a shorter time a thread spins, because such a sleep takes far longer
/// than requested.
const WORTH_SLEEPING: Duration = Duration::from_micros(200);

thread_local! {
    /// The name of the C function that this thread is in, or was in last.
    static CALL: Cell<&'static str> = const { Cell::new("") };
}

static CALLS: AtomicU64 = AtomicU64::new(0);
static INJECTED: AtomicU64 = AtomicU64::new(0);
/// The driver's clock, which advances by each call's cost. Set if calls take time.
static CLOCK: OnceLock<fn() -> Duration> = OnceLock::new();
/// The nanoseconds on the driver's clock for which threads have slept.
static SLEPT: AtomicU64 = AtomicU64::new(0);

struct Armed {
    fault: Planned,
    seen: u64,
}

struct Layer {
    /// `true` if a function may fail or be absent.
    active: AtomicBool,
    version: CudaVersion,
    armed: Mutex<Vec<Armed>>,
}

fn layer() -> &'static Layer {
    static LAYER: OnceLock<Layer> = OnceLock::new();
    LAYER.get_or_init(|| {
        let settings = settings::get().cloned().unwrap_or_default();
        let newest = settings::Settings::default().version;
        Layer {
            active: AtomicBool::new(!settings.fail.is_empty() || settings.version < newest),
            version: settings.version,
            armed: Mutex::new(settings.fail.into_iter().map(Armed::new).collect()),
        }
    })
}

impl Armed {
    fn new(fault: Planned) -> Self {
        Self { fault, seen: 0 }
    }

    /// Counts a call, and returns the code that it fails with.
    fn judge(&mut self, name: &str) -> Option<CUresult> {
        if !self.fault.is_of(name) {
            return None;
        }
        self.seen += 1;
        let fails = (self.fault.first..=self.fault.last).contains(&self.seen);
        fails.then_some(self.fault.code)
    }
}

impl Layer {
    /// Returns the faults. A forked child has none: another thread of its parent may have held the
    /// lock.
    fn armed(&self) -> Result<MutexGuard<'_, Vec<Armed>>, CUresult> {
        gate::refuse_child()?;
        Ok(self.armed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn verdict(&self, name: &str) -> Result<(), CUresult> {
        if is_absent(name, self.version) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let mut failed = None;
        // Every fault counts the call, and the one armed first decides.
        for armed in self.armed()?.iter_mut() {
            failed = failed.or(armed.judge(name));
        }
        match failed {
            None => Ok(()),
            Some(code) => {
                INJECTED.fetch_add(1, Ordering::Relaxed);
                Err(code)
            }
        }
    }
}

/// Runs a C function's work, unless a fault hits the call or the version lacks the function.
pub(crate) fn around(
    name: &'static str,
    work: impl FnOnce() -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    CALL.set(name);
    CALLS.fetch_add(1, Ordering::Relaxed);
    let layer = layer();
    if layer.active.load(Ordering::Acquire) {
        layer.verdict(name)?;
    }
    let answer = work();
    if let Some(clock) = CLOCK.get() {
        pay(clock());
    }
    answer
}

pub(crate) fn current() -> &'static str {
    CALL.get()
}

pub(crate) fn count() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

pub(crate) fn injected() -> u64 {
    INJECTED.load(Ordering::Relaxed)
}

/// Adds faults, which count calls from now on.
pub(crate) fn arm(faults: Vec<Planned>) -> Result<(), CUresult> {
    let layer = layer();
    layer.armed()?.extend(faults.into_iter().map(Armed::new));
    layer.active.store(true, Ordering::Release);
    Ok(())
}

pub(crate) fn disarm() -> Result<(), CUresult> {
    layer().armed()?.clear();
    Ok(())
}

/// Makes calls take the time that they cost on the driver's clock.
pub(crate) fn take_time(clock: fn() -> Duration) {
    // Set once, by the one state of the process.
    let _ = CLOCK.set(clock);
}

/// Sleeps for the time on the driver's clock for which no thread has slept.
///
/// All threads share the clock, so of two calls that end at the same moment one may sleep for both;
/// the sum is right.
fn pay(now: Duration) {
    let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
    let before = SLEPT.fetch_max(now, Ordering::AcqRel);
    let owed = Duration::from_nanos(now.saturating_sub(before));
    if owed >= WORTH_SLEEPING {
        thread::sleep(owed);
    } else if !owed.is_zero() {
        let start = Instant::now();
        while start.elapsed() < owed {
            std::hint::spin_loop();
        }
    }
}
