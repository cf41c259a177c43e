//! The engine that maps and unmaps: physicals in reservations, and the proof that nothing uses
//! them.
//!
//! - A [`Space`] is a reservation with its extents, each a [`Placed`] physical. It copies, fills
//!   and gives access.
//! - A [`Fence`] is the work that memory waits for before it may be reused. [`Uses`] are the
//!   streams that may still use the memory; a fence is made of them when the use ends.
//! - [`Completed`] is a space together with the proof that a fence is complete. It alone unmaps.
//! - [`TakenOut`] are unmapped physicals, until they are released or put back. `replace` exchanges
//!   physicals for others with the same bytes.
//! - [`Zeros`] are read-only zeros in holes.
//! - A [`Registration`] keeps memory in place, and a [`Mapper`] is the thread that works ahead.
//!
//! Nothing here knows of limits, tenants or containers. The containers and the pool use it.

mod access;
mod completed;
mod copies;
mod failure;
mod fence;
mod mapped;
mod mapper;
mod new_memory;
mod place;
mod registration;
mod replace;
#[cfg(test)]
pub(crate) mod rig;
mod space;
mod taken;
mod zeros;

pub(crate) use completed::Completed;
pub(crate) use copies::wait_for;
pub(crate) use failure::Failure;
pub(crate) use fence::{Fence, Poll, Round, Unused, Uses};
pub use mapper::Mapper;
pub(crate) use mapper::{MapperWork, Urgency, Waker};
pub(crate) use new_memory::{New, NewMemory};
pub(crate) use place::{LastWriter, PlaceError, Placed, Target, Unmapped};
pub use registration::Registration;
pub(crate) use registration::RegistrationOwner;
pub(crate) use replace::NotReplaced;
pub use space::{DEFAULT_LARGEST_EXTENT, Extent};
pub(crate) use space::{Space, SpaceCounts};
pub(crate) use taken::{NotPutBack, Stuck, TakenOut, unmap_drained};
pub(crate) use zeros::{DEFAULT_ZERO_EXTENT, Zeros, beside};
