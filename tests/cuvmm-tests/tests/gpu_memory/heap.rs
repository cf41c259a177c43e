//! Heaps under kernels: contents across stitches, streams that wait, memory that other tenants take,
//! graphs, limits, threads and other devices.
//!
//! `unsafe` is used for copies that take any address, for graphs, and for fills by another device.
//! Streams, graphs and memory belong to the tests and live until the work is complete.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::time::{Duration, Instant};

use crate::gpu;
use crate::gpu::{D0, Stage};
use crate::on_each;
use cuvmm::driver::{Call, CaptureMode, DeviceAddress, GraphExecHandle, Ordinal};
use cuvmm::heap::Preset;
use cuvmm::{
    Access, Allocation, Contents, Device, Heap, HostStore, Limit, Mapper, Pool, Stream, Tenant,
};

const MIB: u64 = 1 << 20;

/// A size in whole granules that is too large for a chunk of small allocations.
fn unit(stage: &Stage) -> u64 {
    stage.scaled(16 * MIB, 2 * MIB)
}

/// Creates a pool of `units` units with a tenant.
fn tenant(stage: &Stage, units: u64) -> (Pool, Tenant) {
    let limit = Limit::Bytes(units * unit(stage));
    let pool = Pool::builder(&stage.device).limit(limit).build().unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    (pool, tenant)
}

fn fill(stage: &Stage, stream: &Stream, memory: &Allocation, stamp: u32) {
    late_fill(stage, stream, memory, stamp, Duration::ZERO);
}

fn late_fill(stage: &Stage, stream: &Stream, memory: &Allocation, stamp: u32, after: Duration) {
    let bytes = gpu::words(memory.size());
    stage
        .work()
        .fill(stream, memory.address(), bytes, stamp, after);
}

fn check(stage: &Stage, stream: &Stream, memory: &Allocation, stamp: u32) {
    let bytes = gpu::words(memory.size());
    stage.work().check(stream, memory.address(), bytes, stamp);
}

/// Returns the first word at an address, once all work is complete.
fn word(stage: &Stage, at: DeviceAddress) -> [u8; 4] {
    let mut bytes = [0; 4];
    // SAFETY: the tests pass addresses of memory that is mapped.
    unsafe { stage.driver().copy_to_host(D0, &mut bytes, at) }.unwrap();
    bytes
}

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// The stamps of cells of one unit, in live allocations and in free memory. Each is there once.
struct Cells<'a> {
    stage: &'a Stage,
    stream: &'a Stream,
    /// Stamps by the pattern that they leave.
    known: BTreeMap<[u8; 4], u32>,
    free: BTreeSet<u32>,
    next: u32,
}

impl Cells<'_> {
    /// Returns a stamp that no cell holds. The host driver has 255 of them.
    fn new_stamp(&mut self) -> u32 {
        loop {
            self.next = self.next % 255 + 1;
            let pattern = self.stage.work().pattern(self.next);
            if !self.known.contains_key(&pattern) {
                self.known.insert(pattern, self.next);
                return self.next;
            }
        }
    }

    /// Finds out which free cells an allocation shows, checks all of their bytes, and stamps them
    /// anew. Returns the new stamps, and the number of cells that were in use before.
    fn take(&mut self, memory: &Allocation) -> (Vec<u32>, usize) {
        let (stage, size) = (self.stage, unit(self.stage));
        stage.settle();
        let cells = (0..memory.size() / size).map(|cell| memory.address().0 + cell * size);
        let mut reused = 0;
        let stamps = cells.map(DeviceAddress).map(|at| {
            let seen = word(stage, at);
            // Memory that was not written before is zero.
            let before = match seen {
                [0, 0, 0, 0] => 0,
                _ => self.known.remove(&seen).expect("a cell holds a stamp"),
            };
            if before > 0 {
                reused += 1;
                assert!(
                    self.free.remove(&before),
                    "the cell of stamp {before} is in use"
                );
            }
            stage.work().check(self.stream, at, size, before);
            let stamp = self.new_stamp();
            stage
                .work()
                .fill(self.stream, at, size, stamp, Duration::ZERO);
            stamp
        });
        (stamps.collect(), reused)
    }

    fn check(&self, memory: &Allocation, stamps: &[u32]) {
        let size = unit(self.stage);
        for (cell, &stamp) in stamps.iter().enumerate() {
            let at = DeviceAddress(memory.address().0 + cell as u64 * size);
            self.stage.work().check(self.stream, at, size, stamp);
        }
    }
}

