//! A raw peer that can send arbitrary messages over a channel, and checks for open descriptors.
//!
//! `unsafe` is used to fork and to wait for children.
#![allow(dead_code, unsafe_code)]

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm::Channel;
use cuvmm::share::Users;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with, socketpair,
};

pub const DESCRIPTION: u16 = 1;
pub const HANDLES: u16 = 2;
pub const VERDICT: u16 = 3;
pub const TEXT: u16 = 4;

/// The longest body of a frame.
pub const MOST_BODY: usize = 64 << 10;

/// Timeout for a peer that will not answer.
pub const SHORT: Duration = Duration::from_millis(500);

/// Far longer than anything here takes, also on a busy machine, and shorter than the default
/// timeout.
pub const PROMPT: Duration = Duration::from_secs(9);

/// The head of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub magic: [u8; 4],
    pub version: u16,
    pub kind: u16,
    pub serial: u32,
    pub length: u32,
    pub handles: u16,
    pub more: u16,
}

impl Head {
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.serial.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.handles.to_le_bytes());
        bytes.extend(self.more.to_le_bytes());
        bytes
    }
}

/// Returns the path of the lock file beside a socket.
pub fn lock_of(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".cuvmm-lock");
    path.into()
}

/// A peer that can send any bytes.
#[derive(Debug)]
pub struct Raw {
    pub socket: OwnedFd,
    serial: u32,
}

impl Raw {
    pub const fn over(socket: OwnedFd) -> Self {
        Self { socket, serial: 0 }
    }

    pub fn connect(path: &Path) -> Self {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self::over(socket)
    }

    /// Creates a channel and a raw peer at its other end.
    pub fn pair() -> (Channel, Self) {
        let pair = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let (one, other) = pair.unwrap();
        let mut channel = Channel::from_socket(one, &Users::own()).unwrap();
        channel.set_timeout(SHORT);
        (channel, Self::over(other))
    }

    /// Returns a correct head for the next frame.
    pub fn head(&self, kind: u16, body: &[u8], handles: usize) -> Head {
        Head {
            magic: *b"cvmm",
            version: 3,
            kind,
            serial: self.serial,
            length: body.len() as u32,
            handles: handles as u16,
            more: 0,
        }
    }

    /// Sends bytes and descriptors in one packet. Returns `true` on success.
    pub fn send(&mut self, bytes: &[u8], handles: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !handles.is_empty() {
            assert!(beside.push(SendAncillaryMessage::ScmRights(handles)));
        }
        self.serial = self.serial.wrapping_add(1);
        let parts = [IoSlice::new(bytes)];
        sendmsg(&self.socket, &parts, &mut beside, SendFlags::NOSIGNAL).is_ok()
    }

    pub fn frame(&mut self, head: Head, body: &[u8], handles: &[BorrowedFd<'_>]) -> bool {
        let mut bytes = head.bytes();
        bytes.extend(body);
        self.send(&bytes, handles)
    }

    /// Sends a correct message.
    pub fn say(&mut self, kind: u16, body: &[u8], handles: &[BorrowedFd<'_>]) -> bool {
        let mut parts = body.chunks(MOST_BODY).peekable();
        if parts.peek().is_none() {
            return self.frame(self.head(kind, &[], handles.len()), &[], handles);
        }
        let mut went = true;
        while let Some(part) = parts.next() {
            let more = u16::from(parts.peek().is_some());
            let head = self.head(kind, part, handles.len());
            went &= self.frame(Head { more, ..head }, part, handles);
        }
        went
    }

    pub fn yes(&mut self) -> bool {
        self.say(VERDICT, &[0], &[])
    }

    /// Receives the other side's next message: its kind, body and descriptors. Returns `None` once
    /// it has closed.
    pub fn hear(&mut self) -> Option<(u16, Vec<u8>, Vec<OwnedFd>)> {
        let mut buffer = vec![0; MOST_BODY + 20];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let got = recvmsg(
            &self.socket,
            &mut parts,
            &mut beside,
            RecvFlags::CMSG_CLOEXEC,
        )
        .ok()?
        .bytes;
        let mut handles = vec![];
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                handles.extend(fds);
            }
        }
        let kind = buffer.get(6..8)?.try_into().unwrap();
        (got >= 20).then(|| (u16::from_le_bytes(kind), buffer[20..got].to_vec(), handles))
    }
}

