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

/// Which users' processes may be at the other end: by default this process's own user, and nobody
/// else, root included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    others: Vec<u32>,
}

impl Users {
    /// This process's own.
    #[must_use]
    pub const fn own() -> Self {
        Self { others: Vec::new() }
    }

    /// Another one too, by its user id.
    #[must_use]
    pub fn and(mut self, uid: u32) -> Self {
        self.others.push(uid);
        self
    }

    /// Whether it is this process's own user alone.
    pub(super) const fn is_own_only(&self) -> bool {
        self.others.is_empty()
    }

    /// Who is at the other end of a socket, if that is one of them.
    pub(super) fn admit(&self, socket: impl AsFd) -> Result<Peer, ChannelError> {
        let peer = peer_of(socket).map_err(system("getsockopt(SO_PEERCRED)"))?;
        if peer.uid == geteuid().as_raw() || self.others.contains(&peer.uid) {
            return Ok(peer);
        }
        Err(ChannelError::NotAllowed {
            pid: peer.pid,
            uid: peer.uid,
        })
    }
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
