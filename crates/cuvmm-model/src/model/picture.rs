//! Counts and snapshots of a machine, for tests that check for leaks and changes.

use super::backing::Backing;
use super::state::State;
use cuvmm_driver::{AccessDesc, DeviceAddress, Location, PhysicalHandle};

/// The numbers of live objects of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Live {
    /// Reservations.
    pub reservations: usize,
    /// Bytes of addresses in reservations.
    pub reserved_bytes: u64,
    /// Handle values that still name a physical.
    pub physicals: usize,
    /// References to physicals that still need a `release`.
    pub references: u64,
    /// Bytes of physical memory that handles or exported descriptors keep alive. Memory with
    /// several handles counts once.
    pub physical_bytes: u64,
    /// Physical allocations that only exported descriptors keep alive.
    pub exported_only: usize,
    /// Mappings.
    pub mappings: usize,
    /// Plain, pooled, pinned and managed allocations.
    pub allocations: usize,
    /// Ranges of the program's memory that are registered.
    pub registered: usize,
    /// Memory pools that were created or imported. A destroyed pool counts until its last
    /// allocation has ended.
    pub mem_pools: usize,
    /// Streams that were created and not destroyed.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Captures that have begun and not ended.
    pub captures: usize,
    /// Graphs and executable graphs.
    pub graphs: usize,
    /// Queued pieces of work.
    pub queued: usize,
}

impl Live {
    /// Returns `true` if nothing is live.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// The page tables and the physicals of a machine at one moment. Two snapshots are equal if nothing
/// has changed in between.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Address and size of each reservation, in order.
    pub reservations: Vec<(DeviceAddress, u64)>,
    /// Each mapping, in order of address.
    pub mappings: Vec<MappedAt>,
    /// Each physical, in order of its handle.
    pub physicals: Vec<PhysicalSeen>,
    /// Bytes in use on each device.
    pub used: Vec<u64>,
}

/// A mapping in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedAt {
    /// The first address.
    pub address: DeviceAddress,
    /// The size in bytes.
    pub size: u64,
    /// The mapped physical.
    pub handle: PhysicalHandle,
    /// The access of each location; unlisted locations have none.
    pub access: Vec<AccessDesc>,
}

/// A physical in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PhysicalSeen {
    /// The handle.
    pub handle: PhysicalHandle,
    /// The size in bytes.
    pub size: u64,
    /// The location.
    pub location: Location,
    /// References that still need a `release`; 0 if only mappings keep the physical alive.
    pub references: u64,
    /// The number of mappings.
    pub mappings: u64,
}

impl<B: Backing> State<B> {
    pub(crate) fn live(&mut self) -> Live {
        self.sweep();
        let physicals = &self.physicals;
        Live {
            reservations: self.reservations.ranges.len(),
            reserved_bytes: self.reservations.ranges.values().sum(),
            physicals: physicals.by_handle.len(),
            references: physicals
                .by_handle
                .values()
                .map(|physical| physical.references)
                .sum(),
            physical_bytes: physicals.memories.values().map(|memory| memory.size).sum(),
            exported_only: physicals.exported_only(),
            registered: self.registrations.count(),
            mappings: self.mappings.by_address.len(),
            allocations: self.allocations.by_address.len(),
            mem_pools: self.pools.made(),
            streams: self.streams.live(),
            events: self.events.len(),
            captures: self.captures.len(),
            graphs: self.graphs.len() + self.graph_execs.len(),
            queued: self.streams.queued(),
        }
    }

    pub(crate) fn snapshot(&mut self) -> Snapshot {
        self.sweep();
        let ranges = self.reservations.ranges.iter();
        let mappings = self
            .mappings
            .by_address
            .iter()
            .map(|(&address, mapping)| MappedAt {
                address: DeviceAddress(address),
                size: mapping.size,
                handle: PhysicalHandle(mapping.handle),
                access: mapping
                    .rights
                    .iter()
                    .map(|(who, flags)| AccessDesc {
                        location: who.location(),
                        flags,
                    })
                    .collect(),
            });
        let physicals = self
            .physicals
            .by_handle
            .iter()
            .map(|(&handle, physical)| PhysicalSeen {
                handle: PhysicalHandle(handle),
                size: physical.size,
                location: physical.props.location,
                references: physical.references,
                mappings: physical.mappings,
            });
        Snapshot {
            reservations: ranges
                .map(|(&start, &size)| (DeviceAddress(start), size))
                .collect(),
            mappings: mappings.collect(),
            physicals: physicals.collect(),
            used: self.devices.iter().map(|device| device.used).collect(),
        }
    }
}
