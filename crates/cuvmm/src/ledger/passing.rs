//! Requests that pass older ones of other processes.
//!
//! A waiting request needs memory that others give back. A later request may be charged meanwhile,
//! as long as the older one then waits only for memory that was charged before it came: so memory that
//! came after it, growth excepted, stays at most what the older one leaves of the limit if the others
//! give back all that they had before, except their guarantees.
//!
//! Memory that has become free is the older request's as soon as it is enough for it.
//!
//! Each process counts in one word of its slot the granules that it was charged past waiting requests,
//! and the number that the last request in the line had then. What counts for a request is an upper
//! bound of the memory that came after it: memory that is given back counts as the oldest that the
//! process has, and all that was counted after the request came counts as memory after it.
//!
//! As a [charge](super::charge) does, a process first shows what it would be charged and then sums
//! what all show, with a fence between. So of several that pass at one time, the last one sees all.

use std::sync::atomic::Ordering;

use super::charge::{COUNT_BITS, Count, MOST};
use super::layout::{Layout, Slot, State};
use super::member::{Account, InLine, Member};
use super::word::fence;

/// The granules that a process was charged past waiting requests, and the last number in the line
/// when it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Passed {
    granules: u64,
    last: u64,
}

impl Passed {
    const fn of(word: u64) -> Self {
        Self {
            granules: word & MOST,
            last: word >> COUNT_BITS,
        }
    }

    const fn word(self) -> u64 {
        let granules = if self.granules > MOST {
            MOST
        } else {
            self.granules
        };
        self.last << COUNT_BITS | granules
    }

    /// Returns the granules that may have come after the request with a ticket.
    const fn after(self, ticket: u64) -> u64 {
        if self.last < ticket { 0 } else { self.granules }
    }
}

/// A request of another process that waits: its ticket and slot.
type Older = (u64, usize);

/// Granules that are shown as charged past older requests. They count from then on if they are
/// [charged](Self::charged).
#[must_use]
pub(super) struct Passing<'a> {
    slot: &'a Slot,
    before: Passed,
}

impl Passing<'_> {
    /// Keeps what is shown, or takes it back.
    pub(super) fn end(self, is_charged: bool) {
        if !is_charged {
            self.slot.passed.store(self.before.word());
        }
    }
}

impl Member {
    /// Returns the requests of other processes that wait and are older than one at this place, or than
    /// one that has none; the oldest first.
    pub(super) fn older(&self, place: Option<InLine>) -> Vec<Older> {
        let own = place.map_or(u64::MAX, |it| it.ticket);
        let layout = self.file().layout();
        let tickets = layout.tickets.iter().enumerate();
        let others = tickets.filter(|&(index, _)| index != self.index());
        let older = others.filter_map(|(index, ticket)| {
            let ticket = ticket.load();
            let waits = ticket != 0 && ticket < own && self.seen().is_waiting(layout, index);
            waits.then_some((ticket, index))
        });
        let mut older: Vec<Older> = older.collect();
        older.sort_unstable();
        older
    }

    /// Returns the granules that this process may be charged for new memory past older requests.
    pub(super) fn left_behind(&self, older: &[Older]) -> u64 {
        let layout = self.file().layout();
        let rooms = older.iter().map(|&it| room(layout, it, self.limit_now()));
        rooms
            .map(Option::unwrap_or_default)
            .fold(u64::MAX, u64::min)
    }

    /// Returns the granules that are left and enough for older requests, which have them first.
    pub(super) fn owed_to(&self, older: &[Older]) -> u64 {
        let layout = self.file().layout();
        let charges = layout.charges.iter();
        let charged: u64 = charges.map(|it| Count::of(it.load()).charged()).sum();
        let left = self.limit_now().saturating_sub(charged);
        let wants = older
            .iter()
            .filter_map(|&(_, index)| layout.slots.get(index));
        wants
            .map(|slot| slot.want.load())
            .fold(0, |owed: u64, want| {
                let both = owed.saturating_add(want);
                if both <= left { both } else { owed }
            })
    }

    /// Shows granules that this process is to be charged past older requests; `None` if these would
    /// then wait for memory that came after them. The caller has locked the account.
    pub(super) fn pass(&self, older: &[Older], granules: u64) -> Option<Passing<'_>> {
        let (layout, slot) = (self.file().layout(), self.slot());
        let oldest = older.first().map(|&(ticket, _)| ticket);
        let found = Passed::of(slot.passed.load());
        let before = Passed {
            granules: found.after(oldest.unwrap_or(u64::MAX)),
            ..found
        };
        let passing = Passing { slot, before };
        let shown = Passed {
            granules: before.granules.saturating_add(granules),
            last: layout.header.last_ticket.load(),
        };
        slot.passed.store(shown.word());
        fence(Ordering::SeqCst);
        let limit = self.limit_now();
        let fits =
            shown.granules <= MOST && older.iter().all(|&it| room(layout, it, limit).is_some());
        match fits {
            true => Some(passing),
            false => {
                passing.end(false);
                None
            }
        }
    }

    /// Counts no more memory as charged past waiting requests than the process has above its
    /// guarantee. The caller has locked the account.
    pub(super) fn settle_passed(&self, account: &Account, charged: u64) {
        let slot = self.slot();
        let found = Passed::of(slot.passed.load());
        let most = charged.saturating_sub(account.guarantee);
        if found.granules > most {
            let less = Passed {
                granules: most,
                ..found
            };
            slot.passed.store(less.word());
        }
    }
}

/// Returns the granules that may be charged past a waiting request beyond those that were; `None` if
/// these are too many already.
fn room(layout: &Layout, (ticket, index): Older, limit: u64) -> Option<u64> {
    let want = layout.slots.get(index)?.want.load();
    let own = Count::of(layout.charges.get(index)?.load()).charged();
    let others = layout.slots.iter().enumerate();
    let others = others.filter(|&(other, slot)| other != index && slot.state().0 == State::Live);
    let (mut kept, mut after) = (own.saturating_add(want), 0_u64);
    for (_, slot) in others {
        kept = kept.saturating_add(slot.guarantee.load());
        after = after.saturating_add(Passed::of(slot.passed.load()).after(ticket));
    }
    // A request that nothing that others have can serve waits for memory of its own process.
    let kept = if kept > limit { want } else { kept };
    limit.checked_sub(kept)?.checked_sub(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_charged_before_a_request_came_does_not_count_for_it() {
        let passed = Passed {
            granules: 5,
            last: 9,
        };
        assert_eq!(Passed::of(passed.word()), passed);
        assert_eq!([8, 9, 10].map(|ticket| passed.after(ticket)), [5, 5, 0]);
        let most = Passed {
            granules: u64::MAX,
            last: 1,
        };
        assert_eq!(Passed::of(most.word()).granules, MOST);
    }
}
