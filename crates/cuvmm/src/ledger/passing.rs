//! Requests that pass older requests of other processes.
//!
//! A waiting request needs memory that other processes release. A later request may be charged
//! meanwhile if the older request then still waits only for memory that was charged before it came.
//! So memory charged after the older request came, growth excepted, is bounded: it is at most what
//! that request leaves of the limit when the others release all earlier memory above their
//! guarantees.
//!
//! Free memory belongs to the older request as soon as it is enough for that request.
//!
//! Each process counts in a word of its slot the granules that it was charged past waiting
//! requests, and the last ticket in the line at that time. From these words a request gets an upper
//! bound of the memory that came after it: a process counts released memory as its oldest, and
//! every granule counted after the request came counts as memory after it.
//!
//! As for a [charge](super::charge), a process first shows what it would be charged and then,
//! behind a fence, sums what all processes show. So of several that pass at one time, the last
//! process sees all.

use std::sync::atomic::Ordering;

use super::charge::{COUNT_BITS, Count, MOST};
use super::layout::{Layout, Slot, State};
use super::word::fence;

/// Granules that a process was charged past waiting requests, and the last ticket at that time.
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

    /// Returns the granules that may have come after the request with this ticket.
    const fn after(self, ticket: u64) -> u64 {
        if self.last < ticket { 0 } else { self.granules }
    }
}

/// The ticket and slot of another process's waiting request.
pub(super) type Older = (u64, usize);

/// Granules that are shown as charged past older requests, until the outcome of the charge is known
/// ([`end`](Self::end)).
#[must_use]
pub(super) struct Passing<'a> {
    slot: &'a Slot,
    before: Passed,
}

impl Passing<'_> {
    /// Keeps the shown granules if they were charged, and otherwise removes them.
    pub(super) fn end(self, is_charged: bool) {
        if !is_charged {
            self.slot.passed.store(self.before.word());
        }
    }
}

/// Returns the waiting requests of processes other than slot `me` whose tickets are lower than
/// `own`; the oldest first.
pub(super) fn older(
    layout: &Layout,
    me: usize,
    own: u64,
    is_waiting: impl Fn(usize) -> bool,
) -> Vec<Older> {
    // Every charge asks, and usually no request waits.
    if layout.tickets.iter().all(|ticket| ticket.load() == 0) {
        return Vec::new();
    }
    let tickets = layout.tickets.iter().enumerate();
    let others = tickets.filter(|&(index, _)| index != me);
    let older = others.filter_map(|(index, ticket)| {
        let ticket = ticket.load();
        let waits = ticket != 0 && ticket < own && is_waiting(index);
        waits.then_some((ticket, index))
    });
    let mut older: Vec<Older> = older.collect();
    older.sort_unstable();
    older
}

/// Returns the granules that a process may be charged for new memory past older requests.
pub(super) fn left_behind(layout: &Layout, older: &[Older], limit: u64) -> u64 {
    let rooms = older.iter().map(|&it| room(layout, it, limit));
    rooms
        .map(Option::unwrap_or_default)
        .fold(u64::MAX, u64::min)
}

/// Returns the granules that are left and are enough for older requests, which have them first.
pub(super) fn owed_to(layout: &Layout, older: &[Older], limit: u64) -> u64 {
    if older.is_empty() {
        return 0;
    }
    let charges = layout.charges.iter();
    let charged: u64 = charges.map(|it| Count::of(it.load()).charged()).sum();
    let left = limit.saturating_sub(charged);
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

/// Shows granules that the process of a slot is to be charged past older requests; `None` if an
/// older request would then wait for memory that came after it. Only the owner of the slot may call
/// this, one call at a time.
pub(super) fn pass<'a>(
    layout: &Layout,
    slot: &'a Slot,
    older: &[Older],
    granules: u64,
    limit: u64,
) -> Option<Passing<'a>> {
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
    let mut all = older.iter();
    let fits = shown.granules <= MOST && all.all(|&it| room(layout, it, limit).is_some());
    match fits {
        true => Some(passing),
        false => {
            passing.end(false);
            None
        }
    }
}

/// Lowers the granules charged past waiting requests to `most`, the charge above the guarantee.
/// Only the owner of the slot may call this.
pub(super) fn settle(slot: &Slot, most: u64) {
    let found = Passed::of(slot.passed.load());
    if found.granules > most {
        let less = Passed {
            granules: most,
            ..found
        };
        slot.passed.store(less.word());
    }
}

/// Returns the granules that may still be charged past a waiting request; `None` if too many are
/// charged already.
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
    // If all that others have would not serve the request, it waits for memory of its own process.
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
