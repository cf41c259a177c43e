//! Accesses to the words of a ledger, for tests: they pass the thread's [probe], and a process can
//! end itself at its nth write.

use std::sync::atomic::{AtomicI64, Ordering};

use super::probe;

/// How many writes are left; negative if the process goes on.
static LEFT: AtomicI64 = AtomicI64::new(-1);

/// Ends the process at its nth write from now.
pub(super) fn after(writes: i64) {
    LEFT.store(writes, Ordering::SeqCst);
}

/// Returns how many of the writes are left.
pub(super) fn left() -> i64 {
    LEFT.load(Ordering::SeqCst)
}

pub(super) fn reached(address: usize, writes: bool) -> bool {
    probe::ask(|probe| probe.reached(address, writes)).unwrap_or(true)
}

pub(super) fn found(value: u64) {
    probe::ask(|probe| probe.found(value));
}

pub(super) fn wrote(address: usize, value: u64) {
    probe::ask(|probe| probe.wrote(address, value));
    if LEFT.load(Ordering::Relaxed) >= 0 && LEFT.fetch_sub(1, Ordering::SeqCst) == 0 {
        // As by `kill -9`: nothing is dropped or flushed.
        let process = rustix::process::getpid();
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}
