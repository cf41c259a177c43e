//! A socket at a path, for other processes to connect to.
//!
//! Who listens holds a lock on a file beside the socket, which the system drops when the process ends,
//! however it ends. So a socket that a dead process has left is told from a live one without asking
//! it, and goes with the next that listens there, or with [`sweep`].
//!
//! A forked child has inherited lock and socket, so both live on in it until it ends or runs another
//! program.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{FlockOperation, Mode, OFlags, chmod, fchmod, flock};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::net::{SocketFlags, accept_with, bind, listen};

use super::channel::{Channel, address, new_socket};
use super::peer::Users;
use super::system::{failed, system};
use super::wait::{Deadline, wait_for};
use crate::error::ChannelError;

/// How many may wait to be accepted.
const BACKLOG: i32 = 64;

/// What is added to a socket's path for the lock beside it.
const LOCK: &str = ".lock";

/// Accepts connections of other processes at a path, until it is dropped.
///
/// The socket belongs to this user alone (mode 0600), unless others are let in; then everybody may
/// knock (0666), and whoever is none of them is turned away.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    users: Users,
    /// The process that made it: a forked child removes nothing.
    made_by: u32,
    /// Dropped last.
    _lock: Lock,
}

impl Listener {
    /// Listens at a path, for processes of the same user. What a dead process has left there is
    /// replaced.
    ///
    /// # Errors
    /// [`ChannelError`] when another process listens there, something else than a socket is there, or
    /// the system refuses.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::bind_for(path, Users::own())
    }

    /// The same for processes of these users.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_for(path: impl AsRef<Path>, users: Users) -> Result<Self, ChannelError> {
        let path = path.as_ref();
        let address = address(path)?;
        let lock = Lock::take(path)?.ok_or_else(|| ChannelError::InUse {
            path: path.to_owned(),
        })?;
        remove_dead(path)?;
        let socket = new_socket()?;
        // `accept` must not wait for another connection where somebody else was quicker.
        ioctl_fionbio(&socket, true).map_err(system("ioctl(FIONBIO)"))?;
        // The file that `bind` makes has the mode that the socket has before, less what the process
        // takes from all its files.
        fchmod(&socket, Mode::from_raw_mode(0o600)).map_err(system("fchmod"))?;
        bind(&socket, &address).map_err(system("bind"))?;
        let listener = Self {
            socket,
            path: path.to_owned(),
            users,
            made_by: std::process::id(),
            _lock: lock,
        };
        if !listener.users.is_own_only() {
            chmod(path, Mode::from_raw_mode(0o666)).map_err(system("chmod"))?;
        }
        listen(&listener.socket, BACKLOG).map_err(system("listen"))?;
        Ok(listener)
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next connection, or for so long.
    ///
    /// # Errors
    /// [`ChannelError`] when nobody comes in time, or another user's process does. It listens still.
    pub fn accept(&self, timeout: Duration) -> Result<Channel, ChannelError> {
        let deadline = Deadline::after(timeout);
        loop {
            wait_for(&[(self.socket.as_fd(), PollFlags::IN)], Some(deadline))?;
            if let Some(channel) = self.accept_now()? {
                return Ok(channel);
            }
        }
    }

    /// Accepts one that waits, if one does.
    pub(super) fn accept_now(&self) -> Result<Option<Channel>, ChannelError> {
        match retry_on_intr(|| accept_with(&self.socket, SocketFlags::CLOEXEC)) {
            Ok(socket) => Channel::over(socket, &self.users).map(Some),
            Err(Errno::AGAIN) => Ok(None),
            Err(errno) => Err(system("accept")(errno)),
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.made_by != std::process::id() {
            return;
        }
        // The lock says that nobody else has bound it since.
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "a socket could not be removed");
        }
    }
}

/// Removes a socket that a dead process has left, and the lock beside it. Says whether there was one;
/// one on which somebody listens stays.
///
/// # Errors
/// [`ChannelError`] when something else than a socket is there, or the system refuses.
pub fn sweep(path: impl AsRef<Path>) -> Result<bool, ChannelError> {
    let path = path.as_ref();
    match Lock::take(path)? {
        Some(_lock) => remove_dead(path),
        None => Ok(false),
    }
}

/// Removes the socket at a path, whose lock is held.
fn remove_dead(path: &Path) -> Result<bool, ChannelError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            std::fs::remove_file(path).map_err(failed("unlink"))?;
            Ok(true)
        }
        Ok(_) => Err(ChannelError::NoSocket {
            path: path.to_owned(),
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("lstat")(error)),
    }
}

/// A lock on a file beside a socket. The file goes with it.
#[derive(Debug)]
struct Lock {
    file: File,
    path: PathBuf,
    made_by: u32,
}

impl Lock {
    /// Takes the lock for a socket; nothing if another process has it.
    fn take(socket: &Path) -> Result<Option<Self>, ChannelError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(LOCK);
        let path = PathBuf::from(path);
        // Neither led elsewhere nor held up, by a pipe that somebody has put there.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        loop {
            let file = File::options()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(flags.bits().cast_signed())
                .open(&path)
                .map_err(failed("open"))?;
            match retry_on_intr(|| flock(&file, FlockOperation::NonBlockingLockExclusive)) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(errno) => return Err(system("flock")(errno)),
            }
            // Whoever had it may have removed the file meanwhile, and another may have made it anew.
            let ours = file.metadata().map_err(failed("fstat"))?;
            match std::fs::symlink_metadata(&path) {
                Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => {
                    return Ok(Some(Self {
                        file,
                        path,
                        made_by: std::process::id(),
                    }));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(failed("lstat")(error)),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.made_by != std::process::id() {
            return;
        }
        // Removed while it is held, so that nobody takes a file that goes.
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "a lock could not be removed");
        }
        if let Err(error) = flock(&self.file, FlockOperation::Unlock) {
            tracing::warn!(%error, path = %self.path.display(), "a lock could not be given back");
        }
    }
}
