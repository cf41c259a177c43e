//! Random programs with memory pools of the driver within tenants' limits, against another library
//! that allocates as much as it can at every driver call, and against failures of the driver.
//!
//! At every driver call the device holds no more than the pool's limit, and after every step no more
//! than is charged.
//!
//! `unsafe` is used for what another library would allocate.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex};

use crate::common;
use crate::common::books::figures;
use crate::common::{D0, D1, G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{ModelDriver, Nothing};
use cuvmm::driver::{AccessFlags, CUresult, Call, DeviceAddress, Driver, Location, StreamHandle};
use cuvmm::{
    Access, Block, CurrentTenantMemPool, Device, Limit, MemPool, Pool, PoolAllocation, Stream,
    Tenant, TenantMemPool,
};
use proptest::prelude::*;

const STEP: u64 = 32 << 20;

/// The limit of the pool in steps.
const LIMIT: u64 = 14;

#[derive(Clone, Copy, Debug)]
enum Step {
    Build {
        which: usize,
        maximum: u64,
        minimum: u64,
    },
    Drop {
        which: usize,
    },
    Reserve {
        which: usize,
        steps: u64,
    },
    GrowTo {
        which: usize,
        steps: u64,
    },
    ShrinkTo {
        which: usize,
        steps: u64,
    },
    Trim {
        which: usize,
    },
    Current {
        which: usize,
    },
    EndCurrent,
    Allocate {
        which: usize,
        steps: u64,
    },
    Free {
        index: usize,
    },
    Block {
        which: usize,
        granules: u64,
    },
    FreeBlock {
        index: usize,
    },
    TrimPool {
        keep: u64,
    },
    Guarantee {
        which: usize,
        steps: u64,
    },
    Limit {
        which: usize,
        steps: u64,
    },
    Unregister {
        which: usize,
    },
    /// Sets the size in MiB of the pieces that the other library allocates at each driver call, and
    /// the number of calls after which it frees one.
    Library {
        piece: u64,
        frees: u64,
    },
    Settle,
    Fail {
        nth: u64,
    },
    Heal,
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0..2_usize;
    prop_oneof![
        4 => (which(), 1..8_u64, 0..8_u64).prop_map(|(which, maximum, minimum)| Step::Build {
            which, maximum, minimum: minimum.min(maximum)
        }),
        1 => which().prop_map(|which| Step::Drop { which }),
        4 => (which(), 1..9_u64).prop_map(|(which, steps)| Step::Reserve { which, steps }),
        2 => (which(), 1..9_u64).prop_map(|(which, steps)| Step::GrowTo { which, steps }),
        3 => (which(), 0..9_u64).prop_map(|(which, steps)| Step::ShrinkTo { which, steps }),
        1 => which().prop_map(|which| Step::Trim { which }),
        4 => which().prop_map(|which| Step::Current { which }),
        1 => Just(Step::EndCurrent),
        3 => (which(), 1..6_u64).prop_map(|(which, steps)| Step::Allocate { which, steps }),
        3 => any::<usize>().prop_map(|index| Step::Free { index }),
        4 => (which(), 1..LIMIT * 16).prop_map(|(which, granules)| Step::Block { which, granules }),
        3 => any::<usize>().prop_map(|index| Step::FreeBlock { index }),
        1 => (0..LIMIT).prop_map(|keep| Step::TrimPool { keep }),
        1 => (which(), 0..6_u64).prop_map(|(which, steps)| Step::Guarantee { which, steps }),
        1 => (which(), 4..20_u64).prop_map(|(which, steps)| Step::Limit { which, steps }),
        1 => which().prop_map(|which| Step::Unregister { which }),
        3 => (0..80_u64, 1..6_u64).prop_map(|(piece, frees)| Step::Library { piece, frees }),
        3 => Just(Step::Settle),
        1 => (1..30_u64).prop_map(|nth| Step::Fail { nth }),
        2 => Just(Step::Heal),
    ]
}

/// Another library, which allocates from the current pool at every driver call.
struct Library {
    machine: Arc<ModelDriver>,
    stream: StreamHandle,
    default: cuvmm::driver::MemPoolHandle,
    piece: u64,
    frees: u64,
    calls: u64,
    held: Vec<DeviceAddress>,
    /// The limit of the pool in bytes.
    limit: u64,
    /// The pools are open to the other device.
    peers: bool,
}

impl Library {
    fn act(&mut self) {
        self.calls += 1;
        let machine = &self.machine;
        // The default pool is bounded by nothing.
        let ours = machine.current_mem_pool(D0).unwrap() != self.default;
        if ours && self.peers {
            let pool = machine.current_mem_pool(D0).unwrap();
            // SAFETY: the current pool is alive.
            let access = unsafe { machine.mem_pool_access(D0, pool, Location::device(D1)) };
            assert_eq!(access.unwrap(), AccessFlags::READ_WRITE);
        }
        while ours && self.piece > 0 {
            // SAFETY: the stream is alive.
            match unsafe { machine.alloc_async(D0, self.piece << 20, self.stream) } {
                Ok(at) => self.held.push(at),
                Err(_) => break,
            }
        }
        let info = machine.memory_info(D0).unwrap();
        let used = info.total - info.free;
        assert!(
            used <= self.limit,
            "{} MiB of {}",
            used >> 20,
            self.limit >> 20
        );
        if self.calls.is_multiple_of(self.frees) && !self.held.is_empty() {
            let at = self.held.remove(self.calls as usize % self.held.len());
            // SAFETY: nothing uses the memory.
            unsafe { machine.free_async(D0, at, self.stream).unwrap() };
        }
    }

    fn free_all(&mut self) {
        for at in self.held.drain(..) {
            // SAFETY: nothing uses the memory.
            unsafe { self.machine.free_async(D0, at, self.stream).unwrap() };
        }
    }
}

struct Run<'a> {
    rig: &'a Rig<Nothing>,
    library: Arc<Mutex<Library>>,
    // Fields in drop order.
    guard: Option<CurrentTenantMemPool>,
    held: Vec<PoolAllocation>,
    blocks: Vec<Block>,
    memory: [Option<TenantMemPool>; 2],
    tenants: [Option<Tenant>; 2],
    stream: Stream,
    pool: Pool,
    /// The device that the memory pools are open to.
    peer: Option<Device>,
    failing: bool,
}

