//! What the rules ask of that which lies behind the addresses.
//!
//! The rules have checked everything before they ask. What fails here fails for want of a
//! resource (addresses, memory, the system's mappings), and has then changed nothing.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::answer::Answer;
use crate::{DeviceMemory, DriverKind};

/// Names the bytes of one physical, however many handles it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemoryKey(pub(crate) u64);

/// A part of a mapping that lies in a reservation: where, how long, and where in the physical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) offset: u64,
}

/// What the host may do at an address: the union of what was granted to anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Reach {
    /// Nothing.
    #[default]
    Nothing,
    /// Read.
    Read,
    /// Read and write.
    Write,
}

/// A change of what may be done with a part.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub(crate) part: Part,
    pub(crate) from: Reach,
    pub(crate) to: Reach,
}

/// Where bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a physical, from an offset on.
    Memory(MemoryKey, u64),
    /// In an allocation that is not ours to map, from an address on.
    Allocation(u64),
}

impl Place {
    /// The place `bytes` further.
    pub(crate) fn plus(self, bytes: u64) -> Self {
        match self {
            Self::Memory(key, offset) => Self::Memory(key, offset + bytes),
            Self::Allocation(address) => Self::Allocation(address + bytes),
        }
    }
}

/// What lies behind the addresses of a [`Machine`](super::Machine): nothing, or host memory.
///
/// It cannot be implemented outside this crate.
pub trait Backing: Debug + Send + 'static {
    #[doc(hidden)]
    const KIND: DriverKind;
    #[doc(hidden)]
    const MEMORY: DeviceMemory;
    /// Whether a physical that can be exported needs its file from the start.
    #[doc(hidden)]
    const FILES_AT_ONCE: bool;

    #[doc(hidden)]
    fn reserve(&mut self, size: u64, alignment: u64, at: Option<u64>) -> Answer<u64>;
    #[doc(hidden)]
    fn unreserve(&mut self, address: u64, size: u64) -> Answer;
    #[doc(hidden)]
    fn create(&mut self, key: MemoryKey, size: u64, file: Option<&Arc<OwnedFd>>) -> Answer;
    #[doc(hidden)]
    fn destroy(&mut self, key: MemoryKey);
    #[doc(hidden)]
    fn map(&mut self, key: MemoryKey, parts: &[Part]) -> Answer;
    #[doc(hidden)]
    fn unmap(&mut self, parts: &[Part]) -> Answer;
    #[doc(hidden)]
    fn protect(&mut self, changes: &[Change]) -> Answer;
    /// Memory outside every reservation. The host may touch it if `touchable`.
    #[doc(hidden)]
    fn allocate(&mut self, size: u64, touchable: bool) -> Answer<u64>;
    #[doc(hidden)]
    fn deallocate(&mut self, address: u64, size: u64);
    #[doc(hidden)]
    fn read(&mut self, from: Place, to: &mut [u8]) -> Answer;
    #[doc(hidden)]
    fn write(&mut self, to: Place, from: &[u8]) -> Answer;
    #[doc(hidden)]
    fn fill(&mut self, to: Place, byte: u8, size: u64) -> Answer;
    #[doc(hidden)]
    fn copy(&mut self, to: Place, from: Place, size: u64) -> Answer;
}
