//! Stands between the ledger and the outside in unit tests: a test can see each access to the
//! ledger's file and to its locks, let another member go on before it, end the member there, and
//! set the time and the process numbers that the ledger finds.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::proc::Life;

/// The outside of one thread, as a test sets it.
pub(super) trait Probe {
    /// Called before a word of the file is read or written. Returns `false` if the process has
    /// died: it writes nothing then.
    fn reached(&self, address: usize, writes: bool) -> bool;

    /// Called before a lock is taken, released or looked at. Returns `false` if the process has
    /// died.
    fn locks(&self) -> bool;

    /// Called with each value that the thread has read, and each outcome.
    fn found(&self, value: u64);

    /// Called after a word was written.
    fn wrote(&self, address: usize, value: u64);

    /// Called when a file was mapped.
    fn mapped(&self, address: usize);

    fn now(&self) -> Instant;

    fn sleep(&self, duration: Duration);

    /// Waits while a bell's count is `seen`, at most for `longest`.
    fn wait(&self, address: usize, seen: u32, longest: Duration);

    /// Returns the number of the process.
    fn pid(&self) -> u32;

    /// Returns the number of all processes' namespaces, if it is not the system's.
    fn namespace(&self) -> Option<u64> {
        None
    }

    /// Returns what the process finds of that of a number, if the system is not to be asked.
    fn look(&self, _pid: u32) -> Option<Life> {
        None
    }

    /// Returns `true` if the process gets descriptors of those that it finds running.
    fn holds(&self) -> bool {
        true
    }
}

thread_local! {
    static HERE: RefCell<Option<Rc<dyn Probe>>> = const { RefCell::new(None) };
}

/// Sets the probe of this thread, and returns the one before.
pub(super) fn set(probe: Option<Rc<dyn Probe>>) -> Option<Rc<dyn Probe>> {
    HERE.with(|here| here.replace(probe))
}

/// Asks the probe of this thread, if there is one.
pub(super) fn ask<R>(question: impl FnOnce(&dyn Probe) -> R) -> Option<R> {
    // A thread that ends may have destroyed the value.
    let here = HERE.try_with(|here| here.borrow().clone()).ok().flatten();
    here.map(|probe| question(&*probe))
}
