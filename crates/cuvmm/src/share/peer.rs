//! Who may be at the other end.

use std::os::fd::AsFd;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use super::channel::system;
use crate::error::ChannelError;

/// The process at the other end of a channel, as it was when it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Its process id.
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
        let credentials = socket_peercred(socket).map_err(system("getsockopt(SO_PEERCRED)"))?;
        let peer = Peer {
            pid: u32::try_from(credentials.pid.as_raw_nonzero().get()).unwrap_or(0),
            uid: credentials.uid.as_raw(),
        };
        if peer.uid == geteuid().as_raw() || self.others.contains(&peer.uid) {
            return Ok(peer);
        }
        Err(ChannelError::NotAllowed {
            pid: peer.pid,
            uid: peer.uid,
        })
    }
}
