//! The rules and costs of the driver without memory.
//!
//! A [`ModelDriver`] keeps the books that the real driver keeps (reservations, physicals,
//! mappings, rights, streams, events, captures), answers as a GPU was measured to answer, and
//! counts on a virtual clock what the calls would have cost. It moves no bytes: a copy out of
//! device memory reads zero. Pinned and managed memory is real, because programs touch it
//! directly; copies by device calls do not reach it.
//!
//! # Where it differs from a GPU
//! - Mapping a handle that names nothing any more ends the process there; here it is
//!   `INVALID_VALUE`.
//! - Granting access to a device that cannot reach the memory is `PEER_ACCESS_UNSUPPORTED`,
//!   `address_range` of an unknown address is `NOT_FOUND`, and a stream or event of a lost
//!   context is destroyed with the code that lost it: from the documentation, not measured.
//! - Work takes no virtual time, only the calls do.
//! - A dma-buf is a descriptor with nothing in it.
//! - Imported memory of another process is charged to nobody here.
//! - An allocation on a capturing stream is `NOT_SUPPORTED`; pools keep nothing.

mod access;
mod allocations;
mod answer;
mod answers;
mod backing;
mod capture;
mod clock;
mod copies;
mod costs;
mod device;
mod events;
mod exports;
mod graphs;
mod machine;
mod managed;
mod mappings;
mod nothing;
mod options;
mod pages;
mod physicals;
mod picture;
mod pointers;
mod reservations;
mod space;
mod state;
mod streams;
mod work;

pub use backing::{Backing, Change, MemoryKey, Part, Place, Reach};
pub use costs::{Costs, Curve};
pub use machine::Machine;
pub use nothing::Nothing;
pub use options::{Manner, ModelOptions};
pub use picture::{Live, MappedAt, PhysicalSeen, Snapshot};

pub(crate) use answer::{Answer, OUT_OF_MEMORY};
pub(crate) use options::{Rules, shared_options};
pub(crate) use pages::Pages;
pub(crate) use space::Space;

/// The driver's rules and costs, without memory.
pub type ModelDriver = Machine<Nothing>;

impl Machine<Nothing> {
    /// A driver with the devices that the options describe.
    #[must_use]
    pub fn new(options: ModelOptions) -> Self {
        let nothing = Nothing::new(options.rules.address_end);
        Self::build(options.rules, nothing)
    }
}

impl Default for Machine<Nothing> {
    fn default() -> Self {
        Self::new(ModelOptions::default())
    }
}
