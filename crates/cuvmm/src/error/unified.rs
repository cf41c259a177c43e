//! Errors of unified buffers.

use std::ops::Range;

use cuvmm_driver::{DeviceAddress, Location, Ordinal};

use super::{AllocateManagedError, CallError, CopyError};

/// Why an operation on a unified buffer failed. Its elements and what was advised are as before,
/// unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnifiedError {
    /// Elements without a size have no place in memory.
    #[error("the elements have no size")]
    ZeroSizedElements,
    /// So many elements have more bytes than one object can have.
    #[error("{elements} elements have too many bytes")]
    TooLarge {
        /// How many elements.
        elements: usize,
    },
    /// Some of the elements are not there.
    #[error("elements {range:?} of {len}")]
    OutOfRange {
        /// Which were asked for.
        range: Range<usize>,
        /// Elements there are.
        len: usize,
    },
    /// The home stream belongs to another device than the buffer is to be had from.
    #[error("the home stream belongs to another device")]
    WrongDevice,
    /// A stream or a device belongs to another driver: its handles mean nothing to this one.
    #[error("the stream or device belongs to another driver")]
    WrongDriver,
    /// Memory could not be had.
    #[error(transparent)]
    Allocate(#[from] AllocateManagedError),
    /// The driver's memory begins where such elements may not.
    #[error("the memory begins at {address}, which is no multiple of {align}")]
    Misaligned {
        /// Where the memory begins.
        address: DeviceAddress,
        /// What the elements want a multiple of, in bytes.
        align: usize,
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
    /// There are no nodes of negative number.
    #[error("there is no NUMA node {node}")]
    NoSuchNode {
        /// The node asked for.
        node: i32,
    },
    /// A stream that takes part records its work into a graph instead of running it.
    #[error("the stream is being captured")]
    Capturing,
    /// Pages could not be moved.
    #[error("moving elements {range:?} to {to}: {cause}")]
    Prefetch {
        /// Which elements.
        range: Range<usize>,
        /// Where to.
        to: Location,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// Advice was not taken, or what is in force could not be asked.
    #[error("the advice for elements {range:?}: {cause}")]
    Advise {
        /// Which elements.
        range: Range<usize>,
        /// The driver's answer.
        #[source]
        cause: CallError,
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
    /// Elements could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}
