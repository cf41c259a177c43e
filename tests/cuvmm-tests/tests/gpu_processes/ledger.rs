//! One budget for several processes, on the host driver and on a GPU: memory that another process
//! has idle, memory of processes that are killed, and memory that they exported.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::gpu::{Stage, own_process};
use crate::on_each;
use cuvmm::driver::{DriverKind, HandleTypes};
use cuvmm::error::{BlockError, LedgerRefusal};
use cuvmm::ledger::{LedgerStats, ProcessState};
use cuvmm::share::Listener;
use cuvmm::{Attachment, Block, Channel, Device, Ledger, Limit, Offer, Physical, Pool};

/// The environment variable with the ledger's directory that a child opens.
const DIRECTORY: &str = "CUVMM_TEST_LEDGER";

/// The environment variable with the socket that a child sends its block to, if it is to.
const SOCKET: &str = "CUVMM_TEST_SOCKET";

/// How long one process waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);

/// The memory that a context costs its process, and what the driver may keep besides.
const CONTEXT: u64 = (523 + 128) << 20;

fn directory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

/// The limit of the ledger: 2 GiB on a GPU.
fn limit(device: &Device) -> u64 {
    match device.driver().kind() {
        DriverKind::Cuda => 2 << 30,
        _ => 64 * device.granularity(),
    }
}

fn join(device: &Device, dir: &Path, name: &str) -> (Ledger, Pool) {
    let limit = limit(device);
    let ledger = Ledger::builder(device, dir).limit(limit).name(name);
    let ledger = ledger.open().unwrap();
    let pool = Pool::builder(device).limit(Limit::Bytes(limit));
    let pool = pool.shareable(HandleTypes::POSIX_FD).ledger(&ledger);
    let pool = pool.build().unwrap();
    (ledger, pool)
}

