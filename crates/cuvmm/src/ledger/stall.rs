//! Stall times of a process and of the ledger, counted as the kernel counts pressure stall
//! information. The [ledger's page](super#stall-times) defines *some* and *in full*.
//!
//! Time is added when a waiting request begins, tries again or ends: it counts as the state found
//! at the previous such step. A request tries again within a few milliseconds. If the next attempt
//! comes later than other processes count the request, as in a stopped process, the rest is not
//! counted. The process with the oldest request adds the time of the ledger, so no two processes
//! add the same time, and their clocks are not compared.

use std::time::{Duration, Instant};

use super::layout::{Layout, State};
use super::seen::{Seen, TICKET_AGE};
use crate::wanted::Lacking;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stall {
    #[default]
    No,
    Some,
    /// Every tenant that has memory in use waits.
    Full,
}

impl Stall {
    pub(super) const fn word(self) -> u64 {
        match self {
            Self::No => 0,
            Self::Some => 1,
            Self::Full => 2,
        }
    }
}

#[derive(Debug)]
struct Request {
    ticket: u64,
    since: Instant,
    /// The pool and the tenants of the request; `None` if the process waits for its guarantee.
    of: Option<(u64, Vec<u64>)>,
    /// The tenants of the pool that had memory in use when the request last tried.
    users: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Stalls {
    requests: Vec<Request>,
    state: Stall,
    /// When the state was last found.
    at: Option<Instant>,
    some: Duration,
    full: Duration,
}

impl Stalls {
    /// Adds the time since the last call, and returns it.
    pub(super) fn add(&mut self, now: Instant) -> Duration {
        let passed = self.at.replace(now);
        let passed = passed.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let passed = match self.state {
            Stall::No => Duration::ZERO,
            Stall::Some | Stall::Full => passed.min(TICKET_AGE),
        };
        self.some += passed;
        if self.state == Stall::Full {
            self.full += passed;
        }
        passed
    }

    pub(super) fn begin(&mut self, ticket: u64, now: Instant) {
        self.requests.push(Request {
            ticket,
            since: now,
            of: None,
            users: Vec::new(),
        });
    }

    pub(super) fn note(&mut self, ticket: u64, pool: u64, lacking: Lacking) {
        let mut requests = self.requests.iter_mut();
        if let Some(request) = requests.find(|it| it.ticket == ticket) {
            request.of = Some((pool, lacking.tenants));
            request.users = lacking.users;
        }
    }

    pub(super) fn end(&mut self, ticket: u64) {
        self.requests.retain(|it| it.ticket != ticket);
    }

    /// Returns `true` if a request of a pool waits that is not this one.
    pub(super) fn has_beside(&self, pool: u64) -> bool {
        let mut pools = self.requests.iter().filter_map(|it| it.of.as_ref());
        pools.any(|(of, _)| *of != pool)
    }

    pub(super) fn find(&mut self, pools: &[u64]) -> Stall {
        self.state = match self.requests.is_empty() {
            true => Stall::No,
            false if pools.iter().all(|&pool| self.is_full(pool)) => Stall::Full,
            false => Stall::Some,
        };
        self.state
    }

    fn is_full(&self, pool: u64) -> bool {
        let of = self.requests.iter().filter_map(|it| {
            let (of, tenants) = it.of.as_ref()?;
            (*of == pool).then_some((tenants, &it.users))
        });
        let of: Vec<_> = of.collect();
        let waits = |user: &u64| of.iter().any(|(tenants, _)| tenants.contains(user));
        !of.is_empty() && of.iter().all(|(_, users)| users.iter().all(waits))
    }

    /// Shows the times in the process's slot, and adds `of_ledger` to the times of the ledger.
    pub(super) fn show(
        &self,
        layout: &Layout,
        own: usize,
        of_ledger: Option<Duration>,
        seen: &mut Seen,
    ) {
        let [some, full] = self.totals();
        let (slot, header) = (&layout.slots[own], &layout.header);
        slot.stalled.publish(some);
        slot.stalled_full.publish(full);
        let Some(passed) = of_ledger else {
            return;
        };
        header.stalled.add(nanoseconds(passed));
        if self.state == Stall::Full && others_are_full(layout, own, seen) {
            header.stalled_full.add(nanoseconds(passed));
        }
    }

    fn totals(&self) -> [u64; 2] {
        [self.some, self.full].map(nanoseconds)
    }

