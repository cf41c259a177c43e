//! The giver's knowledge of the holders of its memory: one socket for each time that memory is
//! given, whose other end the taker has.
//!
//! The taker sends a greeting with a descriptor of its process (pidfd) before it imports anything,
//! and a farewell when its free is complete. If it ends without a farewell, the giver waits until
//! the process is gone and all copies of the taker's end are closed: the system closes descriptors
//! before the driver stops the process's work, and a forked child with a copy of the end also has
//! the process's files of the driver.
//!
//! What a taker can send is bounded here.

use std::hash::{BuildHasher as _, RandomState};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec, ioctl_fionread, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use rustix::process::{PidfdFlags, WaitId, WaitIdOptions, getpid, pidfd_open, waitid};

use super::system::system;
use crate::error::ChannelError;
use crate::fork::OpeningProcess;
use crate::own::{GivingProcess, Recipients};

const GREETING: u8 = 1;
const FAREWELL: u8 = 2;

/// The most processes of one grant whose end is noticed. A further process that ends without a
/// farewell holds the memory.
const PROCESSES: usize = 64;

/// The most takers of one grant. A further taker holds the memory until its end is closed.
const TAKERS: usize = 4096;

/// The most messages that one look reads. The memory is held while more wait.
const AT_ONCE: usize = 128;

/// The giver's end.
#[derive(Debug)]
pub(super) struct Grant {
    socket: OwnedFd,
    /// Set if one process takes the memory, which cannot pass it on.
    single: bool,
    over: AtomicBool,
    known: Mutex<Known>,
}

/// Takers that have greeted, and whether more can.
#[derive(Debug, Default)]
struct Known {
    /// The number and, if known, the process of each taker that has greeted and not said farewell.
    takers: Vec<(u64, Option<OwnedFd>)>,
    /// A taker has said farewell.
    farewell: bool,
    /// All other ends are closed.
    closed: bool,
}

impl Grant {
    /// Creates a grant, and the taker's end.
    pub(super) fn new(single: bool) -> Result<(Self, OwnedFd), ChannelError> {
        let (socket, taker) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(system("socketpair"))?;
        let grant = Self {
            socket,
            single,
            over: AtomicBool::new(false),
            known: Mutex::default(),
        };
        Ok((grant, taker))
    }

    fn listen(&self, known: &mut Known) {
        let most = if self.single { 1 } else { TAKERS };
        for _ in 0..AT_ONCE {
            let mut polled = [PollFd::new(&self.socket, PollFlags::IN)];
            if known.closed || !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..)) {
                return;
            }
            // Nothing more is sent.
            let hung_up = polled.iter().any(|p| p.revents().contains(PollFlags::HUP));
            // Without room for its descriptor, a received greeting would lose it.
            let room = fcntl_dupfd_cloexec(&self.socket, 0);
            let said = room.and_then(|room| {
                drop(room);
                receive(&self.socket)
            });
            match said {
                Ok(Said::Greeting(number, process)) => known.greet(number, process, most),
                Ok(Said::Farewell(number)) => known.farewell(number),
                Ok(Said::Nothing) if hung_up && !self.has_more() => known.closed = true,
                Ok(Said::Nothing | Said::Other) => {}
                Err(error) => {
                    if error != Errno::AGAIN {
                        log!(debug, %error, "a grant's socket cannot be read");
                    }
                    return;
                }
            }
        }
    }

    /// Returns `true` unless all waiting messages are empty.
    fn has_more(&self) -> bool {
        !matches!(ioctl_fionread(&self.socket), Ok(0))
    }
}

impl Known {
    fn greet(&mut self, number: u64, process: Option<OwnedFd>, most: usize) {
        let known = self.takers.iter().any(|(taker, _)| *taker == number);
        // A peer that sends another descriptor, or a number twice, is not of this library.
        let wrong = known || process.as_ref().is_some_and(|process| !is_process(process));
        if wrong || self.takers.len() >= most || (most == 1 && self.farewell) {
            return;
        }
        let noticed = self.takers.iter().filter(|(_, process)| process.is_some());
        let room = noticed.count() < PROCESSES;
        self.takers.push((number, process.filter(|_| room)));
    }

