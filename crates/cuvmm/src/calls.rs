//! How often the driver was called, and how long that took, by kind of call.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cuvmm_driver::Call;

use crate::sync::thread::{self, ThreadId};

/// Counters that a [`Device`](crate::Device) adds to at each driver call.
pub(crate) struct Calls {
    kinds: [Kind; Call::COUNT],
    /// The part that a mapper's thread made.
    mapper: OnceLock<Mapper>,
}

struct Mapper {
    thread: ThreadId,
    kinds: [Kind; Call::COUNT],
}

#[derive(Default)]
struct Kind {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Calls {
    pub(crate) fn new() -> Self {
        Self {
            kinds: std::array::from_fn(|_| Kind::default()),
            mapper: OnceLock::new(),
        }
    }

    /// Counts what a thread calls apart, besides.
    pub(crate) fn count_apart(&self, thread: ThreadId) {
        self.mapper.get_or_init(|| Mapper {
            thread,
            kinds: std::array::from_fn(|_| Kind::default()),
        });
    }

    pub(crate) fn add(&self, call: Call, took: Duration) {
        add(&self.kinds, call, took);
        if let Some(mapper) = self.mapper.get()
            && mapper.thread == thread::current().id()
        {
            add(&mapper.kinds, call, took);
        }
    }

    pub(crate) fn snapshot(&self) -> CallCounts {
        snapshot(&self.kinds)
    }

    pub(crate) fn snapshot_of_mapper(&self) -> CallCounts {
        self.mapper.get().map_or_else(
            || CallCounts {
                kinds: [(0, 0); Call::COUNT],
            },
            |mapper| snapshot(&mapper.kinds),
        )
    }
}

fn add(kinds: &[Kind; Call::COUNT], call: Call, took: Duration) {
    if let Some(kind) = kinds.get(call as usize) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: nothing is ordered by these counters.
        kind.count.fetch_add(1, Ordering::Relaxed);
        kind.nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

fn snapshot(kinds: &[Kind; Call::COUNT]) -> CallCounts {
    CallCounts {
        kinds: std::array::from_fn(|index| {
            let kind = &kinds[index];
            (
                kind.count.load(Ordering::Relaxed),
                kind.nanos.load(Ordering::Relaxed),
            )
        }),
    }
}

/// Driver calls by kind, failed ones included: how many, and the time spent in them.
#[derive(Clone, PartialEq, Eq)]
pub struct CallCounts {
    kinds: [(u64, u64); Call::COUNT],
}

impl CallCounts {
    /// How often a call was made.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.kinds.get(call as usize).map_or(0, |kind| kind.0)
    }

    /// The wall time spent in a call, all times together.
    #[must_use]
    pub fn time(&self, call: Call) -> Duration {
        Duration::from_nanos(self.kinds.get(call as usize).map_or(0, |kind| kind.1))
    }

    /// How many calls were made in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.0).sum()
    }

    /// What was added since an earlier snapshot of the same counters.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            kinds: std::array::from_fn(|index| {
                let (now, then) = (self.kinds[index], earlier.kinds[index]);
                (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1))
            }),
        }
    }

    /// The calls that were made at all, with count and time.
    pub fn iter(&self) -> impl Iterator<Item = (Call, u64, Duration)> + '_ {
        Call::ALL
            .iter()
            .map(|&call| (call, self.count(call), self.time(call)))
            .filter(|&(_, count, _)| count > 0)
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(call, count, time)| (call, (count, time))))
            .finish()
    }
}
