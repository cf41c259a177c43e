//! A connection to another process: messages in order, with descriptors beside them, each within a
//! time.
//!
//! A Unix socket of type `SOCK_SEQPACKET`: what was sent in one piece comes in one piece, and is cut
//! visibly if it does not fit. Every descriptor that comes is owned from the moment it is here, so a
//! message that is wrong leaks none.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, recvmsg, sendmsg, socket_with, socketpair,
};

use super::frame::{self, Kind, MOST_BODY, MOST_FRAME, MOST_HANDLES};
use super::peer::{Peer, Users};
use super::system::system;
use super::wait::{Deadline, wait_for};
use super::waker::Waker;
use crate::error::ChannelError;

/// How long an exchange with a peer may take, unless it is told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long is waited before descriptors that the system has no room for are tried again.
const AGAIN: Duration = Duration::from_millis(1);

/// A connection to another process of this machine.
///
/// What a peer sends is checked; what is wrong is an error, and the channel is of no use afterwards.
/// A peer that says nothing is waited for as long as the [timeout](Self::set_timeout) says.
pub struct Channel {
    socket: OwnedFd,
    peer: Peer,
    timeout: Duration,
    sent: u32,
    received: u32,
    broken: bool,
    /// Once it is woken, the peer is not waited for any more.
    stop: Option<Arc<Waker>>,
}

impl Channel {
    /// Two ends that are connected, for a child process to inherit one.
    ///
    /// # Errors
    /// [`ChannelError`] when the system gives none.
    #[doc(alias = "socketpair")]
    pub fn pair() -> Result<(Self, Self), ChannelError> {
        let (one, other) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(system("socketpair"))?;
        let users = Users::own();
        Ok((Self::over(one, &users)?, Self::over(other, &users)?))
    }

