//! Counts and times of driver calls by kind.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cuvmm_driver::Call;
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::display::Table;
use crate::sync::thread::{self, ThreadId};

/// Counters that a [`Device`](crate::Device) updates at each driver call.
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

    /// Also counts the calls of a thread separately.
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
        // Relaxed: these counters order nothing.
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

/// Driver calls by kind, failed ones included: their number, and the time spent in them.
#[derive(Clone, PartialEq, Eq)]
pub struct CallCounts {
    kinds: [(u64, u64); Call::COUNT],
}

impl CallCounts {
    /// Returns how often a call was made.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.kinds.get(call as usize).map_or(0, |kind| kind.0)
    }

    /// Returns the total wall time spent in a call.
    #[must_use]
    pub fn time(&self, call: Call) -> Duration {
        Duration::from_nanos(self.kinds.get(call as usize).map_or(0, |kind| kind.1))
    }

    /// Returns the number of all calls.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.0).sum()
    }

    /// Returns what was added since an earlier snapshot of the same counters.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            kinds: std::array::from_fn(|index| {
                let (now, then) = (self.kinds[index], earlier.kinds[index]);
                (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1))
            }),
        }
    }

    /// Returns the calls made at least once, with count and time.
    pub fn iter(&self) -> impl Iterator<Item = (Call, u64, Duration)> + '_ {
        Call::ALL
            .iter()
            .map(|&call| (call, self.count(call), self.time(call)))
            .filter(|&(_, count, _)| count > 0)
    }
}

/// Shows one line for each call that was made: its name, the count and the time in all.
impl fmt::Display for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["call", "count", "time"]);
        for (call, count, time) in self.iter() {
            let time = format!("{:.1} us", time.as_nanos() as f64 / 1e3);
            table.row([call.name().to_owned(), count.to_string(), time]);
        }
        table.fmt(f)
    }
}

/// Serializes as a map from the name of each call made to its `count` and `time_ns`, the wall time
/// in all in nanoseconds.
impl Serialize for CallCounts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct Made {
            count: u64,
            time_ns: u64,
        }
        let mut map = serializer.serialize_map(None)?;
        for (call, count, time) in self.iter() {
            let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            map.serialize_entry(call.name(), &Made { count, time_ns })?;
        }
        map.end()
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(call, count, time)| (call, (count, time))))
            .finish()
    }
}
