//! Fails every system call of either side of an exchange once. The call returns an error or
//! succeeds, in time, and nothing is left open or mapped.
//!
//! The side under test is a process that this one traces. One of its calls is not made, and returns
//! an error as if a resource were exhausted or a signal had arrived. The other side is an untouched
//! process.
//!
//! `unsafe` is used to end children and to set alarms.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(unsafe_code)]

mod common;
mod share_support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use common::{G, Rig, shareable_region};
use cuvmm::driver::HandleTypes;
use cuvmm::driver::host::HostMemory;
use cuvmm::share::{
    AllocationOffer, Listener, Manifest, PoolImporter, Publisher, Subscriber, Users, sweep,
};
use cuvmm::{Attachment, Channel, MemPool, Offer, Stream};
use nix::libc::user_regs_struct;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use share_support::{fork, leaves_nothing_open, open_files};

/// Exit status of a child that may not be traced.
const REFUSED: i32 = 77;

/// Seconds until a child counts as hanging.
const HANGS: u32 = 600;

/// How long to wait for a peer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// A resource is exhausted, or the peer is gone.
    NoRoom,
    /// A signal arrived, which must not end the operation.
    Interrupted,
}

/// Returns the name of a call and the error that it returns instead of being made, or `None` for
/// calls that are never failed.
fn refusal(way: Way, call: &user_regs_struct) -> Option<(&'static str, i32)> {
    let number = call.orig_rax.cast_signed();
    let interrupted = way == Way::Interrupted;
    let (name, no_room, may_be_interrupted) = match number {
        libc::SYS_socket => ("socket", libc::EMFILE, false),
        libc::SYS_socketpair => ("socketpair", libc::EMFILE, false),
        libc::SYS_pidfd_open => ("pidfd_open", libc::EMFILE, false),
        libc::SYS_bind => ("bind", libc::ENOMEM, false),
        libc::SYS_listen => ("listen", libc::ENOBUFS, false),
        libc::SYS_accept4 => ("accept4", libc::EMFILE, true),
        libc::SYS_connect => ("connect", libc::ENOMEM, true),
        libc::SYS_sendmsg => ("sendmsg", libc::ECONNRESET, true),
        libc::SYS_recvmsg => ("recvmsg", libc::ECONNRESET, true),
        libc::SYS_ppoll => ("ppoll", libc::ENOMEM, true),
        libc::SYS_poll => ("poll", libc::ENOMEM, true),
        libc::SYS_getsockopt => ("getsockopt", libc::ENOBUFS, false),
        libc::SYS_setsockopt => ("setsockopt", libc::ENOMEM, false),
        libc::SYS_eventfd2 => ("eventfd2", libc::EMFILE, false),
        libc::SYS_fchmod => ("fchmod", libc::EPERM, false),
        libc::SYS_chmod => ("chmod", libc::EPERM, false),
        libc::SYS_fchmodat => ("fchmodat", libc::EPERM, false),
        libc::SYS_ioctl => ("ioctl", libc::ENOMEM, false),
        libc::SYS_openat => ("openat", libc::EMFILE, true),
        libc::SYS_open => ("open", libc::EMFILE, true),
        libc::SYS_flock => ("flock", libc::ENOLCK, true),
        libc::SYS_unlink => ("unlink", libc::EACCES, false),
        libc::SYS_unlinkat => ("unlinkat", libc::EACCES, false),
        libc::SYS_utimensat => ("utimensat", libc::EACCES, false),
        libc::SYS_statx => ("statx", libc::EACCES, false),
        libc::SYS_newfstatat => ("newfstatat", libc::EACCES, false),
        libc::SYS_fstat => ("fstat", libc::ENOMEM, false),
        libc::SYS_lstat => ("lstat", libc::EACCES, false),
        libc::SYS_memfd_create => ("memfd_create", libc::EMFILE, false),
        libc::SYS_ftruncate => ("ftruncate", libc::ENOSPC, false),
        libc::SYS_fcntl => ("fcntl", libc::EMFILE, false),
        libc::SYS_readlink => ("readlink", libc::ENOMEM, false),
        libc::SYS_readlinkat => ("readlinkat", libc::ENOMEM, false),
        libc::SYS_clone3 => ("clone3", libc::EAGAIN, false),
        libc::SYS_clone => ("clone", libc::EAGAIN, false),
        // Only shared memory and reserved addresses. Failing the allocator's own mappings would
        // abort the process.
        libc::SYS_mmap if call.r8 as i32 >= 0 => ("mmap of a file", libc::ENOMEM, false),
        libc::SYS_mmap if call.rdx == 0 && call.r10 & libc::MAP_STACK as u64 == 0 => {
            ("mmap of addresses", libc::ENOMEM, false)
        }
        // Reads and writes of an eventfd, which cannot fail otherwise.
        libc::SYS_read if interrupted && call.rdx == 8 => ("read", libc::EINTR, true),
        libc::SYS_write if interrupted && call.rdx == 8 => ("write", libc::EINTR, true),
        _ => return None,
    };
    match way {
        Way::NoRoom => Some((name, no_room)),
        Way::Interrupted => may_be_interrupted.then_some((name, libc::EINTR)),
    }
}

