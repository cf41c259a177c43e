//! Blocks, one way to hold memory of a pool: how they get it, use it and grow. Folders have
//! slots and their lists, shared memory, memory ahead of growth, memory given up, sleep, and
//! compaction.

mod adjacent;
pub(in crate::pool) mod ahead;
mod allocate;
#[cfg(debug_assertions)]
mod audit;
mod batch;
mod beside;
mod block;
mod builder;
mod change;
mod clock;
mod commit;
pub(in crate::pool) mod compaction;
mod exported;
mod figures;
mod fills;
mod grow;
mod headroom;
mod lease;
mod places;
pub(in crate::pool) mod purge;
pub(in crate::pool) mod sharing;
pub(in crate::pool) mod sleep;
pub(in crate::pool) mod slots;
mod stream_cache;
mod uses;

use std::sync::Arc;

use self::ahead::Precommit;
use self::clock::Clock;
use self::slots::{FreedBlock, Hardened, Hardening, PurgeQueues, Slots};
use crate::own::Stream;
use crate::size::Granularity;

pub(in crate::pool) use allocate::Needs;
pub use block::Block;
pub use builder::BlockBuilder;
pub(in crate::pool) use change::Change;
use commit::{Charging, Fit, Gathered, PlacedMemory};
pub use exported::ExportedBlock;
#[cfg(target_os = "linux")]
pub(crate) use exported::{BlockParts, OfferingPool, Promised};
pub(in crate::pool) use figures::IdleFigures;
pub(in crate::pool) use fills::Unfinished;
pub use headroom::Headroom;
pub use lease::Lease;
pub(in crate::pool) use stream_cache::Owner;
#[cfg(any(feature = "dlpack", feature = "cudarc"))]
pub(crate) use uses::Use;

/// The blocks of a pool: slots with memory, and what is to be done with them.
pub(in crate::pool) struct Blocks {
    pub(in crate::pool) slots: Slots,
    pub(in crate::pool) granule: Granularity,
    /// Slots with memory to be unmapped.
    queues: PurgeQueues,
    /// Stream caches advance it too.
    clock: Arc<Clock>,
    /// `true` if memory of slots is to be purged or reclaimed before an operation ends, this one or
    /// another.
    pub(in crate::pool) has_deferred: bool,
    /// Blocks that were swept from stream caches while their slots were out.
    to_free: Vec<FreedBlock>,
    precommit: Option<Precommit>,
    hardening: Option<Box<Hardening>>,
    /// The stream that fills and copies for blocks without a home stream.
    scrubber: Option<Stream>,
}

impl Blocks {
    pub(in crate::pool) fn new(granule: Granularity, hardened: Option<Hardened>) -> Self {
        Self {
            slots: Slots::default(),
            granule,
            queues: PurgeQueues::default(),
            clock: Arc::default(),
            has_deferred: false,
            to_free: Vec::new(),
            precommit: None,
            hardening: hardened.map(|options| Box::new(Hardening::new(options))),
            scrubber: None,
        }
    }
}
