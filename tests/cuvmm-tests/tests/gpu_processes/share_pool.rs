//! Allocations of memory pools shared by two real processes: written by one, read and written by
//! the other, freed there first, and used after the giver has ended or the taker was killed.
//!
//! `unsafe` is used for what another library would allocate.
#![allow(unsafe_code)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::gpu::{D0, Stage, own_process};
use crate::on_each;
use cuvmm::driver::HandleTypes;
use cuvmm::error::{MemoryError, ShareError};
use cuvmm::own::ImportedAllocation;
use cuvmm::share::{AllocationOffer, Listener, PoolImporter};
use cuvmm::{Channel, Device, MemPool, PoolAllocation};

const MIB: u64 = 1 << 20;
const FD: HandleTypes = HandleTypes::POSIX_FD;

/// Environment variable with the socket that a child connects to.
const SOCKET: &str = "CUVMM_TEST_SOCKET";

/// How long one process waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);

fn pool(device: &Device) -> MemPool {
    let pool = MemPool::builder(device).shareable(FD).create().unwrap();
    pool.set_release_threshold(u64::MAX).unwrap();
    pool
}

/// Returns bytes derived from their offset and a number.
fn pattern(size: usize, number: u8) -> Vec<u8> {
    (0..size)
        .map(|at| (at as u8).wrapping_mul(31) ^ number)
        .collect()
}

/// Sizes of allocations: less than a step of the pool, whole steps, and neither.
const SIZES: [u64; 4] = [1000, 2 * MIB, 5 * MIB + 12, 64 * MIB];

fn sizes(stage: &Stage) -> &'static [u64] {
    &SIZES[..stage.scaled(4, 3)]
}

fn say(line: &str) {
    let said = writeln!(std::io::stderr(), "{line}");
    drop(said);
}

fn socket() -> Option<PathBuf> {
    std::env::var_os(SOCKET).map(PathBuf::from)
}

/// Another process that runs an ignored test of this file.
struct Other {
    child: Child,
    listener: Listener,
    _folder: tempfile::TempDir,
}

impl Other {
    fn start(test: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(folder.path().join("socket")).unwrap();
        let child = own_process::only(test)
            .env(SOCKET, listener.path())
            // The child's test summary would be mistaken for this process's.
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            listener,
            _folder: folder,
        }
    }

    fn channel(&self) -> Channel {
        let mut channel = self.listener.accept(PATIENCE).unwrap();
        channel.set_timeout(PATIENCE);
        channel
    }

    fn ends_well(mut self) {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > PATIENCE {
                self.child.kill().unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        };
        assert!(status.success(), "the other process failed: {status}");
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn connect(socket: &Path) -> Channel {
    let mut channel = Channel::connect(socket).unwrap();
    channel.set_timeout(PATIENCE);
    channel
}

fn importer(stage: &Stage) -> PoolImporter {
    PoolImporter::new(&stage.device, &stage.stream()).unwrap()
}

fn check(memory: &ImportedAllocation, number: u8) {
    let mut bytes = vec![0; memory.size() as usize];
    memory.read(memory.stream(), 0, &mut bytes).unwrap();
    assert!(bytes == pattern(bytes.len(), number), "allocation {number}");
}

/// Gives several allocations for writing, and reads what the other process wrote.
fn gives(stage: &Stage, child: &str) {
    let (pool, stream) = (pool(&stage.device), stage.stream());
    let memory: Vec<PoolAllocation> = sizes(stage)
        .iter()
        .zip(0..)
        .map(|(&size, number)| {
            let memory = pool.allocate_on(&stream, size).unwrap();
            let bytes = pattern(size as usize, number);
            memory.write(&stream, 0, &bytes).unwrap();
            memory
        })
        .collect();
    let (first, rest) = memory.split_first().unwrap();
    let offer = AllocationOffer::new(first).unwrap().read_write();
    let offer = rest
        .iter()
        .fold(offer, |offer, memory| offer.and(memory).unwrap());
    let used = pool.stats().unwrap().used;
    let other = Other::start(child);
    let mut channel = other.channel();
    channel.send_allocations(&offer).unwrap();
    // A part of the last one, in the same channel.
    let last = memory.last().unwrap();
    let part = AllocationOffer::part(last, 8..24).unwrap();
    channel.send_allocations(&part).unwrap();
    offer.wait_until_returned(PATIENCE).unwrap();
    other.ends_well();
    for (memory, number) in memory.iter().zip(100..) {
        let mut bytes = vec![0; memory.size() as usize];
        memory.read(&stream, 0, &mut bytes).unwrap();
        assert!(bytes == pattern(bytes.len(), number), "answer {number}");
    }
    drop((offer, part));
    assert_eq!(pool.stats().unwrap().used, used);
    drop(memory);
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0);
    pool.close().unwrap();
}

