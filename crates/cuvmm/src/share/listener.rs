//! A socket at a path, for other processes to connect to.
//!
//! A listener holds the [lock](super::lock) of its socket. What a dead process has left is replaced by
//! the next that listens there, or removed by a [sweep](super::sweep()).
//!
//! A forked child has inherited lock and socket, so both live on in it until it ends or runs another
//! program.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, chmod, fchmod, fstat, open, utimensat};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::net::{SocketFlags, accept_with, bind, listen};

use super::channel::{Channel, address, new_socket};
use super::dead::{State, clear, state_of};
use super::lock::{FileId, Lock, NOW, Taken, is_older, look};
use super::peer::{Users, own_user};
use super::system::system;
use super::wait::{Deadline, pause, wait_for};
use crate::error::ChannelError;
use crate::sync::Mutex;

/// How many may wait to be accepted.
const BACKLOG: i32 = 64;

/// How long a sweep may hold the lock of a socket that is to be bound, or another process may take to
/// listen once it has bound it.
const BUSY: Duration = Duration::from_secs(5);

/// How long is waited before the lock is tried again.
const AGAIN: Duration = Duration::from_millis(1);

/// How old the files of a listener may become. Cleaners of temporary folders remove what was not
/// touched for days.
pub(super) const FRESH: Duration = Duration::from_secs(3600);

/// Accepts connections of other processes at a path, until it is dropped.
///
/// The socket belongs to this user alone (mode 0600), unless others are let in; then everybody may
/// knock (0666), and whoever is none of them is turned away.
///
/// Beside the socket lies a lock, an empty file whose name ends with `.cuvmm-lock`. The folder should
/// be one in which only trusted users may rename files.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The file of the socket. Its number is not used again while the socket is open.
    id: FileId,
    users: Users,
    /// The process that made it: a forked child removes nothing.
    made_by: u32,
    /// Dropped last.
    lock: Mutex<Lock>,
}

impl Listener {
    /// Listens at a path, for processes of the same user. What a dead process has left there is
    /// replaced.
    ///
    /// Waits for up to 5 seconds while another process sweeps that path.
    ///
    /// # Errors
    /// [`ChannelError`] when another process listens there, something else than a socket is there, a
    /// file that is no lock of this user is where the lock should be, or the system refuses.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::bind_for(path, Users::own())
    }

    /// Listens at a path, for processes of these users.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_for(path: impl AsRef<Path>, users: Users) -> Result<Self, ChannelError> {
        let path = path.as_ref();
        let address = address(path)?;
        own_user()?;
        let lock = lock_of(path)?;
        make_way(path)?;
        let socket = new_socket()?;
        // `accept` must not wait for another connection where another thread was quicker.
        ioctl_fionbio(&socket, true).map_err(system("ioctl(FIONBIO)"))?;
        // The file that `bind` makes has the mode that the socket has before, less what the process
        // takes from all its files.
        fchmod(&socket, Mode::from_raw_mode(0o600)).map_err(system("fchmod"))?;
        bind(&socket, &address).map_err(system("bind"))?;
        let id = bound(path)?;
        let listener = Self {
            socket,
            path: path.to_owned(),
            id,
            users,
            made_by: std::process::id(),
            lock: Mutex::new(lock),
        };
        if !listener.users.is_own_only() {
            listener.open_to_all()?;
        }
        listen(&listener.socket, BACKLOG).map_err(system("listen"))?;
        Ok(listener)
    }

    /// Lets every user connect. No link is followed, whatever lies at the path by now.
    fn open_to_all(&self) -> Result<(), ChannelError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = retry_on_intr(|| open(&self.path, flags, Mode::empty()));
        let file = file.map_err(system("open"))?;
        let found = fstat(&file).map_err(system("fstat"))?;
        if FileId::of_stat(&found) != self.id {
            return Err(ChannelError::InUse {
                path: self.path.clone(),
            });
        }
        let file = format!("/proc/self/fd/{}", file.as_raw_fd());
        chmod(file, Mode::from_raw_mode(0o666)).map_err(system("chmod"))
    }

    /// Keeps the files of this listener from those who remove old ones: touches them, and makes the
    /// lock anew if it has gone.
    pub(super) fn refresh(&self) {
        if let Err(error) = self.try_refresh() {
            tracing::debug!(%error, path = %self.path.display(), "a socket was not kept fresh");
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
        // Looked at again after an hour, which may end a little early.
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

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next connection, at most for a time.
    ///
    /// # Errors
    /// [`ChannelError`] when none comes in time, or one of a user who is not let in. It listens still.
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

    /// Which users it lets in.
    pub(super) const fn users(&self) -> &Users {
        &self.users
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
        if let Err(error) = clear(&self.path, self.id) {
            tracing::warn!(%error, path = %self.path.display(), "a socket could not be removed");
        }
    }
}

/// Takes the lock of a socket that is to be bound.
fn lock_of(path: &Path) -> Result<Lock, ChannelError> {
    let deadline = Deadline::after(BUSY);
    loop {
        if let Taken::Lock(lock) = Lock::make(path)? {
            return Ok(lock);
        }
        // Where nothing answers, a sweep has the lock, which gives it back, or a listener in the making.
        if state_of(path)? == State::Live || deadline.left().is_zero() {
            return Err(ChannelError::InUse {
                path: path.to_owned(),
            });
        }
        pause(AGAIN);
    }
}

/// Removes what a dead process has left at a path whose lock is held.
fn make_way(path: &Path) -> Result<(), ChannelError> {
    let path = path.to_owned();
    match state_of(&path)? {
        State::Nothing => Ok(()),
        State::Dead(id) => clear(&path, id),
        State::Live => Err(ChannelError::InUse { path }),
        State::NotOurs => Err(ChannelError::not_ours(path)),
    }
}

/// Which file was made by binding a socket, an instant ago.
fn bound(path: &Path) -> Result<FileId, ChannelError> {
    let found = look(path).and_then(|found| {
        let path = path.to_owned();
        found.ok_or(ChannelError::NotListening { path })
    });
    match found {
        Ok(found) => Ok(FileId::of(&found)),
        Err(error) => {
            // The lock is held, so it is the one that was made.
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}
