//! The ledger's file: made, checked, opened and mapped.
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

use super::charge::MOST;
use super::layout::{Layout, MAGIC, SIZE, VERSION, first_bytes, uuid_words};
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

#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) granule: u64,
    pub(super) device: [u8; 16],
    pub(super) group: bool,
}

impl Terms {
    const fn mode(self) -> u32 {
        match self.group {
            true => 0o660,
            false => 0o600,
        }
    }
}

#[derive(Debug)]
pub(super) struct LedgerFile {
    file: File,
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
    mapped: NonNull<Layout>,
}

// SAFETY: the mapping consists of atomics and belongs to no thread.
unsafe impl Send for LedgerFile {}
// SAFETY: the mapping consists of atomics, which any thread may use.
unsafe impl Sync for LedgerFile {}

impl LedgerFile {
    pub(super) fn open(path: PathBuf, terms: Terms) -> Result<Self, LedgerError> {
        for _ in 0..MOST_TRIES {
            let Some(file) = open(&path, true)? else {
                make(&path, terms)?;
                continue;
            };
            let found = file.metadata().map_err(broken("fstat", &path))?;
            check_access(&path, &found, terms)?;
            if found.is_file() && found.size() == 0 {
                file.set_len(SIZE).map_err(broken("ftruncate", &path))?;
            } else {
                check_size(&path, &found)?;
            }
            allocate(&file, &path)?;
            let ledger = Self::map(file, path.clone(), true)?;
            ledger.prepare(terms)?;
            if ledger.is_in_place() {
                return Ok(ledger);
            }
        }
        Err(LedgerError::Replaced(path))
    }

    pub(super) fn look(path: PathBuf) -> Result<Self, LedgerError> {
        let Some(file) = open(&path, false)? else {
            return Err(failed("open", &path)(Errno::NOENT));
        };
        let found = file.metadata().map_err(broken("fstat", &path))?;
        check_size(&path, &found)?;
        // Reading a hole needs memory too, which a process without write access cannot allocate.
        let has_holes = found.blocks().saturating_mul(BLOCK) < SIZE;
        if has_holes && let Ok(Some(writable)) = open(&path, true) {
            allocate(&writable, &path)?;
        }
        let ledger = Self::map(file, path, false)?;
        ledger.check_version()?;
        Ok(ledger)
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
                size_of::<Layout>(),
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

    /// Checks that the file is a ledger of this device. Initializes a file that lost its contents.
    fn prepare(&self, terms: Terms) -> Result<(), LedgerError> {
        let header = &self.layout().header;
        let device = uuid_words(terms.device);
        // The machine failed before the file's maker had written it to disk.
        if header.magic.load() == 0 && self.is_blank() {
            header.version.store(VERSION);
            header.granule.store(terms.granule);
            header.device[0].store(device[0]);
            header.device[1].store(device[1]);
            header.magic.store(MAGIC);
            return Ok(());
        }
        self.check_version()?;
        let found = header.granule.load();
        if found != terms.granule {
            return Err(self.not_a_ledger(format!(
                "its granule is {}, and the device's is {}",
                Bytes(found),
                Bytes(terms.granule)
            )));
        }
        let found = [header.device[0].load(), header.device[1].load()];
        if found != device {
            return Err(self.not_a_ledger("it is another device's".to_owned()));
        }
        Ok(())
    }

    /// Returns `true` if the file may have lost its contents: no limit was set, and no slot was
    /// ever taken.
    fn is_blank(&self) -> bool {
        let layout = self.layout();
        let slots = layout.slots.iter().map(|slot| slot.state.load());
        let charges = layout.charges.iter().map(super::word::Word::load);
        layout.header.agreed.load() == 0 && slots.chain(charges).all(|word| word == 0)
    }

    fn check_version(&self) -> Result<(), LedgerError> {
        let header = &self.layout().header;
        if header.magic.load() != MAGIC {
            return Err(self.not_a_ledger("its first word is not that of a ledger".to_owned()));
        }
        let found = header.version.load();
        if found != VERSION {
            return Err(LedgerError::Version {
                path: self.path.clone(),
                found,
                supported: VERSION,
            });
        }
        let granule = header.granule.load();
        if !granule.is_power_of_two() || granule > u64::MAX / (MOST + 1) {
            return Err(self.not_a_ledger(format!("its granule is {}", Bytes(granule))));
        }
        Ok(())
    }

    pub(super) const fn layout(&self) -> &Layout {
        // SAFETY: the whole layout is mapped while `self` lives, page-aligned, and consists of
        // atomics, for which every content is valid.
        unsafe { self.mapped.as_ref() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) const fn number(&self) -> u64 {
        self.id.1
    }

    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    /// Checks that the file is still at its path, with its size. Session managers remove the
    /// directories of users who have logged out; other processes would then make a new ledger.
    pub(super) fn is_in_place(&self) -> bool {
        // The inode number of an open file is no other file's.
        let found = statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW);
        found
            .is_ok_and(|found| id_of(&found) == self.id && u64::try_from(found.st_size) == Ok(SIZE))
    }

    fn not_a_ledger(&self, reason: String) -> LedgerError {
        LedgerError::NotALedger {
            path: self.path.clone(),
            reason,
        }
    }

    pub(super) fn failed(&self, call: &'static str) -> impl Fn(Errno) -> LedgerError + '_ {
        failed(call, &self.path)
    }
}

impl Drop for LedgerFile {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and no reference into it outlives `self`.
        let unmapped = unsafe { munmap(self.mapped.as_ptr().cast(), size_of::<Layout>()) };
        if let Err(errno) = unmapped {
            log!(warn, %errno, "a ledger could not be unmapped");
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
fn make(path: &Path, terms: Terms) -> Result<(), LedgerError> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let found = statfs(directory).map_err(failed("statfs", path))?;
    check_system(path, &found)?;
    let mode = Mode::from_raw_mode(terms.mode());
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(CWD, directory, flags, mode).map_err(failed("open(O_TMPFILE)", path))?;
    let file = File::from(file);
    step();
    // The process's umask may have removed too much.
    fchmod(&file, mode).map_err(failed("fchmod", path))?;
    step();
    if !allocate(&file, path)? {
        let zeros = file.write_all_at(&[0; SIZE as usize], 0);
        zeros.map_err(broken("write", path))?;
    }
    step();
    let written = file.write_all_at(&first_bytes(terms.granule, terms.device), 0);
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
fn allocate(file: &File, path: &Path) -> Result<bool, LedgerError> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, SIZE)) {
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

fn check_access(path: &Path, found: &Metadata, terms: Terms) -> Result<(), LedgerError> {
    let (uid, mode) = (found.uid(), found.mode() & 0o7777);
    let foreign = uid != geteuid().as_raw() && !terms.group;
    if foreign || mode != terms.mode() {
        return Err(LedgerError::Access {
            path: path.to_owned(),
            uid,
            mode,
            expected: terms.mode(),
        });
    }
    Ok(())
}

fn check_size(path: &Path, found: &Metadata) -> Result<(), LedgerError> {
    let kind = found.file_type();
    let reason = if !kind.is_file() || kind.is_socket() {
        "it is not a regular file".to_owned()
    } else if found.size() != SIZE {
        format!(
            "it has {}, and a ledger has {}",
            Bytes(found.size()),
            Bytes(SIZE)
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
