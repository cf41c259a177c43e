//! How a physical is passed on: as a descriptor of a file in memory.
//!
//! The file's identity (device and inode) says which physical it is, its length the size, its
//! name the location. It is sealed against a change of its length, so that whoever maps it cannot
//! be surprised by SIGBUS.
//!
//! "Memory lives while a descriptor is open" is measured by file locks: every export is a new
//! open file with a shared lock on it, which the system drops when the last descriptor *and* the
//! last mapping of that open file have gone, in whichever process. While an exclusive lock is
//! refused, a process still holds the memory. A process that locks or unlocks what it was handed
//! makes that count wrong, which changes figures and no contents; it holds up no call, since no lock is
//! waited for.
//!
//! `unsafe` is needed to look at a descriptor that came as a bare number.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FileType, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals,
    fcntl_get_seals, flock, fstat, ftruncate, memfd_create, open, readlink,
};
use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};

use super::answer::{Answer, OUT_OF_MEMORY, UNKNOWN, require};
use crate::{CUresult, Location, LocationKind};

/// What makes a file the same file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

/// What a descriptor that somebody gave us says about itself.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) identity: Identity,
    pub(crate) size: u64,
    pub(crate) location: Location,
    /// A descriptor of our own on the same open file, so that its lock lives on with us.
    pub(crate) file: OwnedFd,
}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// Running out of descriptors is a lack of memory; anything else is the system's own fault.
fn code(error: Errno) -> CUresult {
    match error {
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC => OUT_OF_MEMORY,
        _ => CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    }
}

/// A new file of that size, all zero, taking no memory until written.
pub(crate) fn new_file(size: u64, location: Location) -> Answer<OwnedFd> {
    let name = format!("cuvmm-{}-{}", location.kind.0, location.id);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(name, flags).map_err(code)?;
    ftruncate(&file, size).map_err(|_| OUT_OF_MEMORY)?;
    fcntl_add_seals(&file, seals()).map_err(code)?;
    // A file that was opened for writing can have no lease, and the one that was made just now does
    // not count as such. Where a process had a lease on it, opening it again would wait for that process.
    open_again(&file)
}

/// A new open file of the same memory.
fn open_again(file: &OwnedFd) -> Answer<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    retry_on_intr(|| open(&path, flags, Mode::empty())).map_err(code)
}

/// What stands for a dma-buf: a file of that length which nobody can import.
pub(crate) fn stand_in(size: u64) -> Answer<OwnedFd> {
    let file = memfd_create("cuvmm-dma-buf", MemfdFlags::CLOEXEC).map_err(code)?;
    ftruncate(&file, size).map_err(|_| OUT_OF_MEMORY)?;
    Ok(file)
}

/// A new descriptor on a new open file of the same memory, locked for as long as it lives.
pub(crate) fn hand_out(file: &OwnedFd) -> Answer<OwnedFd> {
    let given = open_again(file)?;
    match retry_on_intr(|| flock(&given, FlockOperation::NonBlockingLockShared)) {
        // A process that was handed the file has locked it for itself: it holds the memory as long
        // as it holds that lock.
        Ok(()) | Err(Errno::WOULDBLOCK) => Ok(given),
        Err(error) => Err(code(error)),
    }
}

/// Whether a descriptor that was handed out, or a mapping of it, still lives anywhere.
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
    Ok(Identity {
        device: stat.st_dev as u64,
        inode: stat.st_ino as u64,
    })
}

/// Looks at a descriptor by number. Anything that is not a physical of a host or a model is
/// `UNKNOWN`, as it was on the GPU.
pub(crate) fn examine(descriptor: i32) -> Answer<Found> {
    require(descriptor >= 0, UNKNOWN)?;
    // SAFETY: the caller of `import` promises that the descriptor is open for the call, or is none
    // at all, for which the duplication below fails. -1 was refused above.
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
        identity: Identity {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
        },
        size: u64::try_from(stat.st_size).map_err(|_| UNKNOWN)?,
        location: location_of(&file).ok_or(UNKNOWN)?,
        file,
    })
}

/// The location that the file's name tells.
fn location_of(file: &OwnedFd) -> Option<Location> {
    let target = readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new()).ok()?;
    let name = target.to_str().ok()?.strip_prefix("/memfd:cuvmm-")?;
    let (kind, id) = name.split_whitespace().next()?.split_once('-')?;
    Some(Location {
        kind: LocationKind(kind.parse().ok()?),
        id: id.parse().ok()?,
    })
}
