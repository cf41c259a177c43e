//! Owners, one for each kind of object that the driver hands out.
//!
//! Each owner keeps alive what it depends on, so owners may be dropped in any order. Each checks
//! arguments that the driver would wrongly accept (see `docs/semantics.md`).
//!
//! Functions that wait for the GPU name the call (`cuStreamSynchronize`, `cuEventSynchronize`). The
//! drop of an owner waits in two cases: the driver waits when it frees [`Managed`] memory, and an
//! [`ImportedAllocation`] waits for its streams before the giver may free the memory.
//! [`ImportedPool::import_allocation`] waits while this process frees the same allocation. The drop
//! of a `Mapping` unmaps at once, which is correct only when no work uses it;
//! [`Region`](crate::Region) and [`Pool`](crate::Pool) ensure that.

mod access;
mod close;
mod copy;
mod current_pool;
mod event;
mod export;
mod given_memory;
mod host;
mod imported_allocation;
mod imported_pool;
mod kept_memory;
mod kept_pool;
mod managed;
mod mapping;
mod mem_pool;
mod mem_pool_builder;
mod mem_pool_settings;
mod mem_pool_sharing;
mod nccl;
#[cfg(target_os = "linux")]
mod pages;
#[cfg(not(target_os = "linux"))]
mod pages_of_heap;
mod physical;
mod place;
mod pool_allocation;
mod pool_export;
mod pool_memory;
mod probe;
mod processes;
mod reach;
mod reservation;
mod reserved;
mod stream;
mod stream_keys;

pub use access::{Access, AccessGrant};
pub use close::{CloseError, CloseRefusal};
pub use current_pool::CurrentPoolGuard;
pub use event::Event;
pub use imported_allocation::ImportedAllocation;
pub use imported_pool::ImportedPool;
pub use managed::Managed;
pub use mapping::Mapping;
pub use mem_pool::MemPool;
pub use mem_pool_builder::MemPoolBuilder;
pub use mem_pool_settings::{MemPoolStats, PoolReuse};
pub use physical::{Physical, PhysicalBuilder};
pub use place::Place;
pub use pool_allocation::PoolAllocation;
pub use reservation::{MappingInfo, Reservation, ReservationBuilder};
pub use stream::Stream;

#[cfg(not(target_os = "linux"))]
use pages_of_heap as pages;

pub(crate) use copy::{CopyFailed, Span};
pub(crate) use export::one_type;
pub(crate) use host::{HostPart, Piece};
#[cfg(target_os = "linux")]
pub(crate) use imported_allocation::AllocationPart;
#[cfg(target_os = "linux")]
pub(crate) use imported_pool::WeakPool;
pub(crate) use nccl::{has_rdma, nccl_properties as nccl_wishes};
pub(crate) use physical::{ExportMark, creatable_as};
#[cfg(target_os = "linux")]
pub(crate) use processes::{GivingProcess, Recipients};
pub(crate) use reach::{check_guests, reachable};
pub(crate) use stream_keys::StreamKeys;