/// Marks the start and the end of the section in which calls are failed.
fn mark() {
    // SAFETY: `getppid` only returns a number.
    let _ = unsafe { libc::getppid() };
}

/// The result of a run.
#[derive(Debug)]
struct Outcome {
    /// The call to be failed was made.
    failed: bool,
    /// Number of calls by name.
    calls: BTreeMap<&'static str, usize>,
    traced: WaitStatus,
    other: WaitStatus,
}

/// The call to be failed: its name, and its number among the calls of that name.
type Target = Option<(&'static str, usize)>;

/// Follows a child that has asked to be traced, and fails one of its calls. Waits for another child
/// too. Returns `None` if tracing is not permitted.
fn follow(traced: i32, other: i32, target: Target, way: Way) -> Option<Outcome> {
    let (traced, other) = (Pid::from_raw(traced), Pid::from_raw(other));
    let mut ended: BTreeMap<Pid, WaitStatus> = BTreeMap::new();
    // Threads inside a call, with the error to return if the call was suppressed.
    let mut within: BTreeMap<Pid, Option<i32>> = BTreeMap::new();
    let mut known = BTreeSet::new();
    let (mut marks, mut failed) = (0, false);
    let mut calls: BTreeMap<&'static str, usize> = BTreeMap::new();
    while ended.len() < 2 {
        let status = waitpid(None, Some(WaitPidFlag::__WALL)).unwrap();
        let pid = status.pid().unwrap();
        let mut signal = None;
        match status {
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => {
                if pid == traced || pid == other {
                    ended.insert(pid, status);
                }
                continue;
            }
            // Each traced thread, and the process itself, starts with a SIGSTOP.
            WaitStatus::Stopped(_, Signal::SIGSTOP) if known.insert(pid) => {
                let options = ptrace::Options::PTRACE_O_TRACESYSGOOD
                    | ptrace::Options::PTRACE_O_TRACECLONE
                    | ptrace::Options::PTRACE_O_EXITKILL;
                ptrace::setoptions(pid, options).unwrap();
            }
            WaitStatus::Stopped(_, other) => signal = Some(other),
            WaitStatus::PtraceSyscall(_) => {
                // A thread that was killed meanwhile has no registers.
                if let Ok(mut registers) = ptrace::getregs(pid) {
                    if let Some(answer) = within.remove(&pid) {
                        if let Some(errno) = answer {
                            registers.rax = i64::from(-errno).cast_unsigned();
                            let _ = ptrace::setregs(pid, registers);
                        }
                    } else {
                        let mut answer = None;
                        if registers.orig_rax.cast_signed() == libc::SYS_getppid {
                            marks += 1;
                        } else if marks == 1
                            && let Some((name, errno)) = refusal(way, &registers)
                        {
                            let nth = calls.entry(name).or_default();
                            *nth += 1;
                            if target == Some((name, *nth)) {
                                failed = true;
                                answer = Some(errno);
                                registers.orig_rax = u64::MAX;
                                ptrace::setregs(pid, registers).unwrap();
                            }
                        }
                        within.insert(pid, answer);
                    }
                }
            }
            _ => {}
        }
        // Fails if the thread was killed meanwhile.
        let _ = ptrace::syscall(pid, signal);
    }
    let (traced, other) = (ended[&traced], ended[&other]);
    if matches!(traced, WaitStatus::Exited(_, REFUSED)) {
        return None;
    }
    Some(Outcome {
        failed,
        calls,
        traced,
        other,
    })
}

/// One side of an exchange.
struct Side<'a> {
    folder: &'a Path,
    /// A socket connected to the other side, which closes its end when it is done.
    socket: Option<OwnedFd>,
    /// The operation must succeed.
    must: bool,
}

