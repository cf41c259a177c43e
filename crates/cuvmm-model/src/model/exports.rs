//! Exported physicals and memory pools: handles of the operating system that identify them.
//!
//! A handle names an object of the system, which tells the size and the location of the memory, so that
//! another process's machine can import it. A physical's memory lives while a handle is open. The object
//! is a file in memory on Unix (`descriptors`), and a section on Windows (`sections`).

#[cfg(unix)]
mod descriptors;
#[cfg(windows)]
mod sections;

use cuvmm_driver::{HandleTypes, Location, OsHandle};

#[cfg(unix)]
pub(crate) use descriptors::{
    examine, examine_pool, hand_out, held_elsewhere, identity, new_file, new_pool_file, stand_in,
};
#[cfg(windows)]
pub(crate) use sections::{
    examine, examine_pool, hand_out, held_elsewhere, identity, new_file, new_pool_file, stand_in,
};

/// The length of a memory pool's file in bytes. Parts that were never written use no memory.
pub(crate) const POOL_FILE: u64 = 1 << 46;

/// The handle types that memory cannot be created for: those of another system, and D3DKMT handles.
pub(crate) const REFUSED: HandleTypes = HandleTypes::POSIX_FD
    .union(HandleTypes::WIN32)
    .union(HandleTypes::WIN32_KMT)
    .difference(HandleTypes::OS);

/// The identity of an exported object, which no other object of the system has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity(pub(crate) [u64; 2]);

#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) identity: Identity,
    pub(crate) size: u64,
    pub(crate) location: Location,
    /// A duplicate of the handle, which keeps the memory alive.
    pub(crate) file: OsHandle,
}
