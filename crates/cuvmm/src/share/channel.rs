//! A connection to another process: messages in order, with descriptors, each with a time limit.
//!
//! The connection is a Unix socket of type `SOCK_SEQPACKET`: a message arrives as it was sent, and
//! is marked as truncated if it does not fit the buffer. Every descriptor is owned as soon as it is
//! received, so a malformed message leaks none.
//!
//! Keeps I-69.

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
use super::system::system;
use super::wait::{Deadline, wait_for};
use super::waker::Waker;
use crate::error::ChannelError;
use crate::peer::{Peer, Users};

/// The time that one exchange with a peer may take by default.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause before descriptors beyond the system's limit are sent again.
const AGAIN: Duration = Duration::from_millis(1);

/// A connection to another process on this machine.
///
/// Everything that a peer sends is checked. After a malformed message the call fails and the
/// channel is of no further use. Each exchange ends with an error after the
/// [timeout](Self::set_timeout).
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let shareable = cuvmm::driver::HandleTypes::POSIX_FD;
/// # let mut region = cuvmm::Region::builder(&device, 4 << 20).shareable(shareable).reserve()?;
/// # region.commit(0..region.size())?;
/// use std::thread;
/// use cuvmm::{Attachment, Channel, Offer};
///
/// let offer = Offer::region(&region, 0..region.size())?;
/// let (mut giver, mut taker) = Channel::pair()?; // usually in two processes
/// let attached = thread::scope(|scope| {
///     scope.spawn(move || giver.send(&offer));
///     taker.recv(&Attachment::builder(&device))
/// })?;
/// assert_eq!(attached.held(), region.size());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias("VMMIPCTransport", "IPCTransport"))]
pub struct Channel {
    socket: OwnedFd,
    peer: Peer,
    timeout: Duration,
    sent: u32,
    received: u32,
    broken: bool,
    /// Ends every wait for the peer once it is woken.
    stop: Option<Arc<Waker>>,
}

