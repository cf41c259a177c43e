//! The rules of the driver over real host memory, for machines without a GPU.
//!
//! A [`HostDriver`] answers like a [`ModelDriver`](crate::model::ModelDriver) and has bytes behind
//! its addresses. A reservation is an empty range of this process's addresses, and a physical a
//! part of a memory file. A mapping maps that part into the reservation, and `set_access` gives the
//! host the access that any location was granted. Copies check the model's page table and not the
//! hardware, so they refuse memory that a device may not access even where the host could.
//!
//! ```
//! use cuvmm_model::host::{HostDriver, HostOptions};
//! use cuvmm_driver::{Driver, Ordinal};
//!
//! let driver = HostDriver::new(HostOptions::new().devices(2).capacity(1 << 30));
//! assert_eq!(driver.device_count()?, 2);
//! assert_eq!(driver.total_memory(Ordinal(0))?, 1 << 30);
//! # Ok::<(), cuvmm_driver::DriverError>(())
//! ```
//!
//! # Limits
//! - **Addresses**: the 47 bits that the system gives a process on x86-64. A reservation of 2^46
//!   bytes succeeds if enough of the upper half is free; all reservations together get a little
//!   less than 2^47 bytes. They lie in larger ranges reserved from the system, so only addresses
//!   limit their number. There is an empty granule before each reservation and after the last one
//!   of a range, except in the hostile manner.
//! - **Mappings**: each takes one of the system's memory areas (`vm.max_map_count`, 65,530 by
//!   default), and each hole beside one takes another. About 63,000 mappings fit side by side, half
//!   as many with holes between them. Beyond that, `map` returns `OUT_OF_MEMORY` and changes
//!   nothing; some areas are left for the rest of the process. Unmapping needs no area.
//! - **Bytes**: by default half of the memory that the system reports as available when the driver
//!   is made, divided evenly among the devices ([`HostOptions::capacity`]). This is a count and not
//!   a promise: memory is allocated at the first write, and a system that runs out then kills the
//!   process. A container's limit is respected only if it is part of the system's figure.
//! - **Descriptors**: all physicals that cannot be exported share one file, so their number is not
//!   limited. Each exportable physical takes a descriptor.
//!
//! # Sharing
//! An exported descriptor opens the physical's own file, which is sealed against shrinking, so no
//! access to it ends in SIGBUS. Another process's host driver can import it with its size and
//! location, but without its handle types. The memory lives as long as any process has the file
//! open or mapped. The driver that created it charges for it until all exported descriptors, and
//! all mappings and imports of them, are gone. An importer charges nothing.

mod addresses;
mod arenas;
mod bytes;
mod files;
mod memory;
mod options;
mod plain;
mod system;

pub use memory::HostMemory;
pub use options::HostOptions;

use crate::model::Machine;

/// The driver's rules over real host memory. Dropping it unmaps all remaining mappings.
pub type HostDriver = Machine<HostMemory>;

impl Machine<HostMemory> {
    /// Creates a driver with the devices that the options describe.
    #[must_use]
    pub fn new(options: HostOptions) -> Self {
        let rules = options.into_rules();
        let memory = HostMemory::new(rules.granularity, rules.gap());
        Self::build(rules, memory)
    }
}

impl Default for Machine<HostMemory> {
    fn default() -> Self {
        Self::new(HostOptions::default())
    }
}
