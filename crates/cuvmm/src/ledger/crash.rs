//! Accesses to the words of a ledger, for tests: each passes the thread's [probe], and a process
//! can end or stop itself at its nth write. A step of making the file counts as a write.

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use super::probe;

/// Writes that are left; negative if the process goes on.
static LEFT: AtomicI64 = AtomicI64::new(-1);

/// `true` if the process stops itself instead of ending.
static STOPS: AtomicBool = AtomicBool::new(false);

pub(crate) fn after(writes: i64) {
    LEFT.store(writes, Ordering::SeqCst);
}

/// Stops the process at its nth write from now. It goes on when it is continued (`SIGCONT`) and has
/// read a byte.
pub(super) fn stop_after(writes: i64) {
    STOPS.store(true, Ordering::SeqCst);
    after(writes);
}

pub(crate) fn left() -> i64 {
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
    step();
}

/// Ends or stops the process if no write is left.
pub(super) fn step() {
    if LEFT.load(Ordering::Relaxed) < 0 || LEFT.fetch_sub(1, Ordering::SeqCst) != 0 {
        return;
    }
    let process = rustix::process::getpid();
    if STOPS.load(Ordering::SeqCst) {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::STOP);
        // The signal may reach another thread first.
        let _ = std::io::stdin().read_exact(&mut [0]);
        return;
    }
    // As by `kill -9`: nothing is dropped or flushed.
    let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}
