//! Files beside a socket: which are created, kept, removed, and left alone.
//!
//! `unsafe` is used to create a named pipe.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use crate::share_support::{PROMPT, alone, ended, fork, in_a_child, leaves_nothing_open, lock_of};
use cuvmm::Channel;
use cuvmm::error::ChannelError;
use cuvmm::share::{Listener, Publisher, Subscriber, sweep};
use rustix::fs::{AtFlags, CWD, FlockOperation, Timespec, Timestamps, flock, inotify, utimensat};

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    (folder, path)
}

/// Returns each file in a folder with its inode, mode, size and number of links.
fn lies_in(folder: &Path) -> BTreeMap<String, (u64, u32, u64, u64)> {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let told = entries.map(|entry| {
        let found = entry.metadata().unwrap();
        let name = entry.file_name().into_string().unwrap();
        (
            name,
            (found.ino(), found.mode(), found.size(), found.nlink()),
        )
    });
    told.collect()
}

/// Leaves the files of a process that was killed while it listened at a path.
fn die_at(path: &Path) {
    let child = fork(|| std::mem::forget(Listener::bind(path).unwrap()));
    assert_eq!(ended(child, PROMPT), Some(0));
}

fn write(path: &Path, bytes: &str, mode: u32) {
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_sweep_makes_opens_and_removes_nothing_that_is_not_a_lock_of_this_user() {
    leaves_nothing_open(|| {
        type Lay = fn(&Path, &Path);
        let others: [(&str, Lay); 9] = [
            ("no lock", |_, _| ()),
            ("a lock of a package manager", |socket, _| {
                let name = format!("{}.lock", socket.display());
                write(Path::new(&name), "", 0o600);
            }),
            ("bytes", |_, lock| write(lock, "mine", 0o600)),
            ("a right for others", |_, lock| write(lock, "", 0o644)),
            ("a second link", |socket, lock| {
                write(lock, "", 0o600);
                fs::hard_link(lock, socket.with_extension("link")).unwrap();
            }),
            ("a link elsewhere", |socket, lock| {
                let target = socket.with_extension("target");
                write(&target, "", 0o600);
                symlink(target, lock).unwrap();
            }),
            ("a folder", |_, lock| fs::create_dir(lock).unwrap()),
            ("a pipe", |_, lock| {
                let name = std::ffi::CString::new(lock.as_os_str().as_encoded_bytes()).unwrap();
                // SAFETY: the name ends with a zero byte and outlives the call.
                assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
            }),
            ("another user's", |_, lock| {
                write(lock, "", 0o600);
                // If this user may not give files away, the file stays this user's, and not empty.
                if std::os::unix::fs::chown(lock, Some(4321), None).is_err() {
                    write(lock, "mine", 0o600);
                }
            }),
        ];
        for (what, lay) in others {
            // Without a socket beside it, and beside a dead socket.
            for dead in [false, true] {
                let (folder, path) = folder();
                if dead {
                    drop(UnixListener::bind(&path).unwrap());
                }
                lay(&path, &lock_of(&path));
                let before = lies_in(folder.path());
                assert!(!sweep(&path).unwrap(), "{what}, {dead}");
                assert_eq!(lies_in(folder.path()), before, "{what}, {dead}");
            }
        }
    });
}

#[test]
fn a_listener_takes_no_lock_that_is_not_one_of_this_user() {
    leaves_nothing_open(|| {
        for (bytes, mode) in [("mine", 0o600), ("", 0o644)] {
            let (folder, path) = folder();
            write(&lock_of(&path), bytes, mode);
            let before = lies_in(folder.path());
            let refused = Listener::bind(&path).unwrap_err();
            let right = matches!(&refused, ChannelError::Path { path: there, problem }
                if *there == lock_of(&path) && problem.starts_with("is in the way"));
            assert!(right, "{refused:?}");
            assert_eq!(lies_in(folder.path()), before);
        }
    });
}

#[test]
fn a_lock_without_a_socket_is_swept_unless_it_is_held() {
    leaves_nothing_open(|| {
        let (folder, path) = folder();
        let lock = lock_of(&path);
        write(&lock, "", 0o600);
        let held = File::open(&lock).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        assert!(!sweep(&path).unwrap());
        assert!(lock.exists());
        drop(held);
        assert!(sweep(&path).unwrap());
        assert!(lies_in(folder.path()).is_empty());
    });
}

/// Cleaners of temporary folders remove old files, but no sockets that are in use.
#[test]
fn a_publisher_whose_lock_file_was_removed_is_neither_swept_nor_replaced() {
    leaves_nothing_open(|| {
        let (folder, path) = folder();
        let publisher = Publisher::bind(&path).unwrap();
        for _ in 0..3 {
            fs::remove_file(lock_of(&path)).unwrap();
            assert!(!sweep(&path).unwrap());
            // The same if another process has left a lock file there.
            write(&lock_of(&path), "", 0o600);
            assert!(!sweep(&path).unwrap());
            fs::remove_file(lock_of(&path)).unwrap();
            assert!(matches!(
                Listener::bind(&path),
                Err(ChannelError::InUse { .. })
            ));
            let mut subscriber = Subscriber::connect(&path).unwrap();
            assert!(subscriber.list().is_ok());
            // The publisher has created its lock file anew by the time that it serves a reader.
            let lock = File::open(lock_of(&path)).unwrap();
            let taken = flock(&lock, FlockOperation::NonBlockingLockExclusive);
            assert_eq!(taken, Err(rustix::io::Errno::WOULDBLOCK));
        }
        drop(publisher);
        assert!(lies_in(folder.path()).is_empty());
    });
}

// I-65
#[test]
fn a_listener_whose_files_were_removed_removes_none_of_the_next_one_s() {
    leaves_nothing_open(|| {
        let (folder, path) = folder();
        for with_lock in [true, false] {
            let first = Listener::bind(&path).unwrap();
            fs::remove_file(&path).unwrap();
            if !with_lock {
                // The first listener holds a lock on a removed file.
                fs::remove_file(lock_of(&path)).unwrap();
            } else {
                drop(first);
                assert!(lies_in(folder.path()).is_empty());
                continue;
            }
            let second = Listener::bind(&path).unwrap();
            drop(first);
            assert!(path.metadata().unwrap().file_type().is_socket());
            assert!(lock_of(&path).exists());
            let channel = Channel::connect(&path).unwrap();
            drop((channel, second.accept(PROMPT).unwrap(), second));
            assert!(lies_in(folder.path()).is_empty());
        }
    });
}

/// A socket without a lock file may belong to another program. It is replaced only if a listener is
/// created there, and only if nothing answers.
#[test]
fn a_socket_without_a_lock_is_replaced_and_not_swept() {
    leaves_nothing_open(|| {
        let (folder, path) = folder();
        let other = UnixListener::bind(&path).unwrap();
        for _ in 0..2 {
            assert!(matches!(
                Listener::bind(&path),
                Err(ChannelError::InUse { .. })
            ));
            assert!(!sweep(&path).unwrap());
        }
        drop(other);
        fs::remove_file(lock_of(&path)).ok();
        assert!(!sweep(&path).unwrap());
        assert!(path.exists());
        drop(Listener::bind(&path).unwrap());
        assert!(lies_in(folder.path()).is_empty());
    });
}

fn age(path: &Path) -> Duration {
    let modified = fs::symlink_metadata(path).unwrap().modified().unwrap();
    SystemTime::now()
        .duration_since(modified)
        .unwrap_or_default()
}

#[test]
fn a_publisher_keeps_its_files_fresh() {
    leaves_nothing_open(|| {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let (_folder, path) = folder();
        let publisher = Publisher::bind(&path).unwrap();
        let old = Timespec {
            tv_sec: 1_000_000_000,
            tv_nsec: 0,
        };
        let times = Timestamps {
            last_access: old,
            last_modification: old,
        };
        for file in [&path, &lock_of(&path)] {
            utimensat(CWD, file, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
            assert!(age(file) > DAY);
        }
        let mut subscriber = Subscriber::connect(&path).unwrap();
        assert!(subscriber.list().is_ok());
        for file in [&path, &lock_of(&path)] {
            assert!(age(file) < DAY);
        }
        drop((subscriber, publisher));
    });
}

#[test]
fn a_listener_waits_until_a_sweep_has_ended() {
    leaves_nothing_open(|| {
        let (folder, path) = folder();
        for removes in [true, false] {
            let lock = lock_of(&path);
            write(&lock, "", 0o600);
            let sweeping = File::open(&lock).unwrap();
            flock(&sweeping, FlockOperation::LockExclusive).unwrap();
            let closings = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
            inotify::add_watch(&closings, &lock, inotify::WatchFlags::CLOSE).unwrap();
            thread::scope(|scope| {
                let binding = scope.spawn(|| Listener::bind(&path));
                // Until the sweeper has found the lock held, and has closed it again.
                assert!(rustix::io::read(&closings, &mut [0; 1024]).unwrap() > 0);
                if removes {
                    fs::remove_file(&lock).unwrap();
                }
                drop(sweeping);
                drop(binding.join().unwrap().unwrap());
            });
            assert!(lies_in(folder.path()).is_empty());
        }
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn binding_beside_sweeps_never_fails() {
    const TIMES: usize = 300;
    let _alone = alone();
    let (folder, path) = folder();
    let sweepers: Vec<i32> = (0..2)
        .map(|_| {
            fork(|| {
                while !folder.path().join("over").exists() {
                    sweep(&path).unwrap();
                }
            })
        })
        .collect();
    for _ in 0..TIMES {
        let listener = loop {
            match Listener::bind(&path) {
                Ok(listener) => break listener,
                // A sweeper that held the lock was not scheduled for the whole timeout.
                Err(ChannelError::InUse { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        };
        assert!(path.exists());
        drop(listener);
        die_at(&path);
    }
    fs::write(folder.path().join("over"), "").unwrap();
    for sweeper in sweepers {
        assert_eq!(ended(sweeper, PROMPT), Some(0));
    }
    sweep(&path).unwrap();
    assert_eq!(lies_in(folder.path()).len(), 1);
}

/// If several bind the same path at once, one succeeds, whatever files a dead listener left there.
#[test]
fn of_those_who_bind_at_once_one_succeeds() {
    const TIMES: usize = 100;
    in_a_child(|| {
        let (folder, path) = folder();
        for _ in 0..TIMES {
            die_at(&path);
            let all = thread::scope(|scope| {
                let all: [_; 4] = std::array::from_fn(|_| scope.spawn(|| Listener::bind(&path)));
                all.map(|one| one.join().unwrap())
            });
            let bound = all.iter().filter(|one| one.is_ok()).count();
            assert_eq!(bound, 1, "{all:?}");
            let channel = Channel::connect(&path).unwrap();
            drop((channel, all));
            assert!(lies_in(folder.path()).is_empty());
        }
    });
}