impl Side<'_> {
    fn path(&self) -> PathBuf {
        self.folder.join("socket")
    }

    fn socket(&mut self) -> OwnedFd {
        self.socket.take().unwrap()
    }

    /// Tells the other side that it can begin.
    fn ready(&self) {
        // The other side may have ended already.
        let _ = rustix::io::write(self.socket.as_ref().unwrap(), b"!");
    }

    /// Waits until this side can begin, or the other side has ended.
    fn begin(&self) {
        let _ = rustix::io::read(self.socket.as_ref().unwrap(), &mut [0]);
    }

    /// Waits until the other side is done.
    fn wait(&self) {
        let mut byte = [0];
        let socket = self.socket.as_ref().unwrap();
        while !matches!(rustix::io::read(socket, &mut byte), Ok(0)) {}
    }

    /// Performs the work of a side while its calls are failed, and checks that it leaves nothing
    /// behind.
    fn does<E: std::fmt::Display>(&mut self, work: impl FnOnce(&mut Self) -> Result<(), E>) {
        let before = open_files();
        mark();
        let done = work(self);
        mark();
        if self.must
            && let Err(error) = done
        {
            panic!("interrupted, and then: {error}");
        }
        // Descriptors that were handed over are closed by their owner.
        let mut left = open_files();
        left.retain(|number, what| before.get(number) != Some(what));
        assert_eq!(left, BTreeMap::new(), "descriptors");
    }
}

/// Checks that nothing is left, except what could not be released because that call was failed,
/// which is counted.
fn given_back(rig: Rig<HostMemory>) {
    let live = rig.machine.live();
    let things = live.reservations + live.mappings + live.allocations;
    let left = things as u64 + live.references;
    let failures = rig.device.drop_failures();
    assert!(failures <= 1, "{live:?}");
    assert!(left <= 2 * failures, "{live:?}");
    assert_eq!(live.exported_only, 0);
}

