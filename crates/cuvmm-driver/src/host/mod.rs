//! The rules of the driver over real host memory: what runs where there is no GPU.
//!
//! A [`HostDriver`] answers as a [`ModelDriver`](crate::model::ModelDriver) does and has bytes
//! behind its addresses. A reservation is a range of this process's address space with nothing in
//! it; a physical is a part of a file in memory; a mapping places that part in the reservation,
//! and `set_access` opens it to the host as far as anybody was granted access. Copies ask the
//! model's page table, never the hardware, so what a device may not reach is refused though the
//! host could reach it.
//!
//! # Limits
//! - **Addresses**: the 47 bits that the system gives a process on x86-64. A reservation of 2^46
//!   bytes succeeds while the upper half is free enough, and all in all a little under 2^47.
//!   Reservations lie in larger ranges that are taken from the system, so their number is bounded
//!   by the addresses alone. Before each and behind the last of a range is a granule of nothing,
//!   save in the hostile manner.
//! - **Mappings**: each takes one of the system's memory areas (`vm.max_map_count`, 65,530 by
//!   default), and each hole beside one takes another. About 63,000 fit side by side, half as
//!   many with holes between. What goes beyond is `OUT_OF_MEMORY` at `map`, with nothing changed;
//!   some areas are left for the rest of the process. Unmapping needs none.
//! - **Bytes**: by default half of what the system says is available when the driver is made,
//!   shared out evenly to the devices ([`HostOptions::capacity`]). It is a count, not a promise:
//!   memory is taken when it is first written, and a system that runs out then ends the process.
//!   A container's limit is respected only as far as the system's figure knows it.
//! - **Descriptors**: all physicals that cannot be exported share one file, so their number is not
//!   bounded; each exportable one takes a descriptor.
//!
//! # Sharing
//! An exported descriptor opens the physical's own file, which is sealed against shrinking, so
//! no access to it ends in SIGBUS. Another process's host driver imports it; size and location
//! are read from the file, the handle types do not travel. The memory lives as long as anybody
//! has the file open or mapped. The driver that created it goes on charging for it until all
//! descriptors that it handed out, and all mappings and imports made from them, have gone; an
//! importer charges nothing.

mod addresses;
mod arenas;
mod bytes;
mod files;
mod memory;
mod options;
mod system;

pub use memory::HostMemory;
pub use options::HostOptions;

use crate::model::Machine;

/// The driver's rules over real host memory. Dropping it unmaps everything that it still has.
pub type HostDriver = Machine<HostMemory>;

impl Machine<HostMemory> {
    /// A driver with the devices that the options describe.
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
