//! Random programs of all holders of one pool's memory: blocks, heaps, heaps for graphs, regions, paged
//! caches and memory pools of the driver, of two tenants, beside held streams, captures under a guard,
//! limits, sleep, and failures and panics of the driver.
//!
//! The reference knows what lives, and the byte that each holds. Memory that two of them had in
//! common would change its bytes; memory that was unmapped too soon loses the context. The device
//! never holds more than is charged. A panic may lose what the operation worked on, and nothing else.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common;
use crate::common::books::figures;
use crate::common::{D0, G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, CaptureMode, DeviceAddress, Driver};
use cuvmm::paged::LayerGroup;
use cuvmm::pool::CaptureGuard;
use cuvmm::sleep::Blocks;
use cuvmm::{
    Allocation, Block, Contents, Heap, HostStore, Limit, PagedKv, Pool, PoolAllocation, Region,
    Stream, Tenant, TenantMemPool,
};
use proptest::prelude::*;

const LIMIT: u64 = 64;

/// Streams for work, and one for captures.
const STREAMS: usize = 2;

/// The driver's panic.
const ON_PURPOSE: &str = "on purpose";

#[derive(Clone, Debug)]
enum Step {
    Block {
        tenant: usize,
        granules: u64,
        home: Option<usize>,
    },
    Grow {
        index: usize,
        by: u64,
    },
    Shrink {
        index: usize,
    },
    Fork {
        index: usize,
    },
    Heap {
        tenant: usize,
        size: u64,
        stream: usize,
    },
    MemPool {
        granules: u64,
        stream: usize,
    },
    Region {
        tenant: usize,
        granules: u64,
        stream: usize,
    },
    /// Commits memory of a region behind its committed bytes.
    Commit {
        index: usize,
        by: u64,
    },
    /// Withdraws the end of a region.
    Withdraw {
        index: usize,
    },
    Drop {
        index: usize,
    },
    /// Backs a block of the paged cache with memory, or ends that.
    Paged {
        number: u32,
    },
    Sleep {
        tenant: usize,
        keep: bool,
    },
    Wake {
        tenant: usize,
    },
    Hold {
        stream: usize,
    },
    Release {
        stream: usize,
    },
    /// Begins a capture under a guard; ends the one that runs.
    Capture,
    /// Allocates and frees in the capture that runs.
    Captured {
        size: u64,
    },
    Guard,
    Limit {
        granules: u64,
    },
    TenantLimit {
        tenant: usize,
        granules: u64,
    },
    Trim {
        granules: u64,
    },
    Fail {
        nth: u64,
    },
    /// Lets the driver panic in its nth call from now on.
    Panic {
        nth: u64,
    },
    Heal,
}

fn step() -> impl Strategy<Value = Step> {
    let (tenant, stream) = (|| 0..2_usize, || 0..STREAMS);
    let index = any::<usize>;
    prop_oneof![
        8 => (tenant(), 1..20_u64, proptest::option::of(stream()))
            .prop_map(|(tenant, granules, home)| Step::Block { tenant, granules, home }),
        3 => (index(), 1..8_u64).prop_map(|(index, by)| Step::Grow { index, by }),
        2 => index().prop_map(|index| Step::Shrink { index }),
        3 => index().prop_map(|index| Step::Fork { index }),
        8 => (tenant(), 1..16 * G, stream())
            .prop_map(|(tenant, size, stream)| Step::Heap { tenant, size, stream }),
        3 => (1..20_u64, stream()).prop_map(|(granules, stream)| Step::MemPool { granules, stream }),
        5 => (tenant(), 1..20_u64, stream())
            .prop_map(|(tenant, granules, stream)| Step::Region { tenant, granules, stream }),
        3 => (index(), 1..8_u64).prop_map(|(index, by)| Step::Commit { index, by }),
        4 => index().prop_map(|index| Step::Withdraw { index }),
        16 => index().prop_map(|index| Step::Drop { index }),
        4 => (0..16_u32).prop_map(|number| Step::Paged { number }),
        2 => (tenant(), any::<bool>()).prop_map(|(tenant, keep)| Step::Sleep { tenant, keep }),
        2 => tenant().prop_map(|tenant| Step::Wake { tenant }),
        3 => stream().prop_map(|stream| Step::Hold { stream }),
        4 => stream().prop_map(|stream| Step::Release { stream }),
        3 => Just(Step::Capture),
        4 => (1..8 * G).prop_map(|size| Step::Captured { size }),
        1 => Just(Step::Guard),
        1 => (16..=LIMIT).prop_map(|granules| Step::Limit { granules }),
        1 => (tenant(), 8..=LIMIT)
            .prop_map(|(tenant, granules)| Step::TenantLimit { tenant, granules }),
        2 => (0..LIMIT).prop_map(|granules| Step::Trim { granules }),
        1 => (1..20_u64).prop_map(|nth| Step::Fail { nth }),
        2 => (1..20_u64).prop_map(|nth| Step::Panic { nth }),
        2 => Just(Step::Heal),
    ]
}

