//! A file that the processes of a machine map and use together: made, checked, opened and mapped.
//! Ledgers and [groups](crate::group) are such files.
//!
//! A process makes a file without a name, complete enough to join, and then names it, unless
//! another process has named a file meanwhile. So no process finds an unfinished file, and a
//! process that dies or is stopped on the way leaves nothing behind and delays no other process.
//!
//! A machine that fails can leave a named file without its contents. Such a file is initialized in
//! place, its first word last. Several processes may do so at once: they write equal values.
//!
//! All of the file is allocated before it is mapped: on a full file system an access to a page
//! without memory would end the process. A file system that copies on writing (btrfs, a file with
//! snapshots or shared extents on xfs) needs space for each written page all the same.
//!
//! `unsafe` in this file: mapping the file, and references to words in the mapping. The words are
//! atomics, so writes by other processes are allowed, and every content is valid. The file is
//! mapped while the references live. A program that can write the file can truncate it; the next
//! access beyond its end then ends the process with `SIGBUS`.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, Stat, StatFs, fallocate, fchmod, fstat, fstatfs,
    linkat, openat, statat, statfs,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::geteuid;

use super::lock;
use crate::display::Bytes;
use crate::error::LedgerError;

/// How often a process opens the file again because it was removed or replaced meanwhile.
const MOST_TRIES: u32 = 100;

/// The unit of `st_blocks`, in bytes.
const BLOCK: u64 = 512;

/// File systems on which locks or shared mappings do not work between all processes, by the type
/// that `statfs` reports (`linux/magic.h`).
const REFUSED: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xfe53_4d42, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0x6573_5546, "FUSE"),
    (0x794c_7630, "overlayfs"),
    (0x0102_1997, "9P"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
];

/// The contents of a shared file.
///
/// # Safety
/// The type consists of atomics for which every content is valid, and is aligned to at most a page.
pub(crate) unsafe trait Contents: Sized {
    /// The name of the kind of file, as in messages.
    const KIND: &'static str;

    /// In bytes.
    const SIZE: u64 = size_of::<Self>() as u64;
}

/// Who may open a shared file, and the beginning that its maker writes. The rest is zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Making<'a> {
    /// `true` if processes of the file's group may use it too.
    pub(crate) group: bool,
    pub(crate) first: &'a [u8],
}

impl Making<'_> {
    const fn mode(&self) -> u32 {
        match self.group {
            true => 0o660,
            false => 0o600,
        }
    }
}

pub(crate) struct SharedFile<T: Contents> {
    file: File,
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
    mapped: NonNull<T>,
}

// SAFETY: the mapping consists of atomics and belongs to no thread.
unsafe impl<T: Contents> Send for SharedFile<T> {}
// SAFETY: the mapping consists of atomics, which any thread may use.
unsafe impl<T: Contents> Sync for SharedFile<T> {}

impl<T: Contents> SharedFile<T> {
    /// Opens the file, and makes it if there is none. `prepare` checks the contents and initializes
    /// those of a file that lost them.
    pub(crate) fn open_or_make(
        path: PathBuf,
        making: Making<'_>,
        prepare: impl Fn(&Self) -> Result<(), LedgerError>,
    ) -> Result<Self, LedgerError> {
        for _ in 0..MOST_TRIES {
            let Some(file) = open(&path, true)? else {
                make(&path, making, T::SIZE)?;
                continue;
            };
            let found = file.metadata().map_err(broken("fstat", &path))?;
            check_access(&path, &found, making)?;
            if found.is_file() && found.size() == 0 {
                file.set_len(T::SIZE).map_err(broken("ftruncate", &path))?;
            } else {
                check_size::<T>(&path, &found)?;
            }
            allocate(&file, &path, T::SIZE)?;
            let shared = Self::map(file, path.clone(), true)?;
            prepare(&shared)?;
            if shared.is_in_place() {
                return Ok(shared);
            }
        }
        Err(LedgerError::Replaced(path))
    }

