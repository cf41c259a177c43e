//! Descriptors of other processes (pidfds), opened by number or received over sockets.
//!
//! A process number means nothing in another PID namespace. A pidfd does: it becomes readable in
//! any namespace when its process has ended. So where a process cannot be [opened by its
//! number](super::super::proc), another process connects to its socket while it runs, and keeps one
//! pidfd of it.
//!
//! The kernel says which process listens (`SO_PEERPIDFD`, Linux 6.5). On older kernels the process
//! is asked for a pidfd of its own (`SCM_RIGHTS`). Where the two processes can see each other's
//! numbers, that pidfd must be of the listening process (`SO_PEERCRED`). Where they cannot, the
//! answer is believed: a pidfd counts only for the slot of its socket, and only if its process runs
//! as the slot's user. Such a process could as well write into the file that it has ended.
//!
//! Nothing here waits for another process: the next pass looks for a late answer.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::super::clock;
use super::super::proc::{Life, Look, Process, have_ended};
use super::Request;
use super::client::address;
use super::timed::connect_now;
use crate::peer::{overflow_uid, peer_of, peer_pidfd};

/// The pause before a process that has given no pidfd is asked again, and the longest wait for an
/// answer.
const PAUSE: Duration = Duration::from_secs(1);

/// The most descriptors received with one answer; more than one is refused.
const MOST: usize = 4;

#[derive(Debug, Default)]
pub(in crate::ledger) struct Pidfds(BTreeMap<usize, Entry>);

#[derive(Debug)]
struct Entry {
    generation: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The process ran when it was last polled.
    Held(Process),
    Ended,
    /// The process was asked over this connection.
    Asked(UnixStream, Instant),
    Refused(Instant),
}

pub(in crate::ledger) struct Whom<L, S> {
    pub(in crate::ledger) uid: u64,
    pub(in crate::ledger) look: L,
    pub(in crate::ledger) socket: Option<S>,
}

impl Pidfds {
    /// Makes one system call.
    pub(in crate::ledger) fn poll(&mut self) {
        let states = self.0.values().map(|entry| &entry.state);
        let processes: Vec<&Process> = states.filter_map(State::process).collect();
        if processes.is_empty() {
            return;
        }
        let ended = have_ended(&processes);
        let states = self.0.values_mut().map(|entry| &mut entry.state);
        let held = states.filter(|state| state.process().is_some());
        for (state, _) in held.zip(ended).filter(|&(_, has_ended)| has_ended) {
            *state = State::Ended;
        }
    }

    /// Returns the life of the process that took a slot, if it is held or has ended.
    pub(in crate::ledger) fn known(&self, slot: usize, generation: u64) -> Option<Life> {
        let entry = self.0.get(&slot);
        match &entry.filter(|entry| entry.generation == generation)?.state {
            State::Held(_) => Some(Life::Runs),
            State::Ended => Some(Life::Ended),
            State::Asked(..) | State::Refused(_) => None,
        }
    }

    /// Looks up the process of a slot that is not [known](Self::known) yet, and tries to hold it. A
    /// process that was refused is looked up again only after a pause, unless `again` is set.
    pub(in crate::ledger) fn meet(
        &mut self,
        (slot, generation): (usize, u64),
        whom: Whom<impl FnOnce() -> Look, impl FnOnce() -> PathBuf>,
        again: bool,
    ) -> Life {
        let known = self.0.remove(&slot);
        let known = known.filter(|entry| entry.generation == generation);
        let known = known.map(|entry| entry.state);
        let waits = matches!(&known, Some(State::Asked(_, at) | State::Refused(at)) if clock::since(*at) < PAUSE);
        let look = match waits && !again {
            true => Look::NotHeld(Life::Unknown),
            false => (whom.look)(),
        };
        let (life, state) = match look {
            Look::Found(process) => (Life::Runs, State::Held(process)),
            Look::NotHeld(Life::Ended) => (Life::Ended, State::Ended),
            Look::NotHeld(life) => match (known, whom.socket) {
                (Some(State::Refused(at)), _) if waits => (life, State::Refused(at)),
                (_, None) => (life, State::Refused(clock::now())),
                (known, Some(socket)) => {
                    let state = ask_over(known, socket, whom.uid);
                    let is_held = matches!(state, State::Held(_));
                    (if is_held { Life::Runs } else { life }, state)
                }
            },
        };
        self.0.insert(slot, Entry { generation, state });
        life
    }

    pub(in crate::ledger) fn forget(&mut self, slot: usize) {
        self.0.remove(&slot);
    }
}

