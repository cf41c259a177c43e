//! Joining a ledger: a process takes a slot, and agrees on the limit with the processes that have
//! joined before.
//!
//! No process waits for another that joins. A process locks the byte of a free slot, which only a
//! process that takes this slot needs, and fills the slot, which still counts as free. Then it
//!
//! 1. reads the word of the limit, which also counts how often a process has joined;
//! 2. looks whether any other slot is taken. If one is, the limit stays, and a process that
//!    requires another limit is refused. If none is, it replaces the limit by the one that it
//!    requires; if the word has changed since it was read, it begins again;
//! 3. writes the state of its slot, which is taken from here on;
//! 4. counts itself in the word of the limit. If the limit is another than in step 2, it frees its
//!    slot and begins again.
//!
//! So the limit does not change while a process B has joined. If another process A has read the
//! word before B counted itself, the word has changed and A does not replace the limit. If A reads
//! it afterwards, A finds B's slot taken. And if A replaces the limit before B counts itself, B
//! finds the new limit.
//!
//! A process that is stopped or ends before the third step has a slot that counts as free, and that
//! others pass over while it is locked. After the third step it is a process like any other,
//! without memory.
//!
//! Keeps I-72.

use std::path::Path;
use std::time::Duration;

use super::clock;
use super::dead;
use super::file::LedgerFile;
use super::layout::{SLOTS, State};
use super::lock::Lock;
use super::proc;
use super::seen::Seen;
use crate::device::WeakDevice;
use crate::error::LedgerError;
use crate::size::Granularity;

/// How often a process begins again because the limit has changed.
const MOST_TRIES: u32 = 1000;

/// The terms of a process that joins. Sizes in bytes, in whole granules.
#[derive(Clone, Debug)]
pub(super) struct Wishes {
    pub(super) limit: Option<u64>,
    /// The memory of the device, as this process sees it.
    pub(super) default_limit: u64,
    pub(super) process_limit: u64,
    pub(super) priority: i32,
    pub(super) name: String,
    /// Asked for its free memory.
    pub(super) device: WeakDevice,
    /// How long after the end of the process the driver may still have its memory.
    pub(super) lingers: Duration,
}

/// Checks a name under which a process joins: commands take names and process ids, so a name is no
/// number.
pub(super) fn check_name(name: &str) -> Result<(), LedgerError> {
    let problem = if name.is_empty() {
        "it is empty"
    } else if name.bytes().all(|byte| byte.is_ascii_digit()) {
        "it is a number, as process ids are"
    } else if name.contains(char::is_control) {
        "it has control characters"
    } else {
        return Ok(());
    };
    Err(LedgerError::Name {
        name: name.to_owned(),
        problem,
    })
}

/// Checks that this process sees as much memory of the device as the common limit. A slice of a
/// device does not show the other slices' memory, and their processes use another budget.
pub(super) fn check_view(path: &Path, limit: u64, view: u64) -> Result<(), LedgerError> {
    if limit <= view {
        return Ok(());
    }
    Err(LedgerError::BeyondView {
        path: path.to_owned(),
        limit,
        view,
        memory_set_by: None,
    })
}

/// Takes a slot, and sets the limit if no other process has a slot. Returns the slot's index, and
/// how often it was taken before.
pub(super) fn take_slot(
    file: &LedgerFile,
    granule: Granularity,
    wishes: &Wishes,
) -> Result<(usize, u64), LedgerError> {
    let mut seen = Seen::default();
    dead::collect(file, None, &mut seen);
    let index = lock_slot(file)?;
    let entered = enter(file, index, granule, wishes, &mut seen);
    if entered.is_err() {
        // Closing the file releases the lock too, unless a forked child has the file.
        let _ = Lock::Owner(index).release(file.file());
    }
    Ok((index, entered?))
}