fn takes(stage: &Stage, socket: &Path) {
    let mut channel = connect(socket);
    let importer = importer(stage).read_write();
    let memory = channel.recv_allocations(&importer).unwrap();
    assert_eq!(memory.len(), sizes(stage).len());
    let reader = PoolImporter::new(&stage.device, &stage.stream()).unwrap();
    let part = channel.recv_allocations(&reader).unwrap().remove(0);
    for (memory, number) in memory.iter().zip(0..) {
        check(memory, number);
    }
    let mut bytes = [0; 16];
    part.read(part.stream(), 0, &mut bytes).unwrap();
    let last = pattern(24, memory.len() as u8 - 1);
    assert_eq!(bytes, last[8..]);
    for (memory, number) in memory.iter().zip(100..) {
        let bytes = pattern(memory.size() as usize, number);
        memory.write(memory.stream(), 0, &bytes).unwrap();
    }
    // Of another stream, whose work the free waits for.
    let other = stage.stream();
    memory[0].record_use(&other).unwrap();
    drop(part);
    memory
        .into_iter()
        .for_each(|memory| memory.close().unwrap());
}

/// Gives to a process that is killed while it has the memory.
fn gives_to_one_that_is_killed(stage: &Stage, child: &str) {
    let (pool, stream) = (pool(&stage.device), stage.stream());
    let memory = pool.allocate_on(&stream, 2 * MIB).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    let other = Other::start(child);
    let mut channel = other.channel();
    channel.send_allocations(&offer).unwrap();
    drop(offer);
    assert!(memory.is_held());
    drop(memory);
    assert_eq!(pool.held_elsewhere(), 2 * MIB);
    other.kill();
    let begun = Instant::now();
    while pool.held_elsewhere() > 0 {
        assert!(begun.elapsed() < PATIENCE, "the memory is still held");
        thread::sleep(Duration::from_millis(1));
    }
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0);
    // The pool is as it was.
    let again = pool.allocate_on(&stream, 2 * MIB).unwrap();
    again.write(&stream, 0, &[1; 64]).unwrap();
}

fn takes_and_waits(stage: &Stage, socket: &Path) {
    let memory = connect(socket).recv_allocations(&importer(stage)).unwrap();
    loop {
        thread::sleep(Duration::from_secs(1));
        drop(memory[0].check_giver());
    }
}

/// Takes from a process that is killed, and says what the driver does with the memory afterwards.
fn takes_from_one_that_is_killed(stage: &Stage, child: &str) {
    let other = Other::start(child);
    let mut channel = other.channel();
    let memory = channel
        .recv_allocations(&importer(stage))
        .unwrap()
        .remove(0);
    check(&memory, 9);
    other.kill();
    assert_eq!(memory.check_giver(), Err(MemoryError::GiverGone));
    let refused = memory.read(memory.stream(), 0, &mut [0]);
    assert_eq!(refused, Err(MemoryError::GiverGone));
    let mut byte = [0];
    // SAFETY: the memory is still imported; what it holds is what is asked.
    let read = unsafe { stage.driver().copy_to_host(D0, &mut byte, memory.address()) };
    say(&format!(
        "after the giver was killed: read {read:?}, byte {}",
        byte[0]
    ));
    let freed = memory.close();
    say(&format!(
        "after the giver was killed: freed {:?}",
        freed.is_ok()
    ));
    drop(freed);
}

