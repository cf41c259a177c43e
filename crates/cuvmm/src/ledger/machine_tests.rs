//! Tests of the ledger on machines with something missing: a PID namespace without a `/proc` of its
//! own, a seccomp profile without `pidfd_open`, no free descriptor, a hidden `/proc`, a full tmpfs.
//!
//! Each test runs this test program again, with a part in its environment, and says so where the
//! system does not permit it.
//!
//! `unsafe` in this file: system calls that put the process's own thread into such conditions.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::dead;
use super::file::LedgerFile;
use super::layout::{SIZE, State, first_bytes};
use super::member::Member;
use super::probe::{self, Probe as _};
use super::proc;
use super::seen::Seen;
use super::tests::{
    G, LIMIT, TERMS, charged, collected, directory, join, not_tried, refusal, stop_time,
};
use crate::error::{LedgerError, LedgerRefusal};
use crate::wanted::Purpose;

/// The environment variable with a part, a colon, and the ledger's path.
const PART: &str = "CUVMM_LEDGER_MACHINE";

/// Begins the reason of a part that the machine does not permit.
const NOT_TRIED: &str = "not tried: ";

/// Returns the command that plays a part, as arguments of another command if any.
fn play(before: &[&str], part: &str, path: &Path) -> Command {
    let own = std::env::current_exe().unwrap();
    let mut command = match before {
        [] => Command::new(own),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(own);
            command
        }
    };
    command
        .args(["--exact", "ledger::machine_tests::part", "--nocapture"])
        .env(PART, format!("{part}:{}", path.display()));
    command
}

/// Plays a part to its end, behind the first of `commands` that this system permits.
fn played(commands: &[&[&str]], part: &str, path: &Path) {
    let is_permitted = |before: &&&[&str]| {
        let [first, rest @ ..] = **before else {
            return true;
        };
        let mut command = Command::new(first);
        command.args(rest).arg("true").stderr(Stdio::null());
        command.status().is_ok_and(|it| it.success())
    };
    let Some(before) = commands.iter().find(is_permitted) else {
        not_tried(&format!(
            "a ledger, {part}: this process may not run {commands:?}"
        ));
        return;
    };
    let played = play(before, part, path).output().unwrap();
    let said = String::from_utf8_lossy(&played.stdout);
    if let Some((_, why)) = said.split_once(NOT_TRIED) {
        not_tried(&format!(
            "a ledger, {part}: {}",
            why.lines().next().unwrap()
        ));
        return;
    }
    assert!(
        played.status.success() && said.contains("played"),
        "{part}: {:?}\n{said}\n{}",
        played.status,
        String::from_utf8_lossy(&played.stderr)
    );
}

/// Plays the part of a process. Does nothing when it runs as a test.
#[test]
fn part() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let (part, path) = part.split_once(':').unwrap();
    let path = Path::new(path);
    match part {
        "hold" => hold(path),
        "holder" => holder(path),
        "observer" => observer(path),
        "unreaped" => ends(path, false, || deny(libc::SYS_pidfd_open, libc::ENOSYS)),
        "denied" => ends(path, true, || deny(libc::SYS_pidfd_open, libc::EPERM)),
        "missing" => ends(path, true, || deny(libc::SYS_pidfd_open, libc::ENOSYS)),
        "bare" => ends(path, true, || {
            let calls = [
                libc::SYS_pidfd_open,
                libc::SYS_fcntl,
                libc::SYS_openat,
                libc::SYS_statx,
                libc::SYS_readlink,
            ];
            calls.into_iter().for_each(|call| deny(call, libc::EPERM));
        }),
        "crowded" => {
            let mut held = Vec::new();
            ends(path, false, || {
                let limit = getrlimit(Resource::Nofile);
                let limit = Rlimit {
                    current: Some(64),
                    ..limit
                };
                setrlimit(Resource::Nofile, limit).unwrap();
                held.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
            });
            assert!(!held.is_empty());
        }
        "hidden" => hidden(path),
        "full" => full(path),
        "sparse" => sparse(path),
        "zeros" => zeros(path),
        _ => unreachable!(),
    }
    println!("played");
}

/// Joins a ledger, takes memory, and stays until it is killed, or its parent has ended.
fn hold(path: &Path) {
    let member = join(path, LIMIT * G);
    member.grant(40 * G, 0, Purpose::New, None).unwrap();
    println!("holds");
    let _ = std::io::stdin().read(&mut [0]);
}

