//! Errors of containers: vectors, sparse arrays and grids, rings, buffers with snapshots, unified
//! buffers.

use std::ops::Range;

use cuvmm_driver::Ordinal;

use super::{ArgumentError, CallError, MemoryError};

/// Why an operation on a container failed. The container's length, its elements and what was advised
/// are as before, unless the variant says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// A value that was given cannot be meant: elements without a size or more than can be counted, a
    /// range that the container has not, a stream of another device.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// No tile of the size asked for, or of up to 64 times that, is made of whole elements and whole
    /// granules.
    #[error("there is no tile of {tile} bytes or a little more for elements of {element} bytes")]
    OddTile {
        /// Bytes asked for.
        tile: u64,
        /// Bytes of an element.
        element: usize,
    },
    /// A grid has one to three axes, none of them zero long, and no more elements than can be counted.
    #[error(
        "there is no grid of {shape:?} elements in bricks of {brick:?}: one to three axes above zero"
    )]
    Shape {
        /// Elements along each axis.
        shape: Vec<usize>,
        /// Elements of a brick along each axis.
        brick: Vec<usize>,
    },
    /// The region has memory already, and a container begins with none.
    #[error("the region holds {held} bytes already, and a container begins with none")]
    RegionInUse {
        /// Bytes that the region holds.
        held: u64,
    },
    /// Some of the elements have no memory.
    #[error("of elements {range:?}, those from {first} on have no memory")]
    Uncommitted {
        /// Which were asked for.
        range: Range<usize>,
        /// The first that has none.
        first: usize,
    },
    /// There is no room for the elements: in what the container may have at most, or, where the
    /// operation takes no memory, in what it has.
    #[error("{additional} elements more than {len} do not fit: there is room for {capacity}")]
    Full {
        /// Elements there are.
        len: usize,
        /// Elements to be added.
        additional: usize,
        /// Elements there can be.
        capacity: usize,
    },
    /// A device cannot work while the host touches managed memory (attribute 89 says so): the
    /// host would die if anything ran there meanwhile. Copies work all the same.
    #[error(
        "{device} has no concurrent managed access: the host may not touch managed memory while anything runs there"
    )]
    NoConcurrentAccess {
        /// The device.
        device: Ordinal,
    },
    /// A policy could not be set in full, and what had been taken of it could not be undone in full.
    /// What is in force can be asked; setting a policy again starts from there.
    #[error("the policy for elements {range:?} stands half way: {cause}, and then {undoing}")]
    HalfWay {
        /// Which elements.
        range: Range<usize>,
        /// Why it could not be set.
        #[source]
        cause: CallError,
        /// Why it could not be undone.
        undoing: CallError,
    },
    /// Memory could not be had, given up, mapped a second time, moved or copied.
    #[error(transparent)]
    Memory(MemoryError),
}
