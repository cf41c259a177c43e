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