    /// Opens the file for reading. The caller checks the contents.
    pub(crate) fn open_to_read(path: PathBuf) -> Result<Self, LedgerError> {
        let Some(file) = open(&path, false)? else {
            return Err(failed("open", &path)(Errno::NOENT));
        };
        let found = file.metadata().map_err(broken("fstat", &path))?;
        check_size::<T>(&path, &found)?;
        // Reading a hole needs memory too, which a process without write access cannot allocate.
        let has_holes = found.blocks().saturating_mul(BLOCK) < T::SIZE;
        if has_holes && let Ok(Some(writable)) = open(&path, true) {
            allocate(&writable, &path, T::SIZE)?;
        }
        Self::map(file, path, false)
    }

    fn map(file: File, path: PathBuf, writes: bool) -> Result<Self, LedgerError> {
        let rights = match writes {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        // SAFETY: a new mapping that the kernel places.
        let mapped = unsafe {
            mmap(
                std::ptr::null_mut(),
                size_of::<T>(),
                rights,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let mapped = mapped.map_err(failed("mmap", &path))?;
        let mapped =
            NonNull::new(mapped.cast()).ok_or_else(|| failed("mmap", &path)(Errno::NOMEM))?;
        #[cfg(test)]
        super::probe::ask(|probe| probe.mapped(mapped.addr().get()));
        let found = fstat(&file).map_err(failed("fstat", &path))?;
        Ok(Self {
            id: id_of(&found),
            file,
            path,
            mapped,
        })
    }

    pub(crate) const fn layout(&self) -> &T {
        // SAFETY: the whole type is mapped while `self` lives, page-aligned, and consists of
        // atomics, for which every content is valid.
        unsafe { self.mapped.as_ref() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn number(&self) -> u64 {
        self.id.1
    }

    /// Returns `true` if processes of the file's group may use it too.
    pub(crate) fn is_of_group(&self) -> Result<bool, LedgerError> {
        let found = fstat(&self.file).map_err(self.failed("fstat"))?;
        Ok(found.st_mode & 0o060 != 0)
    }

    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    /// Checks that the file is still at its path, with its size. Session managers remove the
    /// directories of users who have logged out; other processes would then make a new ledger.
    pub(crate) fn is_in_place(&self) -> bool {
        // The inode number of an open file is no other file's.
        let found = statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| id_of(&found) == self.id && has_size::<T>(&found))
    }

    /// Checks that the open file has a name and its size: it was neither removed nor shortened.
    /// Takes a third of the time of [`Self::is_in_place`], and does not see that the file was moved.
    pub(crate) fn is_whole(&self) -> bool {
        let found = fstat(&self.file);
        found.is_ok_and(|found| found.st_nlink > 0 && has_size::<T>(&found))
    }

    pub(crate) fn is_not_one(&self, reason: String) -> LedgerError {
        LedgerError::NotALedger {
            path: self.path.clone(),
            reason,
        }
    }

    pub(crate) fn failed(&self, call: &'static str) -> impl Fn(Errno) -> LedgerError + '_ {
        failed(call, &self.path)
    }
}

impl<T: Contents> fmt::Debug for SharedFile<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedFile")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl<T: Contents> Drop for SharedFile<T> {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and no reference into it outlives `self`.
        let unmapped = unsafe { munmap(self.mapped.as_ptr().cast(), size_of::<T>()) };
        if let Err(errno) = unmapped {
            log!(warn, %errno, "a shared file could not be unmapped");
        }
    }
}

fn open(path: &Path, writes: bool) -> Result<Option<File>, LedgerError> {
    // Does not follow a link or wait for the other end of a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut options = File::options();
    options.read(true).write(writes).custom_flags(flags);
    match options.open(path) {
        Ok(file) => {
            let found = fstatfs(&file).map_err(failed("fstatfs", path))?;
            check_system(path, &found)?;
            Ok(Some(file))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            Err(LedgerError::NotALedger {
                path: path.to_owned(),
                reason: "it is a symbolic link".to_owned(),
            })
        }
        Err(error) => Err(broken("open", path)(error)),
    }
}

/// Makes the file, unless another process has made it meanwhile.
fn make(path: &Path, making: Making<'_>, size: u64) -> Result<(), LedgerError> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let found = statfs(directory).map_err(failed("statfs", path))?;
    check_system(path, &found)?;
    let mode = Mode::from_raw_mode(making.mode());
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(CWD, directory, flags, mode).map_err(failed("open(O_TMPFILE)", path))?;
    let file = File::from(file);
    step();
    // The process's umask may have removed too much.
    fchmod(&file, mode).map_err(failed("fchmod", path))?;
    step();
    if !allocate(&file, path, size)? {
        let zeros = vec![0; usize::try_from(size).unwrap_or_default()];
        let zeros = file.write_all_at(&zeros, 0);
        zeros.map_err(broken("write", path))?;
    }
    step();
    let written = file.write_all_at(making.first, 0);
    written.map_err(broken("write", path))?;
    step();
    if !lock::reached() {
        return Ok(());
    }
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    match linkat(CWD, unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => step(),
        Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed("linkat", path)(errno)),
    }
    Ok(())
}

/// Allocates all pages of the file. Returns `false` if the file system cannot allocate without
/// writing.
fn allocate(file: &File, path: &Path, size: u64) -> Result<bool, LedgerError> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, size)) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP) => Ok(false),
        Err(errno) => Err(failed("fallocate", path)(errno)),
    }
}

