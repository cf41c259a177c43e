//! Who may be at the other end.
//!
//! `unsafe` here: asking for a peer's credentials. A process that this one's PID namespace does not
//! show, as in another container, has the id 0, for which the safe wrappers have no room.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd as _};

use rustix::io::Errno;
use rustix::process::geteuid;

use super::system::system;
use crate::error::ChannelError;

/// The process at the other end of a channel, as it was when it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Its process id; 0 where this process does not see it, as in another container.
    pub pid: u32,
    /// Its user id.
    pub uid: u32,
}

/// Which users' processes may be at the other end: by default this process's own user alone, without
/// root.
///
/// The system's overflow user id (65534, `/proc/sys/kernel/overflowuid`) is never let in, not even where
/// it is this process's own: in a user namespace it stands for every user that has no id there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    others: Vec<u32>,
}

impl Users {
    /// Lets in this process's own user.
    #[must_use]
    pub const fn own() -> Self {
        Self { others: Vec::new() }
    }

    /// Lets in another user too, by its user id.
    #[must_use]
    pub fn and(mut self, uid: u32) -> Self {
        self.others.push(uid);
        self
    }

    /// Whether it is this process's own user alone.
    pub(super) const fn is_own_only(&self) -> bool {
        self.others.is_empty()
    }

    /// How many users are let in, at most.
    pub(super) const fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// Who is at the other end of a socket, if that is one of them.
    pub(super) fn admit(&self, socket: impl AsFd) -> Result<Peer, ChannelError> {
        let peer = peer_of(socket).map_err(system("getsockopt(SO_PEERCRED)"))?;
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

/// Checks that this process's own user is one that can be told from others.
pub(super) fn own_user() -> Result<(), ChannelError> {
    let uid = geteuid().as_raw();
    match is_own_user(uid) {
        true => Ok(()),
        false => Err(ChannelError::UnmappedUser {
            pid: std::process::id(),
            uid,
        }),
    }
}

/// Whether an id is that of this process's user, and of no other.
pub(super) fn is_own_user(uid: u32) -> bool {
    uid == geteuid().as_raw() && uid != overflow_uid()
}

/// The id that the system shows for every user who has none in this process's namespace.
fn overflow_uid() -> u32 {
    /// Where the system does not say.
    const USUAL: u32 = 65_534;
    let said = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    let said = said.and_then(|text| text.trim().parse().ok());
    said.unwrap_or(USUAL)
}

/// Who is at the other end of a Unix socket.
fn peer_of(socket: impl AsFd) -> Result<Peer, Errno> {
    let mut found = libc::ucred {
        pid: 0,
        // Nobody's, should the system write nothing.
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the socket is open for the call, and `length` says how much there is to write to, all
    // of it plain numbers.
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