fn lock_slot(file: &LedgerFile) -> Result<usize, LedgerError> {
    for (index, slot) in file.layout().slots.iter().enumerate() {
        if slot.state().0 != State::Free {
            continue;
        }
        // A process that joins, or a forked child of an earlier owner, may hold the lock.
        let lock = Lock::Owner(index);
        if !lock.take(file.file()).map_err(file.failed("fcntl"))? {
            continue;
        }
        // Another process may have taken the slot before the lock was taken, and have ended.
        if slot.state().0 == State::Free {
            return Ok(index);
        }
        lock.release(file.file()).map_err(file.failed("fcntl"))?;
    }
    Err(LedgerError::Full {
        path: file.path().to_owned(),
        slots: SLOTS,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Others {
    None,
    /// Only processes that have ended, whose memory the driver may still have.
    Dying,
    Some,
}

/// Makes a process with a locked free slot a member. Returns how often the slot was taken before.
fn enter(
    file: &LedgerFile,
    index: usize,
    granule: Granularity,
    wishes: &Wishes,
    seen: &mut Seen,
) -> Result<u64, LedgerError> {
    let layout = file.layout();
    let (header, slot) = (&layout.header, &layout.slots[index]);
    let granules = |bytes: u64| bytes / granule.bytes();
    let required = wishes.limit.map(granules);
    let until = clock::now() + dead::UNVERIFIED + Duration::from_secs(1);
    fill(file, index, granule, wishes);
    for _ in 0..MOST_TRIES {
        let found = header.agreed();
        let is_other = required.is_some_and(|limit| limit != found.limit());
        let limit = match others(file, index) {
            Others::None => {
                let limit = required.unwrap_or_else(|| granules(wishes.default_limit));
                if limit != found.limit() && !header.set_limit(found, limit) {
                    continue;
                }
                limit
            }
            Others::Dying if is_other && clock::now() <= until => {
                dead::collect(file, Some(index), seen);
                clock::sleep(Duration::from_millis(10));
                continue;
            }
            // A process that has joined since may have set the required limit.
            Others::Dying | Others::Some if is_other && header.agreed() != found => continue,
            Others::Dying | Others::Some if is_other => break,
            Others::Dying | Others::Some => {
                let limit = found.limit();
                let bytes = limit.saturating_mul(granule.bytes());
                check_view(file.path(), bytes, wishes.default_limit)?;
                limit
            }
        };
        let (_, generation) = slot.state();
        slot.set_state(State::Live, generation);
        if header.count_in() == limit {
            return Ok(generation);
        }
        let free = (State::Free, generation.wrapping_add(1));
        slot.replace_state((State::Live, generation), free);
    }
    Err(LedgerError::OtherLimit {
        path: file.path().to_owned(),
        limit: header.limit().saturating_mul(granule.bytes()),
        required: wishes.limit.unwrap_or(wishes.default_limit),
    })
}

fn others(file: &LedgerFile, own: usize) -> Others {
    let mut found = Others::None;
    let slots = file.layout().slots.iter().enumerate();
    for (_, slot) in slots.filter(|&(index, _)| index != own) {
        match slot.state().0 {
            State::Free => {}
            State::Dying => found = Others::Dying,
            State::Live | State::Lending => return Others::Some,
        }
    }
    found
}

/// Fills a locked free slot, except for its state.
fn fill(file: &LedgerFile, index: usize, granule: Granularity, wishes: &Wishes) {
    let layout = file.layout();
    let slot = &layout.slots[index];
    let pid = proc::own_id();
    slot.pid.store(u64::from(pid));
    slot.started.store(proc::own_start());
    slot.pid_namespace.store(proc::own_namespace());
    slot.uid
        .store(u64::from(rustix::process::geteuid().as_raw()));
    slot.limit.store(wishes.process_limit / granule.bytes());
    let lingers = wishes.lingers.as_millis().try_into().unwrap_or(u64::MAX);
    slot.lingers.store(lingers);
    slot.priority
        .store(i64::from(wishes.priority).cast_unsigned());
    for word in [
        &layout.tickets[index],
        &slot.guarantee,
        &slot.obtained,
        &slot.idle,
        &slot.want,
        &slot.stalled,
        &slot.foreign,
        &slot.usable,
        &slot.stall,
        &slot.stalled_full,
        &slot.waited,
        &slot.averaged,
        &slot.passed,
    ] {
        word.store(0);
    }
    for word in slot.averages.iter().chain(&slot.ledger_averages) {
        word.store(0);
    }
    slot.set_name(&wishes.name);
}
