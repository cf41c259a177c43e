//! The address at which the figures are served.

mod unix;

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::anyhow;
use rustix::io::retry_on_intr;
use rustix::net::{SocketFlags, accept_with};

use self::unix::UnixListener;
use cuvmm_command::command::usage;
use cuvmm_command::terminal::safe;

/// A listening socket that does not block.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Listens at a loopback address with a port or, after `unix:`, at a path.
    ///
    /// # Errors
    /// The address cannot be parsed, is reachable from other machines, or cannot be listened at.
    pub(super) fn open(address: &str) -> anyhow::Result<Self> {
        if let Some(path) = address.strip_prefix("unix:") {
            return match path {
                "" => Err(usage("a path follows unix:")),
                path => Ok(Self::Unix(UnixListener::bind(Path::new(path))?)),
            };
        }
        let wrong = || {
            let address = safe(address);
            let forms = "such as 127.0.0.1:9470, nor unix: with a path";
            usage(format!("{address} is not an address with a port, {forms}"))
        };
        let mut found = address.to_socket_addrs().map_err(|_| wrong())?;
        let found = found.next().ok_or_else(wrong)?;
        if !found.ip().is_loopback() {
            let rule = "names and sizes of this user's processes are served on this machine only";
            return Err(usage(format!("{found} is no loopback address: {rule}")));
        }
        let listener = TcpListener::bind(found).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = listener.map_err(|error| anyhow!("{}: {error}", safe(address)))?;
        Ok(Self::Tcp(listener))
    }

    pub(super) fn shown(&self) -> String {
        match self {
            Self::Tcp(listener) => listener.local_addr().map_or_else(|_| String::new(), url),
            Self::Unix(listener) => listener.shown(),
        }
    }

    /// Accepts a waiting connection, without blocking.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if none waits, and the errors of the system.
    pub(super) fn accept(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
        Ok(retry_on_intr(|| accept_with(self, flags))?)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}/metrics")
}
