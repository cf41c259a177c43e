//! Slots of dead processes: when what they were charged is free again.
//!
//! The kernel releases a killed process's locks after about 30 ms and its device memory after 60 to
//! 90 ms (`docs/measurements.md`). So a slot whose owner has lost its lock is *dying*: its charge
//! still counts. It is free when the process is known to have ended, which is after its memory was
//! freed. A process in the same PID namespace is looked up by its number and start time, and
//! `pidfd_open` tells when all of its threads have ended. A process in another namespace cannot be
//! looked up: its slot is free [two seconds](UNVERIFIED) after its lock.
//!
//! A forked child of a dead process may hold its lock. Such a slot is collected if the process is
//! known to have ended; it can be taken again when the child has ended too.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::charge;
use super::file::LedgerFile;
use super::layout::{Slot, State};
use super::lock::Lock;
use super::proc;
use super::seen::{Seen, What};

/// How long the slot of a process that cannot be looked up stays dying.
pub(super) const UNVERIFIED: Duration = Duration::from_secs(2);

/// Frees the slots of processes that have ended, except slot `own`. Returns `true` if a slot is
/// dying.
pub(super) fn collect(file: &LedgerFile, own: Option<usize>, seen: &mut Seen) -> bool {
    let mut dying = false;
    for (index, slot) in file.layout().slots.iter().enumerate() {
        if Some(index) == own || slot.state().0 == State::Free {
            continue;
        }
        match collect_one(file, index, slot, seen) {
            Ok(is_dying) => dying |= is_dying,
            Err(errno) => tracing::warn!(%errno, "a ledger's slot could not be locked"),
        }
    }
    dying
}

/// Frees a slot if its owner has ended. Returns `true` if the slot is dying.
fn collect_one(
    file: &LedgerFile,
    index: usize,
    slot: &Slot,
    seen: &mut Seen,
) -> Result<bool, Errno> {
    let is_locked = || Lock::Owner(index).is_held_elsewhere(file.file());
    if is_locked()? && !is_gone(slot) {
        return Ok(false);
    }
    if !Lock::Collector(index).take(file.file())? {
        return Ok(true);
    }
    // Under the lock no other process collects it, and a new owner has another generation.
    let (state, generation) = slot.state();
    let is_dying = match state {
        State::Free => false,
        _ if is_locked()? && !is_gone(slot) => false,
        _ => {
            slot.set_state(State::Dying, generation);
            let unverified = !proc::is_visible(slot.pid_namespace.load());
            let age = seen.age(What::Dying, index, generation);
            let ended = is_gone(slot) || (unverified && age >= UNVERIFIED);
            if ended {
                free(file, index, slot, generation);
                seen.forget(What::Dying, index);
            }
            !ended
        }
    };
    Lock::Collector(index).release(file.file())?;
    Ok(is_dying)
}

/// Returns `true` if the process of a slot is known to have ended.
fn is_gone(slot: &Slot) -> bool {
    if !proc::is_visible(slot.pid_namespace.load()) {
        return false;
    }
    let pid = i32::try_from(slot.pid.load()).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else {
        return false;
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            // Read after the process was opened: its number cannot be reused from here on.
            let started = proc::start_time(pid.as_raw_nonzero().get().cast_unsigned());
            let expected = slot.started.load();
            if expected != 0 && started.is_some_and(|started| started != expected) {
                return true;
            }
            // Readable when all threads have ended.
            let mut polled = [PollFd::new(&process, PollFlags::IN)];
            matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
        }
        Err(errno) => errno == Errno::SRCH,
    }
}

/// Removes what a process was charged and what it waits for, and frees its slot. The caller is the
/// owner, or has the collector's lock. The slot's state is written last, so that a slot in which a
/// process dies is collected again.
pub(super) fn free(file: &LedgerFile, index: usize, slot: &Slot, generation: u64) {
    slot.ticket.store(0);
    slot.want.store(0);
    slot.obtained.store(0);
    slot.idle.store(0);
    slot.guarantee.store(0);
    if let Some(charge) = file.layout().charges.get(index) {
        charge::clear(charge);
    }
    slot.set_state(State::Free, generation.wrapping_add(1));
    file.layout().header.given.ring();
}