fn begin(stage: &Stage, stream: &Stream) {
    let mode = CaptureMode::GLOBAL;
    // SAFETY: the stream is alive.
    unsafe { stage.driver().capture_begin(D0, stream.as_raw(), mode) }.unwrap();
}

fn end(stage: &Stage, stream: &Stream) -> GraphExecHandle {
    let driver = stage.driver();
    // SAFETY: the stream is alive, and the graph is destroyed once.
    unsafe {
        let graph = driver.capture_end(D0, stream.as_raw()).unwrap();
        let ready = driver.graph_instantiate(D0, graph).unwrap();
        driver.graph_destroy(D0, graph).unwrap();
        ready
    }
}

/// Opens the second device, or prints a message if there is none. `CUVMM_REQUIRE_GPUS=2` turns a
/// missing device into a failure.
fn second(stage: &Stage, test: &str) -> Option<Device> {
    if let Ok(device) = Device::open(stage.driver().clone(), 1) {
        return Some(device);
    }
    let required = std::env::var("CUVMM_REQUIRE_GPUS").is_ok_and(|count| count != "1");
    assert!(!required, "there is only one device");
    let said = writeln!(
        std::io::stderr(),
        "\n*** {test} DID NOT RUN: it needs two devices ***"
    );
    drop(said);
    None
}

