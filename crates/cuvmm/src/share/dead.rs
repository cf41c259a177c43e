//! Telling a socket that a dead process has left from a live one, and removing it.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::net::connect;

use super::channel::{address, new_socket};
use super::lock::{FileId, Lock, Taken, look};
use super::peer::is_own_user;
use super::system::{failed, system};
use crate::error::ChannelError;

/// How it is with the socket at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// There is none.
    Nothing,
    /// A process listens there.
    Live,
    /// One of this user, at which no process listens.
    Dead(FileId),
    /// One of another user, at which no process listens.
    NotOurs,
}

/// Asks a socket whether a process listens at it, by connecting. A connection that is made ends at
/// once.
///
/// One that is bound and does not listen yet seems dead: only the holder of its lock may believe it.
///
/// # Errors
/// [`ChannelError::Path`] when something else is there, and [`ChannelError::System`].
pub(super) fn state_of(path: &Path) -> Result<State, ChannelError> {
    let Some(found) = look(path)? else {
        return Ok(State::Nothing);
    };
    if !found.file_type().is_socket() {
        return Err(ChannelError::no_socket(path.to_owned()));
    }
    let (address, socket) = (address(path)?, new_socket()?);
    // One whose queue is full is not waited for.
    ioctl_fionbio(&socket, true).map_err(system("ioctl(FIONBIO)"))?;
    match retry_on_intr(|| connect(&socket, &address)) {
        // A socket of another type answers too.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(State::Live),
        Err(Errno::NOENT) => Ok(State::Nothing),
        Err(Errno::CONNREFUSED) if is_own_user(found.uid()) => Ok(State::Dead(FileId::of(&found))),
        Err(Errno::CONNREFUSED) => Ok(State::NotOurs),
        Err(errno) => Err(system("connect")(errno)),
    }
}

/// Removes a socket, unless another file is at its path by now.
///
/// # Errors
/// [`ChannelError::System`].
pub(super) fn clear(path: &Path, id: FileId) -> Result<(), ChannelError> {
    match look(path)? {
        Some(found) if FileId::of(&found) == id => {
            std::fs::remove_file(path).map_err(failed("unlink"))
        }
        _ => Ok(()),
    }
}

/// Removes what a dead listener of this user has left at a path: its socket and the lock beside it, or
/// the lock alone. Returns whether there was any of it.
///
/// Leaves everything as it is unless the file beside the socket can only be a lock of this library and
/// of this user (empty, mode 0600, one link, its name ending with `.cuvmm-lock`), no process holds that
/// lock, and no process answers at the socket. Makes no file.
///
/// # Errors
/// [`ChannelError`] when something else than a socket is there, or the system refuses.
pub fn sweep(path: impl AsRef<Path>) -> Result<bool, ChannelError> {
    let path = path.as_ref();
    if look(path)?.is_some_and(|found| !found.file_type().is_socket()) {
        return Err(ChannelError::no_socket(path.to_owned()));
    }
    let Taken::Lock(_lock) = Lock::find(path)? else {
        return Ok(false);
    };
    match state_of(path)? {
        State::Dead(id) => {
            clear(path, id)?;
            Ok(true)
        }
        State::Nothing => Ok(true),
        State::Live | State::NotOurs => Ok(false),
    }
}
