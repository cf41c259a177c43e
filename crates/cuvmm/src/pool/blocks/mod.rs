//! Blocks: how they get memory, use it and grow. Folders have the parts that need no more than a
//! slot: slots and their lists, shared memory, memory ahead of growth, memory given up, sleep, and
//! compaction.

mod adjacent;
pub(in crate::pool) mod ahead;
mod allocate;
mod batch;
mod beside;
mod block;
mod builder;
mod change;
mod commit;
pub(in crate::pool) mod compaction;
mod exported;
mod fills;
mod grow;
mod headroom;
mod lease;
pub(in crate::pool) mod purge;
pub(in crate::pool) mod sharing;
pub(in crate::pool) mod sleep;
pub(in crate::pool) mod slots;
mod stream_cache;
mod uses;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use self::ahead::Precommit;
use self::slots::{FreedBlock, Hardening, PurgeQueues, Slots};
use crate::own::Stream;

pub use block::Block;
pub use builder::BlockBuilder;
pub(in crate::pool) use change::Change;
use commit::{Fit, Gathered, PlacedMemory};
pub use exported::ExportedBlock;
#[cfg(target_os = "linux")]
pub(crate) use exported::Promised;
pub(in crate::pool) use fills::Unfinished;
pub use headroom::Headroom;
pub use lease::Lease;
pub(in crate::pool) use stream_cache::{Owner, StreamCaches};
#[cfg(any(feature = "dlpack", feature = "cudarc"))]
pub(crate) use uses::Use;

/// The blocks of a pool: slots with memory, and what is to be done with them.
#[derive(Default)]
pub(in crate::pool) struct Blocks {
    pub(in crate::pool) slots: Slots,
    /// Slots with memory to be unmapped.
    pub(in crate::pool) queues: PurgeQueues,
    /// Counts uses, to order memory by its last use. Stream caches advance it too.
    pub(in crate::pool) clock: Arc<AtomicU64>,
    pub(in crate::pool) to_free: Vec<FreedBlock>,
    pub(in crate::pool) precommit: Option<Precommit>,
    pub(in crate::pool) hardening: Option<Box<Hardening>>,
    /// The stream that fills and copies for blocks without a home stream.
    pub(in crate::pool) scrubber: Option<Stream>,
    #[cfg(debug_assertions)]
    pub(in crate::pool) audits: u64,
}
