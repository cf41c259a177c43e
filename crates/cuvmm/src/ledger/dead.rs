//! Slots of dead processes, and when their charge is free again.
//!
//! The kernel releases a killed process's locks after about 30 ms and its device memory after 60 to
//! 90 ms (`docs/measurements.md`). So a slot whose owner has lost its lock is *dying*: its charge
//! still counts. The slot is free when the process is known to have ended and the driver has had
//! [time](LINGERS) to free its memory: on an H200 up to 8 ms after the end of a process with 2 GiB
//! (`docs/measurements.md`).
//!
//! Each process holds a [pidfd](super::control) of every other process from its first look at the
//! slot on, and polls all of them with one system call. A process in the same PID namespace is
//! opened by its number, if its start time is that of the slot; any other process is met over its
//! socket while it runs. While a process is held and runs, its lock is not looked at.
//!
//! A process that is not held counts while its lock is held, unless its number is known to be
//! unused or another process's. Once its lock is free, it counts while `/proc` shows it. If nothing
//! is known of it, because it is of another namespace or `/proc` hides it, its slot is free [two
//! seconds](UNVERIFIED) later.
//!
//! A forked child of a dead process may hold its lock. Such a slot is collected if the process is
//! known to have ended; it can be taken again when the child has ended too.
//!
//! Exported memory that other processes [have](super::exports) stays charged to the slot, which is
//! then *lending*, until none has it.
//!
//! Several processes may collect a slot at once, and one of them may be stopped at any instruction
//! while another process takes the slot. So each change names what it was decided for: the slot's
//! state with its generation, or the charge of that generation.
//!
//! Keeps I-71.

use std::time::Duration;

use rustix::io::Errno;

use super::charge::{self, Count};
use super::control::{Whom, socket_path};
use super::exports;
use super::file::LedgerFile;
use super::layout::{Slot, State};
use super::lock::Lock;
use super::proc::{self, Life, Look};
use super::seen::{Seen, What};

/// How long after the end of a process the CUDA driver may still have its memory.
pub(super) const LINGERS: Duration = Duration::from_millis(100);

/// How long a slot stays dying if nothing is known of its process.
pub(super) const UNVERIFIED: Duration = Duration::from_secs(2);

/// Frees the slots of processes that have ended, except slot `own`. Returns `true` if a slot is
/// dying.
pub(super) fn collect(file: &LedgerFile, own: Option<usize>, seen: &mut Seen) -> bool {
    seen.pidfds.poll();
    let mut dying = false;
    for index in 0..file.layout().slots.len() {
        if Some(index) == own {
            continue;
        }
        let is_member = own.is_some();
        match collect_one(file, index, is_member, seen) {
            Ok(is_dying) => dying |= is_dying,
            Err(errno) => log!(warn, %errno, "a ledger's slot could not be locked"),
        }
    }
    dying
}

/// Frees a slot if its owner has ended. A member also meets processes of other PID namespaces.
/// Returns `true` if the slot is dying.
fn collect_one(
    file: &LedgerFile,
    index: usize,
    is_member: bool,
    seen: &mut Seen,
) -> Result<bool, Errno> {
    let slot = &file.layout().slots[index];
    let found = slot.state();
    if found.0 == State::Free {
        seen.pidfds.forget(index);
        return Ok(false);
    }
    if found.0 == State::Lending {
        free(file, index, slot, found);
        return Ok(false);
    }
    let Some(life) = life_without_lock(file, index, found.1, is_member, seen)? else {
        return Ok(found.0 == State::Dying);
    };
    // An owner frees its slot, which changes the generation, before it releases its lock. So if
    // this succeeds, the values read before are this owner's, and it has ended or lost its lock.
    let dying = (State::Dying, found.1);
    if !slot.replace_state(found, dying) {
        return Ok(true);
    }
    let has_ended = match life {
        Life::Runs => {
            seen.forget(What::Unknown, index);
            false
        }
        Life::Ended => {
            let lingers = lingers(slot, Count::of(file.layout().charges[index].load()));
            seen.age(What::Ended, index, found.1) >= lingers
        }
        Life::Unknown => seen.age(What::Unknown, index, found.1) >= UNVERIFIED,
    };
    if has_ended {
        // The socket's name contains the generation, so it is no other process's. It goes first: no
        // process looks for it once the slot is free.
        let _ = std::fs::remove_file(socket_path(file, index, found.1));
        free(file, index, slot, dying);
        seen.forget(What::Unknown, index);
        seen.forget(What::Ended, index);
        seen.pidfds.forget(index);
    }
    Ok(!has_ended)
}

/// Returns what is known of the process of a slot; `None` while the process is held and runs, or
/// has its lock and is not known to have ended.
fn life_without_lock(
    file: &LedgerFile,
    index: usize,
    generation: u64,
    is_member: bool,
    seen: &mut Seen,
) -> Result<Option<Life>, Errno> {
    let known = |seen: &Seen| seen.pidfds.known(index, generation);
    if known(seen).is_none() {
        let is_locked = Lock::Owner(index).is_held_elsewhere(file.file())?;
        let slot = &file.layout().slots[index];
        let whom = Whom {
            uid: slot.uid.load(),
            look: || look(slot),
            socket: is_member.then_some(|| socket_path(file, index, generation)),
        };
        let life = seen.pidfds.meet((index, generation), whom, !is_locked);
        if known(seen).is_none() {
            return Ok(Some(life).filter(|_| !is_locked));
        }
    }
    Ok(known(seen).filter(|&life| life == Life::Ended))
}

/// Returns how long after its owner's end the driver may still have a slot's memory. The charge
/// counts too, because the slot may not show yet what the pools obtained.
fn lingers(slot: &Slot, charge: Count) -> Duration {
    match charge.charged() {
        0 => Duration::ZERO,
        _ => Duration::from_millis(slot.lingers.load()).min(UNVERIFIED),
    }
}

/// Returns `true` if the owner of a slot of another open file has ended or lost its lock.
pub(super) fn has_lost(file: &LedgerFile, index: usize, slot: &Slot) -> bool {
    let held = Lock::Owner(index).is_held_elsewhere(file.file());
    held.is_ok_and(|held| !held) || matches!(look(slot), Look::NotHeld(Life::Ended))
}

fn look(slot: &Slot) -> Look {
    proc::look(
        slot.pid_namespace.load(),
        slot.pid.load(),
        slot.started.load(),
    )
}

/// Removes the charge of a process except for lent memory, and frees its slot if the slot still has
/// the state `found`. The caller is the owner, or knows that the owner has ended. The state is
/// written last, so that a slot in which a process dies is collected again.
pub(super) fn free(file: &LedgerFile, index: usize, slot: &Slot, found: (State, u64)) {
    let layout = file.layout();
    let is_whose = || slot.state() == found;
    exports::remove_names(layout, index, is_whose);
    let lent = exports::lent(layout, index, is_whose);
    let charge = layout.charges.get(index);
    let lowered = charge.is_some_and(|charge| charge::lower(charge, lent, is_whose));
    let next = match lent {
        0 => (State::Free, found.1.wrapping_add(1)),
        _ => (State::Lending, found.1),
    };
    let changed = next != found && slot.replace_state(found, next);
    if lowered || changed {
        layout.header.given.ring();
    }
}
