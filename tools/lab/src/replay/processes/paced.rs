//! Memory in real time. Under a ledger a refused request waits for memory of other processes;
//! without one it is tried again when this process has freed memory.
//!
//! Only the oldest waiting request of each model waits here. It gives way when a running request
//! grows, so freed memory goes to running requests first.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use cuvmm::Block;
use cuvmm::error::LedgerRefusal;
use rustix::time::{ClockId, clock_gettime};

use crate::replay::memory::{Memory, Usage};
use crate::replay::process::{Process, ms};
use crate::replay::settings::Nanos;
use crate::replay::shared::{Shared, Wish};
use cuvmm_command::stop::Stop;

/// The interval at which a waiting process checks that it is still wanted, and sends a sign of
/// life.
const LOOK: Duration = Duration::from_millis(250);

/// Returns the time on the system's monotonic clock, which is one for all processes: what one gives
/// and another takes then follow each other in their reports too.
pub(super) fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    now.try_into().unwrap_or_default()
}

/// Real time, counted from the first second of the trace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// When the first second begins, as [`since_boot`] counts. A process may read it later than that.
    pub(super) start: Duration,
    /// Seconds of the trace in one second.
    pub(super) speed: f64,
}

impl Clock {
    fn elapsed(&self) -> Duration {
        since_boot().saturating_sub(self.start)
    }

    fn now(&self) -> Nanos {
        (self.elapsed().as_nanos() as f64 * self.speed) as Nanos
    }

    /// Returns the real time from the start to a time of the trace.
    fn at(&self, due: Nanos) -> Duration {
        let seconds = Duration::from_nanos(due).as_secs_f64() / self.speed;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

pub(super) struct Paced<'a, M> {
    pub(super) memory: M,
    pub(super) clock: Clock,
    /// `true` if a refused request waits for memory of other processes.
    pub(super) asks: bool,
    /// Set when this process is not wanted any more.
    pub(super) unwanted: &'a Stop,
    /// Sends a sign of life.
    pub(super) lives: &'a dyn Fn() -> anyhow::Result<()>,
    /// Added to the numbers of requests in stamps, so that no two processes stamp alike.
    pub(super) first: u64,
    /// The figures of the waits.
    pub(super) counts: Process,
    /// The waiting request of each model.
    pub(super) asked: Vec<Option<Asked>>,
}

pub(super) struct Asked {
    request: u64,
    granules: u64,
    since: Instant,
    state: Waiting,
}

impl Asked {
    /// Returns the time until this process should look after the request.
    fn again(&self) -> Duration {
        match self.state {
            Waiting::Pending(Wish::Again(at)) => at.saturating_duration_since(Instant::now()),
            _ => LOOK,
        }
    }
}

enum Waiting {
    Pending(Wish),
    Granted(Block),
    /// The request should be tried again, and has waited since it was refused first.
    Due,
    /// The request gave way, and should be tried again.
    GaveWay,
}

impl<M> Paced<'_, M> {
    /// Returns `true` if a waiting request may be tried again.
    fn may_fit(&mut self) -> anyhow::Result<bool> {
        let mut any = false;
        for asked in self.asked.iter_mut().flatten() {
            match &mut asked.state {
                Waiting::Pending(Wish::Block(future)) => {
                    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
                    match Pin::new(future).poll(&mut Context::from_waker(&waker)) {
                        Poll::Pending => continue,
                        Poll::Ready(block) => {
                            self.counts.waited(asked.since);
                            asked.state = Waiting::Granted(block?);
                        }
                    }
                }
                Waiting::Pending(Wish::Again(at)) if *at > Instant::now() => continue,
                Waiting::Pending(Wish::Again(_)) => asked.state = Waiting::Due,
                Waiting::Granted(_) | Waiting::Due | Waiting::GaveWay => {}
            }
            any = true;
        }
        Ok(any)
    }
}

