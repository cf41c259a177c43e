//! The interface between the rules and the memory behind the addresses.
//!
//! The rules have checked everything before they call it. A call fails only for lack of a resource
//! (addresses, memory, the system's mappings), and has then changed nothing.

use std::fmt::Debug;
use std::sync::Arc;

use super::answer::{Answer, NOT_SUPPORTED};
use cuvmm_driver::{DeviceMemory, DriverKind, OsHandle};

/// The key of the bytes of one physical, which may have several handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemoryKey(pub(crate) u64);

/// A part of a mapping that is in one reservation: its address, its size and its offset in the
/// physical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) offset: u64,
}

/// The host's access at an address: the union of the access granted to all locations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Reach {
    /// No access.
    #[default]
    Nothing,
    /// Read only.
    Read,
    /// Read and write.
    Write,
}

/// A change of the host's access to a part.
// Only the host driver reads it.
#[cfg_attr(not(target_os = "linux"), expect(dead_code))]
#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub(crate) part: Part,
    pub(crate) from: Reach,
    pub(crate) to: Reach,
}

/// A name of plain memory for another process: the process, its descriptor of the file, the offset,
/// the size, a number that is unique among the process's names, and the number's place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlainName(pub(crate) [u64; 6]);

/// A location of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// An offset in a physical.
    Memory(MemoryKey, u64),
    /// An address in an allocation outside virtual memory management.
    Allocation(u64),
}

impl Place {
    pub(crate) fn plus(self, bytes: u64) -> Self {
        match self {
            Self::Memory(key, offset) => Self::Memory(key, offset + bytes),
            Self::Allocation(address) => Self::Allocation(address + bytes),
        }
    }
}

/// The memory behind the addresses of a [`Machine`](super::Machine): none, or host memory.
///
/// The trait cannot be implemented outside this crate.
pub trait Backing: Debug + Send + 'static {
    #[doc(hidden)]
    const KIND: DriverKind;
    #[doc(hidden)]
    const MEMORY: DeviceMemory;
    /// `true` if an exportable physical needs its file from the start.
    #[doc(hidden)]
    const FILES_AT_ONCE: bool;

    #[doc(hidden)]
    fn reserve(&mut self, size: u64, alignment: u64, at: Option<u64>) -> Answer<u64>;
    #[doc(hidden)]
    fn unreserve(&mut self, address: u64, size: u64) -> Answer;
    #[doc(hidden)]
    fn create(&mut self, key: MemoryKey, size: u64, file: Option<&Arc<OsHandle>>) -> Answer;
    #[doc(hidden)]
    fn destroy(&mut self, key: MemoryKey);
    #[doc(hidden)]
    fn map(&mut self, key: MemoryKey, parts: &[Part]) -> Answer;
    #[doc(hidden)]
    fn unmap(&mut self, parts: &[Part]) -> Answer;
    #[doc(hidden)]
    fn protect(&mut self, changes: &[Change]) -> Answer;
    /// Allocates memory outside every reservation. The host may access it if `touchable`.
    #[doc(hidden)]
    fn allocate(&mut self, size: u64, touchable: bool) -> Answer<u64>;
    #[doc(hidden)]
    fn deallocate(&mut self, address: u64, size: u64);
    /// Names memory outside every reservation to other processes, by the first address of its
    /// allocation, the first named address and the size.
    #[doc(hidden)]
    fn name(&mut self, _part: u64, address: u64, size: u64) -> Answer<PlainName> {
        Ok(PlainName([0, 0, address, size, 0, 0]))
    }
    /// Ends a name when its memory is freed.
    #[doc(hidden)]
    fn end_name(&mut self, _name: &PlainName) {}
    /// Maps memory that another process has named. `deallocate` unmaps it.
    #[doc(hidden)]
    fn open(&mut self, _name: &PlainName) -> Answer<u64> {
        Err(NOT_SUPPORTED)
    }
    #[doc(hidden)]
    fn read(&mut self, from: Place, to: &mut [u8]) -> Answer;
    #[doc(hidden)]
    fn write(&mut self, to: Place, from: &[u8]) -> Answer;
    #[doc(hidden)]
    fn fill(&mut self, to: Place, byte: u8, size: u64) -> Answer;
    #[doc(hidden)]
    fn copy(&mut self, to: Place, from: Place, size: u64) -> Answer;
}