impl Channel {
    /// Creates two connected channels, for example for a child process to inherit one.
    ///
    /// # Errors
    /// [`ChannelError`] if the system refuses.
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
        Ok((
            Self::from_socket(one, &users)?,
            Self::from_socket(other, &users)?,
        ))
    }

    /// Connects to the process of the same user that listens at a path.
    ///
    /// # Errors
    /// [`ChannelError`] if no process listens there, or a process of another user does.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::connect_to(path, &Users::own())
    }

    /// Connects to a process that listens at a path and belongs to one of `users`.
    ///
    /// # Errors
    /// [`ChannelError`] if no process listens there, or a process of another user does.
    pub fn connect_to(path: impl AsRef<Path>, users: &Users) -> Result<Self, ChannelError> {
        let path = path.as_ref();
        let address = address(path)?;
        let socket = new_socket()?;
        let deadline = Deadline::after(DEFAULT_TIMEOUT);
        loop {
            deadline.check()?;
            // A busy listener delays a connection until it accepts it.
            let left = deadline.left().max(AGAIN);
            set_socket_timeout(&socket, Timeout::Send, Some(left))
                .map_err(system("setsockopt(SO_SNDTIMEO)"))?;
            let path = || path.to_owned();
            return match connect(&socket, &address) {
                Ok(()) => Self::from_socket(socket, users),
                // A signal ends the wait even if its handler was installed with `SA_RESTART`.
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(Errno::NOENT | Errno::CONNREFUSED) => Err(ChannelError::NotListening(path())),
                Err(Errno::PROTOTYPE | Errno::NOTSOCK) => Err(ChannelError::no_socket(path())),
                Err(errno) => Err(system("connect")(errno)),
            };
        }
    }

    /// Creates a channel from a connected socket, for example an inherited or received one.
    ///
    /// # Errors
    /// [`ChannelError`] if it is not a connected Unix socket of type `SOCK_SEQPACKET`, or the
    /// process at the other end belongs to another user.
    #[doc(alias = "over")]
    pub fn from_socket(socket: OwnedFd, users: &Users) -> Result<Self, ChannelError> {
        let domain = socket_domain(&socket).map_err(system("getsockopt(SO_DOMAIN)"))?;
        let kind = socket_type(&socket).map_err(system("getsockopt(SO_TYPE)"))?;
        if domain != AddressFamily::UNIX || kind != SocketType::SEQPACKET {
            return Err(ChannelError::Malformed("on another kind of socket"));
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

    /// Ends waits for the peer with [`ChannelError::Closed`] once `stop` is woken.
    pub(super) fn until(mut self, stop: Arc<Waker>) -> Self {
        self.stop = Some(stop);
        self
    }

    /// Returns the process at the other end.
    #[must_use]
    pub const fn peer(&self) -> Peer {
        self.peer
    }

    /// Sets the time that one exchange (sending or receiving memory, a request) may take in all; 10
    /// seconds by default.
    pub const fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the deadline of an exchange with `time` for the peer in addition to the timeout.
    pub(super) fn deadline_after(&self, time: Duration) -> Deadline {
        Deadline::after(self.timeout.saturating_add(time))
    }

    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// Sends a message of one or more parts in as many frames as it needs. Copies only one frame at
    /// a time.
    pub(super) fn send_message(
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

    pub(super) fn send_handles(
        &mut self,
        body: &[u8],
        handles: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        self.send_frame(Kind::Handles, body, handles, false, deadline)
    }

    /// Receives a message of one of these kinds, with its handles.
    pub(super) fn receive(
        &mut self,
        kinds: &[Kind],
        most: usize,
        deadline: Deadline,
    ) -> Result<Message, ChannelError> {
        let received = self.receive_whole(kinds, most, deadline);
        // After a malformed or incomplete message, the frames are out of step.
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
            // A frame that announces another must be full. Otherwise a peer could send one byte per
            // frame and occupy this thread for as many frames as a large message has bytes.
            if frame.more && frame.body.len() < MOST_BODY {
                return Err(ChannelError::Malformed(
                    "followed by more, and not full itself",
                ));
            }
            if !kinds.contains(&frame.kind) {
                return Err(ChannelError::Malformed("unexpected at this point"));
            }
            let whole = message.get_or_insert_with(|| Message {
                kind: frame.kind,
                body: vec![],
                handles,
            });
            if whole.kind != frame.kind {
                return Err(ChannelError::Malformed("interleaved with another"));
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
                break Err(ChannelError::TooManyFiles);
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match retry_on_intr(|| sendmsg(&self.socket, &parts, &mut beside, flags)) {
                Ok(_) => break Ok(()),
                Err(Errno::AGAIN) => match self.wait(PollFlags::OUT, deadline) {
                    Ok(()) => {}
                    Err(error) => break Err(error),
                },
                // Too many descriptors are in flight already.
                Err(Errno::TOOMANYREFS) => match self.pause(deadline) {
                    Ok(()) => {}
                    Err(ChannelError::TimedOut { .. }) => {
                        break Err(ChannelError::TooManyFiles);
                    }
                    Err(error) => break Err(error),
                },
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    break Err(ChannelError::Closed);
                }
                Err(errno) => break Err(system("sendmsg")(errno)),
            }
        };
        // A peer that has gone may have sent a reason before.
        self.broken |= !matches!(sent, Ok(()) | Err(ChannelError::Closed));
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
        loop {
            // Ends an exchange with a peer that sends without end.
            deadline.check()?;
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
                // The peer has gone without reading everything. The system reports that once,
                // before it hands out what the peer had sent.
                Err(Errno::CONNRESET) => continue,
                Err(errno) => return Err(system("recvmsg")(errno)),
            };
            // Owned first, so that no descriptor leaks if a check fails.
            let mut handles = vec![];
            for message in beside.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    handles.extend(fds);
                }
            }
            if got.flags.contains(ReturnFlags::CTRUNC) {
                return Err(ChannelError::TooManyFiles);
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

    fn pause(&self, deadline: Deadline) -> Result<(), ChannelError> {
        deadline.check()?;
        let stop = self.stop.as_ref().map(|stop| (stop.as_fd(), PollFlags::IN));
        match wait_for(stop.as_slice(), Some(Deadline::after(AGAIN))) {
            Err(ChannelError::TimedOut { .. }) => Ok(()),
            Ok(_) => Err(ChannelError::Closed),
            Err(error) => Err(error),
        }
    }

    /// Marks the channel as broken: no message after a malformed or incomplete one can be read.
    pub(super) fn give_up(&mut self) {
        self.broken = true;
    }

    /// Marks the channel as broken, and returns an error about the message.
    pub(super) fn malformed(&mut self, what: &'static str) -> ChannelError {
        self.give_up();
        ChannelError::Malformed(what)
    }

    /// Waits at most `time` until the peer sends something or `other` is readable, and returns
    /// which.
    pub(super) fn wait_with(
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Peer,
    Other,
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) body: Vec<u8>,
    pub(super) handles: Vec<OwnedFd>,
}

pub(super) fn new_socket() -> Result<OwnedFd, ChannelError> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(system("socket"))
}

pub(super) fn address(path: &Path) -> Result<SocketAddrUnix, ChannelError> {
    /// The longest path that fits, with its terminating zero.
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
