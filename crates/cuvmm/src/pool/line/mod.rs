//! Requests that wait for memory: how a request waits, the queue of futures, and what is announced
//! to both.

#[cfg(test)]
mod again_tests;
mod clock;
pub mod futures;
mod in_ledger;
mod lacked;
mod needs;
mod of_holder;
mod pressure;
mod queue;
mod queued;
mod relief;
mod requests;
mod serve;
mod wait;
mod wanted;

use std::time::Duration;

use self::clock::Clock;
use self::queue::{Queue, Turn};

pub(crate) use self::needs::Needs;
pub(crate) use self::of_holder::HolderRequest;
pub use self::pressure::{Pressure, PressureHook};
pub(crate) use self::queued::{HolderWant, QueuedAttempt};
pub(in crate::pool) use self::relief::Demand;
pub(in crate::pool) use self::wait::Attempt;
pub(crate) use self::wait::{Wait, after};
pub(in crate::pool) use self::wanted::{ExtentOptions, Wanted};

/// The pause before requests that wait poll fences again, from 100 us on to 1.6 ms: it doubles each
/// time. Memory that other threads free ends it at once; polling more often for memory that only
/// the GPU can complete is not worth the pool's time.
#[derive(Debug, Default)]
struct Pause(Duration);

impl Pause {
    const BOUNDS: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(1600));

    fn next(&mut self) -> Duration {
        self.0 = (2 * self.0).clamp(Self::BOUNDS.0, Self::BOUNDS.1);
        self.0
    }
}

/// The queue of futures, and the announcements to all requests that wait.
#[derive(Debug, Default)]
pub(crate) struct Line {
    queue: Queue,
    clock: Clock,
    told: u64,
    freed_count: u64,
    others_lack: bool,
}

impl Line {
    /// Returns how often waiting requests were notified that memory became idle. An attempt
    /// releases the lock, and may miss memory that becomes idle meanwhile.
    pub(in crate::pool) const fn told(&self) -> u64 {
        self.told
    }

    /// Returns how often memory became free while a request waited.
    const fn freed_count(&self) -> u64 {
        self.freed_count
    }

    /// Counts an announcement to the requests that wait: memory became free `freed_count` times.
    /// Returns `true` if the mapper is to serve the queue; without a mapper, `has_mapper` is
    /// `false`.
    pub(super) fn announce(&mut self, freed_count: u64, has_mapper: bool) -> bool {
        self.freed_count += freed_count;
        self.told += 1;
        let serves = has_mapper && self.has_requests();
        self.queue.memory_freed |= serves;
        serves
    }

    /// Returns a request's [turn](Queue::turn).
    fn turn(&mut self, number: u64, attempts: bool) -> Option<Turn> {
        self.queue.turn(number, attempts, &self.clock)
    }

    /// Notes that a turn that calls hooks has ended, before which memory had become free
    /// `freed_count` times. Memory that a hook gave up is for the first request that it is enough for.
    /// Returns `true` if the request's round of hooks goes on.
    fn note_called(&mut self, turn: &Turn, freed_count: u64) -> bool {
        self.queue.memory_freed |= self.freed_count != freed_count;
        self.queue.note_called(turn, &self.clock)
    }

    /// Returns `true` if a future waits.
    pub(super) fn has_requests(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Returns `true` if a future's request still waits. Its growing block then exists, since the
    /// block withdraws the request before it is freed.
    pub(super) fn has(&self, number: u64) -> bool {
        self.queue.has(number)
    }

    /// Returns `true` while an older request of another process lacks memory of the ledger.
    pub(super) const fn others_lack(&self) -> bool {
        self.others_lack
    }

    /// Sets whether an older request of another process lacks memory of the ledger; returns `true`
    /// if that changed.
    pub(super) const fn set_others_lack(&mut self, yes: bool) -> bool {
        std::mem::replace(&mut self.others_lack, yes) != yes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_is_counted_and_calls_the_mapper_only_for_a_future() {
        let mut line = Line::default();
        assert!(!line.announce(1, true), "no future waits");
        assert!(!line.announce(0, false));
        assert_eq!((line.told(), line.freed_count()), (2, 1));
    }

    #[test]
    fn others_lack_until_that_is_taken_back() {
        let mut line = Line::default();
        assert!(line.set_others_lack(true) && !line.set_others_lack(true));
        assert!(line.others_lack());
        assert!(line.set_others_lack(false) && !line.others_lack());
    }
}