enum Memory {
    Block(Block),
    Allocation(Allocation),
    OfDriver(PoolAllocation),
    /// Its first bytes are committed.
    Region(Box<Region>),
}

struct Live {
    memory: Memory,
    /// The byte at both ends, if known.
    byte: Option<u8>,
}

impl Live {
    fn range(&self) -> (u64, u64) {
        match &self.memory {
            Memory::Block(block) => (block.address().0, block.size()),
            Memory::Allocation(memory) => (memory.address().0, memory.size()),
            Memory::OfDriver(memory) => (memory.address().0, memory.size()),
            Memory::Region(region) => (region.address().0, region.committed()),
        }
    }

    fn region(&mut self) -> Option<&mut Region> {
        match &mut self.memory {
            Memory::Region(region) => Some(region),
            _ => None,
        }
    }

    fn block(&mut self) -> Option<&mut Block> {
        match &mut self.memory {
            Memory::Block(block) => Some(block),
            _ => None,
        }
    }
}

struct Run<'a, B: Backing> {
    rig: &'a Rig<B>,
    // Fields in drop order.
    live: Vec<Live>,
    capture: Option<CaptureGuard>,
    guard: Option<CaptureGuard>,
    heaps: Vec<Heap>,
    kv: PagedKv,
    graphs: Heap,
    of_driver: TenantMemPool,
    store: HostStore,
    tenants: [Tenant; 2],
    streams: Vec<Stream>,
    held: [bool; STREAMS],
    pool: Pool,
    next: u8,
    failing: bool,
    /// `true` after a panic of the driver, which may have lost memory and addresses.
    lossy: bool,
}

impl<B: Backing> Drop for Run<'_, B> {
    /// Disarms faults and lets streams go, also after a failure.
    fn drop(&mut self) {
        self.rig.faults.disarm();
        self.rig.faults.watch(None);
        self.rig.machine.release_all_streams(D0);
    }
}

impl<'a, B: Backing> Run<'a, B> {
    fn new(rig: &'a Rig<B>) -> Self {
        let pool = common::pool(rig, LIMIT);
        let tenants = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let heap = |tenant| Heap::builder(tenant).addresses(1 << 30);
        let heaps = tenants.iter().map(|tenant| heap(tenant).build().unwrap());
        let streams: Vec<Stream> = (0..=STREAMS)
            .map(|_| Stream::new(&rig.device).unwrap())
            .collect();
        let group = LayerGroup::new(2, 1).part(1, G as u32, 1);
        let kv = PagedKv::builder(&tenants[0], &streams[0], 16).group(group);
        Self {
            kv: kv.build().unwrap(),
            rig,
            live: vec![],
            capture: None,
            guard: None,
            heaps: heaps.collect(),
            graphs: heap(&tenants[0]).for_graphs(true).build().unwrap(),
            of_driver: tenants[1].memory_pool(32 * G).build().unwrap(),
            store: HostStore::builder(&rig.device)
                .ordinary(LIMIT * G)
                .build()
                .unwrap(),
            streams,
            tenants,
            held: [false; STREAMS],
            pool,
            next: 0,
            failing: false,
            lossy: false,
        }
    }

    /// Notes new memory, and has a kernel write to both of its ends.
    fn made<E: std::fmt::Display>(
        &mut self,
        made: Result<Memory, E>,
        stream: usize,
        is_short: impl Fn(&E) -> bool,
    ) {
        match made {
            Ok(memory) => {
                let mut live = Live { memory, byte: None };
                self.stamp(&mut live, stream);
                self.live.push(live);
            }
            Err(error) => assert!(self.fails() || is_short(&error), "{error}"),
        }
    }

    fn stamp(&mut self, live: &mut Live, stream: usize) {
        self.next = self.next % 250 + 1;
        let ((at, size), byte) = (live.range(), self.next);
        let ends = [at, at + size - 1].map(|at| (DeviceAddress(at), 1, byte));
        let stream = self.streams[stream].as_raw();
        let queued = self
            .rig
            .machine
            .queue_kernel(D0, stream, vec![], ends.to_vec());
        queued.unwrap();
        live.byte = Some(byte);
    }