    /// In nanoseconds.
    pub(super) fn waited(&self, now: Instant) -> u64 {
        let since = self.requests.iter().map(|it| it.since).min();
        since.map_or(0, |since| nanoseconds(now.saturating_duration_since(since)))
    }
}

/// Returns `true` if each process with memory, except that of slot `own`, is stalled in full.
fn others_are_full(layout: &Layout, own: usize, seen: &mut Seen) -> bool {
    let slots = layout.slots.iter().enumerate();
    let mut others = slots.filter(|&(index, slot)| {
        let has_memory = slot.obtained.load() > 0 && slot.state().0 == State::Live;
        index != own && has_memory
    });
    let full = Stall::Full.word();
    others.all(|(index, slot)| slot.stall.load() == full && seen.is_waiting(layout, index))
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The times over which shares are averaged, in seconds.
const WINDOWS: [f64; 3] = [10.0, 60.0, 300.0];

/// The parts of a share of 1 in the file's words.
const PARTS: f64 = 1e6;

/// The averages of some and full over the [windows](WINDOWS), as in the file.
pub(super) type Words = [u64; 6];

/// Exponentially decaying averages of the shares of the time in which requests waited.
#[derive(Clone, Debug, Default)]
pub(super) struct Averages {
    /// The last totals, some and full.
    totals: Option<[u64; 2]>,
    shares: [[f64; 3]; 2],
}

impl Averages {
    /// Adds the totals after a time; returns the averages.
    pub(super) fn add(&mut self, passed: Duration, totals: [u64; 2]) -> Words {
        let before = self.totals.replace(totals).unwrap_or(totals);
        let passed = passed.as_secs_f64();
        let pairs = totals.into_iter().zip(before);
        for (shares, (now, before)) in self.shares.iter_mut().zip(pairs) {
            let stalled = Duration::from_nanos(now.saturating_sub(before)).as_secs_f64();
            let share = if passed > 0.0 { stalled / passed } else { 0.0 };
            for (average, window) in shares.iter_mut().zip(WINDOWS) {
                let kept = (-passed / window).exp();
                *average = *average * kept + share.min(1.0) * (1.0 - kept);
            }
        }
        let [some, full] = self.shares;
        let words = some.into_iter().chain(full);
        let mut all = Words::default();
        for (word, share) in all.iter_mut().zip(words) {
            *word = (share * PARTS).round() as u64;
        }
        all
    }
}

pub(super) fn percent(word: u64) -> f64 {
    (word as f64 / PARTS).min(1.0) * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn lacking(tenants: &[u64], users: &[u64]) -> Lacking {
        Lacking {
            bytes: 1,
            tenants: tenants.to_vec(),
            users: users.to_vec(),
        }
    }

    #[test]
    fn requests_that_wait_at_one_time_count_once() {
        let (mut stalls, begin) = (Stalls::default(), Instant::now());
        assert_eq!(stalls.add(begin), Duration::ZERO);
        stalls.begin(1, begin);
        stalls.note(1, 0, lacking(&[7], &[7, 8]));
        assert_eq!(stalls.find(&[0]), Stall::Some, "tenant 8 goes on");
        stalls.add(begin + 10 * MS);
        stalls.begin(2, begin + 10 * MS);
        stalls.note(2, 0, lacking(&[8], &[7, 8]));
        assert_eq!(stalls.find(&[0]), Stall::Full);
        assert_eq!(stalls.add(begin + 15 * MS), 5 * MS);
        stalls.end(1);
        assert_eq!(stalls.find(&[0]), Stall::Some);
        assert_eq!(
            stalls.waited(begin + 15 * MS),
            5_000_000,
            "the oldest has ended"
        );
        stalls.add(begin + 18 * MS);
        stalls.end(2);
        assert_eq!(stalls.find(&[0]), Stall::No);
        assert_eq!(stalls.add(begin + 90 * MS), Duration::ZERO);
        assert_eq!(stalls.totals(), [18_000_000, 5_000_000]);
        assert_eq!(stalls.waited(begin + 90 * MS), 0);
    }

    #[test]
    fn a_pool_without_a_waiting_request_goes_on() {
        let (mut stalls, now) = (Stalls::default(), Instant::now());
        stalls.begin(1, now);
        assert_eq!(stalls.find(&[]), Stall::Full, "it waits to join");
        assert_eq!(stalls.find(&[3]), Stall::Some, "pool 3 does not wait");
        stalls.note(1, 3, lacking(&[7], &[]));
        assert_eq!(stalls.find(&[3]), Stall::Full);
        assert_eq!(stalls.find(&[3, 4]), Stall::Some);
        stalls.begin(2, now);
        stalls.note(2, 4, lacking(&[7], &[7]));
        assert_eq!(stalls.find(&[3, 4]), Stall::Full);
        stalls.note(2, 4, lacking(&[7], &[7, 9]));
        assert_eq!(stalls.find(&[3, 4]), Stall::Some);
    }

    #[test]
    fn a_request_without_a_sign_of_life_counts_as_long_as_others_count_it() {
        let (mut stalls, begin) = (Stalls::default(), Instant::now());
        stalls.begin(1, begin);
        stalls.add(begin);
        stalls.find(&[]);
        assert_eq!(stalls.add(begin + 100 * TICKET_AGE), TICKET_AGE);
    }

    #[test]
    fn requests_of_a_queue_are_counted_together() {
        let one = lacking(&[1], &[1, 2]);
        assert_eq!(one.clone().with(None), one);
        let mut two = lacking(&[2], &[1, 2, 3]);
        two.bytes = 9;
        let both = Lacking {
            bytes: 9,
            tenants: vec![1, 2],
            users: vec![1, 2, 3],
        };
        assert_eq!(two.with(Some(one)), both);
    }

    #[test]
    fn averages_come_near_the_share_and_decay() {
        let mut averages = Averages::default();
        let (second, mut totals) = (Duration::from_secs(1), [0, 0]);
        averages.add(second, totals);
        for _ in 0..10 {
            totals = [totals[0] + 1_000_000_000, totals[1] + 500_000_000];
            averages.add(second, totals);
        }
        // 1 - e^-1, 1 - e^(-1/6) and 1 - e^(-1/30).
        let [a, b, c, d, ..] = averages.add(Duration::ZERO, totals);
        assert_eq!([a, b, c, d], [632_121, 153_518, 32_784, 316_060]);
        let [some, .., full] = averages.add(10 * second, totals);
        assert_eq!((some, full), (232_544, 15_855));
        let above = [totals[0] + 90_000_000_000, totals[1]];
        let [some, ..] = averages.add(second, above);
        assert!(some < 320_000, "no share is above one: {some}");
        assert!((percent(632_121) - 63.2121).abs() < 1e-9);
        assert!((percent(u64::MAX) - 100.0).abs() < 1e-9);
    }
}
