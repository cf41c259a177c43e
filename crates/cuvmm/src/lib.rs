#![doc = include_str!("../README.md")]
//!
//! # The rooms of this crate, from the bottom up
//! - [`Device`]: one device of one [`driver`] (the real one, or the host's memory by the same
//!   rules).
//! - [`own`]: an owner for each thing the driver hands out.
//! - [`region`]: a range of addresses with commit and decommit.
//! - [`mod@vec`]: a vector that grows in place.
//! - [`pool`]: one device's memory under a hard limit, shared by tenants, taken back where it is
//!   idle.

pub use cuvmm_driver as driver;

mod calls;
mod device;
mod drops;
pub mod error;
mod fork;
pub mod own;
pub mod pool;
pub mod region;
mod size;
mod sync;
pub mod vec;

pub use calls::CallCounts;
pub use device::Device;
pub use drops::{DropFailure, DropHook};
pub use error::Error;
pub use error::{AllocateError, CallError};
pub use own::{Access, Event, Mapping, Physical, Reservation, Right, Stream};
pub use pool::{Block, Growth, Lease, Limit, Pool, PoolStats, Scrub, Tenant, TenantStats};
pub use region::{Extent, Mapper, Region};
pub use vec::DeviceVec;
