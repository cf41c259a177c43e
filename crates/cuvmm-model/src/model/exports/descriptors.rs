//! Exports on Unix: descriptors of files in memory.
//!
//! The file's identity (device and inode) identifies the physical, its length is the size, and its
//! name holds the location. The file is sealed against a change of its length, so that a process
//! that maps it cannot get SIGBUS.
//!
//! A physical's memory lives while a descriptor is open. File locks show if one is: every export is
//! a new open file with a shared lock on it. The system drops the lock when the last descriptor
//! *and* the last mapping of that open file are gone, in all processes. While an exclusive lock is
//! refused, a process still holds the memory. A process that locks or unlocks a descriptor it
//! received makes this check wrong, which changes figures and no contents. No call waits for a
//! lock.
//!
//! `unsafe` is needed to examine a descriptor that was passed as a number.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FileType, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals,
    fcntl_get_seals, flock, fstat, ftruncate, memfd_create, open, readlink,
};
use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};

use super::{Found, Identity, POOL_FILE};
use crate::model::answer::{Answer, OUT_OF_MEMORY, UNKNOWN, require};
use cuvmm_driver::{CUresult, Location, LocationKind};

/// Beginnings of the names of a physical's and a memory pool's file.
const PHYSICAL: &str = "cuvmm-";
const POOL: &str = "cuvmm-pool-";

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// Converts a system error: lack of descriptors or memory is `OUT_OF_MEMORY`, any other error is
/// the system's own.
fn code(error: Errno) -> CUresult {
    match error {
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC => OUT_OF_MEMORY,
        _ => CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    }
}

/// Creates a zeroed file, which uses no memory until it is written.
pub(crate) fn new_file(size: u64, location: Location) -> Answer<OwnedFd> {
    named_file(PHYSICAL, size, location)
}

pub(crate) fn new_pool_file(location: Location) -> Answer<OwnedFd> {
    named_file(POOL, POOL_FILE, location)
}

fn named_file(prefix: &str, size: u64, location: Location) -> Answer<OwnedFd> {
    let name = format!("{prefix}{}-{}", location.kind.0, location.id);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(name, flags).map_err(code)?;
    ftruncate(&file, size).map_err(|_| OUT_OF_MEMORY)?;
    fcntl_add_seals(&file, seals()).map_err(code)?;
    // A file that was opened for writing cannot have a lease, but the file just created does not
    // count as opened. If a process took a lease on it, a later open would wait for that process.
    open_again(&file)
}

fn open_again(file: &OwnedFd) -> Answer<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    retry_on_intr(|| open(&path, flags, Mode::empty())).map_err(code)
}

/// Creates the stand-in for a dma-buf: a file of this length that no driver can import.
pub(crate) fn stand_in(size: u64) -> Answer<OwnedFd> {
    let file = memfd_create("cuvmm-dma-buf", MemfdFlags::CLOEXEC).map_err(code)?;
    ftruncate(&file, size).map_err(|_| OUT_OF_MEMORY)?;
    Ok(file)
}

/// Creates a descriptor on a new open file of the same memory, locked while that file is open.
pub(crate) fn hand_out(file: &OwnedFd) -> Answer<OwnedFd> {
    let given = open_again(file)?;
    match retry_on_intr(|| flock(&given, FlockOperation::NonBlockingLockShared)) {
        // A process that received the file has locked it, and holds the memory while it holds that
        // lock.
        Ok(()) | Err(Errno::WOULDBLOCK) => Ok(given),
        Err(error) => Err(code(error)),
    }
}

/// Returns `true` if any process has an exported descriptor or a mapping of one.
pub(crate) fn held_elsewhere(file: &OwnedFd) -> bool {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            let _ = flock(file, FlockOperation::Unlock);
            false
        }
        Err(error) => error == Errno::WOULDBLOCK,
    }
}

pub(crate) fn identity(file: &OwnedFd) -> Answer<Identity> {
    let stat = fstat(file).map_err(code)?;
    Ok(Identity([stat.st_dev as u64, stat.st_ino as u64]))
}

/// Examines a descriptor by number. Anything but a physical of a host driver or model is `UNKNOWN`,
/// as on the GPU.
pub(crate) fn examine(descriptor: i32) -> Answer<Found> {
    examine_as(PHYSICAL, descriptor)
}

/// Like [`examine`], for a memory pool.
pub(crate) fn examine_pool(descriptor: i32) -> Answer<Found> {
    examine_as(POOL, descriptor)
}

fn examine_as(prefix: &str, descriptor: i32) -> Answer<Found> {
    require(descriptor >= 0, UNKNOWN)?;
    // SAFETY: the caller of `import` promises that the descriptor is open during the call, or is
    // not a descriptor at all, in which case the duplication below fails. -1 was refused above.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let file = fcntl_dupfd_cloexec(borrowed, 3).map_err(|_| UNKNOWN)?;
    let stat = fstat(&file).map_err(|_| UNKNOWN)?;
    require(
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
        UNKNOWN,
    )?;
    let sealed = fcntl_get_seals(&file).map_err(|_| UNKNOWN)?;
    require(sealed.contains(seals()), UNKNOWN)?;
    Ok(Found {
        identity: Identity([stat.st_dev as u64, stat.st_ino as u64]),
        size: u64::try_from(stat.st_size).map_err(|_| UNKNOWN)?,
        location: location_of(prefix, &file).ok_or(UNKNOWN)?,
        file,
    })
}

fn location_of(prefix: &str, file: &OwnedFd) -> Option<Location> {
    let target = readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new()).ok()?;
    let name = target.to_str().ok()?.strip_prefix("/memfd:")?;
    let name = name.strip_prefix(prefix)?;
    let (kind, id) = name.split_whitespace().next()?.split_once('-')?;
    Some(Location {
        kind: LocationKind(kind.parse().ok()?),
        id: id.parse().ok()?,
    })
}
