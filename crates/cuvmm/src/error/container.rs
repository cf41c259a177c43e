//! Errors of containers: vectors, sparse arrays and grids, ring buffers, copy-on-write buffers,
//! unified buffers.

use std::ops::Range;

use cuvmm_driver::Ordinal;

use super::{ArgumentError, CallError, MemoryError};
use crate::display::{Bytes, Count};

/// An error of an operation on a container. The container's length, elements and advice are
/// unchanged, unless the variant says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum ContainerError {
    /// An argument cannot be used: elements of size zero or more than can be counted, a range
    /// outside the container, a stream of another device.
    Argument(#[from] ArgumentError),
    /// No tile of the requested size, or up to 64 times as large, consists of whole elements and
    /// whole granules.
    #[error(
        "no tile of {} to 64 times as much consists of whole elements of {} and whole granules: \
         use another tile size",
        Bytes(*.tile), Count(*.element, "byte")
    )]
    TileSize {
        /// The requested bytes.
        tile: u64,
        /// Bytes of an element.
        element: usize,
    },
    /// The shape of a grid is invalid. A grid has one to three axes, none of length zero, and no
    /// more elements than can be counted.
    #[error("a grid of {shape:?} in bricks of {brick:?}: use 1 to 3 axes, none of length 0")]
    Shape {
        /// Elements along each axis.
        shape: Vec<usize>,
        /// Elements of a brick along each axis.
        brick: Vec<usize>,
    },
    /// The region already holds memory, and a container requires an empty one.
    #[error("the region holds {} already: a container requires an empty region", Bytes(*.held))]
    RegionInUse {
        /// Bytes that the region holds.
        held: u64,
    },
    /// Some of the elements have no memory.
    #[error("of elements {range:?}, those from {first} on have no memory: commit them first")]
    Uncommitted {
        /// The requested elements.
        range: Range<usize>,
        /// The first element without memory.
        first: usize,
    },
    /// An operation on a brick of a grid failed. Arguments that cannot be used are
    /// [`Argument`](Self::Argument) errors instead.
    #[error("brick {brick:?}: {cause}")]
    Brick {
        /// The brick, counted in bricks along each axis.
        brick: Vec<usize>,
        /// The reason.
        #[source]
        cause: Box<Self>,
    },
    /// The elements do not fit the container's capacity, or, if the operation allocates no memory,
    /// the memory that it has.
    #[error("cannot add {} to {len}: the capacity is {capacity}", Count(*.additional, "element"))]
    Full {
        /// The current number of elements.
        len: usize,
        /// The number of elements to add.
        additional: usize,
        /// The capacity in elements.
        capacity: usize,
    },
    /// This device cannot work while the host accesses managed memory (attribute 89): the host
    /// would crash while the device runs anything. Copies still work.
    #[error("{0} has no concurrent managed access: use copies instead")]
    NoConcurrentAccess(Ordinal),
    /// A policy could not be set completely, nor undone. The policy in force can be queried;
    /// setting a policy again starts from there.
    #[error("policy set only for a part of {range:?}: {cause}; undoing it failed: {undoing}")]
    PartlyApplied {
        /// The elements.
        range: Range<usize>,
        /// The reason why it could not be set.
        #[source]
        cause: CallError,
        /// The reason why it could not be undone.
        undoing: CallError,
    },
    /// Memory could not be created, freed, mapped a second time, moved or copied.
    Memory(MemoryError),
}
