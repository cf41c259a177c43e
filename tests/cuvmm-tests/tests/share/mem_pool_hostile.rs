//! Peers that give or take allocations of memory pools and lie, keep silent or send anything. Each
//! causes an error in time, with nothing left, and no memory that a process may use is freed.
//!
//! `unsafe` is used for what another library would allocate.
#![allow(unsafe_code)]

use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{G, MIB, cases};
use crate::share_support;
use crate::share_support::{
    DESCRIPTION, HANDLES, PROMPT, Raw, VERDICT, Words, alone, in_a_child, leaves_nothing_open,
    lend, open_files,
};
use cuvmm::driver::{Call, Exported, HandleTypes};
use cuvmm::error::{ChannelError, DescriptionError, MemoryError, ShareError};
use cuvmm::own::ImportedAllocation;
use cuvmm::share::{AllocationDescription, AllocationOffer, AllocationParcel, PoolImporter};
use cuvmm::{Channel, Device, MemPool, Physical, PoolAllocation, Stream};
use proptest::prelude::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, getpid, getrlimit, pidfd_open, setrlimit,
};

const FD: HandleTypes = HandleTypes::POSIX_FD;

/// Offset of the first record, and of the parts of a record.
const HEAD: usize = 48;
const RECORD: usize = 88;

/// A process that gives `MIB` bytes.
struct Giver {
    pool: MemPool,
    memory: PoolAllocation,
    stream: Stream,
}

impl Giver {
    fn new(device: &Device) -> Self {
        let pool = MemPool::builder(device).shareable(FD).create().unwrap();
        let stream = Stream::new(device).unwrap();
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        Self {
            pool,
            memory,
            stream,
        }
    }

    fn offer(&self) -> AllocationOffer {
        AllocationOffer::new(&self.memory).unwrap()
    }

    /// Returns the bytes of a description, and the two descriptors.
    fn parts(&self) -> (Vec<u8>, [OwnedFd; 2]) {
        let (description, handles) = self.offer().parcel().unwrap().into_parts();
        (description.to_bytes(), handles)
    }
}

