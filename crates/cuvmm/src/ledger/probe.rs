//! Stands between the ledger and the outside in unit tests. A test can see each access to the
//! ledger's file and its locks, let another member go on before it, end the member there, and set
//! the time and the process numbers that the ledger finds.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::proc::Life;

/// The outside of one thread.
pub(super) trait Probe {
    /// Runs before a word of the file is read or written. Returns `false` if the process has died:
    /// it writes nothing then.
    fn reached(&self, address: usize, writes: bool) -> bool;

    /// Runs before a lock is taken, released or looked at. Returns `false` if the process has died.
    fn locks(&self) -> bool;

    fn found(&self, value: u64);

    fn wrote(&self, address: usize, value: u64);

    fn mapped(&self, address: usize);

    fn now(&self) -> Instant;

    fn sleep(&self, duration: Duration);

    /// Waits while a bell's count is `seen`, at most for `longest`.
    fn wait(&self, address: usize, seen: u32, longest: Duration);

    fn pid(&self) -> u32;

    /// Returns the number of all processes' namespaces, if not the system's.
    fn namespace(&self) -> Option<u64> {
        None
    }

    /// Returns the state of the process with a number, if the system is not to be asked.
    fn look(&self, _pid: u32) -> Option<Life> {
        None
    }

    /// Returns `true` if the process gets descriptors of running processes.
    fn holds(&self) -> bool {
        true
    }
}

thread_local! {
    static HERE: RefCell<Option<Rc<dyn Probe>>> = const { RefCell::new(None) };
}

/// Returns the old probe.
pub(super) fn set(probe: Option<Rc<dyn Probe>>) -> Option<Rc<dyn Probe>> {
    HERE.with(|here| here.replace(probe))
}

pub(super) fn ask<R>(question: impl FnOnce(&dyn Probe) -> R) -> Option<R> {
    // A thread that ends may have destroyed the value.
    let here = HERE.try_with(|here| here.borrow().clone()).ok().flatten();
    here.map(|probe| question(&*probe))
}
