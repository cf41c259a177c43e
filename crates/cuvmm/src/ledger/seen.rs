//! Values in other processes' slots, and since when this process has seen them unchanged.
//!
//! Ages are measured by this process's own clock, so processes need no clock in common.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::clock;
use super::control::Pidfds;
use super::layout::{Layout, State};

/// How long a waiting request of another process counts after its last sign of life.
pub(super) const TICKET_AGE: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    Charge,
    Ticket,
    /// A slot whose owner has lost its lock and is not known otherwise.
    Unknown,
    Ended,
    Beat,
}

#[derive(Debug, Default)]
pub(super) struct Seen {
    values: BTreeMap<(What, usize), (u64, Instant)>,
    pub(super) pidfds: Pidfds,
}

impl Seen {
    /// Notes a value, and returns for how long it has been seen unchanged.
    pub(super) fn age(&mut self, what: What, slot: usize, value: u64) -> Duration {
        let now = clock::now();
        let (seen, since) = self.values.entry((what, slot)).or_insert((value, now));
        if *seen != value {
            (*seen, *since) = (value, now);
        }
        now.duration_since(*since)
    }

    /// Returns `true` if a request of the slot's process waits and shows signs of life.
    pub(super) fn is_waiting(&mut self, layout: &Layout, index: usize) -> bool {
        self.waiting_ticket(layout, index) != 0
    }

    /// Returns the number of the oldest such request of the slot's process, or 0 if there is none.
    pub(super) fn waiting_ticket(&mut self, layout: &Layout, index: usize) -> u64 {
        let (Some(ticket), Some(slot)) = (layout.tickets.get(index), layout.slots.get(index))
        else {
            return 0;
        };
        let ticket = ticket.load();
        if ticket == 0 || slot.state().0 != State::Live {
            return 0;
        }
        match self.age(What::Ticket, index, slot.renewed.load()) < TICKET_AGE {
            true => ticket,
            false => 0,
        }
    }

    pub(super) fn forget(&mut self, what: What, slot: usize) {
        self.values.remove(&(what, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_ages_while_it_is_unchanged() {
        let mut seen = Seen::default();
        assert_eq!(seen.age(What::Charge, 1, 5), Duration::ZERO);
        std::thread::sleep(Duration::from_millis(2));
        assert!(seen.age(What::Charge, 1, 5) >= Duration::from_millis(2));
        assert_eq!(seen.age(What::Ticket, 1, 5), Duration::ZERO, "another kind");
        assert_eq!(seen.age(What::Charge, 1, 6), Duration::ZERO, "it changed");
        seen.forget(What::Charge, 1);
        assert_eq!(seen.age(What::Charge, 1, 6), Duration::ZERO);
    }
}
