//! Reservations inside ranges reserved from the system.
//!
//! A range of the system is one memory area, however many reservations are in it: reserved and free
//! parts are both empty, so they look the same to the system. So the system's areas do not limit
//! the number of reservations. Small reservations share arenas of a fixed size. A large
//! reservation, or one at an address chosen by the caller, has its own arena.
//!
//! A gap is left before each reservation and after the last one of an arena, so that an access
//! beyond the end of one reservation does not reach the next. Only a reservation at an address
//! chosen by the caller may touch another.
//!
//! [`addresses`](super::addresses) deals with the system's areas.

use std::collections::BTreeMap;

use crate::model::Space;

/// The size of a shared arena. Addresses cost nothing.
pub(super) const SHARED: u64 = 256 << 30;

/// The largest reservation, with its alignment, in a shared arena.
const SMALL: u64 = SHARED / 4;

#[derive(Debug)]
struct Arena {
    end: u64,
    space: Space,
    reservations: usize,
    shared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) size: u64,
}

#[derive(Debug)]
pub(super) struct Arenas {
    by_start: BTreeMap<u64, Arena>,
    /// The bytes before each reservation that belong to it, by the reservation's start.
    leads: BTreeMap<u64, u64>,
    gap: u64,
}

impl Arenas {
    pub(super) fn new(gap: u64) -> Self {
        Self {
            by_start: BTreeMap::new(),
            leads: BTreeMap::new(),
            gap,
        }
    }

    pub(super) fn gap(&self) -> u64 {
        self.gap
    }

    pub(super) fn is_small(&self, size: u64, alignment: u64) -> bool {
        let with_gaps = size.checked_add(alignment.max(self.gap));
        with_gaps.is_some_and(|all| all <= SMALL)
    }

    pub(super) fn take_anywhere(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let gap = self.gap;
        let mut shared = self.by_start.values_mut().filter(|arena| arena.shared);
        let start = shared.find_map(|arena| {
            let start = arena.space.allocate_behind(gap, size, alignment)?;
            arena.reservations += 1;
            Some(start)
        })?;
        self.leads.insert(start, gap);
        Some(start)
    }

    /// Takes exactly this range in the arena that contains it. Returns `None` if no arena contains
    /// it, `Some(false)` if it is not free.
    pub(super) fn take_at(&mut self, start: u64, size: u64) -> Option<bool> {
        let (_, arena) = self.by_start.range_mut(..=start).next_back()?;
        if start >= arena.end {
            return None;
        }
        let taken = arena.space.claim(start, size);
        if taken {
            arena.reservations += 1;
            self.leads.insert(start, 0);
        }
        Some(taken)
    }

    pub(super) fn add_shared(&mut self, span: Span) {
        let end = span.start + span.size;
        let arena = Arena {
            end,
            space: Space::new(span.start..end - self.gap),
            reservations: 0,
            shared: true,
        };
        self.by_start.insert(span.start, arena);
    }

    pub(super) fn add_single(&mut self, span: Span, reservation: u64) {
        let arena = Arena {
            end: span.start + span.size,
            space: Space::new(0..0),
            reservations: 1,
            shared: false,
        };
        self.by_start.insert(span.start, arena);
        self.leads.insert(reservation, reservation - span.start);
    }

    /// Frees a reservation, and returns the arena that can now be freed, if any. One empty shared
    /// arena is kept for the next reservation.
    pub(super) fn give_back(&mut self, start: u64, size: u64) -> Option<Span> {
        let lead = self.leads.remove(&start)?;
        let (&at, arena) = self.by_start.range_mut(..=start).next_back()?;
        arena.reservations -= 1;
        let span = Span {
            start: at,
            size: arena.end - at,
        };
        if !arena.shared {
            return Some(span);
        }
        arena.space.give_back(start - lead, size + lead);
        if arena.reservations != 0 {
            return None;
        }
        let is_empty = |arena: &&Arena| arena.shared && arena.reservations == 0;
        let another = self.by_start.values().filter(is_empty).nth(1);
        another.map(|_| span)
    }

    pub(super) fn forget(&mut self, start: u64) {
        self.by_start.remove(&start);
    }

    pub(super) fn containing(&self, address: u64) -> Option<Span> {
        let (&start, arena) = self.by_start.range(..=address).next_back()?;
        (address < arena.end).then_some(Span {
            start,
            size: arena.end - start,
        })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Span> {
        self.by_start.iter().map(|(&start, arena)| Span {
            start,
            size: arena.end - start,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Arenas, SHARED, Span};

    const GAP: u64 = 0x1000;

    fn with_one() -> Arenas {
        let mut arenas = Arenas::new(GAP);
        arenas.add_shared(shared(0));
        arenas
    }

    fn shared(index: u64) -> Span {
        Span {
            start: (16 + index) * SHARED,
            size: SHARED,
        }
    }

    #[test]
    fn neighbours_are_apart_unless_they_were_asked_for() {
        let mut arenas = with_one();
        let first = arenas.take_anywhere(GAP, GAP);
        assert_eq!(first, Some(16 * SHARED + GAP), "a gap before the first");
        assert_eq!(arenas.take_anywhere(GAP, GAP), Some(16 * SHARED + 3 * GAP));
        assert_eq!(arenas.take_at(16 * SHARED + 3 * GAP, GAP), Some(false));
        assert_eq!(arenas.take_at(16 * SHARED + 4 * GAP, GAP), Some(true));
        assert_eq!(arenas.take_at(15 * SHARED, GAP), None, "not of ours");
        let last = 17 * SHARED - GAP;
        assert_eq!(arenas.take_at(last, GAP), Some(false), "a gap at the end");
        for index in [1, 3, 4] {
            assert_eq!(arenas.give_back(16 * SHARED + index * GAP, GAP), None);
        }
        assert_eq!(arenas.take_anywhere(GAP, GAP), first, "all merged again");
    }

    #[test]
    fn one_empty_arena_is_kept() {
        let mut arenas = with_one();
        arenas.add_shared(shared(1));
        let first = arenas.take_anywhere(SHARED / 2, GAP).unwrap_or_default();
        let second = arenas.take_anywhere(SHARED / 2, GAP).unwrap_or_default();
        assert!(shared(1).start < second);
        assert_eq!(arenas.give_back(first, SHARED / 2), None);
        assert_eq!(arenas.give_back(second, SHARED / 2), Some(shared(1)));
        arenas.forget(shared(1).start);
        assert_eq!(arenas.containing(second), None);
        assert_eq!(arenas.all().count(), 1);
    }

    #[test]
    fn a_single_arena_goes_with_its_reservation() {
        let mut arenas = with_one();
        let span = Span {
            start: 64 * SHARED,
            size: 2 * SHARED,
        };
        arenas.add_single(span, 64 * SHARED + GAP);
        assert_eq!(arenas.containing(65 * SHARED), Some(span));
        assert_eq!(arenas.give_back(64 * SHARED + GAP, SHARED), Some(span));
    }
}
