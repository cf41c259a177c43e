//! Playing a trace on a heap.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::num::NonZero;
use std::time::{Duration, Instant};

use cuvmm::heap::{HeapStats, Preset};
use cuvmm::{Allocation, Device, Heap, Limit, Pool, PoolError, Stream};

use super::ahead::Ahead;
use super::trace::{Operation, Trace};
use cuvmm_command::command::usage;
use cuvmm_command::drivers::{Concrete, Opened};

#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) preset: Preset,
    pub(super) aliases: bool,
    pub(super) limit: Option<u64>,
    /// On the model, the number of operations after which the work of all streams is complete.
    /// `None` if no work is queued.
    pub(super) ahead: Option<NonZero<u64>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    pub(super) driver: &'static str,
    pub(super) granule: u64,
    /// Memory of the device in bytes.
    pub(super) memory: u64,
    pub(super) operations: u64,
    pub(super) stats: HeapStats,
    pub(super) driver_calls: u64,
    /// The time of all driver calls: on the model by its clock, on a GPU as measured.
    pub(super) driver_time: Option<Duration>,
    /// The time of the whole run, where time is real.
    pub(super) time: Option<Duration>,
    pub(super) failed: u64,
}

/// Plays a trace on a heap over all of a device's memory, or over `limit` bytes.
///
/// # Errors
/// The device or the pool refuses. A failed allocation is counted and left out.
pub(super) fn play(opened: &Opened, trace: &Trace, options: Options) -> anyhow::Result<Outcome> {
    let device = Device::open(opened.driver.clone(), 0)?;
    let granule = device.granularity();
    let limit = options.limit.unwrap_or(device.total_memory());
    let pool = Pool::builder(&device).limit(Limit::Bytes(limit));
    let option = options.limit.map_or("--memory", |_| "--limit");
    let pool = pool.build().map_err(|error| match error {
        PoolError::Argument(error) => usage(format!("{option}: {error}")),
        error => error.into(),
    })?;
    let tenant = pool.tenant("trace").register()?;
    let heap = Heap::builder(&tenant)
        .preset(options.preset)
        .aliases(options.aliases)
        .build()?;
    let model = opened.model();
    let begun = model.as_ref().map(|model| model.clock());
    let calls = device.calls();
    let watch = Instant::now();
    let both = model.as_deref().zip(options.ahead);
    let mut run = Run {
        ahead: both.map(|(model, every)| Ahead::new(model, &device, every.get())),
        live: HashMap::new(),
        streams: HashMap::new(),
        device: &device,
        heap: &heap,
        failed: 0,
    };
    for operation in &trace.operations {
        run.operate(*operation)?;
    }
    let time = watch.elapsed();
    let calls = device.calls().since(&calls);
    let driver_time = match (&model, begun) {
        (Some(model), Some(begun)) => {
            let queued = run.ahead.as_ref().map(|ahead| ahead.spent);
            Some(model.clock() - begun - queued.unwrap_or_default())
        }
        _ if matches!(opened.concrete, Concrete::Cuda(_)) => {
            Some(calls.iter().map(|(.., time)| time).sum())
        }
        _ => None,
    };
    Ok(Outcome {
        driver: opened.driver.kind().name(),
        granule,
        memory: device.total_memory(),
        operations: trace.operations.len() as u64,
        stats: heap.stats(),
        driver_calls: calls.total(),
        driver_time,
        time: begun.is_none().then_some(time),
        failed: run.failed,
    })
}

/// A run. The drop of `ahead` comes first, because all else waits for its work.
struct Run<'a> {
    ahead: Option<Ahead<'a>>,
    live: HashMap<u64, Allocation>,
    streams: HashMap<u64, Stream>,
    device: &'a Device,
    heap: &'a Heap,
    failed: u64,
}

impl Run<'_> {
    fn operate(&mut self, operation: Operation) -> anyhow::Result<()> {
        match operation {
            Operation::Allocate { id, size, stream } => {
                let stream = match self.streams.entry(stream) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => new.insert(Stream::new(self.device)?),
                };
                match self.heap.allocate(size, 1, stream) {
                    Ok(memory) => {
                        self.live.insert(id, memory);
                        if let Some(ahead) = &mut self.ahead {
                            ahead.queue(stream)?;
                        }
                    }
                    Err(error) if error.is_out_of_memory() => self.failed += 1,
                    Err(error) => return Err(error.into()),
                }
            }
            Operation::Free { id } => drop(self.live.remove(&id)),
        }
        if let Some(ahead) = &mut self.ahead {
            ahead.step();
        }
        Ok(())
    }
}

/// Returns the smallest limit with which no allocation fails, to 1/512 of the peak of live bytes or
/// a granule. `failed` plays the trace with a limit.
///
/// # Errors
/// Those of `failed`.
pub(super) fn smallest_limit(
    (live, held): (u64, u64),
    granule: u64,
    failed: impl Fn(u64) -> anyhow::Result<u64>,
) -> anyhow::Result<u64> {
    let step = (live / 512).max(granule);
    // The lower limit fails, or is less than the live bytes; the upper limit suffices.
    let (mut low, mut high) = (live.saturating_sub(1), held);
    while high.saturating_sub(low) > step {
        let middle = (low + (high - low) / 2).max(granule);
        match failed(middle)? {
            0 => high = middle,
            _ => low = middle,
        }
    }
    Ok(high)
}
