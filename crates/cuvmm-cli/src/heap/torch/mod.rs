//! Models of PyTorch's allocators, as far as the memory that they hold and their driver calls go.
//!
//! `blocks` has what both do alike, `meter` counts. What neither models: garbage collection and other
//! options, private pools of captured graphs, events of other streams (a trace has none), and what
//! the context and libraries hold.

mod blocks;
mod expandable;
mod meter;
mod native;

use std::collections::HashMap;

use cuvmm::driver::model::Costs;

use self::blocks::{Id, Pool};
use self::expandable::Expandable;
use self::meter::Meter;
use self::native::Native;
use super::course::Course;
use super::trace::{Operation, Trace};

const MIB: u64 = 1 << 20;
/// The size of segments and pages of small blocks.
const SMALL: u64 = 2 * MIB;
/// The size of segments of requests of 1 to 10 MiB, and of pages of large blocks.
const LARGE: u64 = 20 * MIB;

/// An allocator of PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Native,
    Expandable,
}

/// The figures of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    pub(super) peak_live: u64,
    pub(super) peak_held: u64,
    pub(super) driver_calls: u64,
    pub(super) driver_us: f64,
    pub(super) failed: u64,
}

/// An allocator with one stream order for each stream, and no memory in common.
trait Caching {
    fn allocate(&mut self, size: u64, stream: u64) -> Option<Id>;

    fn free(&mut self, id: Id);

    fn meter(&self) -> &Meter<'_>;
}

/// Returns the pool of a request.
const fn pool(size: u64, stream: u64) -> Pool {
    let small = size <= MIB;
    Pool { small, stream }
}

/// Returns the size of the block for a request.
const fn rounded(size: u64) -> Option<u64> {
    size.checked_next_multiple_of(512)
}

/// Plays a trace on a device with `memory` bytes, of which `limit` can be held.
pub(super) fn play(
    kind: Kind,
    trace: &Trace,
    costs: &Costs,
    (limit, memory): (u64, u64),
    course: &mut Course,
) -> Outcome {
    let meter = Meter::new(costs, limit, memory);
    match kind {
        Kind::Native => play_on(Native::new(meter), trace, course),
        Kind::Expandable => play_on(Expandable::new(meter), trace, course),
    }
}

fn play_on(mut allocator: impl Caching, trace: &Trace, course: &mut Course) -> Outcome {
    let mut blocks: HashMap<u64, (Id, u64)> = HashMap::new();
    let (mut live, mut peak_live, mut failed) = (0_u64, 0, 0);
    for operation in &trace.operations {
        match *operation {
            Operation::Allocate { id, size, stream } => match allocator.allocate(size, stream) {
                Some(block) => {
                    blocks.insert(id, (block, size));
                    live += size;
                }
                None => failed += 1,
            },
            Operation::Free { id } => {
                if let Some((block, size)) = blocks.remove(&id) {
                    allocator.free(block);
                    live -= size;
                }
            }
        }
        peak_live = peak_live.max(live);
        course.note(|| (live, allocator.meter().held));
    }
    let meter = allocator.meter();
    Outcome {
        peak_live,
        peak_held: meter.peak_held,
        driver_calls: meter.calls,
        driver_us: meter.microseconds,
        failed,
    }
}