on_each! {
    fn contents_are_the_same_at_each_address(stage) {
        let (pool, tenant) = tenant(stage, 48);
        // Extents are whole units in this preset, so that cells stay whole.
        let heap = Heap::builder(&tenant).preset(Preset::Tight).build().unwrap();
        let stream = stage.stream();
        let mut cells = Cells {
            stage,
            stream: &stream,
            known: BTreeMap::new(),
            free: BTreeSet::new(),
            next: 0,
        };
        let mut random = Random(1);
        let mut live: Vec<(Allocation, Vec<u32>)> = Vec::new();
        let mut reused = 0;
        for _ in 0..stage.scaled(400, 200) {
            let size = (1 + random.below(9)) * unit(stage);
            while live.iter().map(|(it, _)| it.size()).sum::<u64>() + size > 40 * unit(stage) {
                let index = random.below(live.len() as u64) as usize;
                let (memory, stamps) = live.swap_remove(index);
                cells.check(&memory, &stamps);
                cells.free.extend(stamps);
            }
            let memory = heap.allocate(size, 1, &stream).unwrap();
            let (stamps, again) = cells.take(&memory);
            reused += again;
            live.push((memory, stamps));
        }
        for (memory, stamps) in &live {
            cells.check(memory, stamps);
        }
        stage.settle();
        let stats = heap.stats();
        assert!(stats.stitches > 10 && reused > 100, "{reused}, {stats:?}");
        drop(live);
        gpu::eventually(|| match heap.trim() {
            Ok(_) if heap.stats().held == 0 => Ok(()),
            _ => Err("memory is pending"),
        });
        drop((heap, tenant));
        pool.close().unwrap();
    }

    fn a_stream_waits_for_what_another_one_frees(stage) {
        let (pool, tenant) = tenant(stage, 4);
        let heap = Heap::builder(&tenant).build().unwrap();
        let [home, other] = stage.streams();
        for recorded in [false, true] {
            let memory = heap.allocate(4 * unit(stage), 1, &home).unwrap();
            let (busy, next) = if recorded { (&other, &home) } else { (&home, &other) };
            if recorded {
                memory.record_use(&other).unwrap();
            }
            let waits = heap.stats().stream_waits;
            let gate = stage.work().gate(busy);
            fill(stage, busy, &memory, stage.stamp());
            drop(memory);
            let memory = heap.allocate(4 * unit(stage), 1, next).unwrap();
            assert_eq!(heap.stats().stream_waits, waits + 1);
            let stamp = stage.stamp();
            fill(stage, next, &memory, stamp);
            check(stage, next, &memory, stamp);
            gate.open();
            stage.settle();
            check(stage, next, &memory, stamp);
            stage.settle();
        }
        drop((heap, tenant));
        pool.close().unwrap();
    }

    fn without_waits_a_stream_gets_what_is_complete(stage) {
        let (pool, tenant) = tenant(stage, 4);
        let heap = Heap::builder(&tenant).stream_waits(false).build().unwrap();
        let [home, other] = stage.streams();
        let memory = heap.allocate(4 * unit(stage), 1, &home).unwrap();
        let gate = stage.work().gate(&home);
        fill(stage, &home, &memory, stage.stamp());
        drop(memory);
        assert!(heap.allocate(unit(stage), 1, &other).unwrap_err().is_out_of_memory());
        gate.open();
        let memory = gpu::eventually(|| heap.allocate(4 * unit(stage), 1, &other));
        let stamp = stage.stamp();
        fill(stage, &other, &memory, stamp);
        check(stage, &other, &memory, stamp);
        stage.settle();
        assert_eq!(heap.stats().stream_waits, 0);
        drop((memory, heap, tenant));
        pool.close().unwrap();
    }

    fn another_tenant_gets_memory_when_its_work_is_complete(stage) {
        let (pool, a) = tenant(stage, 8);
        let b = pool.tenant("b").register().unwrap();
        let [of_a, of_b] = [&a, &b].map(|tenant| Heap::builder(tenant).build().unwrap());
        let [ours, theirs] = stage.streams();
        for round in 0..4 {
            let (from, to, on, next) = match round % 2 {
                0 => (&of_a, &of_b, &ours, &theirs),
                _ => (&of_b, &of_a, &theirs, &ours),
            };
            let parts = [4, 3, 1].map(|units| from.allocate(units * unit(stage), 1, on).unwrap());
            let gate = stage.work().gate(on);
            for memory in &parts {
                fill(stage, on, memory, stage.stamp());
            }
            drop(parts);
            let refused = to.allocate(unit(stage), 1, next).unwrap_err();
            assert!(refused.is_out_of_memory(), "{refused}");
            gate.open();
            let memory = gpu::eventually(|| to.allocate(8 * unit(stage), 1, next));
            // Nothing of the other tenant is left in it.
            check(stage, next, &memory, 0);
            let stamp = stage.stamp();
            fill(stage, next, &memory, stamp);
            check(stage, next, &memory, stamp);
            stage.settle();
            assert_eq!((from.stats().held, to.stats().held), (0, 8 * unit(stage)));
        }
        drop((of_a, of_b, a, b));
        pool.close().unwrap();
    }

    fn a_graph_keeps_what_its_capture_freed(stage) {
        let (pool, tenant) = tenant(stage, 12);
        let graphs = Heap::builder(&tenant).for_graphs(true).build().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let [stream, other] = stage.streams();
        let (stamps, size) = ([0; 3].map(|_| stage.stamp()), 2 * unit(stage));
        begin(stage, &stream);
        let scratch = graphs.allocate(size, 1, &stream).unwrap();
        fill(stage, &stream, &scratch, stamps[0]);
        let at = scratch.address();
        drop(scratch);
        let first = graphs.allocate(size, 1, &stream).unwrap();
        assert_eq!(first.address(), at, "the capture reuses what it freed");
        fill(stage, &stream, &first, stamps[1]);
        let second = graphs.allocate(size, 1, &stream).unwrap();
        fill(stage, &stream, &second, stamps[2]);
        let graph = end(stage, &stream);
        let kept = second.address();
        drop(second);
        for round in 0..5 {
            fill(stage, &stream, &first, stage.stamp());
            stage.work().fill(&stream, kept, size, stage.stamp(), Duration::ZERO);
            // SAFETY: the heap for graphs is alive, and keeps all memory of the capture.
            unsafe { stage.driver().graph_launch(D0, graph, stream.as_raw()) }.unwrap();
            check(stage, &stream, &first, stamps[1]);
            stage.work().check(&stream, kept, size, stamps[2]);
            // All other memory changes hands meanwhile, and is none of the graph's.
            let memory = gpu::eventually(|| heap.allocate((8 - round) * unit(stage), 1, &other));
            let stamp = stage.stamp();
            late_fill(stage, &other, &memory, stamp, Duration::from_millis(1));
            check(stage, &other, &memory, stamp);
            assert!(graphs.trim().unwrap() == 0 && graphs.stats().held >= 2 * size);
        }
        stage.settle();
        // SAFETY: the launches are complete, and the graph is destroyed once.
        unsafe { stage.driver().graph_exec_destroy(D0, graph) }.unwrap();
        drop((first, graphs));
        gpu::eventually(|| heap.allocate(12 * unit(stage), 1, &other).map(drop));
        drop((heap, tenant));
        pool.close().unwrap();
    }

    fn a_graph_works_after_its_memory_slept(stage) {
        let (pool, tenant) = tenant(stage, 12);
        let graphs = Heap::builder(&tenant).for_graphs(true).build().unwrap();
        let [stream, other] = stage.streams();
        let unit = unit(stage);
        let stamps = [0; 3].map(|_| stage.stamp());
        begin(stage, &stream);
        let mut parts: Vec<_> = (0..8).map(|_| graphs.allocate(unit, 1, &stream).unwrap()).collect();
        for index in [6, 4, 2, 0] {
            drop(parts.remove(index));
        }
        // Of memory in four places.
        let joined = graphs.allocate(4 * unit, 1, &stream).unwrap();
        fill(stage, &stream, &joined, stamps[0]);
        fill(stage, &stream, &parts[0], stamps[1]);
        let graph = end(stage, &stream);
        let store = HostStore::builder(&stage.device).limit(12 * unit).build().unwrap();
        // SAFETY: the heap for graphs is alive, and awake.
        let launch = || unsafe { stage.driver().graph_launch(D0, graph, stream.as_raw()) }.unwrap();
        launch();
        for contents in [Contents::Keep(&store), Contents::Discard] {
            fill(stage, &stream, &parts[1], stamps[2]);
            stage.settle();
            let held = graphs.stats().held;
            assert_eq!(graphs.alone().release(true).sleep(contents).unwrap().given, held);
            assert_eq!(pool.stats().committed, 0);
            let block = tenant.block(12 * unit).home_stream(&other).allocate().unwrap();
            stage.work().fill(&other, block.address(), gpu::words(12 * unit), stage.stamp(), Duration::ZERO);
            stage.settle();
            drop(block);
            assert_eq!(graphs.alone().wake().unwrap().mapped, held);
            if matches!(contents, Contents::Keep(_)) {
                for (memory, stamp) in [(&joined, 0), (&parts[0], 1), (&parts[1], 2)] {
                    check(stage, &stream, memory, stamps[stamp]);
                }
            }
            launch();
            check(stage, &stream, &joined, stamps[0]);
            check(stage, &stream, &parts[0], stamps[1]);
        }
        stage.settle();
        // SAFETY: the launches are complete, and the graph is destroyed once.
        unsafe { stage.driver().graph_exec_destroy(D0, graph) }.unwrap();
        drop((joined, parts, graphs, tenant));
        pool.close().unwrap();
    }

    fn a_trim_leaves_what_is_busy(stage) {
        let (pool, tenant) = tenant(stage, 8);
        let heap = Heap::builder(&tenant).build().unwrap();
        let [idle, busy] = stage.streams();
        let (one, two) = (
            heap.allocate(4 * unit(stage), 1, &idle).unwrap(),
            heap.allocate(4 * unit(stage), 1, &busy).unwrap(),
        );
        let stamp = stage.stamp();
        fill(stage, &idle, &one, stage.stamp());
        idle.synchronize().unwrap();
        let gate = stage.work().gate(&busy);
        fill(stage, &busy, &two, stamp);
        drop((one, two));
        assert_eq!(heap.trim().unwrap(), 4 * unit(stage));
        assert_eq!(heap.stats().held, 4 * unit(stage));
        // The stream that is at work can still use its memory.
        let again = heap.allocate(4 * unit(stage), 1, &busy).unwrap();
        check(stage, &busy, &again, stamp);
        gate.open();
        stage.settle();
        drop(again);
        gpu::eventually(|| match heap.trim() {
            Ok(_) if heap.stats().held == 0 => Ok(()),
            _ => Err("memory is pending"),
        });
        drop((heap, tenant));
        pool.close().unwrap();
    }

    fn a_full_heap_refuses_and_goes_on(stage) {
        let (pool, tenant) = tenant(stage, 16);
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = stage.stream();
        let mut live: Vec<(Allocation, u32)> = Vec::new();
        for round in 0..stage.scaled(20, 5) {
            let refused = loop {
                match heap.allocate((1 + round % 3) * unit(stage), 1, &stream) {
                    Ok(memory) => {
                        let stamp = stage.stamp();
                        fill(stage, &stream, &memory, stamp);
                        live.push((memory, stamp));
                    }
                    Err(error) => break error,
                }
            };
            assert!(refused.is_out_of_memory(), "{refused}");
            let stats = heap.stats();
            assert!(stats.held <= 16 * unit(stage) && pool.stats().committed <= 16 * unit(stage));
            for (memory, stamp) in &live {
                check(stage, &stream, memory, *stamp);
            }
            stage.settle();
            let half = live.len() / 2;
            live.rotate_left(1 + round as usize % half);
            live.truncate(half);
        }
        live.clear();
        let all = gpu::eventually(|| heap.allocate(16 * unit(stage), 1, &stream));
        drop((all, heap, tenant));
        pool.close().unwrap();
    }

    fn eight_threads_share_a_heap(stage) {
        let (pool, tenant) = tenant(stage, 96);
        let heap = Heap::builder(&tenant).preset(Preset::Fast).build().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let heap = &heap;
                scope.spawn(move || {
                    let (mut random, stream) = (Random(thread), stage.stream());
                    let mut live: Vec<(Allocation, u32)> = Vec::new();
                    for round in 0..stage.scaled(200, 40) {
                        let size = match round % 3 {
                            0 => 4 + random.below(MIB / 2),
                            _ => MIB + random.below(unit(stage)),
                        };
                        let memory = gpu::eventually(|| heap.allocate(size, 1, &stream));
                        let stamp = stage.stamp();
                        fill(stage, &stream, &memory, stamp);
                        live.push((memory, stamp));
                        if live.len() > 2 {
                            let index = random.below(3) as usize;
                            let (memory, stamp) = live.swap_remove(index);
                            check(stage, &stream, &memory, stamp);
                        }
                    }
                    for (memory, stamp) in &live {
                        check(stage, &stream, memory, *stamp);
                    }
                    stream.synchronize().unwrap();
                });
            }
        });
        stage.settle();
        assert_eq!((heap.stats().live, heap.stats().allocations), (0, 0));
        drop((heap, tenant));
        pool.close().unwrap();
    }

    fn the_mapper_unmaps_what_is_not_needed_under_kernels(stage) {
        let mapper = Mapper::start(&stage.device).unwrap();
        let size = stage.scaled(2 * MIB, MIB + (64 << 10));
        let limit = Limit::Bytes(128 * size);
        let pool = Pool::builder(&stage.device).limit(limit).mapper(&mapper).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).addresses(1024 * size).build().unwrap();
        let stream = stage.stream();
        let mut random = Random(1);
        let mut live: Vec<(Allocation, u32)> = Vec::new();
        let unmapped = || stage.device.mapper_calls().count(Call::MemUnmap);
        let begun = Instant::now();
        let mut steps = 0;
        while steps < 400 || (unmapped() == 0 && begun.elapsed() < Duration::from_secs(20)) {
            steps += 1;
            let wanted = (1 + random.below(24)) * size;
            while live.iter().map(|(it, _)| it.size()).sum::<u64>() + wanted > 96 * size {
                let index = random.below(live.len() as u64) as usize;
                let (memory, stamp) = live.swap_remove(index);
                for at in ends(&memory) {
                    stage.work().check(&stream, at, 4096, stamp);
                }
            }
            let memory = heap.allocate(wanted, 1, &stream).unwrap();
            let stamp = stage.stamp();
            for at in ends(&memory) {
                stage.work().fill(&stream, at, 4096, stamp, Duration::ZERO);
            }
            live.push((memory, stamp));
        }
        stage.settle();
        assert!(unmapped() > 0, "the mapper unmapped nothing: {:?}", heap.stats());
        drop((live, heap, tenant));
        pool.close().unwrap();
        drop(mapper);
    }

    fn another_device_uses_the_memory_of_a_heap(stage) {
        let Some(peer) = second(stage, "another_device_uses_the_memory_of_a_heap") else { return };
        let (pool, tenant) = tenant(stage, 8);
        let open = Heap::builder(&tenant).open_to(&peer, Access::ReadWrite).build().unwrap();
        let (home, theirs) = (stage.stream(), Stream::new(&peer).unwrap());
        let (driver, device) = (stage.driver(), Ordinal(1));
        let fill_there = |memory: &Allocation, byte| {
            let (at, size) = (memory.address(), memory.size());
            // SAFETY: the memory lives until the work is complete, or its use is recorded.
            unsafe { driver.fill_async(device, at, byte, size, theirs.as_raw()) }
        };
        // Each half of an extent, and what is stitched of the other halves.
        let whole = [2, 2, 2, 2].map(|units| open.allocate(units * unit(stage), 1, &home).unwrap());
        drop(whole);
        let mut halves = Vec::from([(); 8].map(|()| open.allocate(unit(stage), 1, &home).unwrap()));
        for index in [7, 4, 3, 0] {
            drop(halves.remove(index));
        }
        let stitched = open.allocate(2 * unit(stage), 1, &home).unwrap();
        assert_eq!(open.stats().stitches, 1);
        home.synchronize().unwrap();
        for (byte, memory) in (1..).zip(halves.iter().chain([&stitched])) {
            fill_there(memory, byte).unwrap();
        }
        theirs.synchronize().unwrap();
        for (byte, memory) in (1..).zip(halves.iter().chain([&stitched])) {
            for cell in 0..memory.size() / MIB {
                let at = DeviceAddress(memory.address().0 + cell * MIB);
                assert_eq!(word(stage, at), [byte; 4]);
            }
        }
        let stamp = stage.stamp();
        fill(stage, &home, &stitched, stamp);
        home.synchronize().unwrap();
        let mut seen = [0; 4];
        // SAFETY: the memory is alive, and its work is complete.
        unsafe { driver.copy_to_host(device, &mut seen, stitched.address()) }.unwrap();
        assert_eq!(seen, stage.work().pattern(stamp));
        // Its work is waited for.
        drop((halves, stitched));
        let memory = open.allocate(8 * unit(stage), 1, &home).unwrap();
        for round in 0..stage.scaled(50, 5) {
            memory.record_use(&theirs).unwrap();
            fill_there(&memory, round).unwrap();
        }
        drop(memory);
        let next = open.allocate(8 * unit(stage), 1, &home).unwrap();
        let stamp = stage.stamp();
        fill(stage, &home, &next, stamp);
        check(stage, &home, &next, stamp);
        stage.settle();
        theirs.synchronize().unwrap();
        check(stage, &home, &next, stamp);
        stage.settle();
        drop((next, open));
        // Memory of a heap that is not open to it is refused to the device.
        let shut = Heap::builder(&tenant).build().unwrap();
        let memory = shut.allocate(8 * unit(stage), 1, &home).unwrap();
        assert!(fill_there(&memory, 1).is_err());
        assert!(memory.record_use(&theirs).is_err());
        stage.settle();
        drop((memory, shut, tenant, theirs));
        pool.close().unwrap();
        drop(peer);
    }
}

/// Returns the addresses of the first and the last 4 KiB of an allocation.
fn ends(memory: &Allocation) -> [DeviceAddress; 2] {
    let first = memory.address().0;
    [first, first + memory.size() - 4096].map(DeviceAddress)
}