/// A description in its wire format, encoded independently of the library.
#[derive(Clone, Debug)]
pub struct AdviceRecord {
    pub magic: [u8; 8],
    pub version: u16,
    pub access: u16,
    pub handle_type: u32,
    pub granularity: u64,
    pub size: u64,
    pub elements: u64,
    pub element_size: u32,
    /// A ledger's number, and the name of the memory in it.
    pub counted: (u64, u64),
    /// Kind, number, identity.
    pub places: Vec<(i32, i32, [u8; 16])>,
    /// Offset, size, place.
    pub extents: Vec<(u64, u64, u32)>,
}

impl AdviceRecord {
    /// Describes adjacent extents of one granule each on one device.
    pub fn of(uuid: [u8; 16], granule: u64, extents: u64) -> Self {
        Self {
            magic: *b"cuvmm-sh",
            version: 3,
            access: 1,
            handle_type: 1,
            granularity: granule,
            size: extents * granule,
            elements: 0,
            element_size: 0,
            counted: (0, 0),
            places: vec![(1, 0, uuid)],
            extents: (0..extents)
                .map(|index| (index * granule, granule, 0))
                .collect(),
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.access.to_le_bytes());
        bytes.extend(self.handle_type.to_le_bytes());
        bytes.extend(self.granularity.to_le_bytes());
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(self.elements.to_le_bytes());
        bytes.extend(self.element_size.to_le_bytes());
        bytes.extend((self.places.len() as u32).to_le_bytes());
        bytes.extend((self.extents.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.counted.0.to_le_bytes());
        bytes.extend(self.counted.1.to_le_bytes());
        for (kind, id, uuid) in &self.places {
            bytes.extend(kind.to_le_bytes());
            bytes.extend(id.to_le_bytes());
            bytes.extend(uuid);
        }
        for (offset, size, place) in &self.extents {
            bytes.extend(offset.to_le_bytes());
            bytes.extend(size.to_le_bytes());
            bytes.extend(place.to_le_bytes());
            bytes.extend([0; 4]);
        }
        bytes
    }
}

/// Returns every descriptor that this process has open, and what it refers to.
pub fn open_files() -> BTreeMap<i32, String> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().parse().unwrap();
        // The directory itself is open while it is read, and closed by the time it is resolved.
        if let Ok(target) = std::fs::read_link(entry.path()) {
            let target = target.to_string_lossy().into_owned();
            if !target.ends_with("/fd") {
                found.insert(name, target);
            }
        }
    }
    found
}

static ALONE: Mutex<()> = Mutex::new(());

/// Keeps the other tests of this process from running. They would open descriptors, and a child
/// forked meanwhile would inherit them.
pub fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a test alone, and checks that it leaves no descriptor open.
pub fn leaves_nothing_open<T>(test: impl FnOnce() -> T) -> T {
    let _alone = alone();
    let before = open_files();
    let told = test();
    assert_eq!(open_files(), before, "descriptors");
    told
}

/// Runs `work` in a forked child, which must end in time and without a panic.
///
/// The child has only this thread, and must open devices of its own.
pub fn in_a_child(work: impl FnOnce()) {
    let _alone = alone();
    let child = fork(work);
    assert_eq!(ended(child, Duration::from_secs(300)), Some(0), "the child");
}

/// Set if any thread of a child has panicked.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// Starts `work` in a forked child, which exits with 0 if none of its threads panics.
pub fn fork(work: impl FnOnce()) -> i32 {
    // SAFETY: the child has only this thread, uses nothing of other threads, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // The test runner's captured output would be lost.
        std::panic::set_hook(Box::new(|info| {
            PANICKED.store(true, Ordering::SeqCst);
            let said = writeln!(std::io::stderr(), "in a child: {info}");
            drop(said);
        }));
        let outcome = catch_unwind(AssertUnwindSafe(work));
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe {
            libc::_exit(i32::from(
                outcome.is_err() || PANICKED.load(Ordering::SeqCst),
            ))
        }
    }
    child
}

