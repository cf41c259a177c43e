//! A wrapper that fails, delays and records the calls of any driver.
//!
//! A test wraps a driver, arms [`Fault`]s, runs an operation and checks the state that it leaves. A
//! failed call is not passed on, so it has no effect, as if the driver had refused it. To fail each
//! call of an operation once, arm [`Fault::nth`] with 1, 2, 3 and so on, each time on a fresh
//! wrapper, until the operation ends with [`FaultDriver::injected`] still 0.
//!
//! ```
//! use std::sync::Arc;
//! use cuvmm_driver::fault::{Fault, FaultDriver};
//! use cuvmm_driver::{CUresult, Call, DeviceAddress, Driver};
//!
//! fn the_second_fails(inner: Arc<dyn Driver>) {
//!     let driver = FaultDriver::new(inner);
//!     driver.arm(Fault::nth(2, CUresult::CUDA_ERROR_OUT_OF_MEMORY));
//!     assert!(driver.reserve(2 << 20, 0, DeviceAddress::NULL, 0).is_ok());
//!     assert!(driver.reserve(2 << 20, 0, DeviceAddress::NULL, 0).is_err());
//!     assert!(driver.reserve(2 << 20, 0, DeviceAddress::NULL, 0).is_ok());
//!     assert_eq!(driver.count(Call::MemAddressReserve), 3);
//!     assert_eq!(driver.injected(), 1);
//! }
//! ```

mod pass;
mod plan;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub use plan::Fault;

use crate::{Call, Driver, DriverError, Result};
use plan::{Armed, Verdict};

/// The shortest delay for which a thread sleeps. For shorter ones it spins, because such a sleep
/// takes far longer than requested.
const WORTH_SLEEPING: Duration = Duration::from_micros(200);

/// A driver that passes calls on to another driver, applies the armed faults and records the calls.
pub struct FaultDriver {
    inner: Arc<dyn Driver>,
    log: Mutex<Log>,
    watcher: Mutex<Option<Watcher>>,
    /// Called behind each call.
    behind: Mutex<Option<Watcher>>,
}

/// A function that is called before each call, or behind it.
type Watcher = Arc<dyn Fn(Call) + Send + Sync>;

#[derive(Debug, Default)]
struct Log {
    armed: Vec<Armed>,
    calls: Vec<Call>,
    counts: Vec<u64>,
    injected: u64,
}

