//! The rules and costs of the driver without memory.
//!
//! A [`ModelDriver`] keeps the books that the real driver keeps (reservations, physicals,
//! mappings, rights, streams, events, captures), answers as a GPU was measured to answer, and
//! counts on a virtual clock what the calls would have cost. It moves no bytes: a copy out of
//! device memory reads zero. Pinned and managed memory is real, because programs touch it
//! directly; copies by device calls do not reach it.
//!
//! # Where it differs from a GPU
//! The answers of an H200 are recorded (`crates/conformance/answers`), and the model gives the same
//! ones, case by case, but for these:
//! - Mapping a handle that names nothing any more ends the process there; here it is
//!   `INVALID_VALUE`.
//! - An exported descriptor is a file of the model's own, and a dma-buf is a descriptor with
//!   nothing in it.
//! - Work takes no virtual time, only the calls do.
//! - Imported memory of another process is charged to nobody here, nor are managed pages.
//! - An allocation on a capturing stream is `NOT_SUPPORTED`; pools keep nothing.
//!
//! # What is not measured
//! From the documentation, or guessed where that is silent:
//! - Granting access to a device that cannot reach the memory is `PEER_ACCESS_UNSUPPORTED`.
//! - A stream or event of a lost context is destroyed, with the code that lost it.
//! - A hint is followed to the start of what is left of a range freed lately. In the middle of one
//!   it was seen not to be; that the start makes the difference is a guess that fits all answers.
//! - `address_range` finds a mapping for a device that has a right on it, be it only to read. It
//!   was seen to find an open one and not to find one that nobody has a right on.
//! - Pinned memory of no bytes lies at an address of its own and is charged as one granule. That
//!   it is given out and can be given back was seen.

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
        let nothing = Nothing::new(options.rules.address_end, options.rules.granularity);
        Self::build(options.rules, nothing)
    }
}

impl Default for Machine<Nothing> {
    fn default() -> Self {
        Self::new(ModelOptions::default())
    }
}
