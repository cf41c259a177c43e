//! The rules and costs of the driver without memory.
//!
//! A [`ModelDriver`] keeps the real driver's state (reservations, physicals, mappings, access,
//! streams, events, captures), returns what a GPU was measured to return, and adds up the costs of
//! the calls on a virtual clock. It moves no bytes: a copy from device memory reads zero. Pinned
//! and managed memory is real, because programs access it directly; device copies do not reach it.
//!
//! ```
//! use cuvmm_model::model::{ModelDriver, ModelOptions};
//! use cuvmm_driver::{Call, DeviceAddress, Driver};
//!
//! let driver = ModelDriver::new(ModelOptions::new().devices(2));
//! let address = driver.reserve(2 << 20, 0, DeviceAddress::NULL, 0)?;
//! println!("on an H200 this takes {:?}", driver.clock());
//! assert_eq!(driver.clock(), driver.spent(Call::MemAddressReserve));
//! assert_eq!(driver.live().reservations, 1);
//! // SAFETY: the reservation comes from this driver, and nothing is mapped in it.
//! unsafe { driver.free_reservation(address, 2 << 20)? };
//! assert!(driver.live().is_nothing());
//! # Ok::<(), cuvmm_driver::DriverError>(())
//! ```
//!
//! # Differences from a GPU
//! The results of an H200 are recorded (`stand-in/conformance/answers`). The model returns the same
//! results, except for these:
//! - Mapping a handle that has been released and has no mapping ends the process on the GPU. Here
//!   it is `INVALID_VALUE`.
//! - An exported descriptor is a file of the model, and a dma-buf is an empty descriptor. On Windows an
//!   exported handle is one of a section, D3DKMT handles are `INVALID_VALUE`, and a dma-buf is
//!   `NOT_SUPPORTED`.
//! - Work takes virtual time only for a call that waits for the work: a query reports it as done.
//! - Memory imported from another process is not charged, nor are managed pages.
//! - An allocation on a capturing stream is `NOT_SUPPORTED`, and so is a pool of host NUMA memory
//!   that can be shared.
//! - An exported descriptor of a memory pool does not keep the pool's memory charged.
//!
//! # The hostile manner
//! [`Manner::Hostile`] is a driver that follows the documentation only. It refuses what
//! [`Manner::Strict`] refuses, and:
//! - **hints are ignored**: a reservation is placed in the last freed range that is large enough,
//!   so that a stale user meets the new owner; otherwise at the lowest address that fits, directly
//!   beside another;
//! - **handle values are reused at once**, the last freed first, for any kind of object, so that a
//!   stale handle names another object;
//! - **a refusal has any code** that is [`documented`] for the call, chosen by
//!   [`ModelOptions::seed`].
//!
//! These codes are neither replaced nor used as replacements, because a program may act on them:
//! - `OUT_OF_MEMORY`: bytes, mappings or addresses are used up, and freeing some helps;
//! - the codes after which a context is lost, and any code that a context was lost with;
//! - `DEINITIALIZED`: the driver has shut down with the process, so no report is needed;
//! - `STREAM_CAPTURE_*` and `CAPTURED_EVENT`: the call disturbs a capture, and may be made later;
//! - `INVALID_VALUE` by `cuEventQuery` and `cuStreamWaitEvent`: the event's capture is over;
//! - `NOT_SUPPORTED` by `cuCtxRecordEvent`: the program has to use another way.
//!
//! "Not ready" is not an error here, and a missing symbol has no code.
//!
//! [`RandomFailures`] makes calls fail at random, in any manner.
//!
//! # Behavior that was not measured
//! The following comes from the documentation, or is an assumption where the documentation says
//! nothing:
//! - Granting access to a device that cannot reach the memory is `PEER_ACCESS_UNSUPPORTED`.
//! - A stream or event of a lost context is destroyed, and the call returns the code that lost it.
//! - A hint to the start of the unused part of a recently freed range is followed: an assumption
//!   that fits all results. A hint to the middle of such a range was measured not to be followed.
//! - `address_range` finds a mapping that the device can only read. That it finds mappings with
//!   full access and none without access was measured.
//! - As the header says, advice and prefetches of managed memory apply to whole pages of the host,
//!   NUMA nodes are distinct from the host as a whole, and the last prefetch is reported at once.
//!   `INVALID_VALUE` for a node that does not exist is an assumption.
//! - Prefetches to a device that cannot migrate managed pages while the host uses them, and advice
//!   that names it, are `INVALID_DEVICE`.
//! - Memory pools follow the documentation: free memory above the release threshold is released at
//!   a synchronization; freed memory is used again on its stream, behind an event, when its work is
//!   done, or, rather than failing, behind a dependency that the pool inserts; a shareable pool
//!   keeps its memory until it ends. Measured on an H200: pools keep to their maximum, and an
//!   imported pool allocates nothing (`INVALID_VALUE`).
//! - Assumed of memory pools: their bytes count in granules and are interchangeable; bytes count as
//!   used until `cuMemFreeAsync` is called; a lack of memory elsewhere does not make a pool release
//!   memory; a synchronization of a device leaves pools of other devices alone; obtaining memory
//!   costs what `cuMemAlloc` costs, and releasing it what `cuMemRelease` costs; the maximum of a
//!   figure starts anew from the current figure; granting access to a device that cannot reach the
//!   memory is `PEER_ACCESS_UNSUPPORTED`.
//! - A reset of the primary context follows the documentation, which does not mention mappings.
//! - Pinned memory of 0 bytes has its own address and is charged as one granule. Only its
//!   allocation and its free were measured.

mod access;
mod advice;
mod allocation_table;
mod allocations;
mod answer;
mod answers;
mod attributes;
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
mod host_calls;
mod host_launch;
mod interprocess;
mod interprocess_calls;
mod losses;
mod machine;
mod managed;
mod mapping_table;
mod mappings;
mod nothing;
mod objects;
mod options;
mod pages;
mod physical_table;
mod physicals;
mod picture;
mod pieces;
mod pointers;
mod pool;
mod pool_memory;
mod pool_sharing;
mod pool_table;
mod pools;
mod programs;
mod refusals;
mod registration_table;
mod registrations;
mod reservation_table;
mod reservations;
mod reset;
mod resolve;
mod rights;
mod shadow;
mod slabs;
mod source;
mod space;
mod spite;
mod state;
mod stream_table;
mod streams;
mod unwritten;
mod work;

pub use backing::{Backing, Change, MemoryKey, Part, Place, PlainName, Reach};
pub use capture::Recording;
pub use costs::{Costs, Curve, ParseCostsError};
pub use documented::documented;
pub use hazards::Hazard;
pub use host_launch::HostWork;
pub use machine::Machine;
pub use nothing::Nothing;
pub use objects::{Object, ObjectKind};
pub use options::{Manner, ModelOptions};
pub use picture::{Live, MappedAt, PhysicalSeen, Snapshot};
pub use shadow::Unwritten;
pub use spite::RandomFailures;

// For the host driver.
#[cfg(target_os = "linux")]
pub(crate) use {
    answer::{Answer, INVALID_VALUE, OUT_OF_MEMORY},
    options::{Rules, shared_options},
    pages::Pages,
    space::Space,
};

/// The driver's rules and costs, without memory.
pub type ModelDriver = Machine<Nothing>;

impl Machine<Nothing> {
    /// Creates a driver with the devices that the options describe.
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