    fn farewell(&mut self, number: u64) {
        let before = self.takers.len();
        self.takers.retain(|(taker, _)| *taker != number);
        self.farewell |= self.takers.len() < before;
    }
}

impl Recipients for Grant {
    fn is_over(&self) -> bool {
        if self.over.load(Ordering::Acquire) {
            return true;
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        self.listen(&mut known);
        let has_ended = |(number, process): &(u64, Option<OwnedFd>)| {
            let ended = process.as_ref().is_some_and(has_ended);
            ended.then_some(*number)
        };
        let ended: Vec<_> = known.takers.iter().filter_map(has_ended).collect();
        if !ended.is_empty() {
            // Their farewells have arrived by now.
            self.listen(&mut known);
            known.takers.retain(|(taker, _)| !ended.contains(taker));
        }
        let over = known.takers.is_empty() && (known.closed || (self.single && known.farewell));
        self.over.store(over, Ordering::Release);
        over
    }
}

/// The taker's end.
#[derive(Debug)]
pub(super) struct Held {
    socket: OwnedFd,
    number: u64,
    process: OpeningProcess,
}

impl Held {
    /// Sends the giver a descriptor of this process.
    pub(super) fn greet(socket: OwnedFd) -> Result<Self, ChannelError> {
        let own = pidfd_open(getpid(), PidfdFlags::empty()).map_err(system("pidfd_open"))?;
        let number = RandomState::new().hash_one(std::process::id());
        let process = OpeningProcess::new();
        let held = Self {
            socket,
            number,
            process,
        };
        match held.send(GREETING, Some(&own)) {
            Ok(()) => Ok(held),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(ChannelError::Closed),
            Err(errno) => Err(system("sendmsg")(errno)),
        }
    }

    fn send(&self, word: u8, process: Option<&OwnedFd>) -> Result<(), Errno> {
        let mut message = [word; 9];
        let (_, number) = message.split_at_mut(1);
        number.copy_from_slice(&self.number.to_le_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let process = process.map(|process| [process.as_fd()]);
        if let Some(process) = &process
            && !beside.push(SendAncillaryMessage::ScmRights(process))
        {
            return Err(Errno::NOBUFS);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        retry_on_intr(|| sendmsg(&self.socket, &[IoSlice::new(&message)], &mut beside, flags))?;
        Ok(())
    }
}

impl GivingProcess for Held {
    fn keeps(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::empty())];
        // Hangs up when the giver's end is closed.
        !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A forked child does not speak for its parent.
        if self.process.is_here()
            && let Err(error) = self.send(FAREWELL, None)
        {
            log!(debug, %error, "a farewell could not be sent: the giver keeps its memory until this process ends");
        }
    }
}

enum Said {
    /// Without its descriptor if this process could not open another.
    Greeting(u64, Option<OwnedFd>),
    Farewell(u64),
    /// An empty message, or the end.
    Nothing,
    Other,
}

/// Receives one message without waiting.
fn receive(socket: &OwnedFd) -> Result<Said, Errno> {
    let mut buffer = [0; 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut buffer)];
        recvmsg(socket, &mut parts, &mut beside, flags)
    });
    let got = got?;
    // Owned first, so that no descriptor leaks if a check fails.
    let mut descriptors = vec![];
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent);
        }
    }
    let lost = got.flags.contains(ReturnFlags::CTRUNC);
    let [word, number @ ..] = &buffer;
    let number = number.first_chunk().copied();
    let number = u64::from_le_bytes(number.unwrap_or_default());
    Ok(match (got.bytes, *word, descriptors.pop()) {
        (0, _, None) if !lost => Said::Nothing,
        (9, GREETING, None) if lost => Said::Greeting(number, None),
        (9, GREETING, Some(process)) => Said::Greeting(number, Some(process)),
        (9, FAREWELL, None) => Said::Farewell(number),
        _ => Said::Other,
    })
}

/// Returns `true` for a process's descriptor. Polling any other descriptor would report an ended
/// process.
fn is_process(descriptor: &OwnedFd) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    match waitid(WaitId::PidFd(descriptor.as_fd()), options) {
        Ok(_) | Err(Errno::CHILD) => true,
        Err(_) => false,
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
}
