//! One owner for each thing the driver hands out.
//!
//! A [`Reservation`] owns addresses, a [`Physical`] owns memory, a [`Mapping`] owns the placing of
//! one in the other, a [`Managed`], a [`Stream`] and an [`Event`] what their names say. Each keeps alive what it
//! stands on, so they may be dropped in any order; each checks what the driver would let through
//! (see `docs/semantics.md`) before the driver sees it.
//!
//! Nothing here waits for the GPU, but for what the driver does by itself when managed memory is
//! freed: dropping a `Mapping` unmaps at once, which is right only when no work uses it. [`Region`](crate::Region) and [`Pool`](crate::Pool) see to that by themselves.

mod access;
mod close;
mod copy;
mod event;
mod export;
mod host;
mod managed;
mod mapping;
mod nccl;
mod physical;
mod place;
mod reservation;
mod reserved;
mod stream;

pub use access::{Access, AccessGrant};
pub use close::{CloseError, CloseRefusal};
pub use event::Event;
pub use managed::Managed;
pub use mapping::Mapping;
pub use physical::{Physical, PhysicalBuilder};
pub use place::Place;
pub use reservation::{Reservation, ReservationBuilder};
pub use stream::Stream;

pub(crate) use copy::{CopyFailed, Span};
pub(crate) use export::one_type;
pub(crate) use host::HostPart;
pub(crate) use nccl::wishes as nccl_wishes;
pub(crate) use physical::{ExportMark, creatable_as};