fn over(socket: OwnedFd) -> Result<Channel, String> {
    let mut channel = Channel::from_socket(socket, &Users::own()).map_err(text)?;
    channel.set_timeout(PATIENCE);
    Ok(channel)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn give(side: &mut Side<'_>) {
    let rig = common::host();
    let region = shareable_region(&rig, 2);
    // The offer is moved in, because it keeps the handles that it made.
    let offer = Offer::region(&region, 0..2 * G).unwrap();
    side.does(move |side| {
        drop(Channel::pair().map_err(text)?);
        let given = over(side.socket())?.send(&offer).map_err(text);
        drop(offer);
        given
    });
    // The other side may still hold the handles.
    drop(region);
    let begun = Instant::now();
    while rig.machine.live().exported_only > 0 && begun.elapsed() < 2 * PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
    given_back(rig);
}

fn take(side: &mut Side<'_>) {
    let rig = common::host();
    side.does(|side| {
        let how = Attachment::builder(&rig.device);
        over(side.socket())?.recv(&how).map(drop).map_err(text)
    });
    given_back(rig);
}

fn listen(side: &mut Side<'_>) {
    let rig = common::host();
    side.does(|side| {
        let users = Users::own().and(4321);
        let listener = Listener::bind_for(side.path(), users).map_err(text)?;
        side.ready();
        let mut channel = listener.accept(PATIENCE).map_err(text)?;
        channel.set_timeout(PATIENCE);
        let how = Attachment::builder(&rig.device);
        channel.recv(&how).map(drop).map_err(text)
    });
    given_back(rig);
}

fn give_allocation(side: &mut Side<'_>) {
    let rig = common::host();
    let shareable = MemPool::builder(&rig.device).shareable(HandleTypes::POSIX_FD);
    let pool = shareable.create().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let memory = pool.allocate_on(&stream, G).unwrap();
    side.does(|side| {
        let offer = AllocationOffer::new(&memory).map_err(text)?;
        let given = over(side.socket())?.send_allocations(&offer).map_err(text);
        // The grant's descriptors are closed when the other side has let go.
        let until = Instant::now() + 2 * PATIENCE;
        while offer.is_held() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        given
    });
    memory.close().unwrap();
    drop((pool, stream));
    given_back(rig);
}

fn take_allocation(side: &mut Side<'_>) {
    let rig = common::host();
    side.does(|side| {
        let stream = Stream::new(&rig.device).map_err(text)?;
        let importer = PoolImporter::new(&rig.device, &stream).map_err(text)?;
        let mut channel = over(side.socket())?;
        let taken = channel.recv_allocations(&importer).map_err(text)?;
        taken[0].read(&stream, 0, &mut [0; 8]).map_err(text)
    });
    given_back(rig);
}

/// Connects to a listening peer and sends.
fn give_there(side: &mut Side<'_>) {
    let rig = common::host();
    let region = shareable_region(&rig, 2);
    let offer = Offer::region(&region, 0..2 * G).unwrap();
    side.begin();
    side.does(move |side| {
        let mut channel = Channel::connect(side.path()).map_err(text)?;
        channel.set_timeout(PATIENCE);
        let given = channel.send(&offer).map_err(text);
        drop(offer);
        given
    });
    // Ends the wait of a listener whose peer could not connect.
    drop(Channel::connect(side.path()));
    drop(region);
}

fn publish(side: &mut Side<'_>) {
    let rig = common::host();
    let region = shareable_region(&rig, 2);
    side.does(|side| {
        let publisher = Publisher::bind(side.path()).map_err(text)?;
        publisher
            .publish("model", Manifest::default(), region)
            .map_err(text)?;
        side.ready();
        side.wait();
        drop(publisher);
        Ok::<(), String>(())
    });
    given_back(rig);
}

fn subscribe(side: &mut Side<'_>) {
    let rig = common::host();
    side.begin();
    side.does(|side| {
        let how = Attachment::builder(&rig.device);
        let mut subscriber = Subscriber::connect(side.path()).map_err(text)?;
        subscriber.channel().set_timeout(PATIENCE);
        subscriber.list().map_err(text)?;
        let published = subscriber.attach("model", &how).map_err(text)?;
        let soon = Duration::from_millis(5);
        subscriber.wait_for_newer(&published, soon).map_err(text)?;
        Ok::<(), String>(())
    });
    given_back(rig);
}

type Does = fn(&mut Side<'_>);

/// Runs both sides and fails one call of the first.
fn run(traced: Does, other: Does, target: Target, way: Way) -> Option<Outcome> {
    let folder = tempfile::tempdir().unwrap();
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (one, two) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
    let mut ends = [Some(one), Some(two)];
    let mut begin = |mine: usize, traced: bool, work: Does| {
        fork(|| {
            ends[1 - mine] = None;
            // SAFETY: `alarm` only makes the system end this process in time.
            unsafe { libc::alarm(HANGS) };
            let mut side = Side {
                folder: folder.path(),
                socket: ends[mine].take(),
                must: traced && way == Way::Interrupted,
            };
            if traced {
                if ptrace::traceme().is_err() {
                    // SAFETY: ends the child without running any code of the parent's exit.
                    unsafe { libc::_exit(REFUSED) }
                }
                raise(Signal::SIGSTOP).unwrap();
            }
            work(&mut side);
        })
    };
    let other = begin(1, false, other);
    let traced = begin(0, true, traced);
    ends = [None, None];
    drop(ends);
    let outcome = follow(traced, other, target, way)?;
    // Files that could not be removed are swept by the next process that looks.
    sweep(folder.path().join("socket")).unwrap();
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 0, "{target:?}, {way:?}: {outcome:?}");
    let right = |status| matches!(status, WaitStatus::Exited(_, 0));
    assert!(
        right(outcome.traced) && right(outcome.other),
        "{target:?}, {way:?}: {outcome:?}"
    );
    Some(outcome)
}

/// Fails the first, second and each later call of every name that one side makes.
fn each_call(traced: Does, other: Does, expected: &[&str]) {
    leaves_nothing_open(|| {
        for way in [Way::NoRoom, Way::Interrupted] {
            let Some(untouched) = run(traced, other, None, way) else {
                let said = "*** NO SYSTEM CALL WAS FAILED: this system does not allow tracing";
                drop(writeln!(std::io::stderr(), "{said}"));
                return;
            };
            for expected in expected {
                let there = way == Way::Interrupted || untouched.calls.contains_key(expected);
                assert!(there, "{expected}: {untouched:?}");
            }
            // A fast run need not call `ppoll` at all.
            for name in untouched.calls.into_keys().chain(["ppoll"]) {
                let failed = (1..).take_while(|&nth| {
                    assert!(nth < 1000, "the operation never ends");
                    let outcome = run(traced, other, Some((name, nth)), way);
                    outcome.is_some_and(|outcome| outcome.failed)
                });
                assert!(failed.count() > 0 || name == "ppoll", "{name}, {way:?}");
            }
        }
    });
}

#[test]
fn giving() {
    let calls = ["socketpair", "getsockopt", "recvmsg", "sendmsg", "open"];
    each_call(give, take, &calls);
}

#[test]
fn taking() {
    let calls = ["fcntl", "mmap of a file", "recvmsg", "sendmsg"];
    each_call(take, give, &calls);
}

#[test]
fn giving_an_allocation() {
    let calls = ["socketpair", "recvmsg", "sendmsg", "fcntl"];
    each_call(give_allocation, take_allocation, &calls);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn taking_an_allocation() {
    let calls = ["pidfd_open", "fcntl", "recvmsg", "sendmsg"];
    each_call(take_allocation, give_allocation, &calls);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn listening() {
    let calls = [
        "socket", "ioctl", "fchmod", "bind", "listen", "accept4", "flock", "openat", "unlink",
    ];
    each_call(listen, give_there, &calls);
}

#[test]
fn connecting() {
    let calls = ["socket", "setsockopt", "connect", "sendmsg", "recvmsg"];
    each_call(give_there, listen, &calls);
}

#[test]
fn publishing() {
    let calls = ["eventfd2", "clone3", "accept4", "ppoll", "openat"];
    each_call(publish, subscribe, &calls);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn subscribing() {
    each_call(subscribe, publish, &["connect", "mmap of a file"]);
}