impl<M: Shared> Memory for Paced<'_, M> {
    type Block = M::Block;

    fn granule(&self) -> u64 {
        self.memory.granule()
    }

    fn ceiling(&self, model: usize) -> u64 {
        self.memory.ceiling(model)
    }

    fn allocate(
        &mut self,
        model: usize,
        request: u64,
        granules: u64,
        capacity: u64,
    ) -> anyhow::Result<Option<M::Block>> {
        let stamp = self.first + request;
        // Dropped if it belongs to a request that gave way to an older one.
        let asked = self.asked[model].take();
        let mut refused = None;
        match asked.filter(|asked| asked.request == request && asked.granules == granules) {
            Some(Asked {
                state: Waiting::Granted(block),
                ..
            }) => return self.memory.hold(block, model, stamp, granules).map(Some),
            Some(asked) if matches!(asked.state, Waiting::Pending(Wish::Block(_))) => {
                self.asked[model] = Some(asked);
                return Ok(None);
            }
            Some(Asked {
                state: Waiting::Pending(Wish::Again(_)) | Waiting::Due,
                since,
                ..
            }) => refused = Some(since),
            _ => {}
        }
        if let Some(held) = self.memory.allocate(model, stamp, granules, capacity)? {
            if let Some(since) = refused {
                self.counts.waited(since);
            }
            return Ok(Some(held));
        }
        if !self.asks {
            return Ok(None);
        }
        self.counts.waits += u64::from(refused.is_none());
        self.asked[model] = Some(Asked {
            request,
            granules,
            since: refused.unwrap_or_else(Instant::now),
            state: Waiting::Pending(self.memory.ask(model, granules, capacity)),
        });
        Ok(None)
    }

    fn grow(&mut self, held: &mut M::Block, granules: u64) -> anyhow::Result<bool> {
        if self.memory.grow(held, granules)? {
            return Ok(true);
        }
        for asked in self.asked.iter_mut().flatten() {
            // This withdraws the request, and gives its granted memory back.
            asked.state = Waiting::GaveWay;
            if self.memory.grow(held, granules)? {
                return Ok(true);
            }
        }
        if self.asks {
            let begun = Instant::now();
            let served = self.memory.grow_waiting(held, granules)?;
            self.counts.growth_waits += 1;
            self.counts.growth_waited_ms += ms(begun.elapsed());
            if served {
                self.counts.growth_served += 1;
                return Ok(true);
            }
        }
        self.counts.growth_refused += 1;
        let why = self.memory.refusal_of_ledger();
        self.counts.growth_refused_behind += u64::from(why == Some(LedgerRefusal::OlderRequest));
        let why = why.map_or("Pool".to_owned(), |why| format!("{why:?}"));
        *self.counts.growth_refused_why.entry(why).or_default() += 1;
        Ok(false)
    }

    fn free(&mut self, held: M::Block) -> anyhow::Result<()> {
        self.memory.free(held)
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        self.memory.settle()
    }

    fn last_refusal(&self) -> Option<String> {
        self.memory.last_refusal()
    }

    fn usage(&self, model: usize) -> anyhow::Result<Option<Usage>> {
        self.memory.usage(model)
    }

    fn now(&self, due: Nanos) -> Nanos {
        due.max(self.clock.now())
    }

    fn pause(&mut self, due: Option<Nanos>) -> anyhow::Result<Option<Nanos>> {
        loop {
            let wanted = !self.unwanted.within(Duration::ZERO);
            ensure!(wanted, "the replay that started this process has ended");
            (self.lives)()?;
            if self.may_fit()? {
                return Ok(Some(self.clock.now()));
            }
            let left = match due {
                Some(due) => {
                    let (due, now) = (self.clock.at(due), self.clock.elapsed());
                    let late = ms(now.saturating_sub(due));
                    self.counts.late_max_ms = self.counts.late_max_ms.max(late);
                    due.saturating_sub(now)
                }
                None if self.asked.iter().all(Option::is_none) => return Ok(None),
                None => LOOK,
            };
            if left.is_zero() {
                return Ok(None);
            }
            let again = self.asked.iter().flatten().map(Asked::again).min();
            std::thread::park_timeout(left.min(again.unwrap_or(LOOK)));
        }
    }

    fn keeps_course(&self) -> bool {
        true
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_starts_late_counts_from_the_start_of_all() {
        let late = Duration::from_secs(10);
        let clock = Clock {
            start: since_boot().saturating_sub(late),
            speed: 2.0,
        };
        assert!(clock.now() >= 20_000_000_000);
        assert_eq!(clock.at(20_000_000_000), late);
    }
}
