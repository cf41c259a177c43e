//! A socket at a path, for other processes to connect to.
//!
//! A listener holds the [lock](super::lock) of its socket. The next listener at the path replaces
//! files that a dead process left, and a [sweep](super::sweep()) removes them. A forked child
//! inherits the lock and the socket, so both stay in use until the child ends or executes another
//! program.
//!
//! Keeps I-65.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{AtFlags, CWD, utimensat};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::net::{SocketFlags, accept_with, listen};

use super::channel::{Channel, address, new_socket};
use super::dead::{State, clear, state_of};
use super::lock::{FileId, Lock, NOW, Taken, is_older, look};
use super::system::system;
use super::wait::{Deadline, pause, wait_for};
use crate::error::ChannelError;
use crate::modes;
use crate::peer::{Users, own_user};
use crate::sync::Mutex;

/// The most connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// How long a sweep may hold the lock of a socket that is to be bound, and another process may take
/// between binding and listening.
const BUSY: Duration = Duration::from_secs(5);

/// The pause before the lock is tried again.
const AGAIN: Duration = Duration::from_millis(1);

/// The age at which a listener's files are touched. Cleaners of temporary directories remove files
/// that were not touched for days.
pub(super) const FRESH: Duration = Duration::from_secs(3600);

/// A socket at a path that accepts connections of other processes until it is dropped.
///
/// Only this user can connect to the socket (mode 0600). If other users are admitted, every user
/// can connect (mode 0666), and processes of users that are not admitted are refused.
///
/// The lock is an empty file beside the socket, whose name ends with `.cuvmm-lock`. Put the socket
/// in a directory in which only trusted users may rename files.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The file of the socket. Its inode number is not reused while the socket is open.
    id: FileId,
    users: Users,
    /// The creating process. A forked child removes no files.
    made_by: u32,
    /// Dropped last.
    lock: Mutex<Lock>,
}

impl Listener {
    /// Listens at a path for processes of the same user. Replaces the files of a dead process.
    ///
    /// Waits for up to 5 seconds while another process sweeps the path.
    ///
    /// # Errors
    /// [`ChannelError`] if another process listens there, the path is something other than a
    /// socket, the path of the lock is a file that is not a lock of this user, or the system
    /// refuses.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::bind_for(path, Users::own())
    }

    /// Listens at a path for processes that belong to `users`. Otherwise like [`bind`](Self::bind).
    ///
    /// # Errors
    /// [`ChannelError`] if another process listens there, the path is something other than a
    /// socket, the path of the lock is a file that is not a lock of this user, or the system
    /// refuses.
    pub fn bind_for(path: impl AsRef<Path>, users: Users) -> Result<Self, ChannelError> {
        let path = path.as_ref();
        let address = address(path)?;
        own_user()?;
        let lock = lock_of(path)?;
        remove_stale(path)?;
        let socket = new_socket()?;
        // `accept` must not block if another thread accepted the connection first.
        ioctl_fionbio(&socket, true).map_err(system("ioctl(FIONBIO)"))?;
        let mode = if users.is_own_only() { 0o600 } else { 0o666 };
        let made = modes::bind(&socket, &address, path, mode);
        made.map_err(|failed| system(failed.call)(failed.errno))?;
        let id = bound(path)?;
        let listener = Self {
            socket,
            path: path.to_owned(),
            id,
            users,
            made_by: std::process::id(),
            lock: Mutex::new(lock),
        };
        listen(&listener.socket, BACKLOG).map_err(system("listen"))?;
        Ok(listener)
    }

    /// Keeps cleaners of old files from this listener's files: touches them, and creates the lock
    /// file again if it was removed.
    pub(super) fn refresh(&self) {
        if let Err(error) = self.try_refresh() {
            log!(debug, %error, path = %self.path.display(), "the files of a socket could not be touched");
        }
    }

    fn try_refresh(&self) -> Result<(), ChannelError> {
        if self.made_by != std::process::id() {
            return Ok(());
        }
        let there = look(&self.path)?.filter(|there| FileId::of(there) == self.id);
        let Some(there) = there else {
            return Ok(());
        };
        // The caller returns after an hour, which may end a little early.
        let old = FRESH / 2;
        if is_older(&there, old) {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            utimensat(CWD, &self.path, &NOW, flags).map_err(system("utimensat"))?;
        }
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if !lock.is_in_place()?
            && let Taken::Lock(new) = Lock::make(&self.path)?
        {
            *lock = new;
        }
        lock.refresh(old)
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits up to `timeout` for the next connection.
    ///
    /// # Errors
    /// [`ChannelError`] if no connection comes in time, or the user of the connecting process is
    /// not admitted. The listener stays usable.
    pub fn accept(&self, timeout: Duration) -> Result<Channel, ChannelError> {
        let deadline = Deadline::after(timeout);
        self.refresh();
        loop {
            wait_for(&[(self.socket.as_fd(), PollFlags::IN)], Some(deadline))?;
            if let Some(channel) = self.accept_now()? {
                return Ok(channel);
            }
        }
    }

    pub(super) const fn users(&self) -> &Users {
        &self.users
    }

    /// Accepts a waiting connection, if any.
    pub(super) fn accept_now(&self) -> Result<Option<Channel>, ChannelError> {
        match retry_on_intr(|| accept_with(&self.socket, SocketFlags::CLOEXEC)) {
            Ok(socket) => Channel::from_socket(socket, &self.users).map(Some),
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
        if let Err(error) = clear(&self.path, self.id) {
            log!(warn, %error, path = %self.path.display(), "a socket could not be removed");
        }
    }
}

fn lock_of(path: &Path) -> Result<Lock, ChannelError> {
    let deadline = Deadline::after(BUSY);
    loop {
        if let Taken::Lock(lock) = Lock::make(path)? {
            return Ok(lock);
        }
        // If no process answers at the socket, the lock is held by a sweep, which releases it, or
        // by a listener that is being created.
        if state_of(path)? == State::Live || deadline.left().is_zero() {
            return Err(ChannelError::InUse(path.to_owned()));
        }
        pause(AGAIN);
    }
}

/// Removes the files of a dead process at a path whose lock is held.
fn remove_stale(path: &Path) -> Result<(), ChannelError> {
    let path = path.to_owned();
    match state_of(&path)? {
        State::Nothing => Ok(()),
        State::Dead(id) => clear(&path, id),
        State::Live => Err(ChannelError::InUse(path)),
        State::NotOurs => Err(ChannelError::not_ours(path)),
    }
}

/// Returns the identity of the new socket's file.
fn bound(path: &Path) -> Result<FileId, ChannelError> {
    let found = look(path).and_then(|found| {
        let path = path.to_owned();
        found.ok_or(ChannelError::NotListening(path))
    });
    match found {
        Ok(found) => Ok(FileId::of(&found)),
        Err(error) => {
            // The lock is held, so the file is the one that was created.
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}
