//! Channels and the operating system: sockets, users, limits, signals, namespaces and forks.
//!
//! `unsafe` is used to change the user, the limits, the signals and the namespace of forked
//! children.
#![allow(unsafe_code)]

use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{G, shareable_region};
use crate::share_support::{
    PROMPT, Raw, SHORT, alone, drop_in_child, ended, fork, in_a_child, leaves_nothing_open,
    lock_of, open_files,
};
use cuvmm::error::{ChannelError, MemoryError, ShareError};
use cuvmm::share::{Listener, Manifest, Parcel, Publisher, Subscriber, Users, sweep};
use cuvmm::{Attachment, Channel, Offer};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit, umask};

/// Exit status of a child that lacks a permission.
const MAY_NOT: i32 = 77;

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    (folder, path)
}

fn is_empty(folder: &tempfile::TempDir) -> bool {
    std::fs::read_dir(folder.path()).unwrap().count() == 0
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Reports a skipped check where test output is not captured.
fn not_tried(what: &str) {
    let said = writeln!(std::io::stderr(), "*** NOT TRIED: {what}");
    drop(said);
}

#[test]
fn paths_that_are_no_use() {
    leaves_nothing_open(|| {
        let (folder, path) = folder();
        let long = folder.path().join("x".repeat(108));
        for refused in [
            Listener::bind(&long).map(drop),
            Channel::connect(&long).map(drop),
        ] {
            let right = matches!(
                &refused,
                Err(ChannelError::Path { path, problem })
                    if *path == long && problem.contains("longer than the path of a socket")
            );
            assert!(right, "{refused:?}");
        }
        let longest = folder
            .path()
            .join("x".repeat(107 - folder.path().as_os_str().len() - 1));
        drop(Listener::bind(&longest).unwrap());
        let nowhere = folder.path().join("nowhere/socket");
        assert!(matches!(
            Listener::bind(&nowhere),
            Err(ChannelError::System {
                errno: Errno::NOENT,
                ..
            })
        ));
        assert!(matches!(
            Channel::connect(&nowhere),
            Err(ChannelError::NotListening { .. })
        ));
        // A file that is no socket is not touched.
        std::fs::write(&path, "mine").unwrap();
        for refused in [Listener::bind(&path).map(drop), sweep(&path).map(drop)] {
            let right = matches!(
                refused,
                Err(ChannelError::Path {
                    problem: "is not a socket",
                    ..
                })
            );
            assert!(right, "{refused:?}");
        }
        assert!(Channel::connect(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        std::fs::remove_file(&path).unwrap();
        // A symbolic link is not followed.
        let mine = folder.path().join("mine");
        let there = Listener::bind(&mine).unwrap();
        symlink(&mine, &path).unwrap();
        assert!(matches!(
            sweep(&path),
            Err(ChannelError::Path {
                problem: "is not a socket",
                ..
            })
        ));
        std::fs::remove_file(&path).unwrap();
        symlink(&mine, lock_of(&path)).unwrap();
        assert!(Listener::bind(&path).is_err());
        std::fs::remove_file(lock_of(&path)).unwrap();
        drop(there);
        // A pipe in place of the lock file does not block.
        let lock = lock_of(&path);
        let name = std::ffi::CString::new(lock.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the name ends with a zero byte and outlives the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(Listener::bind(&path).is_err());
        std::fs::remove_file(&lock).unwrap();
        assert!(is_empty(&folder));
    });
}

#[test]
fn what_a_dead_process_left_is_told_from_what_is_in_use() {
    leaves_nothing_open(|| {
        let (folder, path) = folder();
        let listener = Listener::bind(&path).unwrap();
        assert!(matches!(
            Listener::bind(&path),
            Err(ChannelError::InUse(there)) if there == path
        ));
        assert!(!sweep(&path).unwrap(), "a listener is alive");
        assert!(path.metadata().unwrap().file_type().is_socket());
        drop(listener);
        assert!(is_empty(&folder));
        assert!(!sweep(&path).unwrap(), "there is no socket");
        assert!(is_empty(&folder));
        let die = || {
            let child = fork(|| {
                let listener = Listener::bind(&path).unwrap();
                std::mem::forget(listener);
            });
            assert_eq!(ended(child, PROMPT), Some(0));
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
            assert!(matches!(
                Channel::connect(&path),
                Err(ChannelError::NotListening(there)) if there == path
            ));
        };
        die();
        assert!(sweep(&path).unwrap());
        assert!(is_empty(&folder));
        die();
        let listener = Listener::bind(&path).unwrap();
        let (here, there) = (
            Channel::connect(&path).unwrap(),
            listener.accept(PROMPT).unwrap(),
        );
        assert_eq!(here.peer().pid, std::process::id());
        assert_eq!(here.peer(), there.peer());
        drop((here, there, listener));
        assert!(is_empty(&folder));
    });
}

#[test]
fn a_socket_is_for_those_it_is_meant_for_whatever_the_umask() {
    for mask in [0, 0o022, 0o077, 0o777] {
        in_a_child(|| {
            let (_folder, path) = folder();
            umask(rustix::fs::Mode::from_raw_mode(mask));
            let own = Listener::bind(&path).unwrap();
            assert_eq!(mode(&path) & !0o600, 0);
            drop(own);
            let all = Listener::bind_for(&path, Users::own().and(4321)).unwrap();
            assert_eq!(mode(&path), 0o666, "with a mask of {mask:o}");
            assert_eq!(mode(&lock_of(&path)), 0o600, "with a mask of {mask:o}");
            drop(all);
        });
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn those_who_accept_at_once_do_not_hold_each_other_up() {
    const MANY: usize = 8;
    const MOMENT: Duration = Duration::from_millis(5);
    leaves_nothing_open(|| {
        let (_folder, path) = folder();
        let listener = Listener::bind(&path).unwrap();
        for _ in 0..200 {
            let begun = Instant::now();
            let accepted = thread::scope(|scope| {
                let accept = || scope.spawn(|| listener.accept(MOMENT));
                let all: [_; MANY] = std::array::from_fn(|_| accept());
                let here = Channel::connect(&path).unwrap();
                let accepted = all.map(|thread| thread.join().unwrap());
                drop(here);
                accepted
            });
            assert!(begun.elapsed() < PROMPT);
            let late = |accepted: &&Result<Channel, ChannelError>| {
                matches!(accepted, Err(ChannelError::TimedOut(MOMENT)))
            };
            let late = accepted.iter().filter(late).count();
            let came = accepted.iter().filter(|one| one.is_ok()).count();
            assert_eq!(late + came, MANY, "{accepted:?}");
            if came == 0 {
                // The earlier connections have ended, so the listener waits for this one.
                drop(listener.accept(PROMPT).unwrap());
            }
        }
    });
}

/// Runs `work` as another user. Returns `None` if this process may not change users.
fn as_user(uid: u32, work: impl FnOnce()) -> Option<()> {
    let child = fork(|| {
        // SAFETY: no pointers are passed.
        if unsafe { libc::setgroups(0, std::ptr::null()) } != 0 || unsafe { libc::setuid(uid) } != 0
        {
            // SAFETY: ends the child without running any code of the parent's exit.
            unsafe { libc::_exit(MAY_NOT) }
        }
        work();
    });
    match ended(child, PROMPT) {
        Some(0) => Some(()),
        Some(MAY_NOT) => None,
        other => panic!("the child ended with {other:?}"),
    }
}

#[test]
fn another_user_is_turned_away() {
    let _alone = alone();
    const OTHER: u32 = 4322;
    let (folder, path) = folder();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let own = Listener::bind(&path).unwrap();
    let tried = as_user(OTHER, || {
        assert!(matches!(
            Channel::connect(&path),
            Err(ChannelError::System {
                errno: Errno::ACCESS,
                ..
            })
        ));
    });
    if tried.is_none() {
        not_tried("another user, which requires root");
        return;
    }
    drop(own);
    let me = geteuid().as_raw();
    // Both sides check the user.
    let letting = Listener::bind_for(&path, Users::own().and(OTHER)).unwrap();
    as_user(OTHER, || {
        assert!(matches!(
            Channel::connect(&path),
            Err(ChannelError::NotAllowed { uid, .. }) if uid == me
        ));
        let channel = Channel::connect_to(&path, &Users::own().and(me)).unwrap();
        assert_eq!(channel.peer().uid, me);
    });
    drop(letting.accept(PROMPT).unwrap());
    let accepted = letting.accept(PROMPT).unwrap();
    assert_eq!(accepted.peer().uid, OTHER);
    drop((accepted, letting));
    let turning_away = Listener::bind_for(&path, Users::own().and(4321)).unwrap();
    as_user(OTHER, || {
        drop(Channel::connect_to(&path, &Users::own().and(me)).unwrap());
    });
    assert!(matches!(
        turning_away.accept(PROMPT),
        Err(ChannelError::NotAllowed { uid: OTHER, .. })
    ));
    drop(turning_away);
    let publisher = Publisher::bind_for(&path, Users::own().and(4321)).unwrap();
    as_user(OTHER, || {
        let mut subscriber = Subscriber::connect_to(&path, &Users::own().and(me)).unwrap();
        let error = subscriber.list().unwrap_err();
        assert!(
            matches!(error, ShareError::Channel(ChannelError::Closed)),
            "{error}"
        );
    });
    assert_eq!(
        Subscriber::connect(&path)
            .unwrap()
            .list()
            .unwrap()
            .publications,
        []
    );
    drop(publisher);
    assert!(is_empty(&folder));
}

/// In a user namespace all users without an id share the overflow id, which this process may have
/// too.
#[test]
fn a_user_without_an_id_of_its_own_is_never_let_in() {
    const OVERFLOW: u32 = 65_534;
    let _alone = alone();
    let (folder, path) = folder();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let listener = Listener::bind_for(&path, Users::own().and(OVERFLOW)).unwrap();
    let child = fork(|| {
        // SAFETY: no pointers are passed. No user has an id in the new namespace.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
            // SAFETY: ends the child without running any code of the parent's exit.
            unsafe { libc::_exit(MAY_NOT) }
        }
        assert_eq!(geteuid().as_raw(), OVERFLOW);
        let unmapped = |outcome: Result<(), ChannelError>| {
            let right = matches!(
                outcome,
                Err(ChannelError::UnmappedUser { uid: OVERFLOW, .. })
            );
            assert!(right, "{outcome:?}");
        };
        let both = Users::own().and(OVERFLOW);
        unmapped(Channel::connect(&path).map(drop));
        unmapped(Channel::connect_to(&path, &both).map(drop));
        unmapped(Channel::pair().map(drop));
        unmapped(Listener::bind(path.with_extension("other")).map(drop));
        // The files of all users seem to be its own.
        assert!(!sweep(&path).unwrap());
    });
    match ended(child, PROMPT) {
        Some(0) => {}
        Some(MAY_NOT) => {
            not_tried("users without an id, which requires a user namespace");
            return;
        }
        other => panic!("the child ended with {other:?}"),
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    // Here the child was this user. The overflow id itself is not admitted either.
    for _ in 0..2 {
        drop(listener.accept(PROMPT).unwrap());
    }
    if as_user(OVERFLOW, || {
        let known = Users::own().and(0);
        drop(Channel::connect_to(&path, &known));
    })
    .is_some()
    {
        assert!(matches!(
            listener.accept(PROMPT),
            Err(ChannelError::UnmappedUser { uid: OVERFLOW, .. })
        ));
    }
}

/// A container has process ids of its own, and its processes can share memory all the same.
#[test]
fn a_peer_whose_process_id_is_not_seen_here() {
    let _alone = alone();
    let (_folder, path) = folder();
    let listener = Listener::bind(&path).unwrap();
    let child = fork(|| {
        // SAFETY: no pointers are passed. The next child has process ids of its own.
        if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
            // SAFETY: ends the child without running any code of the parent's exit.
            unsafe { libc::_exit(MAY_NOT) }
        }
        let inside = fork(|| {
            let channel = Channel::connect(&path).unwrap();
            assert_eq!(channel.peer().pid, 0);
            assert_eq!(channel.peer().uid, geteuid().as_raw());
        });
        assert_eq!(ended(inside, PROMPT), Some(0));
    });
    match ended(child, 2 * PROMPT) {
        Some(0) => {
            let accepted = listener.accept(PROMPT).unwrap();
            assert_ne!(accepted.peer().pid, 0, "its id here is another");
        }
        Some(MAY_NOT) => not_tried("process ids of another namespace, which requires root"),
        other => panic!("the child ended with {other:?}"),
    }
}

/// Lowers this process's limit of open files so that it may open `more` more.
fn allow_more_files(more: usize) {
    let open = open_files();
    let mut free = (0..).filter(|number| !open.contains_key(number));
    let most = free.nth(more).unwrap() as u64;
    let limit = Rlimit {
        current: Some(most),
        ..getrlimit(Resource::Nofile)
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// On this driver memory that can be exported has a descriptor of its own, and each handle another.
#[test]
fn a_driver_call_that_finds_no_descriptor_names_them_and_their_limit() {
    in_a_child(|| {
        let giver = common::clean(common::host());
        let region = shareable_region(&giver, 4);
        allow_more_files(2);
        let _offer = Offer::region(&region, 0..4 * G).unwrap();
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        let memory = cuvmm::Physical::builder(&giver.device, G);
        let memory = memory.shareable(cuvmm::driver::HandleTypes::POSIX_FD);
        let first = memory.create().unwrap();
        let _second = first.export(cuvmm::driver::HandleTypes::POSIX_FD).unwrap();
        for refused in [
            first
                .export(cuvmm::driver::HandleTypes::POSIX_FD)
                .unwrap_err(),
            cuvmm::Physical::builder(&giver.device, G)
                .shareable(cuvmm::driver::HandleTypes::POSIX_FD)
                .create()
                .unwrap_err(),
        ] {
            let said = refused.to_string();
            assert!(
                said.contains(&format!("may, {limit} (RLIMIT_NOFILE)")),
                "{said}"
            );
            assert!(!refused.is_out_of_memory(), "{said}");
        }
    });
}

#[test]
fn a_taker_that_may_open_few_files() {
    // With the higher limits the import fails, which keeps descriptors on this driver; with the
    // lower ones receiving them does.
    for allowed in [1, 5, 40, 90] {
        in_a_child(|| {
            let taker = common::clean(common::host());
            let (mut here, mut there) = Channel::pair().unwrap();
            // The giver is a separate process with its own limit.
            let giving = fork(|| {
                drop_in_child(&here);
                let giver = common::clean(common::host());
                let region = shareable_region(&giver, 80);
                let offer = Offer::region(&region, 0..80 * G).unwrap();
                let given = there.send(&offer).unwrap_err();
                let right = matches!(
                    given,
                    ShareError::Refused { .. } | ShareError::Channel(ChannelError::Closed)
                );
                assert!(right, "{given}");
            });
            drop(there);
            let before = open_files();
            allow_more_files(allowed);
            let error = here.recv(&Attachment::builder(&taker.device)).unwrap_err();
            let right = matches!(
                error,
                ShareError::Channel(ChannelError::TooManyFiles)
                    | ShareError::Memory(MemoryError::Range { .. })
            );
            assert!(right, "{allowed}: {error:?}");
            if let ShareError::Memory(_) = error {
                let limit = getrlimit(Resource::Nofile).current.unwrap();
                let said = error.to_string();
                assert!(
                    said.contains(&format!("may, {limit} (RLIMIT_NOFILE)")),
                    "{said}"
                );
                assert!(!error.is_out_of_memory(), "{said}");
            }
            assert_eq!(open_files(), before);
            drop(here);
            assert_eq!(ended(giving, PROMPT), Some(0));
        });
    }
}

#[test]
fn a_giver_that_may_open_few_files() {
    in_a_child(|| {
        let (giver, taker) = (common::clean(common::host()), common::clean(common::host()));
        let region = shareable_region(&giver, 80);
        let offer = Offer::region(&region, 0..80 * G).unwrap();
        let (mut here, mut there) = Channel::pair().unwrap();
        let before = open_files();
        allow_more_files(10);
        thread::scope(|scope| {
            let taking = scope.spawn(|| there.recv(&Attachment::builder(&taker.device)));
            let error = here.send(&offer).unwrap_err();
            let right = matches!(error, ShareError::Memory(MemoryError::Export { .. }));
            assert!(right, "{error:?}");
            let error = taking.join().unwrap().unwrap_err();
            let right = matches!(error, ShareError::Refused { .. });
            assert!(right, "{error:?}");
        });
        assert_eq!(open_files(), before);
    });
}

/// A reader that raises its own limit and is told why it is refused.
fn refused_for_want_of_descriptors(path: &Path, limit: u64) {
    let own = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: own.maximum,
        ..own
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    let mut reader = Subscriber::connect(path).unwrap();
    let refused = reader.list().unwrap_err();
    let said = refused.to_string();
    assert!(matches!(refused, ShareError::Refused { .. }), "{said}");
    let why = format!("may, {limit} (RLIMIT_NOFILE)");
    assert!(said.contains(&why), "{said}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_publisher_that_may_open_no_more_files_says_so_to_each_reader() {
    in_a_child(|| {
        let (_folder, path) = folder();
        let giver = common::clean(common::host());
        let publisher = Publisher::bind(&path).unwrap();
        let region = shareable_region(&giver, 4);
        let memory = publisher.publish("model", Manifest::default(), region);
        memory.unwrap();
        let before = getrlimit(Resource::Nofile);
        allow_more_files(0);
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        for _ in 0..3 {
            let reader = fork(|| refused_for_want_of_descriptors(&path, limit));
            assert_eq!(ended(reader, PROMPT), Some(0));
        }
        setrlimit(Resource::Nofile, before).unwrap();
        let listed = Subscriber::connect(&path).unwrap().list().unwrap();
        assert_eq!(listed.publications[0].name, "model");
    });
}

/// The usual limit is 1024 files, and many readers may attach to a publisher at once.
#[test]
fn ten_readers_of_many_extents_at_once() {
    const EXTENTS: u64 = 300;
    in_a_child(|| {
        let (_folder, path) = folder();
        let writer = common::clean(common::host());
        let region = shareable_region(&writer, EXTENTS);
        allow_more_files(400);
        let publisher = Publisher::bind(&path).unwrap();
        publisher
            .publish("llama", Manifest::default(), region)
            .unwrap();
        let (ready, go) = std::io::pipe().unwrap();
        // Readers are processes of their own, with their own limits.
        let readers: Vec<i32> = (0..10)
            .map(|_| {
                fork(|| {
                    let reader = common::host();
                    let mut wait = [0];
                    assert_eq!((&ready).read(&mut wait).unwrap(), 1);
                    let mut subscriber = Subscriber::connect(&path).unwrap();
                    let how = Attachment::builder(&reader.device);
                    let read = subscriber.attach("llama", &how).unwrap();
                    assert_eq!(read.memory().held(), EXTENTS * G);
                })
            })
            .collect();
        let before = open_files().len();
        (&go).write_all(&[0; 10]).unwrap();
        for reader in readers {
            assert_eq!(ended(reader, 3 * PROMPT), Some(0));
        }
        drop(publisher);
        assert!(open_files().len() < before);
    });
}

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, Ordering::SeqCst);
}

/// Interrupts this process from now on, without restarting its system calls.
fn interrupt_often() {
    // SAFETY: an all-zero action is a valid action without flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count as *const () as usize;
    let often = libc::timeval {
        tv_sec: 0,
        tv_usec: 500,
    };
    let timer = libc::itimerval {
        it_interval: often,
        it_value: often,
    };
    // SAFETY: the handler only counts.
    let set = unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    // SAFETY: the timer is plain integers.
    let set = unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn signals_end_no_wait() {
    const LONG: Duration = Duration::from_millis(80);
    in_a_child(|| {
        let (_folder, path) = folder();
        let (giver, taker) = (common::clean(common::host()), common::clean(common::host()));
        let region = shareable_region(&giver, 40);
        let offer = Offer::region(&region, 0..40 * G).unwrap();
        let listener = Listener::bind(&path).unwrap();
        // Until another connection has to wait to be accepted.
        let address = SocketAddrUnix::new(&path).unwrap();
        let mut knocking = vec![];
        loop {
            let flags = SocketFlags::NONBLOCK;
            let one = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            match connect(&one, &address) {
                Ok(()) => knocking.push(one),
                Err(Errno::AGAIN) => break,
                Err(other) => panic!("{other}"),
            }
        }
        // Until enough signals have arrived, also on a slow machine.
        let interrupted = |times| {
            thread::sleep(LONG);
            while SIGNALS.load(Ordering::SeqCst) < times {
                thread::sleep(Duration::from_millis(1));
            }
        };
        thread::scope(|scope| {
            let begun = Instant::now();
            let giving = scope.spawn(|| {
                interrupted(10);
                let mut last = listener.accept(PROMPT).unwrap();
                for _ in &knocking {
                    last = listener.accept(PROMPT).unwrap();
                }
                interrupted(21);
                last.send(&offer)
            });
            interrupt_often();
            let mut channel = Channel::connect(&path).unwrap();
            assert!(begun.elapsed() >= LONG / 2, "connecting had to wait");
            let taken = channel.recv(&Attachment::builder(&taker.device)).unwrap();
            assert!(begun.elapsed() >= LONG, "receiving had to wait");
            giving.join().unwrap().unwrap();
            drop((taken, channel));
            // An operation that fails ends in time all the same.
            let begun = Instant::now();
            let (mut silent, _peer) = Raw::pair();
            assert!(silent.recv(&Attachment::builder(&taker.device)).is_err());
            assert!(begun.elapsed() < PROMPT);
            assert!(matches!(
                listener.accept(SHORT),
                Err(ChannelError::TimedOut { .. })
            ));
        });
        assert!(SIGNALS.load(Ordering::SeqCst) > 20);
    });
}

/// The driver takes a descriptor as a pointer, and refuses a null one.
#[test]
fn descriptor_0_is_imported() {
    in_a_child(|| {
        let rig = common::host();
        let region = shareable_region(&rig, 1);
        let offer = Offer::region(&region, 0..G).unwrap();
        let (description, mut handles) = offer.parcel().unwrap().into_parts();
        let cuvmm::driver::Exported::Fd(descriptor) = handles.remove(0) else {
            panic!("a descriptor");
        };
        // SAFETY: the child uses its standard input for nothing else.
        let zero = unsafe {
            assert_eq!(libc::dup2(descriptor.as_raw_fd(), 0), 0);
            OwnedFd::from_raw_fd(0)
        };
        let parcel = Parcel::new(description, vec![cuvmm::driver::Exported::Fd(zero)]);
        let attached = Attachment::builder(&rig.device).open(&parcel).unwrap();
        assert_eq!(attached.held(), G);
    });
}
