//! More readers than a publisher can serve, and readers that hold what they received: files, memory
//! and locks.
//!
//! `unsafe` is used to count allocations, to change the user of a forked child, and to request
//! leases of files.
#![allow(unsafe_code)]

mod common;
mod share_support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use common::{Rig, shareable_region};
use cuvmm::Attachment;
use cuvmm::driver::host::HostMemory;
use cuvmm::error::ShareError;
use cuvmm::share::{Manifest, Publisher, Subscriber, Tensor, Users};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use share_support::{
    HANDLES, MOST_BODY, PROMPT, Raw, TEXT, ended, fork, in_a_child, leaves_nothing_open, open_files,
};

const ATTACH: &[u8] = br#"{"Attach":{"name":"llama"}}"#;

/// Counts the bytes that are allocated, and their maximum.
struct Counted;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every operation is forwarded to the system's allocator; only counters are added.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// Creates a publisher with one publication.
fn publisher(rig: &Rig<HostMemory>, path: &Path, extents: u64, manifest: Manifest) -> Publisher {
    let publisher = Publisher::bind(path).unwrap();
    let memory = shareable_region(rig, extents);
    publisher.publish("llama", manifest, memory).unwrap();
    publisher
}

fn allow_files(most: u64) {
    let limit = Rlimit {
        current: Some(most),
        ..getrlimit(Resource::Nofile)
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// A process with many silent connections, which lives until it is told to end.
struct Crowd {
    child: i32,
    end: std::io::PipeWriter,
}

impl Crowd {
    /// Connects as this user, or as another.
    fn of(path: &Path, many: usize, user: Option<u32>) -> Self {
        let (wait, end) = std::io::pipe().unwrap();
        let (here, ready) = std::io::pipe().unwrap();
        let child = fork(|| {
            drop_writer(&end);
            allow_files(2 * many as u64 + 100);
            if let Some(user) = user {
                // SAFETY: no pointers are passed.
                assert_eq!(unsafe { libc::setuid(user) }, 0);
            }
            let idle: Vec<Raw> = (0..many).map(|_| Raw::connect(path)).collect();
            (&ready).write_all(&[1]).unwrap();
            assert_eq!((&wait).read(&mut [0]).unwrap(), 0);
            drop(idle);
        });
        drop(ready);
        assert_eq!((&here).read(&mut [0]).unwrap(), 1);
        Self { child, end }
    }

    fn end(self) {
        drop(self.end);
        assert_eq!(ended(self.child, PROMPT), Some(0));
    }
}

/// Closes the child's copy of the pipe that its parent closes to end it.
fn drop_writer(end: &std::io::PipeWriter) {
    // SAFETY: the child ends without using or dropping the descriptor.
    assert_eq!(unsafe { libc::close(end.as_raw_fd()) }, 0);
}

/// Retries a request until it is served, because earlier connections may still be closing.
fn is_served(path: &Path) {
    let begun = Instant::now();
    loop {
        let listed = Subscriber::connect(path).unwrap().list();
        match listed {
            Ok(listed) => {
                assert_eq!(listed.publications.len(), 1);
                return;
            }
            Err(ShareError::Refused(_)) if begun.elapsed() < PROMPT => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn idle_connections_leave_files_for_those_who_are_served_and_for_the_program() {
    const FILES: u64 = 256;
    in_a_child(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let writer = common::clean(common::host());
        let publisher = publisher(&writer, &path, 2, Manifest::default());
        allow_files(FILES);
        let mut served = Subscriber::connect(&path).unwrap();
        assert_eq!(served.list().unwrap().all, 1);
        let before = open_files().len();
        let crowd = Crowd::of(&path, 2 * FILES as usize, None);
        // Connections are handled in order: once a later one was refused, all of these were
        // handled.
        let late = Subscriber::connect(&path).unwrap().list();
        let right =
            matches!(&late, Err(ShareError::Refused(why)) if why.contains("connected already"));
        assert!(right, "{late:?}");
        // It is told before its connection is closed.
        let begun = Instant::now();
        while open_files().len() > before + FILES as usize / 4 {
            assert!(begun.elapsed() < PROMPT);
        }
        assert_eq!(served.list().unwrap().all, 1);
        let more = shareable_region(&writer, 2);
        publisher
            .publish("more", Manifest::default(), more)
            .unwrap();
        assert!(publisher.withdraw("more"));
        crowd.end();
        is_served(&path);
    });
}

#[test]
fn a_publisher_without_files_serves_again_once_there_are_some() {
    in_a_child(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let writer = common::clean(common::host());
        let _publisher = publisher(&writer, &path, 2, Manifest::default());
        allow_files(64);
        let mut sockets = std::fs::File::open("/proc/net/unix").unwrap();
        let mut files = vec![];
        while let Ok(file) = std::fs::File::open("/dev/null") {
            files.push(file);
        }
        // A process of its own, which may open files.
        let reader = fork(|| {
            allow_files(1024);
            assert_eq!(Subscriber::connect(&path).unwrap().list().unwrap().all, 1);
        });
        // Waits until the reader is connected, which the publisher cannot accept.
        let shown = path.display().to_string();
        let begun = Instant::now();
        loop {
            let mut all = String::new();
            sockets.rewind().unwrap();
            sockets.read_to_string(&mut all).unwrap();
            if all.lines().filter(|line| line.ends_with(&shown)).count() > 1 {
                break;
            }
            assert!(begun.elapsed() < PROMPT);
        }
        drop(files);
        assert_eq!(ended(reader, PROMPT), Some(0));
    });
}

#[test]
fn the_readers_of_one_user_leave_room_for_those_of_another() {
    const OTHER: u32 = 4321;
    if !geteuid().is_root() {
        let said = "*** NOT TRIED: another user, which requires root";
        drop(writeln!(std::io::stderr(), "{said}"));
        return;
    }
    in_a_child(|| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let path = folder.path().join("socket");
        let writer = common::clean(common::host());
        allow_files(256);
        let publisher = Publisher::bind_for(&path, Users::own().and(OTHER)).unwrap();
        let memory = shareable_region(&writer, 1);
        publisher
            .publish("llama", Manifest::default(), memory)
            .unwrap();
        let crowd = Crowd::of(&path, 200, Some(OTHER));
        // This user may have half of the readers, and has one of them.
        let served = (0..32).map(|_| {
            let mut subscriber = Subscriber::connect(&path).unwrap();
            assert_eq!(subscriber.list().unwrap().all, 1);
            subscriber
        });
        let _served: Vec<_> = served.collect();
        let late = Subscriber::connect(&path).unwrap().list();
        assert!(late.is_err(), "{late:?}");
        crowd.end();
    });
}

fn large_manifest(tensors: u64) -> Manifest {
    let tensor = |number| Tensor {
        name: format!("model.layers.{number}.self_attn.q_proj.weight"),
        dtype: "BF16".to_owned(),
        shape: vec![4096, 4096, 0],
        offset: 0,
        size: 0,
    };
    Manifest {
        tensors: (0..tensors).map(tensor).collect(),
        ..Manifest::default()
    }
}

#[test]
fn many_readers_of_a_large_manifest_cost_no_copy_of_it_each() {
    const READERS: usize = 60;
    leaves_nothing_open(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let writer = common::clean(common::host());
        let manifest = large_manifest(20_000);
        let length = serde_json::to_vec(&manifest).unwrap().len();
        assert!(length > 30 * MOST_BODY);
        let _publisher = publisher(&writer, &path, 1, manifest);
        let before = NOW.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        let mut readers: Vec<Raw> = (0..READERS).map(|_| Raw::connect(&path)).collect();
        for reader in &mut readers {
            assert!(reader.say(TEXT, ATTACH, &[]));
        }
        // All readers are in the middle of an exchange.
        for reader in &mut readers {
            assert_eq!(reader.hear().unwrap().1.len(), MOST_BODY);
        }
        let more = MOST.load(Ordering::Relaxed) - before;
        // A sent frame, a received frame, and the memory of a thread.
        assert!(more < READERS * 4 * MOST_BODY, "{more} bytes");
        assert!(more < READERS * length / 4);
    });
}

/// A reader may lock the descriptors that it received: no other process waits for them.
#[test]
fn a_reader_that_locks_its_handles_holds_up_neither_the_publisher_nor_others() {
    // More extents than a publisher keeps handles for.
    const EXTENTS: u64 = 65;
    leaves_nothing_open(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
        let publisher = publisher(&writer, &path, EXTENTS, Manifest::default());
        let mut hostile = Raw::connect(&path);
        assert!(hostile.say(TEXT, ATTACH, &[]));
        assert_eq!(hostile.hear().unwrap().0, TEXT);
        hostile.hear().unwrap();
        let mut locked = vec![];
        while locked.len() < EXTENTS as usize {
            assert!(hostile.yes());
            let (kind, _, handles) = hostile.hear().unwrap();
            assert_eq!(kind, HANDLES);
            for handle in &handles {
                flock(handle, FlockOperation::LockExclusive).unwrap();
                fcntl_lock(handle, FlockOperation::LockExclusive).unwrap();
                for lease in [libc::F_RDLCK, libc::F_WRLCK] {
                    // SAFETY: the descriptor is open for the call, and no pointers are passed.
                    let had = unsafe { libc::fcntl(handle.as_raw_fd(), libc::F_SETLEASE, lease) };
                    assert_eq!(
                        had, -1,
                        "the publisher has the file open, so no lease is granted"
                    );
                }
            }
            locked.extend(handles);
        }
        assert!(hostile.yes());
        // On threads of their own, because a hang would hang the test.
        let (sender, receiver) = channel();
        let (there, device) = (path.clone(), reader.device.clone());
        let told = thread::spawn(move || {
            let mut subscriber = Subscriber::connect(there).unwrap();
            let read = subscriber.attach("llama", &Attachment::builder(&device));
            let held = read.map(|read| read.memory().held());
            drop((subscriber, device));
            drop(sender.send(held));
        });
        let held = receiver
            .recv_timeout(10 * PROMPT)
            .expect("the publisher hangs");
        told.join().unwrap();
        assert_eq!(held.unwrap(), EXTENTS * common::G);
        let more = shareable_region(&writer, EXTENTS);
        let version = publisher.publish("llama", Manifest::default(), more);
        assert_eq!(version.unwrap(), 2);
    });
}