/// Drops a child's copy of a value, which the child does not use again.
pub fn drop_in_child<T>(value: &T) {
    // SAFETY: the child ends without using or dropping the value again.
    drop(unsafe { std::ptr::read(value) });
}

/// Waits for a child and returns its exit status, or -1 if a signal ended it. Kills it and returns
/// `None` if it did not end in time.
pub fn ended(child: i32, within: Duration) -> Option<i32> {
    let begun = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
            0 if begun.elapsed() < within => std::thread::sleep(Duration::from_millis(2)),
            0 => {
                // SAFETY: the process is a child of this one that has not been waited for.
                unsafe { libc::kill(child, libc::SIGKILL) };
                // SAFETY: waits for a child of this process.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                return None;
            }
            _ if libc::WIFEXITED(status) => return Some(libc::WEXITSTATUS(status)),
            _ => return Some(-1),
        }
    }
}

pub fn lend(handles: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    handles.iter().map(OwnedFd::as_fd).collect()
}

/// The material that a peer can send.
#[derive(Debug)]
pub struct Words {
    pub description: Vec<u8>,
    /// Memory as described.
    pub handles: Vec<OwnedFd>,
    /// Descriptors that are not memory.
    pub junk: Vec<OwnedFd>,
}

impl Words {
    pub fn new(description: Vec<u8>, handles: Vec<OwnedFd>) -> Self {
        let null = std::fs::File::open("/dev/null").unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        Self {
            description,
            handles,
            junk: vec![null.into(), reader.into(), writer.into()],
        }
    }

    /// Sends messages chosen by a script of arbitrary bytes, until the socket is full or the script
    /// ends.
    pub fn speak(&self, peer: &mut Raw, script: &[u8]) {
        rustix::io::ioctl_fionbio(&peer.socket, true).unwrap();
        let mut script = script.iter().copied();
        while let Some(word) = script.next() {
            let mut next = || script.next().unwrap_or(0);
            let kind = u16::from(next() % 5);
            let went = match word % 12 {
                0 | 1 => peer.say(DESCRIPTION, &self.description, &[]),
                2 | 3 => {
                    let many = self.handles.len().min(usize::from(next() % 4));
                    peer.say(HANDLES, &[], &lend(&self.handles[..many]))
                }
                4 | 5 => peer.yes(),
                6 => peer.say(VERDICT, b"\x01no", &[]),
                7 => {
                    let published =
                        br#"{"Published":{"publisher":1,"version":1,"manifest":{"tensors":[]}}}"#;
                    peer.say(TEXT, published, &[])
                }
                8 => {
                    let body: Vec<u8> = (0..next()).map(|_| next()).collect();
                    let many = self.junk.len().min(usize::from(next() % 4));
                    peer.say(kind, &body, &lend(&self.junk[..many]))
                }
                9 => {
                    let mut changed = self.description.clone();
                    let at = usize::from(next()) % changed.len();
                    changed[at] ^= next();
                    peer.say(DESCRIPTION, &changed, &[])
                }
                10 => {
                    let body: Vec<u8> = (0..next() % 8).map(|_| next()).collect();
                    let mut head = peer.head(kind, &body, 0);
                    match next() % 6 {
                        0 => head.magic[0] ^= next(),
                        1 => head.version ^= u16::from(next()),
                        2 => head.serial ^= u32::from(next()),
                        3 => head.length ^= u32::from(next()),
                        4 => head.handles ^= u16::from(next()),
                        _ => head.more ^= u16::from(next() % 4),
                    }
                    peer.frame(head, &body, &[])
                }
                _ => {
                    let bytes: Vec<u8> = (0..next()).map(|_| next()).collect();
                    let many = self.junk.len().min(usize::from(next() % 3));
                    peer.send(&bytes, &lend(&self.junk[..many]))
                }
            };
            if !went {
                break;
            }
        }
        rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write).unwrap();
    }
}