impl FaultDriver {
    /// Wraps a driver. No fault is armed, and every call is recorded.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        let log = Log {
            counts: vec![0; Call::COUNT],
            ..Log::default()
        };
        Self {
            inner,
            log: Mutex::new(log),
            watcher: Mutex::new(None),
            behind: Mutex::new(None),
        }
    }

    /// Returns the wrapped driver.
    #[must_use]
    pub fn inner(&self) -> &Arc<dyn Driver> {
        &self.inner
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arms a fault in addition to those already armed.
    ///
    /// The fault counts calls from now on. When several faults apply to one call, their delays add
    /// up, and the failure armed first wins.
    pub fn arm(&self, fault: Fault) {
        self.log().armed.push(Armed::new(fault));
    }

    /// Disarms all faults. The record of calls stays.
    pub fn disarm(&self) {
        self.log().armed.clear();
    }

    /// Returns the number of calls that faults have failed since the record was last cleared.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.log().injected
    }

    /// Returns the calls made, including failed ones, in the order in which they began.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.log().calls.clone()
    }

    /// Returns the number of calls of one kind.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.log().counts[call as usize]
    }

    /// Returns the total number of calls.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.log().counts.iter().sum()
    }

    /// Clears the record of calls. Armed faults stay armed and keep their counts.
    pub fn forget(&self) {
        let mut log = self.log();
        log.calls.clear();
        log.counts.fill(0);
        log.injected = 0;
    }

    /// Sets a function that is called before each call, on the thread that makes it, for example to
    /// do there what another thread might do at that moment. It must use the wrapped driver, not
    /// this one. `None` removes it.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use cuvmm_driver::fault::FaultDriver;
    /// use cuvmm_driver::{Call, Driver};
    ///
    /// fn counts_its_questions(inner: Arc<dyn Driver>) {
    ///     let driver = FaultDriver::new(inner);
    ///     let seen = Arc::new(AtomicU32::new(0));
    ///     let counted = Arc::clone(&seen);
    ///     driver.watch(Some(Arc::new(move |call| {
    ///         counted.fetch_add(u32::from(call == Call::DeviceGetCount), Ordering::SeqCst);
    ///     })));
    ///     driver.device_count().unwrap();
    ///     driver.watch(None);
    ///     driver.device_count().unwrap();
    ///     assert_eq!(seen.load(Ordering::SeqCst), 1);
    /// }
    /// ```
    pub fn watch(&self, watcher: Option<Arc<dyn Fn(Call) + Send + Sync>>) {
        set(&self.watcher, watcher);
    }

    /// Sets a function that is called behind each call that was passed on, on the thread that made it.
    /// If it panics, the call has been carried out and its answer is lost. It must use the wrapped
    /// driver, not this one. `None` removes it.
    ///
    /// ```
    /// use std::panic::{AssertUnwindSafe, catch_unwind};
    /// use std::sync::Arc;
    /// use cuvmm_driver::fault::FaultDriver;
    /// use cuvmm_driver::{Call, DeviceAddress, Driver};
    ///
    /// fn loses_addresses(inner: Arc<dyn Driver>) {
    ///     let driver = FaultDriver::new(inner);
    ///     driver.watch_behind(Some(Arc::new(|call| assert_ne!(call, Call::MemAddressReserve))));
    ///     let reserve = || driver.reserve(2 << 20, 0, DeviceAddress::NULL, 0);
    ///     assert!(catch_unwind(AssertUnwindSafe(reserve)).is_err());
    ///     // The wrapped driver has reserved the addresses.
    /// }
    /// ```
    pub fn watch_behind(&self, watcher: Option<Arc<dyn Fn(Call) + Send + Sync>>) {
        set(&self.behind, watcher);
    }

    /// Records the call and applies the armed faults to it.
    fn enter(&self, call: Call) -> Result<()> {
        tell(&self.watcher, call);
        let (delay, verdict) = {
            let mut log = self.log();
            log.calls.push(call);
            log.counts[call as usize] += 1;
            let mut delay = Duration::ZERO;
            let mut failed = None;
            for armed in &mut log.armed {
                match armed.judge(call) {
                    Verdict::Pass => {}
                    Verdict::Delay(more) => delay += more,
                    Verdict::Fail(code) => failed = failed.or(Some(code)),
                }
            }
            log.injected += u64::from(failed.is_some());
            (delay, failed)
        };
        linger(delay);
        match verdict {
            Some(code) => Err(DriverError::new(call, code)),
            None => Ok(()),
        }
    }
}

/// Replaces a watcher.
fn set(place: &Mutex<Option<Watcher>>, watcher: Option<Watcher>) {
    let mut current = place.lock().unwrap_or_else(PoisonError::into_inner);
    let before = std::mem::replace(&mut *current, watcher);
    drop(current);
    // Its drop may make calls.
    drop(before);
}

/// Calls a watcher, if there is one.
fn tell(watcher: &Mutex<Option<Watcher>>, call: Call) {
    let watcher = watcher
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    if let Some(watcher) = watcher {
        watcher(call);
    }
}

fn linger(delay: Duration) {
    if delay >= WORTH_SLEEPING {
        thread::sleep(delay);
    } else if !delay.is_zero() {
        let start = Instant::now();
        while start.elapsed() < delay {
            std::hint::spin_loop();
        }
    }
}

impl fmt::Debug for FaultDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let log = self.log();
        f.debug_struct("FaultDriver")
            .field("inner", &self.inner)
            .field("armed", &log.armed)
            .field("calls", &log.calls.len())
            .finish_non_exhaustive()
    }
}
