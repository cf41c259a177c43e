//! Detection and removal of sockets that dead processes left.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::net::connect;

use super::channel::{address, new_socket};
use super::lock::{FileId, Lock, Taken, look};
use super::system::{failed, system};
use crate::error::ChannelError;
use crate::peer::is_own_user;

/// The state of the socket at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Nothing,
    /// A process listens there.
    Live,
    /// The socket is this user's, and no process listens.
    Dead(FileId),
    /// The socket is another user's, and no process listens.
    NotOurs,
}

/// Determines whether a process listens at a socket, by a connection that is closed at once.
///
/// A socket that is bound but does not listen yet appears dead, so only the holder of its lock may
/// rely on that answer.
///
/// # Errors
/// [`ChannelError::Path`] if the path is something other than a socket, and
/// [`ChannelError::System`].
pub(super) fn state_of(path: &Path) -> Result<State, ChannelError> {
    let Some(found) = look(path)? else {
        return Ok(State::Nothing);
    };
    if !found.file_type().is_socket() {
        return Err(ChannelError::no_socket(path.to_owned()));
    }
    let (address, socket) = (address(path)?, new_socket()?);
    // Does not wait for a listener whose queue is full.
    ioctl_fionbio(&socket, true).map_err(system("ioctl(FIONBIO)"))?;
    match retry_on_intr(|| connect(&socket, &address)) {
        // A socket of another type answers with `EPROTOTYPE`.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(State::Live),
        Err(Errno::NOENT) => Ok(State::Nothing),
        Err(Errno::CONNREFUSED) if is_own_user(found.uid()) => Ok(State::Dead(FileId::of(&found))),
        Err(Errno::CONNREFUSED) => Ok(State::NotOurs),
        Err(errno) => Err(system("connect")(errno)),
    }
}

/// Removes a socket, unless the path names another file by now.
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

/// Removes the files that a dead listener of this user left at a path: its socket and the lock
/// beside it, or the lock alone. Returns `true` if there were any.
///
/// Changes nothing unless the file beside the socket can only be a lock of this library and user
/// (empty, mode 0600, one link, its name ending with `.cuvmm-lock`), no process holds that lock,
/// and none answers at the socket. Creates no file.
///
/// # Errors
/// [`ChannelError`] if the path is something other than a socket, or the system refuses.
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
