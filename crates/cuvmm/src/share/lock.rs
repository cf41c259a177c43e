//! The lock beside a socket, which distinguishes a live publisher from the files of a dead one.
//!
//! A process holds the lock while it binds, replaces or removes the socket, and the system releases
//! the lock when the process ends in any way. The lock's file is empty, belongs to this user, has
//! mode 0600 and a single link, and its name has an ending that no other file uses. A file that
//! differs in any of these is not opened, locked or removed.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{
    FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, fchmod, flock, futimens,
};
use rustix::io::{Errno, retry_on_intr};

use super::system::{failed, system};
use crate::error::ChannelError;
use crate::peer::is_own_user;

/// The suffix that is appended to a socket's name to name its lock.
pub const LOCK_ENDING: &str = ".cuvmm-lock";

/// The mode of a lock's file.
const MODE: u32 = 0o600;

pub(super) const NOW: Timestamps = Timestamps {
    last_access: AT_ONCE,
    last_modification: AT_ONCE,
};

const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: UTIME_NOW as _,
};

/// The identity of a file, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(super) fn of(found: &Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
        }
    }
}

/// Returns the metadata of the file at a path, if any. Follows no link.
pub(super) fn look(path: &Path) -> Result<Option<Metadata>, ChannelError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("lstat")(error)),
    }
}

/// Returns `true` if a file was last modified longer than `than` ago.
pub(super) fn is_older(found: &Metadata, than: Duration) -> bool {
    let modified = found.modified().ok();
    let age = modified.and_then(|then| SystemTime::now().duration_since(then).ok());
    age.is_some_and(|age| age > than)
}

#[derive(Debug)]
pub(super) enum Taken {
    Lock(Lock),
    /// Another process has the lock, or its file was replaced meanwhile.
    Held,
    /// There is no file, or it is not a lock of this user.
    Nothing,
}

/// The held lock of a socket. Its drop removes the file, unless the socket still exists.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    id: FileId,
    path: PathBuf,
    socket: PathBuf,
    made_by: u32,
}

impl Lock {
    /// Takes the lock of a socket, and creates its file if there is none.
    ///
    /// # Errors
    /// [`ChannelError::Path`] if the file's path is something other than a lock, and
    /// [`ChannelError::System`].
    pub(super) fn make(socket: &Path) -> Result<Taken, ChannelError> {
        let path = path_of(socket);
        // If two processes create the file at once, the second finds the first one's.
        match create(&path)? {
            Some(file) => Self::take(file, path, socket),
            None => match open(&path)? {
                Some(file) => Self::take(file, path, socket),
                None => match look(&path)? {
                    Some(found) if !is_lock(&found) => Err(ChannelError::not_ours(path)),
                    _ => Ok(Taken::Held),
                },
            },
        }
    }

    /// Takes the lock of a socket if its file exists. Creates none.
    ///
    /// # Errors
    /// [`ChannelError::System`].
    pub(super) fn find(socket: &Path) -> Result<Taken, ChannelError> {
        let path = path_of(socket);
        match open(&path)? {
            Some(file) => Self::take(file, path, socket),
            None => Ok(Taken::Nothing),
        }
    }

    fn take(file: File, path: PathBuf, socket: &Path) -> Result<Taken, ChannelError> {
        match retry_on_intr(|| flock(&file, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Taken::Held),
            Err(errno) => return Err(system("flock")(errno)),
        }
        let id = FileId::of(&file.metadata().map_err(failed("fstat"))?);
        let lock = Self {
            file,
            id,
            path,
            socket: socket.to_owned(),
            made_by: std::process::id(),
        };
        // The earlier holder may have removed the file meanwhile, and another process may have
        // created a new one.
        match lock.is_in_place()? {
            true => Ok(Taken::Lock(lock)),
            false => Ok(Taken::Held),
        }
    }

    pub(super) fn is_in_place(&self) -> Result<bool, ChannelError> {
        let there = look(&self.path)?;
        Ok(there.is_some_and(|there| FileId::of(&there) == self.id))
    }

    /// Touches the file if it is older than `than`.
    pub(super) fn refresh(&self, than: Duration) -> Result<(), ChannelError> {
        let found = self.file.metadata().map_err(failed("fstat"))?;
        match is_older(&found, than) {
            true => retry_on_intr(|| futimens(&self.file, &NOW)).map_err(system("futimens")),
            false => Ok(()),
        }
    }

    /// Removes the file while the lock is held, so that no process locks a file that is being
    /// removed. The file stays while the socket exists: without it no process could tell that the
    /// socket may be swept.
    fn remove(&self) -> Result<(), ChannelError> {
        let socket = look(&self.socket)?;
        if socket.is_some_and(|found| found.file_type().is_socket()) || !self.is_in_place()? {
            return Ok(());
        }
        std::fs::remove_file(&self.path).map_err(failed("unlink"))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.made_by != std::process::id() {
            return;
        }
        if let Err(error) = self.remove() {
            log!(warn, %error, path = %self.path.display(), "a lock could not be removed");
        }
        // A forked child may share the open file, whose close would then not release the lock.
        if let Err(error) = flock(&self.file, FlockOperation::Unlock) {
            log!(warn, %error, path = %self.path.display(), "a lock could not be released");
        }
    }
}

fn path_of(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(LOCK_ENDING);
    path.into()
}

fn is_lock(found: &Metadata) -> bool {
    found.file_type().is_file()
        && found.size() == 0
        && found.nlink() == 1
        && found.mode() & 0o7777 == MODE
        && is_own_user(found.uid())
}

/// Creates the file, or returns `None` if the path exists.
fn create(path: &Path) -> Result<Option<File>, ChannelError> {
    let made = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(MODE)
        .open(path);
    match made {
        Ok(file) => {
            // The process's umask may have removed too much.
            fchmod(&file, Mode::from_raw_mode(MODE)).map_err(system("fchmod"))?;
            Ok(Some(file))
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(failed("open")(error)),
    }
}

fn open(path: &Path) -> Result<Option<File>, ChannelError> {
    if !look(path)?.is_some_and(|found| is_lock(&found)) {
        return Ok(None);
    }
    // Do not follow a link or block on a special file that may have replaced the lock.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = File::options()
        .read(true)
        .write(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("open")(error)),
    };
    let found = file.metadata().map_err(failed("fstat"))?;
    Ok(is_lock(&found).then_some(file))
}