    fn pick(&mut self, index: usize) -> Option<&mut Live> {
        let count = self.live.len();
        (count > 0).then(|| &mut self.live[index % count])
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Block {
                tenant,
                granules,
                home,
            } => {
                let block = self.tenants[tenant].block(granules * G).capacity(LIMIT * G);
                let block = match home {
                    Some(home) => block.home_stream(&self.streams[home]).allocate(),
                    None => block.allocate(),
                };
                let made = block.map(Memory::Block);
                self.made(made, home.unwrap_or(0), |error| error.is_shortage());
            }
            Step::Grow { index, by } => {
                let failing = self.fails();
                let Some(block) = self.pick(index).and_then(Live::block) else {
                    return;
                };
                let (before, to) = (block.size(), block.size() + by * G);
                match block.grow_to(to.min(LIMIT * G)) {
                    Ok(()) => self.pick(index).unwrap().byte = None,
                    Err(error) => {
                        let asleep = block.is_asleep();
                        assert!(failing || asleep || error.is_shortage(), "{error}");
                        assert_eq!(block.size(), before);
                    }
                }
            }
            Step::Shrink { index } => {
                let failing = self.fails();
                let Some(live) = self.pick(index) else { return };
                let Some(block) = live.block() else { return };
                let shrunk = block.shrink_to(block.size().div_ceil(2));
                assert!(failing || block.is_asleep() || shrunk.is_ok(), "{shrunk:?}");
                live.byte = live.byte.filter(|_| shrunk.is_err());
            }
            Step::Fork { index } => {
                let Some(live) = self.pick(index) else { return };
                let Some(block) = live.block() else { return };
                let (size, asleep) = (block.size(), block.is_asleep());
                let (forked, byte) = (block.fork(size, size), live.byte);
                match forked {
                    Ok(fork) => self.live.push(Live {
                        memory: Memory::Block(fork),
                        byte,
                    }),
                    Err(error) => assert!(self.fails() || asleep || error.is_shortage(), "{error}"),
                }
            }
            Step::Heap {
                tenant,
                size,
                stream,
            } => {
                let heap = &self.heaps[tenant];
                let asleep = heap.is_asleep();
                let made = heap.allocate(size, 1, &self.streams[stream]);
                let made = made.map(Memory::Allocation);
                self.made(made, stream, |error| asleep || error.is_out_of_memory());
            }
            // The program's own call would break its capture.
            Step::MemPool { granules, stream } if self.capture.is_none() => {
                let made = self
                    .of_driver
                    .allocate_on(&self.streams[stream], granules * G);
                let made = made.map(Memory::OfDriver);
                self.made(made, stream, |error| error.is_out_of_memory());
            }
            Step::Region {
                tenant,
                granules,
                stream,
            } => {
                let region = self.tenants[tenant].region(LIMIT * G);
                let made = region
                    .largest_extent(4 * G)
                    .reserve()
                    .and_then(|mut region| {
                        region.commit(0..granules * G)?;
                        Ok(Memory::Region(Box::new(region)))
                    });
                self.made(made, stream, |error| error.is_out_of_memory());
            }
            Step::Commit { index, by } => {
                let failing = self.fails();
                let Some(live) = self.pick(index) else { return };
                let Some(region) = live.region() else { return };
                let before = region.committed();
                let end = (before + by * G).min(region.size());
                let committed = region.commit(0..end);
                let error = committed.as_ref().err();
                let allowed = error.is_none_or(|error| failing || error.is_out_of_memory());
                assert!(allowed, "{committed:?}");
                let grown = region.committed() > before;
                assert_eq!(grown, committed.is_ok() && end > before);
                live.byte = live.byte.filter(|_| !grown);
            }
            Step::Withdraw { index } => {
                let Some(live) = self.pick(index) else { return };
                let Some(region) = live.region() else { return };
                let end = region.committed();
                let kept = (end / 2 / G).max(1) * G;
                if kept < end {
                    region.decommit(kept..end).unwrap();
                    live.byte = None;
                }
            }
            Step::Drop { index } => {
                let Some(live) = self.pick(index) else { return };
                let is_drivers = matches!(live.memory, Memory::OfDriver(_));
                if !is_drivers || (self.capture.is_none() && !self.failing) {
                    let index = index % self.live.len();
                    drop(self.live.swap_remove(index));
                }
            }
            Step::Paged { number } => {
                let is_backed = self.kv.is_backed(number).unwrap_or(false);
                let done = match is_backed {
                    true => self.kv.release(&[number]),
                    false => self.kv.back(&[number]),
                };
                let asleep = self.kv.is_asleep();
                let is_short = done.as_ref().err().is_none_or(|it| it.is_out_of_memory());
                assert!(self.fails() || asleep || is_short, "{done:?}");
            }
            Step::Sleep { tenant, keep } if !self.held.contains(&true) => {
                let contents = match keep {
                    true => Contents::Keep(&self.store),
                    false => Contents::Discard,
                };
                let slept = self.selected(tenant).sleep(contents);
                let guarded = self.capture.is_some() || self.guard.is_some();
                assert!(self.fails() || guarded || slept.is_ok(), "{slept:?}");
                if !keep || slept.is_err() {
                    self.forget_bytes();
                }
            }
            Step::Wake { tenant } => {
                let woken = self.selected(tenant).wake();
                if let Err(error) = woken {
                    let guarded = self.capture.is_some() || self.guard.is_some();
                    assert!(
                        self.fails() || guarded || error.shortage().is_some(),
                        "{error}"
                    );
                }
            }
            Step::Hold { stream } => {
                self.rig.machine.hold(D0, self.streams[stream].as_raw());
                self.held[stream] = true;
            }
            Step::Release { stream } => {
                let stream_of = self.streams[stream].as_raw();
                self.rig.machine.release_stream(D0, stream_of);
                self.held[stream] = false;
            }
            Step::Capture => match self.capture.take() {
                Some(guard) => self.end_capture(guard),
                None => self.begin_capture(),
            },
            Step::Captured { size } if self.capture.is_some() => {
                let made = self.graphs.allocate(size, 1, &self.streams[STREAMS]);
                if let Err(error) = made {
                    assert!(self.fails() || error.is_out_of_memory(), "{error}");
                }
            }
            Step::Guard => {
                self.guard = match self.guard.take() {
                    Some(_) => None,
                    None => Some(self.pool.capture_guard()),
                }
            }
            Step::Limit { granules } => drop(self.pool.set_limit(Limit::Bytes(granules * G))),
            Step::TenantLimit { tenant, granules } => {
                drop(self.tenants[tenant].set_limit(granules * G));
            }
            Step::Trim { granules } => drop(self.pool.trim(granules * G)),
            Step::Fail { nth } => {
                self.rig.faults.disarm();
                self.rig
                    .faults
                    .arm(Fault::nth(nth, CUresult::CUDA_ERROR_OUT_OF_MEMORY));
                self.failing = true;
            }
            Step::Panic { nth } => {
                let left = AtomicU64::new(nth);
                self.rig.faults.watch(Some(Arc::new(move |_| {
                    let counts = !std::thread::panicking();
                    if counts && left.fetch_sub(1, Ordering::Relaxed) == 1 {
                        std::panic::panic_any(ON_PURPOSE);
                    }
                })));
            }
            Step::Heal => self.heal(),
            Step::MemPool { .. } | Step::Sleep { .. } | Step::Captured { .. } => {}
        }
    }

    fn heal(&mut self) {
        self.rig.faults.disarm();
        self.rig.faults.watch(None);
        self.failing = false;
    }

    /// Makes a step in which the driver may panic.
    fn try_step(&mut self, step: &Step) {
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.step(step))) else {
            return;
        };
        self.rig.faults.watch(None);
        if panic.downcast_ref::<&str>() != Some(&ON_PURPOSE) {
            resume_unwind(panic);
        }
        self.lossy = true;
        match *step {
            Step::Grow { index, .. }
            | Step::Shrink { index }
            | Step::Fork { index }
            | Step::Commit { index, .. }
            | Step::Withdraw { index } => {
                // Forks share memory.
                if let Some(live) = self.pick(index) {
                    live.byte = None;
                }
                self.forget_bytes();
            }
            Step::Sleep { .. } | Step::Wake { .. } => self.forget_bytes(),
            _ => {}
        }
    }

    /// Returns `true` if an operation may fail.
    fn fails(&self) -> bool {
        self.failing || self.lossy
    }

    /// The blocks of a tenant, with the paged cache and a heap of the first.
    fn selected(&self, tenant: usize) -> Blocks<'_> {
        let blocks = self.tenants[tenant].blocks();
        match tenant {
            0 => blocks.paged(&self.kv).heap(&self.heaps[0]),
            _ => blocks,
        }
    }

    /// Notes that what may have slept has lost its bytes.
    fn forget_bytes(&mut self) {
        for live in &mut self.live {
            if matches!(live.memory, Memory::Block(_) | Memory::Allocation(_)) {
                live.byte = None;
            }
        }
    }

    fn begin_capture(&mut self) {
        self.heal();
        let guard = self.pool.capture_guard();
        let stream = self.streams[STREAMS].as_raw();
        // SAFETY: the stream is alive.
        let begun = unsafe {
            self.rig
                .machine
                .capture_begin(D0, stream, CaptureMode::GLOBAL)
        };
        begun.unwrap();
        self.capture = Some(guard);
    }

    /// Ends a capture that no operation of any holder may have broken.
    fn end_capture(&mut self, guard: CaptureGuard) {
        self.heal();
        let stream = self.streams[STREAMS].as_raw();
        // SAFETY: the stream is alive, and the graph is destroyed once.
        unsafe {
            let graph = self.rig.machine.capture_end(D0, stream).unwrap();
            self.rig.machine.graph_destroy(D0, graph).unwrap();
        }
        drop(guard);
    }

    fn check(&self) {
        assert!(self.rig.device.lost().is_none());
        // What was lost is charged, and in no part.
        let stats = match self.lossy {
            true => self.pool.stats(),
            false => figures(&self.pool),
        };
        let info = self.rig.machine.memory_info(D0).unwrap();
        let used = info.total - info.free;
        let counted = stats.committed + stats.free + stats.quarantined;
        assert!(used <= counted, "{used} of {counted}: {stats:#?}");
        assert!(counted <= LIMIT * G, "{stats:#?}");
        if self.capture.is_some() || !self.rig.keeps_bytes() || self.held.contains(&true) {
            return;
        }
        for live in &self.live {
            let asleep = match &live.memory {
                Memory::Block(block) => block.is_asleep(),
                Memory::Allocation(_) => self.heaps.iter().any(Heap::is_asleep),
                _ => false,
            };
            let Some(byte) = live.byte.filter(|_| !asleep) else {
                continue;
            };
            let (at, size) = live.range();
            for end in [at, at + size - 1] {
                let seen = common::copy(self.rig, end & !3).map(|bytes| bytes[(end % 4) as usize]);
                assert_eq!(seen, Some(byte), "{end:#x} in {size} bytes at {at:#x}");
            }
        }
    }

    fn end(&mut self) {
        if let Some(guard) = self.capture.take() {
            self.end_capture(guard);
        }
        self.heal();
        self.guard = None;
        self.rig.machine.release_all_streams(D0);
        self.held = [false; STREAMS];
        self.check();
        self.live.clear();
    }
}