fn start_holding(path: &Path) -> Child {
    let mut child = play(&[], "hold", path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    assert!(output.lines().any(|line| line.unwrap().contains("holds")));
    child
}

/// Checks that another process's charge counts exactly while that process lives, on a machine that
/// loses something meanwhile.
fn ends(path: &Path, is_reaped: bool, take: impl FnOnce()) {
    let own = join(path, LIMIT * G);
    let mut other = start_holding(path);
    let mut seen = Seen::default();
    assert!(!dead::collect(own.file(), Some(own.index()), &mut seen));
    take();
    for _ in 0..3 {
        assert!(!dead::collect(own.file(), Some(own.index()), &mut seen));
        assert_eq!(charged(&own), 40);
        let more = own.grant((LIMIT - 39) * G, 0, Purpose::New, None);
        assert_eq!(refusal(more), (LedgerRefusal::Full, LIMIT - 40));
    }
    other.kill().unwrap();
    if is_reaped {
        other.wait().unwrap();
    }
    assert!(
        collected(&own, &mut seen),
        "the killed process is charged for ever"
    );
    assert_eq!(charged(&own), 0);
    other.wait().unwrap();
}

/// The environment variable with the command behind which the other process of a PID namespace
/// plays its part.
const OTHERWISE: &str = "CUVMM_LEDGER_OTHERWISE";

/// Holds memory as the first process of a PID namespace. Another process there has a different
/// `/proc`, in which the number is another process's.
fn holder(path: &Path) {
    assert_eq!(std::process::id(), 1);
    let own = join(path, LIMIT * G);
    own.grant(40 * G, 0, Purpose::New, None).unwrap();
    let otherwise = std::env::var(OTHERWISE).unwrap() + " && \"$@\"; exit $?";
    let before = ["unshare", "--mount", "sh", "-c", &otherwise, "sh"];
    let looked = play(&before, "observer", path).output().unwrap();
    assert!(looked.status.success(), "{looked:?}");
    assert_eq!(charged(&own), 40);
    own.give(40 * G);
}

fn observer(path: &Path) {
    let own = join(path, LIMIT * G);
    let slot = own.file().layout().slots.first().unwrap();
    assert_eq!((slot.pid.load(), slot.state().0), (1, State::Live));
    assert_eq!(slot.pid_namespace.load(), own.slot().pid_namespace.load());
    let mut seen = Seen::default();
    assert!(!dead::collect(own.file(), Some(own.index()), &mut seen));
    let more = own.grant((LIMIT - 39) * G, 0, Purpose::New, None);
    assert_eq!(refusal(more), (LedgerRefusal::Full, LIMIT - 40));
}

/// Makes a system call fail for this thread and for processes that it starts.
fn deny(call: libc::c_long, errno: i32) {
    let statement = |code: u32, k: u32, (jt, jf)| libc::sock_filter {
        code: code.try_into().unwrap(),
        jt,
        jf,
        k,
    };
    let mut filter = [
        // The number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, (0, 0)),
        statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            call.try_into().unwrap(),
            (0, 1),
        ),
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | errno.cast_unsigned(),
            (0, 0),
        ),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, (0, 0)),
    ];
    let program = libc::sock_fprog {
        len: filter.len().try_into().unwrap(),
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program lives for the whole call, which copies it.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ) == 0
    };
    if !set {
        println!("{NOT_TRIED}the kernel takes no seccomp filter");
        std::process::exit(0);
    }
}

/// The number of an ended process of this user is reused by another user's process, which is
/// hidden.
fn hidden(path: &Path) {
    let user: libc::uid_t = 1000;
    let given = std::os::unix::fs::chown(path.parent().unwrap(), Some(user), None);
    given.unwrap();
    // SAFETY: changes this thread's groups and user only.
    let set = unsafe {
        [
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()),
            libc::syscall(libc::SYS_setresgid, user, user, user),
            libc::syscall(libc::SYS_setresuid, user, user, user),
        ]
    };
    assert_eq!(set, [0; 3]);
    if Path::new("/proc/1").exists() {
        println!("{NOT_TRIED}processes of other users are not hidden");
        return;
    }
    let own = join(path, LIMIT * G);
    let layout = own.file().layout();
    let slot = &layout.slots[5];
    slot.pid.store(1);
    slot.started.store(1);
    slot.uid.store(user.into());
    slot.pid_namespace.store(proc::own_namespace());
    layout.charges[5].store(40);
    slot.set_state(State::Live, slot.state().1);
    let time = stop_time();
    let mut seen = Seen::default();
    let mut collect = || dead::collect(own.file(), Some(own.index()), &mut seen);
    assert!(collect());
    time.sleep(Duration::from_millis(1_999));
    assert!(collect());
    assert_eq!((slot.state().0, charged(&own)), (State::Dying, 40));
    time.sleep(Duration::from_millis(1));
    assert!(!collect());
    assert_eq!((slot.state().0, charged(&own)), (State::Free, 0));
    probe::set(None);
}

/// Returns `true` if every byte of a file has memory.
fn is_allocated(path: &Path) -> bool {
    std::fs::metadata(path).unwrap().blocks() * 512 >= SIZE
}

