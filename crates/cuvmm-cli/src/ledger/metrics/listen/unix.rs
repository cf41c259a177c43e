//! A Unix socket at a path, which can be served again after its process was killed.
//!
//! While the socket is served, a file beside it with the ending `.lock` is locked, so of two
//! processes that start at once only one replaces the socket of a killed process. The folder should
//! be writable only by this user.

use std::fs::{self, File, Metadata};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock, open};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::geteuid;

use cuvmm_command::terminal::shown;

const LOCK_ENDING: &str = ".lock";

const BACKLOG: i32 = 128;

/// A listening socket that only this user can connect to.
#[derive(Debug)]
pub(in crate::ledger::metrics) struct UnixListener {
    socket: OwnedFd,
    path: PathBuf,
    _lock: File,
}

impl UnixListener {
    /// Listens at a path. Replaces a socket that a killed process of this user has left there, and
    /// no other file.
    ///
    /// # Errors
    /// Another process listens at the path, another file is there, or the system fails.
    pub(super) fn bind(path: &Path) -> anyhow::Result<Self> {
        let named = || shown(path);
        let address = SocketAddrUnix::new(path).with_context(named)?;
        // Where another file is, no lock is made beside it.
        socket_is_there(path).with_context(named)?;
        let lock = lock(path).with_context(named)?;
        remove_stale(path, &address).with_context(named)?;
        let socket = new_socket().with_context(named)?;
        // The socket's file gets the mode set here, without following a link at its name.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).with_context(named)?;
        bind(&socket, &address).with_context(named)?;
        listen(&socket, BACKLOG).with_context(named)?;
        Ok(Self {
            socket,
            path: path.to_owned(),
            _lock: lock,
        })
    }

    pub(super) fn shown(&self) -> String {
        format!("unix:{}", shown(&self.path))
    }
}

impl AsFd for UnixListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Locks the file beside a socket. The kernel releases the lock when the process ends.
fn lock(path: &Path) -> anyhow::Result<File> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(LOCK_ENDING);
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mode = Mode::RUSR | Mode::WUSR;
    let lock: File = open(&beside, flags | OFlags::CLOEXEC, mode)?.into();
    ensure!(is_ours(&lock.metadata()?), "another user has the lock");
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(Errno::WOULDBLOCK) => bail!("another process serves figures there"),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns true if a socket of this user is at the path, and false if nothing is.
fn socket_is_there(path: &Path) -> anyhow::Result<bool> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    ensure!(found.file_type().is_socket(), "this file is no socket");
    ensure!(is_ours(&found), "it is another user's socket");
    Ok(true)
}

/// Removes the socket of a process that has ended.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> anyhow::Result<()> {
    if !socket_is_there(path)? {
        return Ok(());
    }
    match connect(&new_socket()?, address) {
        Err(Errno::CONNREFUSED) => Ok(fs::remove_file(path)?),
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => bail!("another process listens there"),
        Err(errno) => Err(errno.into()),
    }
}

fn is_ours(found: &Metadata) -> bool {
    found.uid() == geteuid().as_raw()
}
