//! Host memory of contents beside other processes: forked children, and a control group's limit.
#![allow(unsafe_code)]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};

use crate::common::{G, MIB, host, pool};
use cuvmm::driver::Call;
use cuvmm::error::{MemoryError, SleepError};
use cuvmm::{Contents, HostStore};

/// The size in which a store takes memory.
const PIECE: u64 = 64 * MIB;

/// The environment variable with the control group's folder, for a child process.
const GROUP: &str = "CUVMM_TEST_CONTROL_GROUP";

/// The bytes of addresses that this process has mapped.
fn mapped() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

/// Forks. The child exits with 0 if it has at least `less` bytes fewer mapped than its parent, once it has
/// dropped what it inherited.
fn fork(less: u64, inherited: impl FnOnce()) -> i32 {
    let parents = mapped();
    // SAFETY: the child only reads a file and drops what this test made, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        inherited();
        let is_less = mapped() + less <= parents;
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe { libc::_exit(i32::from(!is_less)) }
    }
    child
}

fn assert_passes(child: i32) {
    let mut status = -1;
    // SAFETY: waits for a child that was forked here.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's checks");
}

// I-89
#[test]
fn a_forked_child_has_nothing_of_a_store_and_unregisters_nothing() {
    let rig = host();
    let pool = pool(&rig, 128);
    let tenant = pool.tenant("model").register().unwrap();
    let block = tenant.allocate(PIECE + 8 * G).unwrap();
    block.write(PIECE, &[7; 100]).unwrap();
    let store = HostStore::builder(&rig.device)
        .limit(1024 * MIB)
        .build()
        .unwrap();
    tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
    let inherited = (store, block, tenant.clone());
    let mut inherited = Some(inherited);
    // The child drops its copies of the values; the parent has them still.
    let child = fork(PIECE, || drop(inherited.take()));
    assert_passes(child);
    tenant.blocks().wake().unwrap();
    let (store, block, _) = inherited.unwrap();
    let mut seen = [0; 100];
    block.read(PIECE, &mut seen).unwrap();
    assert_eq!(seen, [7; 100]);
    assert_eq!(rig.machine.live().registered, 2, "a piece each");
    drop(store);
    assert_eq!(rig.machine.live().registered, 0);
}

#[test]
fn a_fork_while_a_store_takes_memory_harms_neither() {
    let rig = host();
    let store = HostStore::builder(&rig.device)
        .limit(1024 * MIB)
        .build()
        .unwrap();
    let (seen, child) = (AtomicU64::new(0), Arc::new(AtomicI32::new(0)));
    let forked = Arc::clone(&child);
    rig.faults.watch(Some(Arc::new(move |call| {
        // One piece is registered, and the next one is mapped.
        if call == Call::MemHostRegister && seen.fetch_add(1, SeqCst) == 1 {
            forked.store(fork(2 * PIECE, || ()), SeqCst);
        }
    })));
    store.reserve(3 * PIECE).unwrap();
    rig.faults.watch(None);
    assert_passes(child.load(SeqCst));
    assert_eq!((store.capacity(), store.free()), (3 * PIECE, 3 * PIECE));
    assert_eq!(rig.machine.live().registered, 3);
    drop(store);
    assert_eq!(rig.machine.live().registered, 0);
}

/// A control group below this process's own, which ends with the value.
struct Group(PathBuf);

impl Group {
    /// Makes a group whose processes may have `limit` bytes together, if the machine permits that.
    fn new(limit: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let groups = own.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            match controllers {
                "memory" => Some((
                    Path::new("/sys/fs/cgroup/memory").join(path),
                    "memory.limit_in_bytes",
                )),
                "" => Some((Path::new("/sys/fs/cgroup").join(path), "memory.max")),
                _ => None,
            }
        });
        for (own, file) in groups {
            let group = Self(own.join(format!("cuvmm-test-{}", std::process::id())));
            let is_made = fs::create_dir(&group.0).is_ok();
            if is_made && fs::write(group.0.join(file), limit.to_string()).is_ok() {
                return Some(group);
            }
        }
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_store_takes_no_more_than_its_control_group_has() {
    let Some(group) = Group::new(256 * MIB) else {
        let said = "*** NOT TRIED: a control group, which requires the right to make one";
        drop(writeln!(std::io::stderr(), "{said}"));
        return;
    };
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program)
        .args([
            "processes::member_of_a_control_group",
            "--exact",
            "--ignored",
        ])
        .env(GROUP, &group.0)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

#[test]
#[ignore = "a part of another test"]
fn member_of_a_control_group() {
    let Some(group) = std::env::var_os(GROUP) else {
        return;
    };
    let processes = Path::new(&group).join("cgroup.procs");
    fs::write(processes, std::process::id().to_string()).unwrap();
    let rig = host();
    let refused = HostStore::builder(&rig.device).pinned(512 * MIB).build();
    let Err(MemoryError::HostOutOfMemory { wanted, available }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(wanted, 512 * MIB);
    // The group's limit, less what is left to others.
    assert!((64 * MIB..=192 * MIB).contains(&available), "{available}");
    let store = HostStore::builder(&rig.device)
        .pinned(PIECE)
        .limit(1024 * MIB)
        .build()
        .unwrap();
    assert_eq!(store.capacity(), PIECE);
    let grown = store.reserve(512 * MIB);
    assert!(
        matches!(
            grown,
            Err(SleepError::Memory(MemoryError::HostOutOfMemory { .. }))
        ),
        "{grown:?}"
    );
    assert_eq!(store.capacity(), PIECE);
}