fn register(pool: &Pool, which: usize) -> Option<Tenant> {
    pool.tenant(["a", "b"][which]).register().ok()
}

impl<'a> Run<'a> {
    fn new(rig: &'a Rig<Nothing>, peers: bool) -> Self {
        let peer = peers.then(|| rig.second());
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(LIMIT * STEP));
        let pool = pool.build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let theirs = Stream::new(&rig.device).unwrap();
        let library = Arc::new(Mutex::new(Library {
            machine: Arc::clone(&rig.machine),
            stream: theirs.as_raw(),
            default: MemPool::default_of(&rig.device).unwrap().as_raw(),
            piece: 0,
            frees: 1,
            calls: 0,
            held: Vec::new(),
            limit: LIMIT * STEP,
            peers: peer.is_some(),
        }));
        let acting = Arc::clone(&library);
        // The stream lives as long as the watcher.
        rig.faults.watch(Some(Arc::new(move |call| {
            let _ = &theirs;
            if call != Call::StreamDestroy {
                acting.lock().unwrap().act();
            }
        })));
        Self {
            rig,
            library,
            guard: None,
            held: Vec::new(),
            blocks: Vec::new(),
            memory: [None, None],
            tenants: [register(&pool, 0), register(&pool, 1)],
            stream,
            pool,
            peer,
            failing: false,
        }
    }

    fn memory(&self, which: usize) -> Option<&TenantMemPool> {
        self.memory[which].as_ref()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Build {
                which,
                maximum,
                minimum,
            } => {
                let Some(tenant) = &self.tenants[which] else {
                    self.tenants[which] = register(&self.pool, which);
                    return;
                };
                let mut made = tenant.memory_pool(maximum * STEP).minimum(minimum * STEP);
                if let Some(peer) = &self.peer {
                    made = made.open_to(peer, Access::ReadWrite);
                }
                if let Ok(made) = made.build() {
                    self.memory[which] = Some(made);
                }
            }
            Step::Drop { which } => self.memory[which] = None,
            Step::Reserve { which, steps } => {
                if let Some(memory) = self.memory(which) {
                    let _ = memory.reserve(steps * STEP);
                }
            }
            Step::GrowTo { which, steps } => {
                if let Some(memory) = self.memory(which) {
                    let _ = memory.grow_to(steps * STEP);
                }
            }
            Step::ShrinkTo { which, steps } => {
                if let Some(memory) = self.memory(which) {
                    let _ = memory.shrink_to(steps * STEP);
                }
            }
            Step::Trim { which } => {
                if let Some(memory) = self.memory(which) {
                    let _ = memory.trim();
                }
            }
            Step::Current { which } => {
                let made = self.memory(which).and_then(|it| it.make_current().ok());
                if made.is_some() {
                    self.guard = made;
                }
            }
            Step::EndCurrent => self.guard = None,
            Step::Allocate { which, steps } => {
                let made = self.memory(which);
                let made = made.and_then(|it| it.allocate_on(&self.stream, steps * STEP).ok());
                self.held.extend(made);
            }
            Step::Free { index } => {
                if !self.held.is_empty() && !self.failing {
                    drop(self.held.swap_remove(index % self.held.len()));
                }
            }
            Step::Block { which, granules } => {
                let tenant = self.tenants[which].as_ref();
                self.blocks
                    .extend(tenant.and_then(|it| it.allocate(granules * G).ok()));
            }
            Step::FreeBlock { index } => {
                if !self.blocks.is_empty() {
                    self.blocks.swap_remove(index % self.blocks.len());
                }
            }
            Step::TrimPool { keep } => drop(self.pool.trim(keep * STEP)),
            Step::Guarantee { which, steps } => {
                if let Some(tenant) = &self.tenants[which] {
                    let _ = tenant.set_guarantee(steps * STEP);
                }
            }
            Step::Limit { which, steps } => {
                if let Some(tenant) = &self.tenants[which] {
                    let _ = tenant.set_limit(steps * STEP);
                }
            }
            Step::Unregister { which } => {
                if let Some(tenant) = self.tenants[which].take() {
                    tenant.unregister();
                }
            }
            Step::Library { piece, frees } => {
                let mut library = self.library.lock().unwrap();
                (library.piece, library.frees) = (piece, frees);
            }
            Step::Settle => {
                let _ = self.stream.synchronize();
                let library = self.library.lock().unwrap();
                // SAFETY: the stream is alive.
                unsafe {
                    library
                        .machine
                        .stream_synchronize(D0, library.stream)
                        .unwrap()
                };
            }
            Step::Fail { nth } => {
                self.rig.faults.disarm();
                let code = CUresult::CUDA_ERROR_UNKNOWN;
                self.rig.faults.arm(Fault::nth(nth, code));
                self.failing = true;
            }
            Step::Heal => {
                self.rig.faults.disarm();
                self.failing = false;
            }
        }
    }

    /// Checks that the figures add up, and that the device holds no more than is charged.
    fn check(&self) {
        let stats = figures(&self.pool);
        let info = self.rig.machine.memory_info(D0).unwrap();
        let used = info.total - info.free;
        let counted = stats.committed + stats.free + stats.quarantined;
        assert!(used <= counted, "{} of {} MiB", used >> 20, counted >> 20);
        assert!(counted <= LIMIT * STEP);
    }

    /// Frees everything, and checks that nothing is charged or held then.
    fn end(mut self) {
        self.rig.faults.disarm();
        {
            let mut library = self.library.lock().unwrap();
            library.piece = 0;
            library.free_all();
            // SAFETY: the stream is alive.
            unsafe {
                library
                    .machine
                    .stream_synchronize(D0, library.stream)
                    .unwrap()
            };
        }
        self.guard = None;
        self.held.clear();
        self.blocks.clear();
        self.stream.synchronize().unwrap();
        self.memory = [None, None];
        self.tenants = [None, None];
        let failures = self.rig.device.drop_failures();
        let closed = self.pool.close();
        assert!(closed.is_ok() || failures > 0, "{:?}", closed.err());
        self.rig.faults.watch(None);
        if failures == 0 {
            let info = self.rig.machine.memory_info(D0).unwrap();
            assert_eq!(info.total, info.free);
            let default = MemPool::default_of(&self.rig.device).unwrap();
            assert!(default.is_current().unwrap());
        }
    }
}

fn run(steps: &[Step], peers: bool) {
    let rig = common::model();
    let mut run = Run::new(&rig, peers);
    for &step in steps {
        run.step(step);
        run.check();
    }
    run.end();
}

#[test]
fn the_device_never_holds_more_than_is_charged() {
    for peers in [false, true] {
        crate::programs::run(75, step(), 1..60, |steps| run(steps, peers));
    }
}
