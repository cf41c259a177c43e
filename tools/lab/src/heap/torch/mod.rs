//! Models of PyTorch's allocators: the memory that they hold, and their driver calls.
//!
//! `blocks` has the common part, `meter` counts. Not modelled: garbage collection and other
//! options, private pools of captured graphs, events of other streams (a trace has none), and the
//! memory of the context and of libraries.

mod blocks;
mod expandable;
mod meter;
mod native;

use std::collections::HashMap;

use cuvmm::driver::model::Costs;
use serde::Serialize;

use self::blocks::{Blocks, Id, Pool, State};
use self::meter::Meter;
use super::trace::{Operation, Trace};

const MIB: u64 = 1 << 20;
/// The size of segments and pages of small blocks.
const SMALL: u64 = 2 * MIB;
/// The size of segments for requests of 1 to 10 MiB, and of pages of large blocks.
const LARGE: u64 = 20 * MIB;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Native,
    Expandable,
}

/// The figures of a modelled allocator.
#[derive(Debug, Serialize)]
pub(super) struct Modelled {
    pub(super) peak_live_bytes: u64,
    pub(super) peak_held_bytes: u64,
    /// Peak held over peak live.
    pub(super) ratio: f64,
    pub(super) driver_calls: u64,
    pub(super) driver_us_per_operation: f64,
    pub(super) failed: u64,
    pub(super) smallest_limit_bytes: Option<u64>,
}

/// An allocator with an order for each stream, and no memory in common.
#[derive(Debug)]
struct Allocator<'a> {
    kind: Kind,
    blocks: Blocks,
    meter: Meter<'a>,
}

impl<'a> Allocator<'a> {
    fn new(kind: Kind, meter: Meter<'a>) -> Self {
        let blocks = Blocks::default();
        Self {
            kind,
            blocks,
            meter,
        }
    }

    fn allocate(&mut self, size: u64, stream: u64) -> Option<Id> {
        let size = size.checked_next_multiple_of(512)?;
        let pool = pool(size, stream);
        let id = match self.kind {
            Kind::Native => self.native(pool, size)?,
            Kind::Expandable => self.expandable(pool, size)?,
        };
        self.blocks.set(id, State::Used);
        // The native allocator splits a large block only if more than this is left of it.
        let least = match self.kind {
            Kind::Native if !pool.small => MIB,
            _ => 0,
        };
        if self.blocks.get(id).size - size > least {
            let rest = self.blocks.split(id, size);
            self.blocks.set(rest, State::Free);
        }
        Some(id)
    }

    fn free(&mut self, id: Id) {
        self.blocks.set(id, State::Free);
        self.blocks.join(id);
    }
}

const fn pool(size: u64, stream: u64) -> Pool {
    let small = size <= MIB;
    Pool { small, stream }
}

/// Plays a trace on a device with `memory` bytes, of which `limit` can be held.
pub(super) fn play(
    kind: Kind,
    trace: &Trace,
    costs: &Costs,
    (limit, memory): (u64, u64),
) -> Modelled {
    let mut allocator = Allocator::new(kind, Meter::new(costs, limit, memory));
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
    }
    let meter = allocator.meter;
    Modelled {
        peak_live_bytes: peak_live,
        peak_held_bytes: meter.peak_held,
        ratio: meter.peak_held as f64 / peak_live.max(1) as f64,
        driver_calls: meter.calls,
        driver_us_per_operation: meter.microseconds / trace.operations.len().max(1) as f64,
        failed,
        smallest_limit_bytes: None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Allocates and frees at random, and checks the blocks after each operation. Each step has a
    /// size in units of 100,000 bytes, a stream, and a choice to free the oldest, the newest or
    /// nothing.
    fn operate(
        mut allocator: Allocator<'_>,
        steps: &[(u64, u64, u8)],
    ) -> Result<(), TestCaseError> {
        let (mut live, mut used) = (std::collections::VecDeque::new(), 0);
        for &(size, stream, free) in steps {
            let size = size * 100_000;
            if let Some(id) = allocator.allocate(size, stream) {
                let block = allocator.blocks.get(id);
                prop_assert!(block.size >= size && block.pool == pool(size, stream));
                live.push_back(id);
                used += block.size;
            }
            let freed = match free {
                0 => live.pop_front(),
                1 => live.pop_back(),
                _ => None,
            };
            if let Some(id) = freed {
                used -= allocator.blocks.get(id).size;
                allocator.free(id);
            }
            let (in_use, free) = allocator.blocks.check();
            let meter = &allocator.meter;
            prop_assert_eq!(in_use, used);
            prop_assert_eq!(in_use + free, meter.held);
            prop_assert!(meter.held <= 300 * MIB);
        }
        live.into_iter().for_each(|id| allocator.free(id));
        prop_assert_eq!(allocator.blocks.check(), (0, allocator.meter.held));
        Ok(())
    }

    proptest! {
        #[test]
        fn blocks_stay_side_by_side(
            steps in prop::collection::vec((1_u64..600, 0_u64..3, 0_u8..4), 1..200),
        ) {
            let costs = Costs::default();
            let meter = || Meter::new(&costs, 300 * MIB, 1 << 30);
            for kind in [Kind::Native, Kind::Expandable] {
                operate(Allocator::new(kind, meter()), &steps)?;
            }
        }
    }
}