    /// Connects to whoever listens at a path: a process of the same user.
    ///
    /// # Errors
    /// [`ChannelError`] when nobody listens there, or another user's process does.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::connect_to(path, &Users::own())
    }

    /// The same where the other process may be one of these users.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_to(path: impl AsRef<Path>, users: &Users) -> Result<Self, ChannelError> {
        let path = path.as_ref();
        let address = address(path)?;
        let socket = new_socket()?;
        let deadline = Deadline::after(DEFAULT_TIMEOUT);
        loop {
            deadline.check()?;
            // A listener that is busy holds up a connection until it accepts it.
            let left = deadline.left().max(AGAIN);
            set_socket_timeout(&socket, Timeout::Send, Some(left))
                .map_err(system("setsockopt(SO_SNDTIMEO)"))?;
            let path = || path.to_owned();
            return match connect(&socket, &address) {
                Ok(()) => Self::over(socket, users),
                // A signal ends the wait, whatever its handler was registered with.
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(Errno::NOENT | Errno::CONNREFUSED) => {
                    Err(ChannelError::NotListening { path: path() })
                }
                Err(Errno::PROTOTYPE | Errno::NOTSOCK) => Err(ChannelError::no_socket(path())),
                Err(errno) => Err(system("connect")(errno)),
            };
        }
    }

    /// Uses a socket that was had otherwise: inherited, or sent.
    ///
    /// # Errors
    /// [`ChannelError`] when it is no connected Unix socket of type `SOCK_SEQPACKET`, or another
    /// user's process is at the other end.
    pub fn over(socket: OwnedFd, users: &Users) -> Result<Self, ChannelError> {
        let domain = socket_domain(&socket).map_err(system("getsockopt(SO_DOMAIN)"))?;
        let kind = socket_type(&socket).map_err(system("getsockopt(SO_TYPE)"))?;
        if domain != AddressFamily::UNIX || kind != SocketType::SEQPACKET {
            return Err(ChannelError::Malformed {
                what: "over another kind of socket",
            });
        }
        Ok(Self {
            peer: users.admit(&socket)?,
            socket,
            timeout: DEFAULT_TIMEOUT,
            sent: 0,
            received: 0,
            broken: false,
            stop: None,
        })
    }

    /// Waits for the peer only until `stop` is woken; then it has [closed](ChannelError::Closed).
    pub(super) fn until(mut self, stop: Arc<Waker>) -> Self {
        self.stop = Some(stop);
        self
    }

    /// Who is at the other end.
    #[must_use]
    pub const fn peer(&self) -> Peer {
        self.peer
    }

    /// How long one exchange (a giving, a taking, a request) may take in all; 10 seconds by default.
    pub const fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// When one must have ended whose peer may take so long of its own accord.
    pub(super) fn deadline_after(&self, time: Duration) -> Deadline {
        Deadline::after(self.timeout.saturating_add(time))
    }

    /// When an exchange that begins now must have ended.
    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// Sends a message, which may lie in several parts, in as many frames as it takes. Of a large one
    /// only a frame is copied at a time.
    pub(super) fn send(
        &mut self,
        kind: Kind,
        message: &[&[u8]],
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let mut body = vec![];
        for part in message {
            let mut left = *part;
            while !left.is_empty() {
                if body.len() == MOST_BODY {
                    self.send_frame(kind, &body, &[], true, deadline)?;
                    body.clear();
                }
                let (next, rest) = left.split_at(left.len().min(MOST_BODY - body.len()));
                body.extend_from_slice(next);
                left = rest;
            }
        }
        self.send_frame(kind, &body, &[], false, deadline)
    }

    /// Sends a frame of handles.
    pub(super) fn send_handles(
        &mut self,
        body: &[u8],
        handles: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        self.send_frame(Kind::Handles, body, handles, false, deadline)
    }

    /// Receives a message of one of these kinds, with what handles come beside it.
    pub(super) fn receive(
        &mut self,
        kinds: &[Kind],
        most: usize,
        deadline: Deadline,
    ) -> Result<Message, ChannelError> {
        let received = self.receive_whole(kinds, most, deadline);
        // After a message that was not understood, or came in part, nothing else can be.
        self.broken |= received.is_err();
        received
    }

    fn receive_whole(
        &mut self,
        kinds: &[Kind],
        most: usize,
        deadline: Deadline,
    ) -> Result<Message, ChannelError> {
        let mut message: Option<Message> = None;
        let mut buffer = vec![0; MOST_FRAME];
        loop {
            let (length, handles) = self.receive_frame(&mut buffer, deadline)?;
            let bytes = buffer.get(..length).unwrap_or_default();
            let frame = frame::read(bytes, self.received, handles.len())?;
            self.received = self.received.wrapping_add(1);
            // What follows has to be worth its head: a peer that sends a byte at a time would keep us
            // busy for as long as a large message may have bytes.
            if frame.more && frame.body.len() < MOST_BODY {
                return Err(ChannelError::Malformed {
                    what: "followed by more, and not full itself",
                });
            }
            if !kinds.contains(&frame.kind) {
                return Err(ChannelError::Malformed {
                    what: "not the one that comes now",
                });
            }
            let whole = message.get_or_insert_with(|| Message {
                kind: frame.kind,
                body: vec![],
                handles,
            });
            if whole.kind != frame.kind {
                return Err(ChannelError::Malformed {
                    what: "mixed up with another",
                });
            }
            if whole.body.len() + frame.body.len() > most {
                return Err(ChannelError::TooLarge { most });
            }
            whole.body.extend_from_slice(frame.body);
            if !frame.more {
                return message.ok_or(ChannelError::Broken);
            }
        }
    }

    fn send_frame(
        &mut self,
        kind: Kind,
        body: &[u8],
        handles: &[BorrowedFd<'_>],
        more: bool,
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        if self.broken {
            return Err(ChannelError::Broken);
        }
        deadline.check()?;
        let head = frame::head(kind, self.sent, body.len(), handles.len(), more);
        let parts = [IoSlice::new(&head), IoSlice::new(body)];
        let sent = loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_HANDLES))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            if !handles.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(handles)) {
                break Err(ChannelError::NoRoomForHandles);
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match retry_on_intr(|| sendmsg(&self.socket, &parts, &mut beside, flags)) {
                Ok(_) => break Ok(()),
                Err(Errno::AGAIN) => match self.wait(PollFlags::OUT, deadline) {
                    Ok(()) => {}
                    Err(error) => break Err(error),
                },
                // So many descriptors are on their way already.
                Err(Errno::TOOMANYREFS) => match self.pause(deadline) {
                    Ok(()) => {}
                    Err(ChannelError::TimedOut { .. }) => {
                        break Err(ChannelError::NoRoomForHandles);
                    }
                    Err(error) => break Err(error),
                },
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    break Err(ChannelError::Closed);
                }
                Err(errno) => break Err(system("sendmsg")(errno)),
            }
        };
        self.broken |= sent.is_err();
        self.sent = self.sent.wrapping_add(1);
        sent
    }

    fn receive_frame(
        &self,
        buffer: &mut [u8],
        deadline: Deadline,
    ) -> Result<(usize, Vec<OwnedFd>), ChannelError> {
        if self.broken {
            return Err(ChannelError::Broken);
        }
        // A peer that never stops talking is not listened to for ever either.
        deadline.check()?;
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_HANDLES))];
            let mut beside = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(buffer)];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let got = match retry_on_intr(|| recvmsg(&self.socket, &mut parts, &mut beside, flags))
            {
                Ok(got) => got,
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN, deadline)?;
                    continue;
                }
                Err(Errno::CONNRESET) => return Err(ChannelError::Closed),
                Err(errno) => return Err(system("recvmsg")(errno)),
            };
            // Owned first, so that none is left open whatever else is wrong.
            let mut handles = vec![];
            for message in beside.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    handles.extend(fds);
                }
            }
            if got.flags.contains(ReturnFlags::CTRUNC) {
                return Err(ChannelError::NoRoomForHandles);
            }
            if got.flags.contains(ReturnFlags::TRUNC) {
                return Err(ChannelError::TooLarge { most: MOST_FRAME });
            }
            if got.bytes == 0 {
                return Err(ChannelError::Closed);
            }
            return Ok((got.bytes, handles));
        }
    }

    fn wait(&self, what: PollFlags, deadline: Deadline) -> Result<(), ChannelError> {
        let stop = self.stop.as_ref().map(|stop| (stop.as_fd(), PollFlags::IN));
        let wanted: Vec<_> = [(self.socket.as_fd(), what)]
            .into_iter()
            .chain(stop)
            .collect();
        if wait_for(&wanted, Some(deadline))?.contains(&1) {
            return Err(ChannelError::Closed);
        }
        Ok(())
    }

    /// Lets a moment pass, if the exchange has one left.
    fn pause(&self, deadline: Deadline) -> Result<(), ChannelError> {
        deadline.check()?;
        let stop = self.stop.as_ref().map(|stop| (stop.as_fd(), PollFlags::IN));
        match wait_for(stop.as_slice(), Some(Deadline::after(AGAIN))) {
            Err(ChannelError::TimedOut { .. }) => Ok(()),
            Ok(_) => Err(ChannelError::Closed),
            Err(error) => Err(error),
        }
    }

    /// Something was said that makes no sense, or not all of it was: nothing that follows can.
    pub(super) fn give_up(&mut self) {
        self.broken = true;
    }

    /// What came is no answer.
    pub(super) fn malformed(&mut self, what: &'static str) -> ChannelError {
        self.give_up();
        ChannelError::Malformed { what }
    }

    /// Waits for a time until the peer has something to say, or `other` can be read; which of the two.
    pub(super) fn wait_beside(
        &self,
        other: BorrowedFd<'_>,
        time: Duration,
    ) -> Result<Woken, ChannelError> {
        let both = [(self.socket.as_fd(), PollFlags::IN), (other, PollFlags::IN)];
        let ready = wait_for(&both, Some(Deadline::after(time)))?;
        Ok(if ready.contains(&1) {
            Woken::Other
        } else {
            Woken::Peer
        })
    }
}

/// What woke a wait for two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Peer,
    Other,
}

/// A whole message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) body: Vec<u8>,
    pub(super) handles: Vec<OwnedFd>,
}

/// A socket of the kind that channels use.
pub(super) fn new_socket() -> Result<OwnedFd, ChannelError> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(system("socket"))
}

/// The address of a path.
pub(super) fn address(path: &Path) -> Result<SocketAddrUnix, ChannelError> {
    /// What the system has room for, with the zero at the end.
    const MOST: usize = 107;
    let length = path.as_os_str().len();
    if length > MOST {
        let path = path.to_owned();
        let problem = "is longer than the path of a socket may be";
        return Err(ChannelError::Path { path, problem });
    }
    SocketAddrUnix::new(path).map_err(system("a socket's path"))
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel")
            .field("peer", &self.peer)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
