//! The process at the other end of a socket, and the users that are admitted.
//!
//! `unsafe` in this file: querying a peer's credentials and its pidfd. A process that is not visible
//! in this PID namespace, as in another container, has the process id 0, which the safe wrappers
//! cannot represent, and they have no query for a pidfd.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};

use rustix::io::Errno;
use rustix::process::geteuid;

use crate::error::ChannelError;

/// The process at the other end of a channel, as it was when it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Its process id, or 0 if this process cannot see it, as in another container.
    pub pid: u32,
    /// Its user id.
    pub uid: u32,
}

/// The users whose processes may be at the other end. The default is this process's own user alone,
/// which does not include root.
///
/// The system's overflow user id (65534, `/proc/sys/kernel/overflowuid`) is never admitted, even if
/// this process has it: in a user namespace it stands for every user not mapped there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    others: Vec<u32>,
}

impl Users {
    /// Admits this process's own user.
    #[must_use]
    pub const fn own() -> Self {
        Self { others: Vec::new() }
    }

    /// Admits another user too, by user id.
    #[must_use]
    pub fn and(mut self, uid: u32) -> Self {
        self.others.push(uid);
        self
    }

    /// Returns `true` if only this process's own user is admitted.
    pub(crate) const fn is_own_only(&self) -> bool {
        self.others.is_empty()
    }

    pub(crate) const fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// Returns the process at the other end of a socket, if its user is admitted.
    pub(crate) fn admit(&self, socket: impl AsFd) -> Result<Peer, ChannelError> {
        let peer = peer_of(socket).map_err(|errno| ChannelError::System {
            call: "getsockopt(SO_PEERCRED)",
            errno,
        })?;
        let Peer { pid, uid } = peer;
        if uid != geteuid().as_raw() && !self.others.contains(&uid) {
            return Err(ChannelError::NotAllowed { pid, uid });
        }
        match uid == overflow_uid() {
            true => Err(ChannelError::UnmappedUser { pid, uid }),
            false => Ok(peer),
        }
    }
}

/// Checks that this process's user id identifies one user.
pub(crate) fn own_user() -> Result<(), ChannelError> {
    let uid = geteuid().as_raw();
    match is_own_user(uid) {
        true => Ok(()),
        false => Err(ChannelError::UnmappedUser {
            pid: std::process::id(),
            uid,
        }),
    }
}

/// Returns `true` if `uid` is this process's user and identifies one user.
pub(crate) fn is_own_user(uid: u32) -> bool {
    uid == geteuid().as_raw() && uid != overflow_uid()
}

/// Returns the id that the system shows for users not mapped in this namespace.
pub(crate) fn overflow_uid() -> u32 {
    /// Used if the system does not report it.
    const USUAL: u32 = 65_534;
    let said = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    let said = said.and_then(|text| text.trim().parse().ok());
    said.unwrap_or(USUAL)
}

/// Returns the process at the other end of a Unix socket.
pub(crate) fn peer_of(socket: impl AsFd) -> Result<Peer, Errno> {
    let mut found = libc::ucred {
        pid: 0,
        // Not a valid user id, in case the system writes nothing.
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the descriptor is open for the whole call. `found` is a valid `ucred`, which consists
    // of integers only, and `length` is its size, so the system writes within it.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
    }
    Ok(Peer {
        pid: u32::try_from(found.pid).unwrap_or(0),
        uid: found.uid,
    })
}

/// Returns a pidfd of the process at the other end of a Unix socket, in whichever PID namespace it
/// is. Fails with [`Errno::NOPROTOOPT`] before Linux 6.5.
pub(crate) fn peer_pidfd(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    let mut found: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(0);
    // SAFETY: the descriptor is open for the whole call. `found` is an integer, and `length` is its
    // size, so the system writes within it.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
    }
    if found < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the call has made this descriptor for the caller, which owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(found) })
}