impl State {
    const fn process(&self) -> Option<&Process> {
        match self {
            Self::Held(process) => Some(process),
            Self::Ended | Self::Asked(..) | Self::Refused(_) => None,
        }
    }
}

/// Gets a pidfd of a process over its socket, or over an open connection.
fn ask_over(known: Option<State>, socket: impl FnOnce() -> PathBuf, uid: u64) -> State {
    let held = |pidfd| State::Held(Process::Pidfd(pidfd));
    let refused = |_| State::Refused(clock::now());
    if let Some(State::Asked(stream, at)) = known {
        return match receive(&stream) {
            Ok(Some(pidfd)) => held(pidfd),
            Ok(None) if clock::since(at) < PAUSE => State::Asked(stream, at),
            Ok(None) | Err(_) => State::Refused(clock::now()),
        };
    }
    match connect_to(&socket(), uid) {
        Ok(stream) => match peer_pidfd(&stream) {
            Err(Errno::NOPROTOOPT) => ask(stream),
            outcome => outcome.map_or_else(refused, held),
        },
        Err(_) => State::Refused(clock::now()),
    }
}

/// Connects to the socket of a user's process, without waiting for a place in its queue.
fn connect_to(path: &Path, uid: u64) -> io::Result<UnixStream> {
    let stream = address(path, connect_now)?;
    let found = peer_of(&stream)?.uid;
    match u64::from(found) == uid && found != overflow_uid() {
        true => Ok(stream),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

fn ask(stream: UnixStream) -> State {
    let line = serde_json::to_vec(&Request::Pidfd).map_err(io::Error::from);
    let sent = line.and_then(|mut line| {
        line.push(b'\n');
        send(&stream, &line, None)
    });
    match sent {
        Ok(()) => State::Asked(stream, clock::now()),
        Err(_) => State::Refused(clock::now()),
    }
}

/// Sends a line that fits into the socket's buffer, with a descriptor if any.
fn send(stream: &UnixStream, line: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|it| [it.as_fd()]);
    if let Some(descriptors) = &descriptors
        && !beside.push(SendAncillaryMessage::ScmRights(descriptors))
    {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let parts = [IoSlice::new(line)];
    match retry_on_intr(|| sendmsg(stream, &parts, &mut beside, flags))? {
        sent if sent == line.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

pub(super) fn give_own(stream: &UnixStream) -> io::Result<()> {
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    send(stream, b"{\"done\":0}\n", Some(&own))
}

/// Receives the pidfd of the process at the other end; `None` if no answer has come yet.
fn receive(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut line = [0; 64];
    let mut parts = [IoSliceMut::new(&mut line)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = match retry_on_intr(|| recvmsg(stream, &mut parts, &mut beside, flags)) {
        Ok(got) => got,
        Err(Errno::AGAIN) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    // Owned first, so that no descriptor leaks if a check fails.
    let mut received: Vec<OwnedFd> = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            received.extend(descriptors);
        }
    }
    let only = received.pop();
    match only.filter(|_| received.is_empty() && !got.flags.contains(ReturnFlags::CTRUNC)) {
        Some(pidfd) if number_of(&pidfd)? == i64::from(peer_of(stream)?.pid) => Ok(Some(pidfd)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Returns the number of a pidfd's process, or 0 if this process cannot see it. Fails for any other
/// descriptor.
fn number_of(pidfd: &OwnedFd) -> io::Result<i64> {
    let facts = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let number = facts.lines().find_map(|line| line.strip_prefix("Pid:"));
    let number = number.and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    /// Returns a process that can only be met at a socket.
    fn at(path: &Path, uid: u64) -> Whom<impl FnOnce() -> Look, impl FnOnce() -> PathBuf> {
        Whom {
            uid,
            look: || Look::NotHeld(Life::Unknown),
            socket: Some(|| path.to_owned()),
        }
    }

    fn pidfd_of(child: &std::process::Child) -> OwnedFd {
        let number = rustix::process::Pid::from_child(child);
        pidfd_open(number, PidfdFlags::empty()).unwrap()
    }

    #[test]
    fn a_process_gives_its_own_pidfd_and_no_other_descriptor_is_taken() {
        let (one, other) = pair();
        assert!(receive(&other).unwrap().is_none(), "no answer yet");
        give_own(&one).unwrap();
        let own = receive(&other).unwrap().unwrap();
        assert_eq!(number_of(&own).unwrap(), i64::from(std::process::id()));
        assert_eq!(have_ended(&[&Process::Pidfd(own)]), [false]);
        // A process other than the one at the other end.
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        send(&one, b"{}\n", Some(&pidfd_of(&child))).unwrap();
        assert!(receive(&other).is_err());
        child.kill().unwrap();
        child.wait().unwrap();
        // A file instead of a descriptor of a process.
        send(
            &one,
            b"{}\n",
            Some(&fs::File::open("/dev/null").unwrap().into()),
        )
        .unwrap();
        assert!(receive(&other).is_err());
        send(&one, b"{}\n", None).unwrap();
        assert!(receive(&other).is_err());
        // A process that another test is starting has this end for a moment, too.
        one.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(receive(&other).is_err(), "the end of the connection");
    }

    #[test]
    fn a_pidfd_counts_for_one_owner_of_a_slot_alone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pidfd = pidfd_of(&child);
        child.wait().unwrap();
        let mut pidfds = Pidfds::default();
        let entry = Entry {
            generation: 7,
            state: State::Held(Process::Pidfd(pidfd)),
        };
        pidfds.0.insert(3, entry);
        assert_eq!(pidfds.known(3, 7), Some(Life::Runs));
        pidfds.poll();
        assert_eq!(pidfds.known(3, 7), Some(Life::Ended));
        assert_eq!((pidfds.known(3, 8), pidfds.known(4, 7)), (None, None));
        // The next owner has no socket.
        let met = pidfds.meet((3, 8), at(Path::new("/nowhere"), 0), false);
        assert_eq!(met, Life::Unknown);
        assert_eq!((pidfds.known(3, 7), pidfds.known(3, 8)), (None, None));
        pidfds.forget(3);
        assert!(pidfds.0.is_empty());
    }

    #[test]
    fn a_process_that_is_not_held_is_looked_at_again_when_that_is_needed() {
        let mut pidfds = Pidfds::default();
        let looks = std::cell::Cell::new(0);
        let mut meet = |again, found: Life| {
            let whom = Whom {
                uid: 0,
                look: || {
                    looks.set(looks.get() + 1);
                    Look::NotHeld(found)
                },
                socket: None::<fn() -> PathBuf>,
            };
            (pidfds.meet((3, 0), whom, again), looks.get())
        };
        assert_eq!(meet(false, Life::Runs), (Life::Runs, 1));
        assert_eq!(meet(false, Life::Runs), (Life::Unknown, 1));
        assert_eq!(meet(true, Life::Runs), (Life::Runs, 2));
        assert_eq!(meet(true, Life::Unknown), (Life::Unknown, 3));
        assert_eq!(meet(true, Life::Ended), (Life::Ended, 4));
        assert_eq!(pidfds.known(3, 0), Some(Life::Ended));
    }

    #[test]
    fn only_a_process_of_the_user_of_the_slot_is_met() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let uid = u64::from(rustix::process::geteuid().as_raw());
        let mut pidfds = Pidfds::default();
        let met = pidfds.meet((3, 0), at(&path, uid + 1), false);
        assert_eq!((met, pidfds.known(3, 0)), (Life::Unknown, None));
        // The process is not asked again so soon.
        let met = pidfds.meet((3, 0), at(&path, uid), false);
        assert_eq!((met, pidfds.known(3, 0)), (Life::Unknown, None));
        pidfds.forget(3);
        let met = pidfds.meet((3, 0), at(&path, uid), false);
        let peer = peer_pidfd(UnixStream::connect(&path).unwrap());
        if peer.is_err_and(|errno| errno == Errno::NOPROTOOPT) {
            println!("this kernel gives no pidfd of a peer: nothing more is tested");
            return;
        }
        pidfds.poll();
        assert_eq!((met, pidfds.known(3, 0)), (Life::Runs, Some(Life::Runs)));
        drop(listener);
    }

    /// The exchange on kernels before Linux 6.5.
    #[test]
    fn a_process_is_asked_and_answers_later() {
        let (one, other) = pair();
        let mut pidfds = Pidfds::default();
        let entry = Entry {
            generation: 0,
            state: ask(other),
        };
        pidfds.0.insert(3, entry);
        let nowhere = || at(Path::new("/nowhere"), 0);
        let met = pidfds.meet((3, 0), nowhere(), false);
        assert_eq!(met, Life::Unknown, "no answer yet");
        let mut request = [0; 64];
        let length = io::Read::read(&mut &one, &mut request).unwrap();
        let request: Request = serde_json::from_slice(&request[..length]).unwrap();
        assert_eq!(request, Request::Pidfd);
        give_own(&one).unwrap();
        let met = pidfds.meet((3, 0), nowhere(), false);
        assert_eq!((met, pidfds.known(3, 0)), (Life::Runs, Some(Life::Runs)));
    }
}
