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
//! - Work takes virtual time only for whoever waits for it: a query answers that it is done.
//! - Imported memory of another process is charged to nobody here, nor are managed pages.
//! - An allocation on a capturing stream is `NOT_SUPPORTED`.
//!
//! # The hostile manner
//! [`Manner::Hostile`] is a driver that keeps to the documentation and to nothing else. It refuses
//! what [`Manner::Strict`] refuses, and
//! - **hints are ignored**: a reservation goes where the last freed one that is large enough lay,
//!   so that a late user meets the new owner; else as low as it fits, directly beside another;
//! - **handle values are used again at once**, the last gone first, for things of any kind: a
//!   handle kept too long names something else;
//! - **a refusal carries any code** that is [`documented`] for the call, chosen by
//!   [`ModelOptions::seed`].
//!
//! Codes that a program may act on are neither replaced nor put in the place of others: lack of
//! memory (`OUT_OF_MEMORY`), the codes of a lost context, a driver that has gone
//! (`DEINITIALIZED`), what has to do with captures (`STREAM_CAPTURE_*`, `CAPTURED_EVENT`), and
//! `NOT_SUPPORTED` by `cuCtxRecordEvent`. "Not ready" is no error here, and a missing symbol no
//! code.
//!
//! [`Spite`] adds calls that fail out of the blue, in this manner or another.
//!
//! # What is not measured
//! From the documentation, or guessed where that is silent:
//! - Granting access to a device that cannot reach the memory is `PEER_ACCESS_UNSUPPORTED`.
//! - A stream or event of a lost context is destroyed, with the code that lost it.
//! - A hint is followed to the start of what is left of a range freed lately. In the middle of one
//!   it was seen not to be; that the start makes the difference is a guess that fits all answers.
//! - `address_range` finds a mapping for a device that has a right on it, be it only to read. It
//!   was seen to find an open one and not to find one that nobody has a right on.
//! - Advice and prefetches of managed memory mean whole pages of the host, NUMA nodes are told from
//!   the host as a whole, and the last prefetch is told at once: so the header says. That a node
//!   which is not there is `INVALID_VALUE` is a guess.
//! - On a device that moves no managed pages while the host uses them, moving them there and advice
//!   that names it are `INVALID_DEVICE`.
//! - A memory pool keeps what `cuMemFreeAsync` gave it until the next synchronisation of a stream,
//!   an event or the context: so the documentation says of a pool with its default attributes. That a
//!   lack of memory elsewhere does not make it give back sooner is a guess.
//! - What a reset of the primary context leaves: so the documentation says, which does not name
//!   mappings.
//! - Pinned memory of no bytes lies at an address of its own and is charged as one granule. That
//!   it is given out and can be given back was seen.

mod access;
mod advice;
mod allocation_table;
mod allocations;
mod answer;
mod answers;
mod backing;
mod capture;
mod chance;
mod charges;
mod clock;
mod copies;
mod costs;
mod device;
mod device_state;
mod documented;
mod events;
mod execution;
mod exports;
mod graphs;
mod handles;
mod hazards;
mod losses;
mod machine;
mod managed;
mod mapping_table;
mod mappings;
mod nothing;
mod options;
mod pages;
mod physical_table;
mod physicals;
mod picture;
mod pointers;
mod pool;
mod programs;
mod refusals;
mod reservation_table;
mod reservations;
mod reset;
mod resolve;
mod rights;
mod space;
mod spite;
mod state;
mod stream_table;
mod streams;
mod work;

pub use backing::{Backing, Change, MemoryKey, Part, Place, Reach};
pub use costs::{Costs, Curve, ParseCostsError};
pub use documented::documented;
pub use hazards::Hazard;
pub use machine::Machine;
pub use nothing::Nothing;
pub use options::{Manner, ModelOptions};
pub use picture::{Live, MappedAt, PhysicalSeen, Snapshot};
pub use spite::Spite;

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
        let nothing = Nothing::new(options.rules.address_end, options.rules.gap());
        Self::build(options.rules, nothing)
    }
}

impl Default for Machine<Nothing> {
    fn default() -> Self {
        Self::new(ModelOptions::default())
    }
}