/// Waits until the figures of a ledger are as they are to be, and returns them. A process that ended
/// is removed after what it had is charged to others, and figures are shown one after another.
fn await_stats(ledger: &Ledger, are_so: impl Fn(&LedgerStats) -> bool) -> LedgerStats {
    let begun = Instant::now();
    loop {
        let stats = ledger.stats();
        if are_so(&stats) {
            return stats;
        }
        assert!(begun.elapsed() < PATIENCE, "{stats}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

on_each! {
    fn what_a_process_has_idle_serves_another_whole_and_clean(stage) {
        let dir = directory();
        let limit = limit(&stage.device);
        let (_one, first) = join(&stage.device, dir.path(), "one");
        let (_other, second) = join(&stage.device, dir.path(), "other");
        let tenants = [first.tenant("a").register().unwrap(), second.tenant("b").register().unwrap()];
        let streams: [_; 2] = stage.streams();
        for turn in 0..10 {
            let which = turn % 2;
            let block = tenants[which].block(limit / 4 * 3).home_stream(&streams[which]);
            let block = block.timeout(PATIENCE).zeroed(turn % 4 < 2).allocate().unwrap();
            if turn % 4 < 2 {
                stage.work().check(&streams[which], block.address(), block.size(), 0);
            }
            let stamp = stage.stamp();
            stage.late_fill(&streams[which], &block, stamp, Duration::from_millis(2));
            stage.check(&streams[which], &block, stamp);
            // Its work runs on when it is freed and another process waits for it.
            drop(block);
        }
        stage.settle();
    }

    fn what_a_killed_process_had_is_free_again(stage) {
        let dir = directory();
        let (device, limit) = (&stage.device, limit(&stage.device));
        let (ledger, pool) = join(device, dir.path(), "parent");
        let tenant = pool.tenant("a").register().unwrap();
        let on_gpu = device.driver().kind() == DriverKind::Cuda;
        let before = device.memory_info().unwrap();
        let mut longest = Duration::ZERO;
        for _ in 0..stage.scaled(20, 5) {
            let mut child = child(dir.path(), on_gpu, None);
            await_ready(&mut child);
            assert!(matches!(
                tenant.try_allocate(limit / 2),
                Err(BlockError::OutOfMemory(short)) if short.ledger.is_some()
            ));
            child.kill().unwrap();
            let begun = Instant::now();
            let block = tenant.block(limit).timeout(PATIENCE).allocate().unwrap();
            longest = longest.max(begun.elapsed());
            if on_gpu {
                let used = before.free.saturating_sub(device.memory_info().unwrap().free);
                assert!(used <= limit + CONTEXT, "{used} bytes are used");
            }
            drop(block);
            pool.trim(0).unwrap();
            child.wait().unwrap();
        }
        println!("from the kill to the allocation: at most {longest:?}");
        await_stats(&ledger, |stats| stats.processes.len() == 1);
    }

    fn memory_of_a_killed_exporter_counts_while_another_process_has_it(stage) {
        let dir = directory();
        let (device, limit) = (&stage.device, limit(&stage.device));
        let (ledger, pool) = join(device, dir.path(), "parent");
        let tenant = pool.tenant("a").register().unwrap();
        let on_gpu = device.driver().kind() == DriverKind::Cuda;
        let stream = stage.stream();
        for _ in 0..stage.scaled(3, 2) {
            let socket = dir.path().join("give");
            let listener = Listener::bind(&socket).unwrap();
            let mut child = child(dir.path(), on_gpu, Some(&socket));
            let mut channel = listener.accept(PATIENCE).unwrap();
            channel.set_timeout(PATIENCE);
            let how = Attachment::builder(device).home_stream(&stream).ledger(&ledger);
            let attached = channel.recv(&how).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            // The slot lends until this process releases what it imported.
            await_stats(&ledger, |stats| {
                stats.processes.iter().any(|it| it.state == ProcessState::Lending)
            });
            let refused = tenant.try_allocate(limit / 2).unwrap_err();
            assert!(refused.is_shortage(), "{refused}");
            let mut bytes = [0; 16];
            attached.read(&stream, 0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"from the owner  ");
            drop(attached);
            let block = tenant.block(limit).timeout(PATIENCE).allocate().unwrap();
            drop(block);
            pool.trim(0).unwrap();
        }
        await_stats(&ledger, |stats| (stats.processes.len(), stats.exports.len()) == (1, 0));
    }

    fn a_hook_gives_memory_in_use_whose_work_still_runs(stage) {
        let dir = directory();
        let limit = limit(&stage.device);
        let (_one, first) = join(&stage.device, dir.path(), "one");
        let (_other, second) = join(&stage.device, dir.path(), "other");
        let kept: Arc<Mutex<Option<Block>>> = Arc::default();
        let drops = Arc::clone(&kept);
        let holder = first.tenant("holder").on_pressure(move |pressure| {
            assert_eq!(pressure.wanted_by, "other");
            drop(drops.lock().unwrap().take());
        });
        let holder = holder.register().unwrap();
        let wants = second.tenant("wants").register().unwrap();
        let streams: [_; 2] = stage.streams();
        let mut longest = Duration::ZERO;
        for _ in 0..stage.scaled(10, 3) {
            let block = holder.block(limit / 4 * 3).home_stream(&streams[0]);
            let block = block.timeout(PATIENCE).allocate().unwrap();
            stage.late_fill(&streams[0], &block, stage.stamp(), Duration::from_millis(5));
            *kept.lock().unwrap() = Some(block);
            let begun = Instant::now();
            let got = wants.block(limit / 2).home_stream(&streams[1]).zeroed(true);
            let got = got.timeout(PATIENCE).allocate().unwrap();
            longest = longest.max(begun.elapsed());
            stage.work().check(&streams[1], got.address(), got.size(), 0);
            assert!(kept.lock().unwrap().is_none());
            drop(got);
        }
        println!("from the request to the allocation, by a hook: at most {longest:?}");
        stage.settle();
    }

    fn memory_outside_the_ledger_is_foreign_and_counts(stage) {
        let dir = directory();
        let device = &stage.device;
        let total = device.total_memory() / device.granularity() * device.granularity();
        let ledger = Ledger::builder(device, dir.path()).limit(total).open().unwrap();
        let pool = Pool::builder(device).limit(Limit::Bytes(total));
        let pool = pool.ledger(&ledger).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let some = 16 * device.granularity();
        let block = tenant.allocate(some).unwrap();
        let outside = Physical::builder(device, 8 * some).create().unwrap();
        // What is used, but for the block, and for what others on a GPU may give back meanwhile.
        let info = device.memory_info().unwrap();
        let foreign = info.total - info.free - 2 * some;
        assert!(foreign >= 7 * some);
        let stats = await_stats(&ledger, |stats| {
            stats.foreign >= foreign && stats.usable <= info.total - foreign
        });
        println!("foreign: {} of {total}", stats.foreign);
        let refused = tenant.try_allocate(total - some).unwrap_err();
        let BlockError::OutOfMemory(shortage) = refused else {
            panic!("{refused}");
        };
        assert_eq!(shortage.ledger.unwrap().reason, LedgerRefusal::Foreign);
        drop((outside, block));
    }
}

/// Starts a process that holds three quarters of the limit, and sends them to a socket if it is to.
fn child(dir: &Path, on_gpu: bool, socket: Option<&Path>) -> Child {
    let part = if on_gpu {
        "ledger::part_on_gpu"
    } else {
        "ledger::part_on_host"
    };
    let mut command = own_process::only(part);
    command.env(DIRECTORY, dir);
    if let Some(socket) = socket {
        command.env(SOCKET, socket);
    }
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    pipes.spawn().unwrap()
}

/// Waits until a child has its memory.
fn await_ready(child: &mut Child) {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = lines
        .map_while(Result::ok)
        .any(|line| line.contains("ready"));
    assert!(ready, "the other process failed");
}

/// Plays the part of the process that is killed.
fn part(stage: Stage) {
    let Some(dir) = std::env::var_os(DIRECTORY) else {
        return;
    };
    let (_ledger, pool) = join(&stage.device, Path::new(&dir), "child");
    let tenant = pool.tenant("b").register().unwrap();
    let size = limit(&stage.device) / 4 * 3;
    // The parent may be giving back what it had.
    let block = tenant.block(size).timeout(PATIENCE).allocate().unwrap();
    let offer = std::env::var_os(SOCKET).map(|socket| {
        block.write(0, b"from the owner  ").unwrap();
        let offer = Offer::block(&block).unwrap();
        let mut channel = Channel::connect(&socket).unwrap();
        channel.set_timeout(PATIENCE);
        channel.send(&offer).unwrap();
        offer
    });
    println!("ready");
    // Ends with its parent too.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop((block, offer));
}

#[test]
#[ignore = "a part of what_a_killed_process_had_is_free_again"]
fn part_on_host() {
    part(Stage::on_host());
}

#[test]
#[ignore = "a part of what_a_killed_process_had_is_free_again"]
fn part_on_gpu() {
    if let Some(stage) = Stage::on_gpu("ledger::part_on_gpu") {
        part(stage);
    }
}
