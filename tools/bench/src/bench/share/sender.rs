//! Sends descriptors of memory over a socket by hand: exported for every process that connects,
//! without metadata.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use anyhow::{bail, ensure};
use cuvmm::driver::Exported;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept,
    bind, connect, listen, recvmsg, sendmsg, shutdown, socket_with,
};

use crate::bench::by_hand::Bare;

const MOST: usize = 253;

const BACKLOG: i32 = 8;

/// A listening socket at a path, which sends descriptors.
#[derive(Debug)]
pub(super) struct Sender(OwnedFd);

impl Sender {
    pub(super) fn bind(path: &Path) -> anyhow::Result<Self> {
        let listener = socket()?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, BACKLOG)?;
        Ok(Self(listener))
    }

    /// Sends descriptors of all of `memory` on each connection, until the socket is closed.
    pub(super) fn serve(&self, memory: &[Bare<'_>]) -> anyhow::Result<()> {
        loop {
            let connection = match accept(&self.0) {
                Ok(connection) => connection,
                Err(Errno::INTR) => continue,
                // `close` has shut the socket down.
                Err(Errno::INVAL) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for some in memory.chunks(MOST) {
                let mut descriptors = Vec::with_capacity(some.len());
                for bare in some {
                    match bare.export()? {
                        Exported::Fd(descriptor) => descriptors.push(descriptor),
                        other => bail!("{other:?} is no descriptor"),
                    }
                }
                let borrowed: Vec<_> = descriptors.iter().map(|one| one.as_fd()).collect();
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
                let mut beside = SendAncillaryBuffer::new(&mut space);
                ensure!(beside.push(SendAncillaryMessage::ScmRights(&borrowed)));
                let what = [IoSlice::new(&[0])];
                sendmsg(&connection, &what, &mut beside, SendFlags::NOSIGNAL)?;
            }
        }
    }

    /// Shuts the socket down, which ends [`serve`](Self::serve).
    pub(super) fn close(&self) -> anyhow::Result<()> {
        Ok(shutdown(&self.0, Shutdown::Both)?)
    }
}

/// Connects, and passes each of `count` received descriptors to `act`.
///
/// # Errors
/// The system refuses, fewer descriptors arrive, or `act` fails.
pub(super) fn fetch(
    path: &Path,
    count: usize,
    mut act: impl FnMut(OwnedFd) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let connection = socket()?;
    connect(&connection, &SocketAddrUnix::new(path)?)?;
    let mut come = 0;
    while come < count {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut what = [IoSliceMut::new(&mut byte)];
        let got = recvmsg(&connection, &mut what, &mut beside, RecvFlags::CMSG_CLOEXEC)?;
        ensure!(got.bytes > 0, "{come} of {count} descriptors came");
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                for descriptor in some {
                    act(descriptor)?;
                    come += 1;
                }
            }
        }
    }
    Ok(())
}

fn socket() -> anyhow::Result<OwnedFd> {
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}