/// Returns `true` if the driver panicked.
fn run(rig: Rig<impl Backing>, steps: &[Step], (faults, panics): (bool, bool)) -> bool {
    let mut program = Run::new(&rig);
    for step in steps {
        match step {
            Step::Fail { .. } if !faults => continue,
            Step::Panic { .. } if !panics => continue,
            _ if panics => program.try_step(step),
            _ => program.step(step),
        }
        program.check();
    }
    program.end();
    let (pool, lossy) = (program.pool.clone(), program.lossy);
    drop(program);
    let failures = rig.device.drop_failures();
    let closed = pool.close();
    assert!(
        closed.is_ok() || failures > 0 || lossy,
        "{:?}",
        closed.err()
    );
    let hazards = rig.machine.take_hazards();
    assert!(hazards.is_empty(), "{}", hazards[0]);
    if failures == 0 && !lossy {
        common::nothing_left(rig);
    }
    lossy
}

fn programs(usual: u32, (faults, panics): (bool, bool), host: bool) {
    let kinds = (faults, panics);
    crate::programs::run(usual, step(), 1..80, |steps| {
        let lossy = match host {
            true => run(common::host(), steps, kinds),
            false => run(common::model(), steps, kinds),
        };
        assert!(panics || !lossy);
    });
}

#[test]
fn programs_of_all_holders() {
    programs(30, (false, false), false);
}

#[test]
fn programs_of_all_holders_with_faults() {
    programs(30, (true, false), false);
}

#[test]
fn programs_of_all_holders_over_real_memory() {
    programs(10, (true, false), true);
}

#[test]
fn programs_of_all_holders_with_panics() {
    programs(40, (false, true), false);
    programs(20, (true, true), true);
}
