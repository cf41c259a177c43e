//! A machine's live objects, for reports of leaks.

use super::allocation_table::Kind;
use super::backing::Backing;
use super::state::State;
use cuvmm_driver::Location;

/// The kind of an [`Object`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ObjectKind {
    /// A range of addresses.
    Reservation,
    /// A physical with references. One that only mappings keep alive is not listed.
    Physical,
    /// A physical placed in a reservation.
    Mapping,
    /// Device memory of `cuMemAlloc`.
    Allocation,
    /// Memory of a memory pool, of `cuMemAllocAsync`.
    PoolAllocation,
    /// Pinned host memory.
    Pinned,
    /// Managed memory.
    Managed,
    /// A memory pool that was created or imported and not destroyed.
    MemPool,
    /// A stream that was created and not destroyed.
    Stream,
    /// An event.
    Event,
    /// A graph.
    Graph,
    /// An executable graph.
    GraphExec,
}

/// A live object of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Object {
    /// The kind.
    pub kind: ObjectKind,
    /// The handle, or the first address of memory with an address.
    pub value: u64,
    /// The size in bytes; 0 for an object without memory.
    pub size: u64,
    /// The location of the memory, or the device of the object.
    pub location: Option<Location>,
    /// For a physical, the references that still need a `release`; otherwise 1.
    pub references: u64,
}

impl<B: Backing> State<B> {
    pub(crate) fn objects(&mut self) -> Vec<Object> {
        self.sweep();
        let mut objects = Vec::new();
        let mut add = |kind, value, size, location, references| {
            objects.push(Object {
                kind,
                value,
                size,
                location,
                references,
            });
        };
        for (&start, &size) in &self.reservations.ranges {
            add(ObjectKind::Reservation, start, size, None, 1);
        }
        for (&handle, physical) in &self.physicals.by_handle {
            if physical.references > 0 {
                let at = Some(physical.props.location);
                let references = physical.references;
                add(ObjectKind::Physical, handle, physical.size, at, references);
            }
        }
        for (&start, mapping) in &self.mappings.by_address {
            let physical = self.physicals.by_handle.get(&mapping.handle);
            let at = physical.map(|physical| physical.props.location);
            add(ObjectKind::Mapping, start, mapping.size, at, 1);
        }
        for (&start, allocation) in &self.allocations.by_address {
            if allocation.ending {
                continue;
            }
            let device = Some(Location::device(cuvmm_driver::Ordinal(allocation.device)));
            let (kind, at) = match allocation.kind {
                Kind::Plain | Kind::Opened => (ObjectKind::Allocation, device),
                Kind::Pool => (ObjectKind::PoolAllocation, device),
                Kind::HostPool => (ObjectKind::PoolAllocation, Some(Location::HOST)),
                Kind::Pinned => (ObjectKind::Pinned, Some(Location::HOST)),
                Kind::Managed => (ObjectKind::Managed, device),
            };
            add(kind, start, allocation.size, at, 1);
        }
        for (&handle, key) in &self.pools.by_handle {
            if let Some(pool) = self.pools.by_key.get(key)
                && !self.pools.is_default(*key)
            {
                add(ObjectKind::MemPool, handle, 0, Some(pool.props.location), 1);
            }
        }
        let of = |device| Some(Location::device(cuvmm_driver::Ordinal(device)));
        for (&handle, key) in &self.streams.named {
            add(ObjectKind::Stream, handle, 0, of(key.device), 1);
        }
        for (&handle, event) in &self.events {
            add(ObjectKind::Event, handle, 0, of(event.device), 1);
        }
        for &handle in self.graphs.keys() {
            add(ObjectKind::Graph, handle, 0, None, 1);
        }
        for (&handle, (device, _)) in &self.graph_execs {
            add(ObjectKind::GraphExec, handle, 0, of(*device), 1);
        }
        objects
    }
}