/// Fills the file system of a path. Returns the path of the file that fills it.
fn fill(path: &Path) -> std::path::PathBuf {
    let filler = path.with_file_name("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    filler
}

fn refused(outcome: Result<impl Sized, LedgerError>) -> (&'static str, Errno) {
    match outcome {
        Err(LedgerError::System { call, errno, .. }) => (call, errno),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("a file without memory is opened"),
    }
}

/// Members join, look, end and are collected where no memory is left for the file.
fn full(path: &Path) {
    drop(join(path, LIMIT * G));
    fill(path);
    assert!(is_allocated(path));
    ends(path, true, || ());
    let members: Vec<_> = (0..20).map(|_| join(path, LIMIT * G)).collect();
    let stats = super::LedgerView::open(path).unwrap().stats();
    assert_eq!(stats.processes.len(), members.len());
    drop(members);
    std::fs::remove_file(path).unwrap();
    fill(&path.with_file_name("more"));
    let joined = Member::join(path.to_owned(), TERMS, &super::tests::wishes(LIMIT * G));
    assert_eq!(refused(joined), ("fallocate", Errno::NOSPC));
    assert!(!path.exists(), "an unfinished file has no name");
}

/// A file with holes, as earlier versions made them, or an empty file.
fn sparse(path: &Path) {
    for length in [SIZE, 0] {
        let file = File::create(path).unwrap();
        file.set_len(length).unwrap();
        if length > 0 {
            (&file).write_all(&first_bytes(G, TERMS.device)).unwrap();
        }
        let private = std::fs::Permissions::from_mode(0o600);
        file.set_permissions(private).unwrap();
        let filler = fill(path);
        let join = || Member::join(path.to_owned(), TERMS, &super::tests::wishes(LIMIT * G));
        assert_eq!(refused(join()), ("fallocate", Errno::NOSPC));
        if length > 0 {
            let looked = LedgerFile::look(path.to_owned());
            assert_eq!(refused(looked), ("fallocate", Errno::NOSPC));
        }
        std::fs::remove_file(filler).unwrap();
        let member = join().unwrap();
        assert!(is_allocated(path));
        fill(path);
        assert_eq!(super::LedgerView::open(path).unwrap().stats().charged, 0);
        drop(member);
        std::fs::remove_file(path.with_file_name("filler")).unwrap();
    }
}

/// A file system that cannot allocate ahead of writing.
fn zeros(path: &Path) {
    deny(libc::SYS_fallocate, libc::EOPNOTSUPP);
    let own = join(path, LIMIT * G);
    assert!(is_allocated(path));
    own.grant(40 * G, 0, Purpose::New, None).unwrap();
    let other = join(path, LIMIT * G);
    assert_eq!(charged(&other), 40, "a named file is not written over");
    own.give(40 * G);
}

/// Either of two processes of a PID namespace has the `/proc` of the outer namespace.
#[test]
fn a_process_is_not_taken_for_ended_because_of_a_foreign_proc() {
    let apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let mapped = [&["unshare", "--user", "--map-root-user"], &apart[1..]].concat();
    let (uncover, cover) = ("umount /proc", "mount -t proc proc /proc");
    for (first, then) in [("true", uncover), (uncover, cover)] {
        let dir = directory();
        let first = format!("export {OTHERWISE}='{then}'; {first} && exec \"$@\"");
        let shell = ["sh", "-c", &first, "sh"];
        let before = [&apart, &mapped[..]].map(|it| [it, &shell].concat());
        let before = before.each_ref().map(Vec::as_slice);
        played(&before, "holder", &dir.path().join("ledger"));
    }
}

#[test]
fn a_killed_process_is_not_charged_for_ever_where_pidfds_are_forbidden() {
    for part in ["denied", "missing", "unreaped"] {
        let dir = directory();
        played(&[&[]], part, &dir.path().join("ledger"));
    }
}

#[test]
fn a_killed_process_is_not_charged_for_ever_where_no_descriptor_is_free() {
    let dir = directory();
    played(&[&[]], "crowded", &dir.path().join("ledger"));
}

/// After the first look a process is only polled.
#[test]
fn a_process_that_is_held_is_only_polled() {
    let dir = directory();
    played(&[&[]], "bare", &dir.path().join("ledger"));
}

#[test]
fn a_number_that_another_user_has_taken_keeps_no_charge() {
    let dir = directory();
    let hides = "mount -o remount,hidepid=2 /proc && \"$@\"; exit $?";
    let unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let hides = [&unshare[..], &["sh", "-c", hides, "sh"]].concat();
    played(&[&hides], "hidden", &dir.path().join("ledger"));
}

fn in_small_tmpfs(part: &str) {
    let dir = directory();
    let small = format!(
        "mount -t tmpfs -o size=1m,mode=0700 tmpfs '{}' && \"$@\"; exit $?",
        dir.path().display()
    );
    let own: &[&str] = &["unshare", "--mount", "sh", "-c", &small, "sh"];
    let mapped = [&["unshare", "--user", "--map-root-user"], &own[1..]].concat();
    played(&[own, &mapped], part, &dir.path().join("ledger"));
}

#[test]
fn a_full_tmpfs_ends_no_process() {
    in_small_tmpfs("full");
}

#[test]
fn a_file_with_holes_is_filled_or_refused() {
    in_small_tmpfs("sparse");
}

#[test]
fn zeros_are_written_where_the_file_system_cannot_allocate() {
    let dir = directory();
    played(&[&[]], "zeros", &dir.path().join("ledger"));
}
