#![doc = include_str!("../README.md")]
//!
//! # The rooms of this crate, from the bottom up
//! - [`Device`]: one device of one [`driver`] (the real one, or the host's memory by the same
//!   rules).
//! - [`own`]: an owner for each thing the driver hands out.
//! - [`region`]: a range of addresses with commit and decommit.
//! - [`mod@vec`], [`sparse`], [`ring`], [`cow`]: containers for one owner. A vector that grows in
//!   place, an array with holes, a ring that never wraps, a buffer with snapshots.
//! - [`unified`]: a buffer that the host and the devices use at one address.
//! - [`plan`]: operations gone through in advance, with what they take.
//! - [`pool`]: one device's memory under a hard limit, shared by tenants, taken back where it is
//!   idle.
//! - [`kv`]: keys and values of attention for many sequences, over a tenant.
//! - [`sleep`]: a tenant's memory put away and brought back at the same addresses; [`store`]: the
//!   host memory that contents are kept in meanwhile.
//! - [`share`]: memory given to other processes, and published under a name.
//!
//! # Features
//! None is on by default.
//! - `cudarc`: the room of that name. Contexts and streams of the crate cudarc taken up here, and
//!   memory of this library where its slices go.
//! - `dlpack`: the room of that name. Tensors over our memory for PyTorch and others, and theirs for
//!   us.

pub use cuvmm_driver as driver;

// A page beside this one, whose code is tested here.
#[cfg(doctest)]
#[doc = include_str!("../docs/coming-from.md")]
mod coming_from {}

mod calls;
pub mod cow;
#[cfg(feature = "cudarc")]
pub mod cudarc;
mod deferred;
mod device;
#[cfg(feature = "dlpack")]
pub mod dlpack;
mod drops;
mod elements;
pub mod error;
mod fork;
mod growth;
pub mod kv;
pub mod own;
pub mod plan;
pub mod pool;
pub mod region;
pub mod ring;
pub mod share;
mod size;
pub mod sleep;
pub mod sparse;
pub mod store;
mod sync;
pub mod unified;
mod users;
pub mod vec;
pub mod view;

pub use calls::CallCounts;
pub use cow::CowBuffer;
pub use device::Device;
pub use drops::{DropFailure, DropHook};
pub use error::Error;
pub use error::{BlockError, CallError};
pub use kv::KvCache;
pub use own::{Access, AccessGrant, Event, Managed, Mapping, Physical, Place, Reservation, Stream};
pub use plan::{Plan, Step};
pub use pool::{
    Block, Growth, Hardened, Lease, Limit, Pool, PoolStats, Scrub, Tenant, TenantStats,
};
pub use region::{DmaBuf, Extent, HostExtents, Layout, Mapper, Region, Registration};
pub use ring::RingBuffer;
pub use share::{Attachment, Channel, Offer};
pub use sleep::Contents;
pub use sparse::{SparseArray, SparseGrid};
pub use store::HostStore;
pub use unified::UnifiedBuffer;
pub use vec::DeviceVec;
pub use view::{View, ViewMut};
