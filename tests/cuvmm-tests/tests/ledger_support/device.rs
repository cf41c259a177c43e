//! The memory of one device that several processes use, counted to the byte.
//!
//! Each process connects to a socket, asks before it creates memory, and tells when it has released
//! some. A thread of the test answers one message at a time, so its total is exact after each.
//!
//! The driver frees a dead process's memory before the process has ended, and after its locks are
//! free. Here the memory is counted until the process has ended, by its pidfd, which is the latest
//! that a ledger may rely on. The connection says nothing: forked children keep it open. Processes
//! that have ended are looked for before each message, so no message of a living process finds
//! memory of one that had ended when it was sent.

use std::collections::BTreeMap;
use std::io::{PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The topic of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topic {
    /// The first message of a process, with its number.
    Process = 1,
    Create,
    Release,
    /// A forked child found what must not be. Not answered.
    Fault,
}

const TOPICS: [Topic; 4] = [Topic::Process, Topic::Create, Topic::Release, Topic::Fault];

/// Sends a message: one write, which a killed process makes as a whole or not at all.
pub fn tell(mut socket: &UnixStream, topic: Topic, number: u64) -> std::io::Result<()> {
    let mut message = [topic as u8; 9];
    message[1..].copy_from_slice(&number.to_le_bytes());
    socket.write_all(&message)
}

/// Sends a message and waits for the answer; `false` if there is too little memory.
pub fn ask(mut socket: &UnixStream, topic: Topic, number: u64) -> bool {
    tell(socket, topic, number).expect("the device is there");
    let mut answer = [0];
    socket.read_exact(&mut answer).expect("the device is there");
    answer == [1]
}

/// The device's counts. Sizes in bytes.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// The bytes that the processes have now.
    pub now: u64,
    /// The most that they had at any instant, and what each process had then.
    pub peak: u64,
    pub at_peak: Vec<(u32, u64)>,
    /// How often memory was created.
    pub created: u64,
    /// How often memory was refused.
    pub refused: u64,
    /// The faults that forked children found.
    pub faults: Vec<u64>,
}

/// The device. Dropping it ends its thread.
#[derive(Debug)]
pub struct Device {
    counts: Arc<Mutex<Counts>>,
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// Starts a device with `capacity` bytes that listens at a path.
    pub fn start(path: &Path, capacity: u64) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let (stopped, stop) = std::io::pipe().unwrap();
        let counts = Arc::new(Mutex::new(Counts::default()));
        let books = Books {
            capacity,
            counts: Arc::clone(&counts),
            clients: BTreeMap::new(),
        };
        let thread = std::thread::spawn(move || books.run(&listener, &stopped.into()));
        Self {
            counts,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub fn counts(&self) -> Counts {
        let counts = self.counts.lock();
        counts.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the device");
    }
}

/// One process.
struct Client {
    /// Its connection, until the process and its forked children have ended.
    socket: Option<UnixStream>,
    pid: u32,
    /// Its pidfd, from its first message until it has ended.
    ended: Option<OwnedFd>,
    bytes: u64,
}

struct Books {
    capacity: u64,
    counts: Arc<Mutex<Counts>>,
    clients: BTreeMap<u64, Client>,
}

impl Books {
    fn run(mut self, listener: &UnixListener, stopped: &OwnedFd) {
        for next in 0.. {
            let mut ready = vec![
                PollFd::new(stopped, PollFlags::IN),
                PollFd::new(listener, PollFlags::IN),
            ];
            for client in self.clients.values() {
                let socket = client.socket.as_ref().map(|it| it.as_fd());
                let ended = client.ended.as_ref().map(|it| it.as_fd());
                let fds = socket.into_iter().chain(ended);
                ready.extend(fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            }
            let _ = poll(&mut ready, None);
            let is_ready = [0, 1].map(|index: usize| !ready[index].revents().is_empty());
            if is_ready[0] {
                return;
            }
            let clients = self.clients.iter();
            let spoken = clients.filter(|(_, it)| it.socket.as_ref().is_some_and(is_readable));
            let spoken: Vec<u64> = spoken.map(|(&key, _)| key).collect();
            for key in spoken {
                self.remove_ended();
                self.serve(key);
            }
            self.remove_ended();
            if is_ready[1] {
                let client = Client {
                    socket: Some(listener.accept().unwrap().0),
                    pid: 0,
                    ended: None,
                    bytes: 0,
                };
                self.clients.insert(next, client);
            }
        }
    }

    /// Takes the memory of processes that have ended off the total.
    fn remove_ended(&mut self) {
        self.clients.retain(|_, client| {
            if client.ended.take_if(|ended| is_readable(ended)).is_some() {
                client.bytes = 0;
            }
            client.ended.is_some() || client.socket.is_some()
        });
        self.add_up();
    }

    fn add_up(&self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.now = self.clients.values().map(|client| client.bytes).sum();
        if counts.now > counts.peak {
            counts.peak = counts.now;
            let clients = self.clients.values();
            counts.at_peak = clients.map(|it| (it.pid, it.bytes)).collect();
        }
    }

    /// Answers one message of a process, which has come unless the process has ended.
    fn serve(&mut self, key: u64) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        let Some(mut socket) = client.socket.as_ref() else {
            return;
        };
        let mut message = [0; 9];
        if socket.read_exact(&mut message).is_err() {
            client.socket = None;
            return;
        }
        let number = u64::from_le_bytes(message[1..].try_into().unwrap());
        let topic = TOPICS.into_iter().find(|it| *it as u8 == message[0]);
        let topic = topic.expect("a topic");
        if client.ended.is_none() && matches!(topic, Topic::Create | Topic::Release) {
            // The process was killed after it had sent this.
            return;
        }
        let total = {
            let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            match topic {
                Topic::Fault => counts.faults.push(number),
                Topic::Create if counts.now + number > self.capacity => counts.refused += 1,
                Topic::Create => counts.created += 1,
                _ => {}
            }
            counts.now
        };
        let answer = match topic {
            Topic::Fault => return,
            Topic::Process => {
                client.pid = u32::try_from(number).unwrap();
                let pid = Pid::from_raw(client.pid.cast_signed()).unwrap();
                client.ended = pidfd_open(pid, PidfdFlags::empty()).ok();
                client.ended.is_some()
            }
            Topic::Create => {
                let fits = total + number <= self.capacity;
                client.bytes += if fits { number } else { 0 };
                fits
            }
            Topic::Release => {
                let left = client.bytes.checked_sub(number);
                client.bytes = left.expect("what is released was created");
                true
            }
        };
        // A process that was killed does not read it.
        let _ = socket.write_all(&[u8::from(answer)]);
        self.add_up();
    }
}

fn is_readable(fd: &impl std::os::fd::AsFd) -> bool {
    let mut polled = [PollFd::new(fd, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
}