/// Lets a test end or stop the process after each step of making the file.
fn step() {
    #[cfg(test)]
    super::crash::step();
}

fn check_system(path: &Path, found: &StatFs) -> Result<(), LedgerError> {
    // The type is a signed long on most architectures; its low 32 bits identify it.
    let kind = found.f_type as u32;
    match REFUSED.iter().find(|(refused, _)| *refused == kind) {
        Some((_, name)) => Err(LedgerError::FileSystem {
            path: path.to_owned(),
            name,
        }),
        None => Ok(()),
    }
}

fn check_access(path: &Path, found: &Metadata, making: Making<'_>) -> Result<(), LedgerError> {
    let (uid, mode) = (found.uid(), found.mode() & 0o7777);
    let foreign = uid != geteuid().as_raw() && !making.group;
    if foreign || mode != making.mode() {
        return Err(LedgerError::Access {
            path: path.to_owned(),
            uid,
            mode,
            expected: making.mode(),
        });
    }
    Ok(())
}

fn check_size<T: Contents>(path: &Path, found: &Metadata) -> Result<(), LedgerError> {
    let kind = found.file_type();
    let reason = if !kind.is_file() || kind.is_socket() {
        "it is not a regular file".to_owned()
    } else if found.size() != T::SIZE {
        format!(
            "it has {}, and a {} has {}",
            Bytes(found.size()),
            T::KIND,
            Bytes(T::SIZE)
        )
    } else {
        return Ok(());
    };
    Err(LedgerError::NotALedger {
        path: path.to_owned(),
        reason,
    })
}

fn id_of(found: &Stat) -> (u64, u64) {
    (found.st_dev, found.st_ino)
}

fn has_size<T: Contents>(found: &Stat) -> bool {
    u64::try_from(found.st_size) == Ok(T::SIZE)
}

fn failed<'a>(call: &'static str, path: &'a Path) -> impl Fn(Errno) -> LedgerError + 'a {
    move |errno| LedgerError::System {
        call,
        path: path.to_owned(),
        errno,
    }
}

fn broken<'a>(call: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> LedgerError + 'a {
    move |error| {
        let code = error.raw_os_error().unwrap_or_default();
        failed(call, path)(Errno::from_raw_os_error(code))
    }
}