fn importer(device: &Device) -> PoolImporter {
    PoolImporter::new(device, &Stream::new(device).unwrap()).unwrap()
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Opens a parcel in another process. Returns the error, after which nothing is left.
fn open(change: impl FnOnce(&Giver, &mut Vec<u8>, &mut [OwnedFd; 2])) -> ShareError {
    let (rig, other) = (common::host(), common::clean(common::host()));
    let giver = Giver::new(&other.device);
    let (mut bytes, mut handles) = giver.parts();
    change(&giver, &mut bytes, &mut handles);
    let opened = AllocationParcel::from_bytes(&bytes, handles)
        .map_err(ShareError::from)
        .and_then(|parcel| importer(&rig.device).open(parcel));
    let error = opened.unwrap_err();
    common::nothing_left(rig);
    assert!(!giver.memory.is_held());
    error
}

#[test]
fn descriptions_that_lie() {
    let field = |at: usize, value: u64| {
        leaves_nothing_open(|| {
            open(|_, bytes, _| match at {
                8.. if at < 16 => bytes[at] = value as u8,
                _ => put(bytes, at, value),
            })
        })
    };
    let description = |error: &ShareError| matches!(error, ShareError::Description(_));
    // Magic, version, access, number.
    for (at, value) in [(0, 1), (8, 9), (10, 0), (10, 2), (12, 0), (12, 2), (15, 1)] {
        let error = field(at, value);
        assert!(description(&error), "{at}: {error}");
    }
    // The device.
    let error = field(16, 5);
    assert!(matches!(error, ShareError::NoSuchDevice { .. }), "{error}");
    // Size, offset and length of the part.
    let (size, offset, length) = (HEAD, HEAD + 8, HEAD + 16);
    for (at, value) in [
        (size, 0),
        (size, MIB - 1),
        (offset, 1),
        (offset, u64::MAX),
        (length, 0),
        (length, MIB + 1),
        (length, u64::MAX),
    ] {
        let error = field(at, value);
        let part = matches!(
            error,
            ShareError::Description(DescriptionError::Allocation { .. })
        );
        assert!(part, "{at}: {error}");
    }
    // More than there is.
    for value in [MIB + 1, 1 << 40, u64::MAX] {
        let error = field(size, value);
        assert!(matches!(error, ShareError::Argument(_)), "{value}: {error}");
    }
    // The data of the allocation.
    let error = field(HEAD + 24, 0);
    let refused = matches!(error, ShareError::Memory(MemoryError::ImportPointer { .. }));
    assert!(refused, "{error}");
    for cut in [0, 1, HEAD - 1, HEAD, HEAD + RECORD - 1] {
        let error = leaves_nothing_open(|| open(|_, bytes, _| bytes.truncate(cut)));
        assert!(description(&error), "{cut}: {error}");
    }
    let error = leaves_nothing_open(|| open(|_, bytes, _| bytes.push(0)));
    assert!(description(&error), "{error}");
}

#[test]
fn handles_of_something_else() {
    let null = || -> OwnedFd { std::fs::File::open("/dev/null").unwrap().into() };
    leaves_nothing_open(|| {
        let error = open(|_, _, handles| handles[0] = null());
        assert!(
            matches!(error, ShareError::Memory(MemoryError::ImportPool { .. })),
            "{error}"
        );
        let error = open(|_, _, handles| handles[1] = null());
        assert!(
            matches!(error, ShareError::Channel(ChannelError::System { .. })),
            "{error}"
        );
        let error = open(|_, _, handles| handles.reverse());
        assert!(
            matches!(error, ShareError::Channel(ChannelError::System { .. })),
            "{error}"
        );
        let error = open(|giver, _, handles| {
            let physical = Physical::builder(giver.pool.device(), G).shareable(FD);
            let Exported::Fd(fd) = physical.create().unwrap().export(FD).unwrap() else {
                panic!("no descriptor");
            };
            handles[0] = fd;
        });
        assert!(
            matches!(error, ShareError::Memory(MemoryError::ImportPool { .. })),
            "{error}"
        );
        // The handle of another pool.
        let error = open(|giver, _, handles| {
            let other = Giver::new(giver.pool.device());
            let [pool, _] = other.parts().1;
            handles[0] = pool;
        });
        assert!(
            matches!(error, ShareError::Memory(MemoryError::ImportPointer { .. })),
            "{error}"
        );
        // A connection whose other end is closed.
        let error = open(|_, _, handles| {
            let (_, other) = Channel::pair().map(|_| socket_pair()).unwrap();
            handles[1] = other;
        });
        assert!(
            matches!(error, ShareError::Memory(MemoryError::GiverGone)),
            "{error}"
        );
    });
}

/// Returns a socket whose other end is closed, twice.
fn socket_pair() -> (OwnedFd, OwnedFd) {
    let pair = || {
        rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
        .1
    };
    (pair(), pair())
}

/// A giver that uses the identity of another giver's pool gets neither that pool's memory nor in
/// the way of its allocations.
#[test]
fn an_identity_that_is_anothers() {
    leaves_nothing_open(|| {
        let (rig, honest, liar) = (common::host(), common::host(), common::host());
        let (one, two) = (Giver::new(&honest.device), Giver::new(&liar.device));
        one.memory.write(&one.stream, 0, &[1]).unwrap();
        two.memory.write(&two.stream, 0, &[2]).unwrap();
        let importer = importer(&rig.device);
        let take = |giver: &Giver, like: Option<&Giver>| {
            let (mut bytes, handles) = giver.parts();
            if let Some(like) = like {
                bytes[32..48].copy_from_slice(&like.parts().0[32..48]);
            }
            let parcel = AllocationParcel::from_bytes(&bytes, handles).unwrap();
            let taken = importer.open(parcel).unwrap().remove(0);
            let mut byte = [0];
            taken.read(taken.stream(), 0, &mut byte).unwrap();
            (taken, byte[0])
        };
        for first in [false, true] {
            let lie = first.then(|| take(&two, Some(&one)));
            let truth = take(&one, None);
            assert_eq!(truth.1, 1);
            let lie = lie.unwrap_or_else(|| take(&two, Some(&one)));
            assert_eq!(lie.1, 2);
            assert_eq!(take(&one, None).1, 1);
        }
        drop((one, two, importer));
        common::nothing_left(rig);
        common::nothing_left(honest);
        common::nothing_left(liar);
    });
}

/// Returns the taker's error for what a peer sends.
fn take_from(said: impl FnOnce(&mut Raw, &Giver)) -> ShareError {
    let (rig, other) = (common::model(), common::clean(common::model()));
    let giver = Giver::new(&other.device);
    let (mut channel, mut peer) = Raw::pair();
    said(&mut peer, &giver);
    let begun = Instant::now();
    let taken = channel.recv_allocations(&importer(&rig.device));
    assert!(begun.elapsed() < PROMPT);
    let error = taken.unwrap_err();
    drop((channel, peer));
    common::nothing_left(rig);
    assert!(!giver.memory.is_held());
    error
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn givers_that_are_wrong_silent_or_gone() {
    let malformed =
        |error: &ShareError| matches!(error, ShareError::Channel(ChannelError::Malformed { .. }));
    leaves_nothing_open(|| {
        for many in [0, 1, 3] {
            let error = take_from(|peer, giver| {
                let (bytes, handles) = giver.parts();
                assert!(peer.say(DESCRIPTION, &bytes, &[]));
                let all = [&handles[0], &handles[1], &handles[0]].map(|fd| fd.as_fd());
                assert!(peer.say(HANDLES, &[], &all[..many]));
            });
            assert!(malformed(&error), "{many}: {error}");
        }
        let error = take_from(|peer, giver| {
            let (bytes, handles) = giver.parts();
            assert!(peer.say(DESCRIPTION, &bytes, &[]));
            assert!(peer.say(HANDLES, b"x", &lend(&handles)));
        });
        assert!(malformed(&error), "{error}");
        let error = take_from(|peer, giver| {
            let (bytes, handles) = giver.parts();
            assert!(peer.say(DESCRIPTION, &bytes, &lend(&handles)));
        });
        assert!(malformed(&error), "{error}");
        let error = take_from(|peer, _| assert!(peer.yes()));
        assert!(malformed(&error), "{error}");
        let error = take_from(|peer, _| assert!(peer.say(VERDICT, b"\x01no", &[])));
        assert!(matches!(error, ShareError::Refused(reason) if reason == "no"));
        let error = take_from(|peer, giver| {
            assert!(peer.say(DESCRIPTION, &giver.parts().0, &[]));
            assert!(peer.say(VERDICT, b"\x01later", &[]));
        });
        assert!(matches!(error, ShareError::Refused(reason) if reason == "later"));
        let error = take_from(|peer, giver| {
            assert!(peer.say(DESCRIPTION, &giver.parts().0, &[]));
        });
        assert!(
            matches!(error, ShareError::Channel(ChannelError::TimedOut { .. })),
            "{error}"
        );
        let error = take_from(|peer, _| {
            let long = vec![0; 4096 * RECORD + HEAD + 1];
            rustix::io::ioctl_fionbio(&peer.socket, true).unwrap();
            peer.say(DESCRIPTION, &long, &[]);
        });
        let channel = matches!(error, ShareError::Channel(_));
        assert!(channel, "{error}");
    });
}

/// Sends what a taker that is not of this library might send over its end.
type Says = fn(&OwnedFd);

fn send(socket: &OwnedFd, bytes: &[u8], handles: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(handles.is_empty() || beside.push(SendAncillaryMessage::ScmRights(handles)));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, flags).is_ok()
}

fn word(word: u8, number: u64) -> Vec<u8> {
    [&[word][..], &number.to_le_bytes()].concat()
}

fn own() -> OwnedFd {
    pidfd_open(getpid(), PidfdFlags::empty()).unwrap()
}

/// Gives to a raw taker, which says something over its end and then closes it. Returns whether the
/// memory is held before and after that. Few descriptors are left open, and none if it is not held.
fn held_while(says: Says) -> (bool, bool) {
    let _alone = alone();
    let before = open_files();
    let other = common::model();
    let giver = Giver::new(&other.device);
    let offer = giver.offer();
    let (mut channel, mut peer) = Raw::pair();
    let end = thread::scope(|scope| {
        let taking = scope.spawn(move || {
            assert_eq!(peer.hear().unwrap().0, DESCRIPTION);
            assert!(peer.yes());
            let (kind, _, mut handles) = peer.hear().unwrap();
            assert_eq!((kind, handles.len()), (HANDLES, 2));
            let end = handles.pop().unwrap();
            says(&end);
            assert!(peer.yes());
            end
        });
        channel.send_allocations(&offer).unwrap();
        taking.join().unwrap()
    });
    let held = giver.memory.is_held();
    drop((end, channel));
    let still_held = giver.memory.is_held();
    drop((offer, giver));
    assert_eq!(other.device.leaked() > 0, still_held);
    if still_held {
        // The end of the giver and what it was sent.
        let open = open_files().len().saturating_sub(before.len());
        assert!(open < 20, "{open} descriptors");
    } else {
        common::nothing_left(other);
        assert_eq!(open_files(), before);
    }
    (held, still_held)
}

#[test]
fn takers_that_do_not_greet_hold_the_memory_until_they_close() {
    let cases: [Says; 8] = [
        |_| {},
        |end| assert!(send(end, b"x", &[])),
        |end| assert!(send(end, &[1; 16], &[])),
        // A greeting without a process, or with something else.
        |end| assert!(send(end, &word(1, 7), &[])),
        |end| {
            let null = std::fs::File::open("/dev/null").unwrap();
            assert!(send(end, &word(1, 7), &[null.as_fd()]));
        },
        // Farewells of others.
        |end| (0..50).for_each(|number| assert!(send(end, &word(2, number), &[]))),
        // Messages without bytes are not the end.
        |end| (0..3).for_each(|_| assert!(send(end, b"", &[]))),
        |end| {
            let own = own();
            assert!(send(end, &word(2, 7), &[own.as_fd()]));
            assert!(send(end, &word(9, 7), &[own.as_fd()]));
        },
    ];
    for says in cases {
        assert_eq!(held_while(says), (true, false));
    }
}

#[test]
fn takers_that_greet_hold_the_memory_until_they_say_farewell() {
    let _ = |end: &OwnedFd| assert!(send(end, &word(1, 7), &[own().as_fd()]));
    assert_eq!(
        held_while(|end| assert!(send(end, &word(1, 7), &[own().as_fd()]))),
        (true, true)
    );
    let both: Says = |end| {
        assert!(send(end, &word(1, 7), &[own().as_fd()]));
        assert!(send(end, &word(2, 7), &[]));
    };
    assert_eq!(held_while(both), (false, false));
    // The farewell of another number is none.
    let other: Says = |end| {
        assert!(send(end, &word(1, 7), &[own().as_fd()]));
        assert!(send(end, &word(2, 8), &[]));
    };
    assert_eq!(held_while(other), (true, true));
    // A greeting a second time counts once.
    let twice: Says = |end| {
        (0..20).for_each(|_| assert!(send(end, &word(1, 7), &[own().as_fd()])));
        assert!(send(end, &word(2, 7), &[]));
    };
    assert_eq!(held_while(twice), (false, false));
}

/// A taker that greets without end makes the giver open a bounded number of descriptors, and may
/// fill its socket.
#[test]
fn greetings_without_end() {
    let _alone = alone();
    let before = open_files().len();
    let other = common::clean(common::model());
    let giver = Giver::new(&other.device);
    let parcel = giver.offer().parcel().unwrap();
    let (_, [_pool, end]) = parcel.into_parts();
    let own = own();
    for number in 0..2000 {
        if !send(&end, &word(1, number), &[own.as_fd()]) {
            assert!(giver.memory.is_held());
            assert!(send(&end, &word(1, number), &[own.as_fd()]));
        }
        assert!(giver.memory.is_held());
    }
    let open = open_files().len() - before;
    assert!(open < 64 + 20, "{open} descriptors");
    for number in 0..2000 {
        assert!(giver.memory.is_held());
        assert!(send(&end, &word(2, number), &[]));
    }
    assert!(giver.memory.is_held());
    drop(end);
    assert!(!giver.memory.is_held());
}

/// The one taker of a channel makes its giver open one descriptor.
#[test]
fn greetings_of_one_taker() {
    let many: Says = |end| {
        let own = own();
        (0..200).for_each(|number| assert!(send(end, &word(1, number), &[own.as_fd()])));
    };
    assert_eq!(held_while(many), (true, true));
}

/// However much a taker sends, one look of its giver reads a part.
#[test]
fn one_look_reads_a_part() {
    let _alone = alone();
    let other = common::clean(common::model());
    let giver = Giver::new(&other.device);
    let (_, [_pool, end]) = giver.offer().parcel().unwrap().into_parts();
    let fill = || (0..).take_while(|_| send(&end, b"x", &[])).count();
    assert!(fill() > 200);
    assert!(giver.memory.is_held());
    let read = fill();
    assert!((1..=150).contains(&read), "{read} were read");
    drop(end);
    giver.offer().wait_until_returned(PROMPT).unwrap();
}

/// A taker of a parcel that sends empty messages neither lets go nor holds what another one has.
#[test]
fn empty_messages_beside_another_taker() {
    leaves_nothing_open(|| {
        let (rig, other) = (
            common::clean(common::model()),
            common::clean(common::model()),
        );
        let (giver, importer) = (Giver::new(&other.device), importer(&rig.device));
        for greets_first in [false, true] {
            let (bytes, [pool, end]) = giver.parts();
            let silent = end.try_clone().unwrap();
            let take = || {
                let parcel = AllocationParcel::from_bytes(&bytes, [pool, end]).unwrap();
                importer.open(parcel).unwrap()
            };
            let taken = if greets_first {
                let taken = take();
                assert!(send(&silent, b"", &[]));
                taken
            } else {
                assert!(send(&silent, b"", &[]));
                assert!(giver.memory.is_held());
                take()
            };
            assert!(giver.memory.is_held());
            drop(silent);
            assert!(giver.memory.is_held());
            drop(taken);
            assert!(!giver.memory.is_held());
        }
    });
}

/// A giver that passes on what it was given, as its own, does not make the taker let the first
/// giver's memory go early.
#[test]
fn memory_that_another_giver_passes_on() {
    leaves_nothing_open(|| {
        let (rig, honest, liar) = (common::model(), common::model(), common::model());
        let (one, two) = (Giver::new(&honest.device), Giver::new(&liar.device));
        let importer = importer(&rig.device);
        let open = |bytes: &[u8], handles| {
            let parcel = AllocationParcel::from_bytes(bytes, handles).unwrap();
            importer.open(parcel).unwrap()
        };
        let (bytes, handles) = one.parts();
        let truth = open(&bytes, handles);
        let lie = open(&bytes, two.parts().1);
        assert_eq!(lie[0].address(), truth[0].address());
        drop(truth);
        assert!(one.memory.is_held(), "it is imported");
        drop(lie);
        assert!(!one.memory.is_held() && !two.memory.is_held());
        drop((one, two, importer));
        common::nothing_left(rig);
        common::nothing_left(honest);
        common::nothing_left(liar);
    });
}

/// A description of which one part is wrong does not import its pool, and the others, again.
#[test]
fn a_pool_of_which_a_part_is_refused() {
    leaves_nothing_open(|| {
        let (rig, other) = (
            common::clean(common::model()),
            common::clean(common::model()),
        );
        let (giver, importer) = (Giver::new(&other.device), importer(&rig.device));
        let second = giver.pool.allocate_on(&giver.stream, MIB).unwrap();
        let taken = importer.open(giver.offer().parcel().unwrap()).unwrap();
        let imports = || {
            rig.device
                .calls()
                .count(Call::MemPoolImportFromShareableHandle)
        };
        assert_eq!(imports(), 1);
        let both = giver.offer().and(&second).unwrap();
        let (description, handles) = both.parcel().unwrap().into_parts();
        let mut bytes = description.to_bytes();
        bytes[HEAD + RECORD + 24] ^= 255;
        let parcel = AllocationParcel::from_bytes(&bytes, handles).unwrap();
        let error = importer.open(parcel).unwrap_err();
        assert!(
            matches!(error, ShareError::Memory(MemoryError::ImportPointer { .. })),
            "{error}"
        );
        assert_eq!(imports(), 1);
        assert!(giver.memory.is_held());
        drop(taken);
        assert!(!giver.memory.is_held());
    });
}

/// A killed taker whose forked child lives: the child has the taker's files of the driver, so its
/// work may go on.
#[test]
fn a_killed_taker_whose_child_lives() {
    let _alone = alone();
    let (mut one, mut two) = Channel::pair().unwrap();
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    let taker = share_support::fork(|| {
        let importer = importer(&common::host().device);
        let taken = two.recv_allocations(&importer).unwrap();
        let child = share_support::fork(|| thread::sleep(Duration::from_secs(60)));
        writer.write_all(&child.to_le_bytes()).unwrap();
        thread::sleep(Duration::from_secs(60));
        drop(taken);
    });
    drop(two);
    let other = common::clean(common::host());
    let giver = Giver::new(&other.device);
    let offer = giver.offer();
    one.send_allocations(&offer).unwrap();
    let mut child = [0; 4];
    reader.read_exact(&mut child).unwrap();
    let kill = |process| {
        // SAFETY: the process was started here and has not ended.
        assert_eq!(unsafe { libc::kill(process, libc::SIGKILL) }, 0);
    };
    kill(taker);
    assert_eq!(share_support::ended(taker, PROMPT), Some(-1));
    assert!(giver.memory.is_held());
    kill(i32::from_le_bytes(child));
    offer.wait_until_returned(PROMPT).unwrap();
}

/// A giver without another descriptor reads a greeting later, and notices when that taker is killed.
#[test]
fn a_taker_that_greets_a_giver_without_descriptors() {
    in_a_child(|| {
        let other = common::clean(common::model());
        let giver = Giver::new(&other.device);
        let (_, [_pool, end]) = giver.offer().parcel().unwrap().into_parts();
        let taker = share_support::fork(|| thread::sleep(Duration::from_secs(60)));
        let process = pidfd_open(Pid::from_raw(taker).unwrap(), PidfdFlags::empty()).unwrap();
        assert!(send(&end, &word(1, 7), &[process.as_fd()]));
        drop(process);
        let full = full();
        assert!(giver.memory.is_held());
        drop(full);
        assert!(giver.memory.is_held());
        // SAFETY: the process was started here and has not ended.
        assert_eq!(unsafe { libc::kill(taker, libc::SIGKILL) }, 0);
        assert_eq!(share_support::ended(taker, PROMPT), Some(-1));
        drop(end);
        // The forked child had copies of the ends.
        assert!(!giver.memory.is_held());
    });
}

/// Keeps this process from opening another file while the returned value lives.
fn full() -> impl Drop {
    struct Full {
        files: Vec<std::fs::File>,
        usual: u64,
    }
    impl Drop for Full {
        fn drop(&mut self) {
            self.files.clear();
            limit(self.usual);
        }
    }
    fn limit(most: u64) {
        let limit = Rlimit {
            current: Some(most),
            ..getrlimit(Resource::Nofile)
        };
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    let usual = getrlimit(Resource::Nofile).current.unwrap();
    let highest = *open_files().keys().next_back().unwrap();
    limit(highest as u64 + 1);
    let files = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok());
    Full {
        files: files.collect(),
        usual,
    }
}

/// A giver without another descriptor notices when its takers let go.
#[test]
fn a_giver_that_may_open_no_more_files() {
    in_a_child(|| {
        let (rig, other) = (common::model(), common::clean(common::model()));
        let (giver, importer) = (Giver::new(&other.device), importer(&rig.device));
        let taken = importer.open(giver.offer().parcel().unwrap()).unwrap();
        // The greeting waits in the socket, and its descriptor cannot be received.
        let full = full();
        assert!(giver.memory.is_held());
        let error = giver.offer().parcel().unwrap_err();
        let said = error.to_string();
        assert!(giver.memory.is_held(), "{said}");
        drop(full);
        assert!(giver.memory.is_held());
        drop(taken);
        assert!(!giver.memory.is_held());
    });
}

/// A forked child of the taker neither lets the memory go nor keeps it.
#[test]
fn a_forked_child_of_the_taker() {
    let _alone = alone();
    let (rig, other) = (common::model(), common::model());
    let giver = Giver::new(&other.device);
    let (mut one, mut two) = Channel::pair().unwrap();
    let offer = giver.offer();
    let importer = importer(&rig.device);
    let taken: Vec<ImportedAllocation> = thread::scope(|scope| {
        scope.spawn(|| one.send_allocations(&offer).unwrap());
        two.recv_allocations(&importer).unwrap()
    });
    let child = share_support::fork(|| {
        assert!(taken[0].read(taken[0].stream(), 0, &mut [0]).is_err());
        share_support::drop_in_child(&taken);
        thread::sleep(Duration::from_millis(200));
    });
    assert!(giver.memory.is_held());
    drop(taken);
    assert!(
        !giver.memory.is_held(),
        "while the child has a copy of the socket"
    );
    assert_eq!(share_support::ended(child, PROMPT), Some(0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(400)))]

    /// A peer that sends anything in any order.
    #[test]
    fn a_peer_that_says_anything(script in proptest::collection::vec(0u8..24, 0..40)) {
        leaves_nothing_open(|| {
            let (rig, other) = (common::clean(common::model()), common::clean(common::model()));
            let giver = Giver::new(&other.device);
            let (bytes, handles) = giver.parts();
            let words = Words::new(bytes, handles.into());
            let importer = importer(&rig.device);
            let begun = Instant::now();
            let hears = |listens: &dyn Fn(Channel)| {
                let (channel, mut peer) = Raw::pair();
                words.speak(&mut peer, &script);
                listens(channel);
            };
            hears(&|mut channel| drop(channel.recv_allocations(&importer)));
            hears(&|mut channel| drop(channel.send_allocations(&giver.offer())));
            prop_assert!(begun.elapsed() < PROMPT);
            drop((words, importer));
            prop_assert!(!giver.memory.is_held());
            Ok(())
        })?;
    }

    /// A description with changed bytes is refused, or is consistent and opens or is refused.
    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn a_description_that_was_changed(changes in proptest::collection::vec((0usize..200, any::<u8>()), 1..4)) {
        leaves_nothing_open(|| {
            let (rig, other) = (common::clean(common::model()), common::clean(common::model()));
            let giver = Giver::new(&other.device);
            let (mut bytes, handles) = giver.parts();
            for (at, change) in changes {
                let at = at % bytes.len();
                bytes[at] ^= change;
            }
            if let Ok(read) = AllocationDescription::from_bytes(&bytes) {
                prop_assert_eq!(read.to_bytes(), bytes.clone());
                prop_assert!(read.sizes().all(|size| size > 0));
                let parcel = AllocationParcel::from_bytes(&bytes, handles).unwrap();
                drop(importer(&rig.device).open(parcel));
            } else {
                drop(handles);
            }
            prop_assert!(!giver.memory.is_held());
            Ok(())
        })?;
    }
}