fn gives_and_waits(stage: &Stage, socket: &Path) {
    let (pool, stream) = (pool(&stage.device), stage.stream());
    let memory = pool.allocate_on(&stream, 2 * MIB).unwrap();
    let bytes = pattern(2 * MIB as usize, 9);
    memory.write(&stream, 0, &bytes).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    connect(socket).send_allocations(&offer).unwrap();
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

/// Sends on one thread and receives on another.
fn within(offer: &AllocationOffer, importer: &PoolImporter) -> Vec<ImportedAllocation> {
    let (mut one, mut two) = Channel::pair().unwrap();
    thread::scope(|scope| {
        let given = scope.spawn(move || one.send_allocations(offer));
        let taken = two.recv_allocations(importer);
        given.join().unwrap().unwrap();
        taken.unwrap()
    })
}

on_each! {
    fn memory_of_another_library_is_given(stage) {
        let (pool, stream) = (pool(&stage.device), stage.stream());
        let guard = pool.make_current().unwrap();
        // SAFETY: the stream is alive, and the memory is freed once below.
        let at = unsafe { stage.driver().alloc_async(D0, 5 * MIB, stream.as_raw()) }.unwrap();
        // SAFETY: the memory is freed after its last use.
        let borrow = |pool: &MemPool| unsafe { pool.borrow(&stream, at, 5 * MIB) };
        let memory = borrow(&pool).unwrap();
        memory.write(&stream, 0, &pattern(5 * MIB as usize, 3)).unwrap();
        let offer = AllocationOffer::new(&memory).unwrap();
        let taken = within(&offer, &importer(stage)).remove(0);
        check(&taken, 3);
        drop(taken);
        offer.wait_until_returned(PATIENCE).unwrap();
        let other = MemPool::new(&stage.device).unwrap();
        let refused = borrow(&other).unwrap_err();
        assert!(matches!(refused, MemoryError::NotOfPool { .. }), "{refused}");
        drop((offer, memory));
        // SAFETY: the memory was allocated above and is freed once.
        unsafe { stage.driver().free_async(D0, at, stream.as_raw()).unwrap() };
        drop(guard);
        stream.synchronize().unwrap();
    }

    fn the_default_pool_is_not_shareable(stage) {
        let stream = stage.stream();
        let pool = MemPool::default_of(&stage.device).unwrap();
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        let refused = AllocationOffer::new(&memory).unwrap_err();
        let right = matches!(
            refused,
            ShareError::Memory(MemoryError::NotShareable { what, .. }) if what.contains("default")
        );
        assert!(right, "{refused}");
        // The driver refuses it too.
        // SAFETY: the default pool is never destroyed.
        let raw = unsafe { MemPool::from_raw(&stage.device, pool.as_raw()) };
        let refused = raw.export(FD).unwrap_err();
        assert!(matches!(refused, MemoryError::Export { .. }), "{refused}");
        assert!(memory.export().is_err());
        drop((memory, raw));
        stream.synchronize().unwrap();
    }

    fn an_allocation_is_taken_twice_and_again(stage) {
        let (pool, stream) = (pool(&stage.device), stage.stream());
        let importer = importer(stage);
        for round in 0..5 {
            let memory = pool.allocate_on(&stream, 3 * MIB).unwrap();
            memory.write(&stream, 0, &pattern(3 * MIB as usize, round)).unwrap();
            let offer = AllocationOffer::new(&memory).unwrap();
            let first = within(&offer, &importer).remove(0);
            let second = within(&offer, &importer).remove(0);
            assert_eq!(first.address(), second.address());
            drop(first);
            check(&second, round);
            drop(second);
            let third = within(&offer, &importer).remove(0);
            check(&third, round);
            third.close().unwrap();
            drop(offer);
            memory.close().unwrap();
        }
        stream.synchronize().unwrap();
    }
}

mod on_host {
    use super::*;

    #[test]
    fn gives() {
        super::gives(&Stage::on_host(), "share_pool::on_host::taker");
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn taker() {
        if let Some(socket) = socket() {
            takes(&Stage::on_host(), &socket);
        }
    }

    #[test]
    fn gives_to_one_that_is_killed() {
        super::gives_to_one_that_is_killed(&Stage::on_host(), "share_pool::on_host::waiting_taker");
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn waiting_taker() {
        if let Some(socket) = socket() {
            takes_and_waits(&Stage::on_host(), &socket);
        }
    }

    #[test]
    fn takes_from_one_that_is_killed() {
        super::takes_from_one_that_is_killed(
            &Stage::on_host(),
            "share_pool::on_host::waiting_giver",
        );
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn waiting_giver() {
        if let Some(socket) = socket() {
            gives_and_waits(&Stage::on_host(), &socket);
        }
    }
}

mod on_gpu {
    use super::*;

    #[test]
    fn gives() {
        if let Some(stage) = Stage::on_gpu("share_pool::on_gpu::gives") {
            super::gives(&stage, "share_pool::on_gpu::taker");
        }
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn taker() {
        if let (Some(socket), Some(stage)) = (socket(), Stage::on_gpu("share_pool::on_gpu::taker"))
        {
            takes(&stage, &socket);
        }
    }

    #[test]
    fn gives_to_one_that_is_killed() {
        if let Some(stage) = Stage::on_gpu("share_pool::on_gpu::gives_to_one_that_is_killed") {
            super::gives_to_one_that_is_killed(&stage, "share_pool::on_gpu::waiting_taker");
        }
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn waiting_taker() {
        if let (Some(socket), Some(stage)) =
            (socket(), Stage::on_gpu("share_pool::on_gpu::waiting_taker"))
        {
            takes_and_waits(&stage, &socket);
        }
    }

    /// In a process of its own, because the driver may lose the context.
    #[test]
    fn takes_from_one_that_is_killed() {
        if let Some(stage) = Stage::on_gpu("share_pool::on_gpu::takes_from_one_that_is_killed") {
            stage.leave_to_a_process_of_its_own("share_pool::on_gpu::takes_there");
        }
    }

    #[test]
    #[ignore = "the process of a test"]
    fn takes_there() {
        if let Some(stage) = Stage::on_gpu("share_pool::on_gpu::takes_there") {
            super::takes_from_one_that_is_killed(&stage, "share_pool::on_gpu::waiting_giver");
            crate::gpu::say_ended();
        }
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn waiting_giver() {
        if let (Some(socket), Some(stage)) =
            (socket(), Stage::on_gpu("share_pool::on_gpu::waiting_giver"))
        {
            gives_and_waits(&stage, &socket);
        }
    }
}
