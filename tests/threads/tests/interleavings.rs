//! Threads in one pool, in many interleavings. Shuttle chooses the interleavings, and reports a
//! wait that never ends as a deadlock. `RUSTFLAGS="--cfg cuvmm_shuttle"` enables these tests.
//!
//! `CUVMM_ORDERS=N` tries N interleavings of each scenario. A failure prints its schedule, and
//! `CUVMM_SCHEDULE=...` runs the test named on the command line with that schedule.
//!
//! The machine sees all threads as one. Therefore no scenario waits for a stream that is held back,
//! which would stop the other threads too, and none captures, because a capture's mode belongs to a
//! thread. A thread that opens a scope does nothing in it but spawn, because shuttle wakes it when
//! the scope's last thread ends, whatever it waits for.
#![cfg(cuvmm_shuttle)]
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

#[path = "../../cuvmm-tests/tests/common/mod.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use common::books::{books, figures};
use common::{D0, Rig, manner};
use cuvmm::driver::Call;
use cuvmm::driver::host::{HostDriver, HostMemory, HostOptions};
use cuvmm::driver::model::{Backing, ModelDriver, Nothing};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PoolError, SleepError};
use cuvmm::paged::LayerGroup;
use cuvmm::pool::PoolBuilder;
use cuvmm::{
    Access, Block, Contents, DeviceVec, Growth, Hardened, Heap, Limit, Mapper, PagedKv, Pool,
    PoolStats, Region, Registration, Stream, Tenant,
};
use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler};
use shuttle::thread::{self, yield_now};
use shuttle::{Config, Runner};

/// The granule. It is small because bytes are copied.
const G: u64 = 64 << 10;

/// Practically never: shuttle has no clock.
const FOREVER: Duration = Duration::from_secs(1 << 20);

/// Runs a scenario in `orders` random interleavings, and in some with few switches at the worst
/// points.
fn explore(orders: usize, scenario: impl Fn() + Clone + Send + Sync + 'static) {
    let mut config = Config::new();
    // Four times the default, because tests are built with little optimization.
    config.stack_size = 1 << 18;
    config.silence_warnings = true;
    if let Ok(schedule) = std::env::var("CUVMM_SCHEDULE") {
        Runner::new(ReplayScheduler::new_from_encoded(&schedule), config).run(scenario);
        return;
    }
    let told = std::env::var("CUVMM_ORDERS").ok();
    let orders = told.and_then(|text| text.parse().ok()).unwrap_or(orders);
    Runner::new(RandomScheduler::new(orders), config.clone()).run(scenario.clone());
    for switches in 1..=3 {
        let scheduler = PctScheduler::new(switches, orders / 8 + 1);
        Runner::new(scheduler, config.clone()).run(scenario.clone());
    }
}

/// A pool on a machine of its own, and the addresses that its blocks use.
struct Scene<B: Backing> {
    rig: Rig<B>,
    pool: Pool,
    limit: u64,
    claims: Mutex<BTreeMap<u64, u64>>,
}

fn model() -> Rig<Nothing> {
    common::rig(ModelDriver::new(
        common::model_options().granularity(G).capacity(64 << 20),
    ))
}

fn host() -> Rig<HostMemory> {
    let options = HostOptions::new().manner(manner()).granularity(G);
    common::rig(HostDriver::new(options.capacity(64 << 20)))
}

/// Creates a pool of `granules` granules without a mapper.
fn scene(granules: u64) -> Scene<Nothing> {
    Scene::new(model(), granules, |builder| builder.build())
}

impl<B: Backing> Scene<B> {
    fn new(
        rig: Rig<B>,
        granules: u64,
        build: impl FnOnce(PoolBuilder<'_>) -> Result<Pool, PoolError>,
    ) -> Self {
        let limit = granules * G;
        let builder = Pool::builder(&rig.device).limit(Limit::Bytes(limit));
        let pool = build(builder).unwrap();
        Self {
            rig,
            pool,
            limit,
            claims: Mutex::default(),
        }
    }

    fn stream(&self) -> Stream {
        Stream::new(&self.rig.device).unwrap()
    }

    fn held_stream(&self) -> Stream {
        let stream = self.stream();
        self.hold(&stream);
        stream
    }

    fn hold(&self, stream: &Stream) {
        self.rig.machine.hold(D0, stream.as_raw());
    }

    fn release(&self, stream: &Stream) {
        self.rig.machine.release_stream(D0, stream.as_raw());
    }

    fn tenant(&self, name: &str) -> Tenant {
        self.pool.tenant(name).register().unwrap()
    }

    /// Claims the addresses of a new block, which no other block may use. Returns `None` if memory
    /// was short or the tenant is gone.
    fn had(&self, got: Result<Block, BlockError>) -> Option<Used<'_>> {
        match got {
            Ok(block) => Some(self.claim(block)),
            Err(BlockError::OutOfMemory(_) | BlockError::Unregistered { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn claim(&self, block: Block) -> Used<'_> {
        self.occupy(block.address().0, block.capacity());
        Used {
            block,
            claims: &self.claims,
        }
    }

    /// Claims addresses that nothing else may use.
    fn occupy(&self, from: u64, size: u64) {
        let mut claims = self.claims.lock().unwrap();
        if let Some((&other, &length)) = claims.range(..from + size).next_back() {
            assert!(other + length <= from, "two blocks at {from:#x}");
        }
        claims.insert(from, size);
    }

    /// Allocates from a heap, which may be short of memory or asleep, and frees it.
    fn come_and_go(&self, heap: &Heap, size: u64, stream: &Stream) {
        match heap.allocate(size, 1, stream) {
            Ok(memory) => {
                let from = memory.address().0;
                self.occupy(from, size);
                yield_now();
                self.claims.lock().unwrap().remove(&from);
            }
            Err(BlockError::OutOfMemory(_) | BlockError::Memory(MemoryError::HeapAsleep(_))) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Queues a kernel that writes to the whole block.
    fn launch(&self, block: &Block, stream: &Stream) {
        let writes = (block.address(), block.size(), 1);
        self.rig.kernel(stream, &[], &[writes]);
    }

    /// Queues a kernel on a block that other threads may move or put to sleep: such work needs a
    /// lease. Queues nothing if the block sleeps.
    fn launch_leased(&self, block: &Block, stream: &Stream) {
        match block.lease_for(Access::ReadWrite) {
            // The stream is not held back, so the kernel has ended when the lease does.
            Ok(lease) => {
                self.launch(block, stream);
                drop(lease);
            }
            Err(MemoryError::Asleep { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Checks the invariants that hold at any moment.
    fn look(&self) -> PoolStats {
        let stats = figures(&self.pool);
        let held = stats.committed + stats.free + stats.quarantined;
        assert!(held <= self.limit, "{stats:#?}");
        assert!(self.rig.machine.live().physical_bytes <= self.limit);
        self.is_whole();
        stats
    }

    fn is_whole(&self) {
        let lost = self.rig.device.lost();
        assert!(lost.is_none(), "unmapped under a kernel: {lost:?}");
    }

    /// Checks the invariants that hold while no operation is running.
    fn books(&self) -> PoolStats {
        self.look();
        let stats = books(&self.rig, &self.pool);
        let mut mapped = self.rig.machine.snapshot().mappings;
        let count = mapped.len();
        mapped.sort_unstable_by_key(|mapping| mapping.handle.0);
        mapped.dedup_by_key(|mapping| mapping.handle.0);
        assert_eq!(mapped.len(), count, "memory that two mappings share");
        stats
    }

    /// Ends a scenario: all memory can be allocated again, and is released. The scenario's tenants,
    /// blocks and streams are gone, except those whose memory is cached in the pool.
    fn end(self) {
        self.rig.machine.release_all_streams(D0);
        assert_eq!(self.books().in_use, 0);
        let last = self.tenant("last");
        // Without a home stream the allocation must not wait for any stream.
        drop(last.try_allocate(self.limit).unwrap());
        last.unregister();
        self.books();
        self.pool.close().unwrap();
        let lost = self.rig.device.lost();
        assert!(lost.is_none(), "unmapped under a kernel: {lost:?}");
        common::nothing_left(self.rig);
    }
}

/// A block and the claim on its addresses, which ends just before the block.
struct Used<'a> {
    block: Block,
    claims: &'a Mutex<BTreeMap<u64, u64>>,
}

impl Drop for Used<'_> {
    fn drop(&mut self) {
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        claims.remove(&self.block.address().0);
    }
}

impl Deref for Used<'_> {
    type Target = Block;

    fn deref(&self) -> &Block {
        &self.block
    }
}

impl DerefMut for Used<'_> {
    fn deref_mut(&mut self) -> &mut Block {
        &mut self.block
    }
}

#[test]
fn another_tenant_takes_everything_back() {
    explore(750, || {
        let scene = scene(4);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let stream = scene.held_stream();
                    for granules in [2, 2, 1] {
                        let got = a.block(granules * G).home_stream(&stream).try_allocate();
                        if let Some(block) = scene.had(got) {
                            scene.launch(&block, &stream);
                        }
                    }
                    scene.release(&stream);
                });
            }
            scope.spawn(|| {
                let stream = scene.stream();
                for _ in 0..4 {
                    let got = b.block(4 * G).home_stream(&stream).try_allocate();
                    if let Some(block) = scene.had(got) {
                        scene.launch(&block, &stream);
                        assert_eq!(scene.look().in_use, 4 * G);
                    }
                    yield_now();
                }
            });
        });
        drop((a, b));
        scene.end();
    });
}

#[test]
fn a_shelf_is_swept_and_closed_while_blocks_come_and_go() {
    explore(750, || {
        let scene = scene(4);
        let a = scene.tenant("a");
        let stream = scene.stream();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..2 {
                        let got = a.block(G).home_stream(&stream).try_allocate();
                        if let Some(block) = scene.had(got) {
                            scene.launch(&block, &stream);
                        }
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..2 {
                    scene.look();
                    scene.pool.trim(0).unwrap();
                }
            });
            scope.spawn(|| a.clone().unregister());
        });
        let stats = scene.books();
        assert_eq!(
            stats.committed, 0,
            "a tenant without blocks was kept: {stats:#?}"
        );
        assert!(stats.tenants.is_empty());
        drop((a, stream));
        scene.end();
    });
}

#[test]
fn a_lease_ends_while_its_block_is_freed_and_wanted() {
    explore(750, || {
        let scene = scene(4);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let (home, other) = (scene.held_stream(), scene.held_stream());
        let block = a.block(2 * G).home_stream(&home).try_allocate().unwrap();
        scene.launch(&block, &home);
        let lease = block.lease();
        let address = block.address();
        let ending = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let second = lease.clone();
                drop(lease);
                scene.rig.kernel(&other, &[], &[(address, 2 * G, 1)]);
                second.record_use(&other).unwrap();
                ending.store(true, Ordering::SeqCst);
                drop(second);
                scene.release(&other);
            });
            scope.spawn(|| {
                drop(block);
                let got = a.block(2 * G).home_stream(&home).try_allocate();
                if let Some(next) = scene.had(got) {
                    let leased = !ending.load(Ordering::SeqCst);
                    assert!(!leased || next.address() != address, "reused under a lease");
                    scene.launch(&next, &home);
                }
                scene.release(&home);
            });
            scope.spawn(|| {
                for granules in [4, 2, 4, 2] {
                    drop(scene.had(b.try_allocate(granules * G)));
                    scene.look();
                }
            });
        });
        drop((a, b, home, other));
        scene.end();
    });
}

/// A lease ends while other threads poll the fences of the memory that it keeps: a block shrinks,
/// grows and is dropped, a tenant needs the memory, and a compaction runs.
#[test]
fn a_lease_ends_beside_those_who_poll_what_it_keeps() {
    explore(500, || {
        for forks in [false, true] {
            let scene = scene(6);
            let (a, b) = (scene.tenant("a"), scene.tenant("b"));
            let (home, other) = (scene.stream(), scene.held_stream());
            let root = a.block(2 * G).largest_extent(G).home_stream(&home);
            let root = root.try_allocate().unwrap();
            let (root, mut block) = match forks {
                true => {
                    let fork = root.fork(2 * G, 2 * G).unwrap();
                    (Some(root), fork)
                }
                false => (None, root),
            };
            let (lease, address) = (block.lease(), block.address());
            thread::scope(|scope| {
                scope.spawn(|| {
                    scene.rig.kernel(&other, &[(address, 2 * G)], &[]);
                    lease.record_use(&other).unwrap();
                    drop(lease);
                    yield_now();
                    scene.release(&other);
                });
                scope.spawn(|| {
                    block.shrink_to(G).unwrap();
                    // A block with shared memory has to wait for the lease and its work.
                    let grown = block.try_grow_to(2 * G);
                    assert!(grown.is_ok() || forks, "{grown:?}");
                    drop(block);
                });
                scope.spawn(|| {
                    for granules in [4, 6] {
                        scene.pool.trim(0).unwrap();
                        drop(scene.had(b.try_allocate(granules * G)));
                        scene.pool.compact(|_| true).unwrap();
                        scene.look();
                    }
                });
            });
            drop((root, a, b, home, other));
            scene.end();
        }
    });
}

/// One tenant's block grows while another tenant reclaims the precommitted memory.
fn margin_is_wanted_by_two(scene: &Scene<Nothing>) {
    let (a, b) = (scene.tenant("a"), scene.tenant("b"));
    let stream = scene.stream();
    let grown = a.block(32 * G).capacity(64 * G).home_stream(&stream);
    let mut grown = scene.claim(grown.try_allocate().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                for granules in 33..=38 {
                    match grown.try_grow_to(granules * G) {
                        Ok(()) | Err(BlockError::OutOfMemory(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                    scene.launch(&grown, &stream);
                }
                // Memory given up by a shrink is cached, not precommitted.
                grown.shrink_to(32 * G).unwrap();
            }
        });
        scope.spawn(|| {
            for granules in [6, 8, 5] {
                drop(scene.had(b.try_allocate(granules * G)));
            }
        });
        scope.spawn(|| {
            scene.look();
            scene.pool.trim(34 * G).unwrap();
            scene.look();
        });
    });
}

#[test]
fn margin_is_grown_into_while_another_takes_it() {
    explore(500, || {
        let scene = scene(40);
        margin_is_wanted_by_two(&scene);
        scene.end();
    });
}

#[test]
fn margin_comes_from_the_mapper_while_another_takes_it() {
    explore(750, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 44, |builder| builder.mapper(&mapper).build());
        margin_is_wanted_by_two(&scene);
        mapper.stop();
        scene.end();
    });
}

/// Blocks of one thread grow, one after the other, while the mapper precommits for them.
fn grow_ahead(scene: &Scene<Nothing>, tenant: &Tenant, stream: &Stream) {
    // The second block reuses the slot of the first and needs more memory.
    for begun in [32, 44] {
        let block = tenant.block(begun * G).capacity(64 * G).home_stream(stream);
        let Some(mut block) = scene.had(block.try_allocate()) else {
            continue;
        };
        for granules in begun + 1..begun + 7 {
            match block.try_grow_to(granules * G) {
                Ok(()) => scene.launch(&block, stream),
                Err(BlockError::OutOfMemory(_) | BlockError::Unregistered { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Waits for the mapper. Shuttle gives up if it never precommits.
fn until_ahead(tenant: &Tenant) {
    while tenant.stats().precommitted == 0 {
        yield_now();
    }
}

#[test]
fn blocks_grow_together_while_the_mapper_places_ahead_of_each() {
    explore(750, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 40, |builder| builder.mapper(&mapper).build());
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let stream = scene.stream();
        let of = a.block(4 * G).capacity(16 * G).home_stream(&stream);
        let mut blocks = of.growth(Growth::Part(64)).try_allocate_many(3).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for granules in 5..=12 {
                    let before: Vec<u64> = blocks.iter().map(Block::size).collect();
                    let mut step: Vec<_> = blocks.iter_mut().map(|it| (it, granules * G)).collect();
                    match a.try_grow_all(&mut step) {
                        Ok(()) => assert!(a.stats().in_use == 3 * granules * G),
                        Err(BlockError::Refused { cause, .. }) => {
                            assert!(matches!(*cause, BlockError::OutOfMemory(_)), "{cause}");
                            assert_eq!(a.stats().in_use, before.iter().sum::<u64>());
                        }
                        Err(error) => panic!("{error}"),
                    }
                    for block in &blocks {
                        scene.launch(block, &stream);
                    }
                }
            });
            scope.spawn(|| {
                for granules in [6, 16] {
                    drop(scene.had(b.try_allocate(granules * G)));
                    scene.look();
                }
            });
        });
        drop((blocks, a, b, stream));
        mapper.stop();
        scene.end();
    });
}

#[test]
fn a_tenant_goes_while_the_mapper_places_ahead_of_it() {
    explore(375, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 64, |builder| {
            builder.mapper(&mapper).free_target(4 * G).build()
        });
        let a = scene.tenant("a");
        let stream = scene.stream();
        thread::scope(|scope| {
            scope.spawn(|| grow_ahead(&scene, &a, &stream));
            scope.spawn(|| {
                scene.look();
                a.clone().unregister();
            });
            scope.spawn(|| {
                let b = scene.tenant("b");
                drop(scene.had(b.try_allocate(24 * G)));
                scene.look();
            });
        });
        mapper.stop();
        let stats = scene.books();
        assert!(
            stats.tenants.iter().all(|tenant| !tenant.draining),
            "{stats:#?}"
        );
        drop((a, stream));
        scene.end();
    });
}

#[test]
fn the_mapper_stops_and_starts_while_it_is_wanted() {
    explore(375, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let device = rig.device.clone();
        let scene = Scene::new(rig, 64, |builder| builder.mapper(&mapper).build());
        let a = scene.tenant("a");
        let stream = scene.stream();
        thread::scope(|scope| {
            scope.spawn(|| grow_ahead(&scene, &a, &stream));
            scope.spawn(|| {
                mapper.stop();
                drop(Mapper::start(&device).unwrap());
            });
        });
        drop((a, stream));
        scene.end();
    });
}

#[test]
fn the_mapper_hears_whoever_rings() {
    explore(750, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 96, |builder| builder.mapper(&mapper).build());
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let grow_until_ahead = |tenant: &Tenant| {
            let stream = scene.stream();
            let block = tenant.block(16 * G).capacity(32 * G).home_stream(&stream);
            let mut block = scene.claim(block.try_allocate().unwrap());
            for granules in [18, 20, 24] {
                block.try_grow_to(granules * G).unwrap();
                until_ahead(tenant);
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| grow_until_ahead(&a));
            scope.spawn(|| grow_until_ahead(&b));
        });
        drop((a, b));
        mapper.stop();
        scene.end();
    });
}

#[test]
fn a_pool_is_closed_again_and_again_while_the_mapper_serves_it() {
    explore(500, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 64, |builder| builder.mapper(&mapper).build());
        let a = scene.tenant("a");
        let stream = scene.stream();
        let block = a.block(16 * G).capacity(64 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for granules in 17..24 {
                    block.try_grow_to(granules * G).unwrap();
                    scene.launch(&block, &stream);
                }
            });
            for _ in 0..2 {
                scope.spawn(|| drop(scene.pool.clone().close().unwrap_err()));
            }
        });
        // The mapper serves the block again after the refusals.
        block.try_grow_to(28 * G).unwrap();
        until_ahead(&a);
        block.try_grow_to(36 * G).unwrap();
        drop((block, a, stream));
        // The mapper may still be working on it.
        let Scene { rig, pool, .. } = scene;
        pool.close().unwrap();
        drop(mapper);
        common::nothing_left(rig);
    });
}

#[test]
fn the_last_owner_of_a_pool_goes_while_the_mapper_serves_it() {
    explore(375, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 64, |builder| builder.mapper(&mapper).build());
        let a = scene.tenant("a");
        let stream = scene.stream();
        let block = a.block(32 * G).capacity(64 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        block.try_grow_to(34 * G).unwrap();
        let Scene { rig, pool, .. } = scene;
        thread::scope(|scope| {
            scope.spawn(move || drop(pool));
            scope.spawn(move || drop(a));
            scope.spawn(move || {
                drop(block.try_grow_to(40 * G));
                drop(block);
            });
            scope.spawn(move || drop(mapper));
        });
        drop(stream);
        common::nothing_left(rig);
    });
}

fn stamped(scene: &Scene<HostMemory>, block: &Block, owner: u64) {
    for offset in [0, block.size() - 8] {
        block.write(offset, &owner.to_le_bytes()).unwrap();
    }
    scene.is_whole();
}

fn verified(block: &Block, owner: u64) {
    for offset in [0, block.size() - 8] {
        let mut bytes = [0; 8];
        block.read(offset, &mut bytes).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), owner, "at {offset}");
    }
}

#[test]
fn blocks_are_used_while_a_compaction_moves_their_memory() {
    explore(375, || {
        let scene = Scene::new(host(), 24, |builder| {
            builder.growth(Growth::Exact).largest_extent(4 * G).build()
        });
        let a = scene.tenant("a");
        let streams = [scene.stream(), scene.stream()];
        // Blocks made of single granules.
        let pieces = |stream, granules| {
            let block = a.block(G).capacity(8 * G).home_stream(stream);
            let mut block = scene.claim(block.try_allocate().unwrap());
            for granule in 1..granules {
                block.try_grow_to((granule + 1) * G).unwrap();
            }
            block
        };
        let [mut one, two] = [pieces(&streams[0], 4), pieces(&streams[1], 3)];
        stamped(&scene, &one, 1);
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2 {
                    scene.pool.compact(|_| true).unwrap();
                }
            });
            scope.spawn(|| {
                verified(&one, 1);
                stamped(&scene, &one, 2);
                verified(&one, 2);
                one.try_grow_to(6 * G).unwrap();
                stamped(&scene, &one, 3);
                one.shrink_to(2 * G).unwrap();
                stamped(&scene, &one, 4);
                let lease = one.lease();
                let before = lease.extents();
                scene.hold(&streams[0]);
                scene.launch(&one, &streams[0]);
                assert_eq!(lease.extents(), before, "moved under a lease");
                drop(lease);
                // The queued work keeps the block in place from here on.
                yield_now();
                scene.release(&streams[0]);
                verified(&one, 0x0101_0101_0101_0101);
            });
            scope.spawn(|| {
                drop(two);
                let got = a.block(3 * G).home_stream(&streams[1]).try_allocate();
                let three = scene.had(got).unwrap();
                stamped(&scene, &three, 5);
                scene.look();
                verified(&three, 5);
            });
        });
        verified(&one, 0x0101_0101_0101_0101);
        scene.pool.compact(|_| true).unwrap();
        verified(&one, 0x0101_0101_0101_0101);
        drop((one, a, streams));
        scene.end();
    });
}

#[test]
fn a_write_is_not_lost_and_a_read_not_torn_by_a_compaction() {
    explore(1000, || {
        let scene = Scene::new(host(), 8, |builder| builder.growth(Growth::Exact).build());
        let a = scene.tenant("a");
        let stream = scene.stream();
        let block = a.block(G).capacity(2 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        block.try_grow_to(2 * G).unwrap();
        stamped(&scene, &block, 0);
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(scene.pool.compact(|_| true).unwrap().no_space, 0));
            scope.spawn(|| {
                for owner in 1..=2 {
                    block.write(0, &[owner; 8]).unwrap();
                    let mut bytes = [0; 8];
                    block.read(0, &mut bytes).unwrap();
                    assert_eq!(bytes, [owner; 8]);
                }
            });
        });
        drop((block, a, stream));
        scene.end();
    });
}

#[test]
fn compaction_meets_the_mapper_and_a_guard_of_captures() {
    explore(375, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 64, |builder| {
            builder.mapper(&mapper).largest_extent(4 * G).build()
        });
        let a = scene.tenant("a");
        let stream = scene.stream();
        let compact = || match scene.pool.compact(|_| true) {
            Ok(_) | Err(BlockError::Memory(MemoryError::Capturing)) => {}
            Err(error) => panic!("{error}"),
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                // The mapper may still be placing memory behind the previous block.
                for begun in [4, 9] {
                    let block = a.block(begun * G).capacity(16 * G).home_stream(&stream);
                    let mut block = scene.claim(block.try_allocate().unwrap());
                    for granules in begun + 1..begun + 4 {
                        block.try_grow_to(granules * G).unwrap();
                    }
                    drop(block);
                    compact();
                }
            });
            scope.spawn(compact);
            scope.spawn(|| {
                drop(scene.pool.capture_guard());
                scene.look();
            });
        });
        mapper.stop();
        drop((a, stream));
        scene.end();
    });
}

/// How a block gives up at least a granule. The returned block lives until the waiting thread was
/// served.
type GiveUp = fn(&Scene<Nothing>, &Tenant, Block) -> Option<Block>;

/// A thread waits for memory that another thread gives up.
fn waited_for(give_up: GiveUp) {
    waited_for_in(|| scene(3), give_up);
}

fn waited_for_in(scene: fn() -> Scene<Nothing>, give_up: GiveUp) {
    explore(500, move || {
        let scene = scene();
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let stream = scene.stream();
        let block = a.block(G).capacity(3 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        block.try_grow_to(2 * G).unwrap();
        thread::scope(|scope| {
            let other = scope.spawn(|| give_up(&scene, &a, block));
            let (scene, b) = (&scene, &b);
            scope.spawn(move || {
                let wanted = b.block(2 * G).timeout(FOREVER).allocate();
                drop(scene.claim(wanted.unwrap()));
                drop(other.join().unwrap());
            });
        });
        drop((a, b, stream));
        scene.end();
    });
}

#[test]
fn one_who_waits_is_woken_by_a_block_that_is_dropped() {
    waited_for(|_, _, block| {
        drop(block);
        None
    });
}

#[test]
fn one_who_waits_is_woken_by_a_block_on_a_shelf_just_made() {
    waited_for(|scene, a, block| {
        drop(block);
        let stream = scene.stream();
        drop(a.allocate_on(&stream, 2 * G));
        None
    });
}

#[test]
fn one_who_waits_is_woken_by_a_block_that_shrinks() {
    waited_for(|_, _, mut block| {
        block.shrink_to(G).unwrap();
        Some(block)
    });
}

#[test]
fn one_who_waits_is_woken_by_the_end_of_a_lease() {
    waited_for(|_, _, block| {
        let lease = block.lease();
        drop(block);
        drop(lease);
        None
    });
}

#[test]
fn one_who_waits_is_woken_by_a_tenant_that_goes() {
    waited_for(|_, a, block| {
        a.clone().unregister();
        drop(block);
        None
    });
}

#[test]
fn one_who_waits_is_woken_by_the_end_of_a_capture() {
    waited_for(|scene, _, block| {
        let guard = scene.pool.capture_guard();
        drop(block);
        drop(guard);
        None
    });
}

#[test]
fn one_who_waits_is_woken_in_a_hardened_pool() {
    let scene = || {
        let build = |builder: PoolBuilder<'_>| builder.hardened(Hardened::new()).build();
        Scene::new(model(), 3, build)
    };
    waited_for_in(scene, |_, _, block| {
        let lease = block.lease();
        drop(block);
        drop(lease);
        None
    });
    waited_for_in(scene, |_, _, mut block| {
        block.shrink_to(G).unwrap();
        Some(block)
    });
}

/// Blocks come and go while the next thread that takes the lock unmaps their memory, and no address
/// is used by two blocks.
fn blocks_are_retired_in_turn(scene: &Scene<Nothing>) {
    let (a, b) = (scene.tenant("a"), scene.tenant("b"));
    let seen = Mutex::new(BTreeSet::new());
    let had = |got| {
        let block = scene.had(got)?;
        let new = seen.lock().unwrap().insert(block.address().0);
        assert!(new, "{} was used by another block", block.address());
        Some(block)
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let stream = scene.held_stream();
                for granules in [2, 1] {
                    let got = a.block(granules * G).home_stream(&stream).try_allocate();
                    if let Some(mut block) = had(got) {
                        scene.launch(&block, &stream);
                        block.shrink_to(G).unwrap();
                        let lease = block.lease();
                        drop(block);
                        yield_now();
                        drop(lease);
                    }
                }
                scene.release(&stream);
            });
        }
        scope.spawn(|| {
            for granules in [4, 2] {
                drop(had(b.try_allocate(granules * G)));
                scene.look();
            }
            scene.pool.trim(0).unwrap();
        });
        scope.spawn(|| a.clone().unregister());
    });
}

fn never_again(builder: PoolBuilder<'_>) -> PoolBuilder<'_> {
    let hardened = Hardened::new();
    builder.hardened(hardened.rest_blocks(u64::MAX).rest_addresses(u64::MAX))
}

#[test]
fn a_hardened_pool_retires_blocks_while_others_come_and_go() {
    explore(750, || {
        let scene = Scene::new(model(), 5, |builder| never_again(builder).build());
        blocks_are_retired_in_turn(&scene);
        scene.end();
    });
}

#[test]
fn the_mapper_retires_blocks_of_a_hardened_pool() {
    explore(500, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 5, |builder| {
            never_again(builder.mapper(&mapper)).build()
        });
        blocks_are_retired_in_turn(&scene);
        mapper.stop();
        scene.end();
    });
}

/// A copy finds its memory mapped, or fails because the block is asleep; the memory is not unmapped
/// during the copy. Contents are not kept here, because the threads that copy them do not belong to
/// shuttle.
#[test]
fn a_block_is_written_and_read_while_it_is_put_to_sleep() {
    explore(750, || {
        let scene = scene(4);
        let a = scene.tenant("a");
        let stream = scene.stream();
        let block = a.block(2 * G).home_stream(&stream).try_allocate().unwrap();
        let slept = AtomicBool::new(false);
        let copied = |outcome: Result<(), MemoryError>| match outcome {
            Ok(()) => {}
            Err(MemoryError::Asleep(size)) => assert_eq!(size, 2 * G),
            Err(error) => panic!("{error}"),
        };
        thread::scope(|scope| {
            scope.spawn(|| copied(block.write(0, &[2; 8])));
            scope.spawn(|| copied(block.read(0, &mut [0; 8])));
            scope.spawn(|| match a.blocks().sleep(Contents::Discard) {
                Ok(_) => slept.store(true, Ordering::SeqCst),
                Err(SleepError::Leased { .. } | SleepError::Busy { .. }) => {}
                Err(error) => panic!("{error}"),
            });
        });
        assert_eq!(block.is_asleep(), slept.load(Ordering::SeqCst));
        a.blocks().wake().unwrap();
        block.write(0, &[3; 8]).unwrap();
        drop((block, a, stream));
        scene.end();
    });
}

/// A registered block stays mapped and cannot sleep. A sleeping block cannot be registered.
#[test]
fn a_block_is_lent_while_it_is_put_to_sleep_and_woken() {
    explore(750, || {
        let scene = scene(4);
        let a = scene.tenant("a");
        let stream = scene.stream();
        let block = a.block(2 * G).home_stream(&stream).try_allocate().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2 {
                    match block.register() {
                        Ok(registration) => {
                            assert_eq!(registration.size(), 2 * G);
                            yield_now();
                            scene.launch(&block, &stream);
                            scene.is_whole();
                        }
                        Err(MemoryError::Asleep(size)) => assert_eq!(size, 2 * G),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            scope.spawn(|| {
                for _ in 0..2 {
                    match a.blocks().sleep(Contents::Discard) {
                        Ok(_) => {}
                        Err(SleepError::Leased { .. } | SleepError::Busy { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    yield_now();
                    a.blocks().wake().unwrap();
                }
            });
        });
        assert!(!block.is_asleep());
        drop((block, a, stream));
        scene.end();
    });
}

#[test]
fn one_who_waits_is_woken_by_what_a_heap_frees() {
    explore(500, || {
        let scene = scene(3);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let heap = Heap::builder(&a).addresses(32 * G).build().unwrap();
        thread::scope(|scope| {
            for sizes in [[2 * G, 2 * G], [G, 512]] {
                let (scene, heap) = (&scene, &heap);
                scope.spawn(move || {
                    let stream = scene.stream();
                    sizes
                        .into_iter()
                        .for_each(|size| scene.come_and_go(heap, size, &stream));
                });
            }
            scope.spawn(|| {
                let wanted = b.block(3 * G).timeout(FOREVER).allocate();
                drop(scene.claim(wanted.unwrap()));
            });
        });
        assert_eq!((heap.stats().live, heap.stats().allocations), (0, 0));
        drop((a, b, heap));
        scene.end();
    });
}

#[test]
fn a_region_commits_again_what_it_withdrew_while_another_tenant_takes_it() {
    explore(500, || {
        let scene = scene(3);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        thread::scope(|scope| {
            scope.spawn(|| {
                let region = a.region(3 * G).largest_extent(G);
                let mut region = region.reserve().unwrap();
                for range in [0..2 * G, 0..G, G..3 * G] {
                    if region.commit(range.clone()).is_ok() {
                        yield_now();
                        assert!(region.is_committed(range.clone()));
                        region.decommit_after(range, &[]).unwrap();
                    }
                }
                if region.commit(0..G).is_ok()
                    && let Ok(fork) = region.fork(&[])
                {
                    drop(region);
                    yield_now();
                    assert!(fork.is_committed(0..G));
                }
            });
            scope.spawn(|| {
                let wanted = b.block(3 * G).timeout(FOREVER).allocate();
                drop(scene.claim(wanted.unwrap()));
            });
        });
        drop((a, b));
        scene.end();
    });
}

#[test]
fn a_paged_cache_gives_blocks_memory_while_the_mapper_maps_ahead_and_another_tenant_takes_all() {
    explore(500, || {
        let rig = model();
        let mapper = Mapper::start(&rig.device).unwrap();
        let scene = Scene::new(rig, 5, |builder| builder.mapper(&mapper).build());
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let stream = scene.stream();
        // Two blocks are in each extent.
        let group = LayerGroup::new(1, 1).part(1, (G / 2) as u32, 1);
        let kv = PagedKv::builder(&a, &stream, 16).group(group).extent(G);
        let kv = kv.precommit(4).build().unwrap();
        let use_blocks = |numbers: [u32; 2]| {
            if kv.try_back(&numbers).is_err() {
                return;
            }
            let step = kv.step();
            kv.release(&numbers[..1]).unwrap();
            yield_now();
            // Released in a step, it has its memory beside the other.
            assert!(kv.stats().unwrap().committed >= 2 * G);
            drop(step);
            assert!(kv.is_backed(numbers[1]).unwrap());
            kv.release(&numbers[1..]).unwrap();
        };
        thread::scope(|scope| {
            scope.spawn(|| [[0, 2], [4, 6]].map(use_blocks));
            scope.spawn(|| use_blocks([1, 3]));
            scope.spawn(|| {
                // Woken by what is released, and by memory ahead that is on its way.
                let wanted = b.block(5 * G).timeout(FOREVER).allocate();
                drop(scene.claim(wanted.unwrap()));
            });
        });
        assert_eq!(kv.stats().unwrap().committed, 0);
        drop((kv, a, b, stream));
        mapper.stop();
        scene.end();
    });
}

#[test]
fn registrations_of_a_dropped_region_end_while_its_fork_gives_its_addresses_back() {
    explore(1000, || {
        let scene = scene(3);
        let a = scene.tenant("a");
        let region = a.region(2 * G).largest_extent(G);
        let mut region = region.reserve().unwrap();
        region.commit(0..2 * G).unwrap();
        let mut fork = region.fork(&[]).unwrap();
        let [one, other] = [0..G, G..2 * G].map(|range| region.register(range).unwrap());
        drop(region);
        thread::scope(|scope| {
            scope.spawn(|| drop(one));
            scope.spawn(|| {
                drop(other);
                // What the first still has mapped keeps the addresses.
                fork.purge().unwrap();
            });
        });
        fork.purge().unwrap();
        assert_eq!((a.stats().mappings, a.stats().addresses), (2, 2 * G));
        drop((fork, a));
        scene.end();
    });
}

/// A heap sleeps and wakes beside requests, and another tenant that takes its idle memory. Contents
/// are not kept here, because the threads that copy them do not belong to shuttle.
#[test]
fn a_heap_sleeps_and_wakes_beside_requests_and_reclaim() {
    explore(500, || {
        let scene = scene(4);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let heap = Heap::builder(&a).addresses(32 * G).build().unwrap();
        let stream = scene.stream();
        let kept = heap.allocate(G, 1, &stream).unwrap();
        drop(heap.allocate(2 * G, 1, &stream).unwrap());
        let moved = |outcome: Result<(), SleepError>| match outcome {
            Ok(()) | Err(SleepError::HeapBusy { .. }) => {}
            Err(SleepError::Block { cause, .. }) => assert!(cause.is_shortage(), "{cause}"),
            Err(error) => panic!("{error}"),
        };
        thread::scope(|scope| {
            scope.spawn(|| [2 * G, 512].map(|size| scene.come_and_go(&heap, size, &stream)));
            for turns in 1..3 {
                let (heap, moved) = (&heap, &moved);
                scope.spawn(move || {
                    for _ in 0..turns {
                        moved(heap.alone().sleep(Contents::Discard).map(drop));
                        yield_now();
                        moved(heap.alone().wake().map(drop));
                    }
                });
            }
            scope.spawn(|| drop(b.try_allocate(3 * G)));
        });
        heap.alone().wake().unwrap();
        assert_eq!((heap.stats().live, heap.stats().allocations), (G, 1));
        drop(kept);
        heap.trim().unwrap();
        assert_eq!((heap.stats().held, a.stats().committed), (0, 0));
        drop((heap, a, b, stream));
        scene.end();
    });
}

#[test]
fn threads_share_a_stream_of_a_heap_that_is_trimmed_and_dropped() {
    explore(500, || {
        let scene = scene(4);
        let a = scene.tenant("a");
        let heap = Heap::builder(&a).addresses(32 * G).build().unwrap();
        let (heap, stream) = (&heap, scene.stream());
        thread::scope(|scope| {
            for sizes in [[2 * G, G, 2 * G], [2 * G, 512, 512]] {
                let (scene, heap, stream) = (&scene, heap.clone(), &stream);
                scope.spawn(move || {
                    sizes
                        .into_iter()
                        .for_each(|size| scene.come_and_go(&heap, size, stream));
                });
            }
            scope.spawn(|| {
                heap.trim().unwrap();
                let stats = heap.stats();
                assert!(stats.live + stats.free <= stats.held, "{stats:?}");
                assert!(stats.held <= 4 * G, "{stats:?}");
            });
        });
        assert_eq!((heap.stats().live, heap.stats().allocations), (0, 0));
        drop((a, stream));
    });
}

#[test]
fn one_who_waits_is_woken_by_a_guarantee_that_ends() {
    explore(250, || {
        let scene = scene(3);
        let a = scene.pool.tenant("a").guarantee(2 * G).register().unwrap();
        let b = scene.tenant("b");
        thread::scope(|scope| {
            scope.spawn(|| {
                let wanted = b.block(2 * G).timeout(FOREVER).allocate();
                drop(scene.claim(wanted.unwrap()));
            });
            scope.spawn(move || a.unregister());
        });
        drop(b);
        scene.end();
    });
}

#[test]
fn all_who_wait_are_served_in_the_end() {
    explore(500, || {
        let scene = scene(2);
        let tenants = [scene.tenant("a"), scene.tenant("b")];
        thread::scope(|scope| {
            for index in 0..3 {
                let (scene, tenant) = (&scene, &tenants[index % 2]);
                scope.spawn(move || {
                    let stream = scene.stream();
                    for _ in 0..2 {
                        let wanted = tenant.block(2 * G).home_stream(&stream);
                        let block = wanted.timeout(FOREVER).allocate();
                        scene.launch(&scene.claim(block.unwrap()), &stream);
                    }
                });
            }
        });
        drop(tenants);
        scene.end();
    });
}

#[test]
fn a_block_grows_again_while_its_end_is_taken_back() {
    explore(500, || {
        let scene = scene(6);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let stream = scene.stream();
        let block = a.block(4 * G).largest_extent(G).home_stream(&stream);
        let mut block = scene.claim(block.try_allocate().unwrap());
        block.shrink_to(G).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for granules in [4, 2, 4] {
                    let before = block.size();
                    match block.try_grow_to(granules * G) {
                        Ok(()) => assert_eq!(block.extents().len() as u64, granules),
                        Err(BlockError::OutOfMemory(_)) => assert_eq!(block.size(), before),
                        Err(BlockError::Argument(ArgumentError::TooSmall { .. })) => {}
                        Err(error) => panic!("{error}"),
                    }
                    scene.launch(&block, &stream);
                    scene.is_whole();
                }
                drop(block);
            });
            scope.spawn(|| {
                for granules in [4, 3] {
                    let got = b.block(granules * G).home_stream(&stream).try_allocate();
                    if let Some(block) = scene.had(got) {
                        scene.launch(&block, &stream);
                    }
                    scene.look();
                }
            });
            scope.spawn(|| {
                for _ in 0..2 {
                    scene.pool.trim(0).unwrap();
                    scene.look();
                }
            });
        });
        drop((a, b, stream));
        scene.end();
    });
}

/// A reclaim is planned under the lock and carried out after other threads have had the lock. The
/// memory is taken from the end, or not at all.
#[test]
fn what_is_taken_back_leaves_no_hole() {
    explore(750, || {
        let scene = Scene::new(model(), 24, |builder| builder.growth(Growth::Exact).build());
        let a = scene.tenant("a");
        let stream = scene.stream();
        let block = || {
            let block = a.block(4 * G).capacity(8 * G).largest_extent(G);
            let mut block = scene.claim(block.home_stream(&stream).try_allocate().unwrap());
            block.shrink_to(G).unwrap();
            block
        };
        let first = [block(), block()];
        let mut second = block();
        thread::scope(|scope| {
            scope.spawn(|| {
                scene.pool.trim(0).unwrap();
            });
            // Asking for the headroom polls the fences.
            scope.spawn(|| {
                for _ in 0..6 {
                    a.headroom().unwrap();
                    yield_now();
                }
            });
            scope.spawn(|| {
                for (granules, left) in [(6, 1), (6, 2), (6, 3), (8, 8)] {
                    second.try_grow_to(granules * G).unwrap();
                    let ends = second.extents().into_iter().map(|it| it.offset + it.size);
                    let ends: Vec<u64> = ends.collect();
                    let whole: Vec<u64> = (1..=ends.len() as u64).map(|end| end * G).collect();
                    assert_eq!(ends, whole, "a hole");
                    scene.launch(&second, &stream);
                    scene.is_whole();
                    second.shrink_to(left * G).unwrap();
                }
            });
        });
        drop((first, second, a, stream));
        scene.end();
    });
}

/// A refused row returns its slots, and another block may be in one of them by then.
#[test]
fn a_refused_row_goes_beside_one_who_allocates() {
    explore(750, || {
        let scene = scene(4);
        let a = scene.tenant("a");
        let stream = scene.stream();
        thread::scope(|scope| {
            scope.spawn(|| {
                let row = a.block(2 * G).capacity(2 * G).home_stream(&stream);
                match row.try_allocate_adjacent(3) {
                    Err(BlockError::OutOfMemory(_)) => {}
                    other => panic!("{other:?}"),
                }
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let block = a.block(G).capacity(2 * G).home_stream(&stream);
                    if let Some(mut block) = scene.had(block.try_allocate()) {
                        scene.launch(&block, &stream);
                        yield_now();
                        let grown = block.try_grow_to(2 * G);
                        assert!(grown.is_ok() || grown.is_err_and(|error| error.is_shortage()));
                        scene.launch(&block, &stream);
                        scene.look();
                    }
                });
            }
        });
        assert_eq!(scene.books().tenants[0].blocks, 0);
        drop((a, stream));
        scene.end();
    });
}

/// Batches succeed as a whole or not at all, while other threads take the same memory, move it, and
/// put the blocks to sleep.
#[test]
fn batches_meet_those_who_take_move_and_sleep() {
    explore(500, || {
        let scene = Scene::new(model(), 8, |builder| builder.largest_extent(2 * G).build());
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let stream = scene.stream();
        thread::scope(|scope| {
            scope.spawn(|| {
                let block = || a.block(G).capacity(8 * G).home_stream(&stream);
                let Ok(blocks) = block().try_allocate_many(2) else {
                    return;
                };
                let mut blocks: Vec<Used<'_>> =
                    blocks.into_iter().map(|it| scene.claim(it)).collect();
                for size in [2 * G, 3 * G, 4 * G] {
                    let before: Vec<u64> = blocks.iter().map(|block| block.size()).collect();
                    let mut steps: Vec<(&mut Block, u64)> = blocks
                        .iter_mut()
                        .map(|block| (&mut **block, size))
                        .collect();
                    let grown = a.try_grow_all(&mut steps);
                    let sizes: Vec<u64> = blocks.iter().map(|block| block.size()).collect();
                    match grown {
                        Ok(()) => assert_eq!(sizes, [size, size]),
                        Err(BlockError::Refused { cause, .. }) => {
                            let asleep =
                                matches!(*cause, BlockError::Memory(MemoryError::Asleep { .. }));
                            assert!(asleep || cause.is_shortage(), "{cause}");
                            assert_eq!(sizes, before);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                loop {
                    match a.blocks().wake() {
                        Ok(_) => break,
                        Err(SleepError::Busy { .. }) => yield_now(),
                        // The other tenant has the memory.
                        Err(SleepError::Block { .. }) => return,
                        Err(error) => panic!("{error}"),
                    }
                }
                for block in &blocks {
                    scene.launch_leased(block, &stream);
                }
            });
            scope.spawn(|| {
                let row = b.block(2 * G).capacity(4 * G).home_stream(&stream);
                if let Ok(row) = row.try_allocate_adjacent(2) {
                    let row: Vec<Used<'_>> = row.into_iter().map(|it| scene.claim(it)).collect();
                    for block in &row {
                        scene.launch_leased(block, &stream);
                    }
                }
                drop(scene.had(b.block(6 * G).home_stream(&stream).try_allocate()));
                scene.look();
            });
            scope.spawn(|| {
                scene.pool.compact(|_| true).unwrap();
                match a.blocks().sleep(Contents::Discard) {
                    Ok(_) => {}
                    Err(SleepError::Busy { .. } | SleepError::Leased { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                scene.look();
            });
        });
        drop((a, b, stream));
        scene.end();
    });
}

/// Blocks that share memory are unshared, each by a copy from another, while they are forked, moved
/// and dropped.
#[test]
fn forks_become_their_own_while_others_fork_and_go() {
    explore(375, || {
        let scene = Scene::new(host(), 12, |builder| {
            builder.growth(Growth::Exact).largest_extent(2 * G).build()
        });
        let a = scene.tenant("a");
        let streams = [scene.stream(), scene.stream(), scene.stream()];
        let root = a.block(2 * G).capacity(4 * G).largest_extent(2 * G);
        let root = root.home_stream(&streams[0]);
        let root = root.try_allocate().unwrap();
        root.write(0, &7u64.to_le_bytes()).unwrap();
        let mut one = root.fork(2 * G, 2 * G).unwrap();
        let mut two = root.fork(2 * G, 2 * G).unwrap();
        let own = |block: &mut Block, owner: u64| {
            block.shrink_to(G).unwrap();
            match block.try_grow_to(2 * G) {
                Ok(()) => {
                    verified_at(block, 0, 7);
                    block.write(G, &owner.to_le_bytes()).unwrap();
                    verified_at(block, G, owner);
                }
                Err(BlockError::SharedInUse { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| own(&mut one, 1));
            scope.spawn(|| own(&mut two, 2));
            scope.spawn(|| {
                match root.try_fork(2 * G, 3 * G) {
                    Ok(three) => verified_at(&three, 0, 7),
                    Err(error) => panic!("{error}"),
                }
                scene.pool.compact(|_| true).unwrap();
                scene.look();
            });
        });
        for block in [&root, &one, &two] {
            verified_at(block, 0, 7);
        }
        drop((root, one, two, a, streams));
        scene.end();
    });
}

/// Two forks are unshared by copies from a third block, which each thread may find out of its place
/// until the other's copy has ended.
#[test]
fn a_fork_waits_for_the_block_that_another_copies_from() {
    explore(750, || {
        let scene = Scene::new(host(), 12, |builder| {
            builder.growth(Growth::Exact).largest_extent(2 * G).build()
        });
        let a = scene.tenant("a");
        let root = a.block(2 * G).largest_extent(2 * G).try_allocate();
        let root = root.unwrap();
        root.write(0, &7u64.to_le_bytes()).unwrap();
        let mut forks = [(); 2].map(|()| root.fork(2 * G, 2 * G).unwrap());
        for fork in &mut forks {
            fork.shrink_to(G).unwrap();
        }
        let [one, two] = &mut forks;
        thread::scope(|scope| {
            for fork in [one, two] {
                scope.spawn(|| {
                    fork.try_grow_to(2 * G).unwrap();
                    verified_at(fork, 0, 7);
                });
            }
        });
        drop((root, forks, a));
        scene.end();
    });
}

/// A capture guard is granted only when no thread is in a driver call, and while it lives no thread
/// makes one.
#[test]
fn a_guard_of_captures_waits_for_what_is_in_flight() {
    explore(500, || {
        let scene = scene(4);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2 {
                    // Without a home stream the memory is zeroed for its next owner, which waits
                    // for the zeroing.
                    for tenant in [&a, &b] {
                        match tenant.try_allocate(3 * G) {
                            // The contents of the other tenant's block cannot be zeroed now.
                            Err(BlockError::Capturing(_)) => {}
                            got => drop(scene.had(got)),
                        }
                    }
                }
            });
            scope.spawn(|| {
                let guard = scene.pool.capture_guard();
                let asked = || {
                    let calls = scene.rig.device.calls();
                    calls.count(Call::StreamSynchronize) + calls.count(Call::CtxSynchronize)
                };
                let before = asked();
                for _ in 0..8 {
                    yield_now();
                }
                assert_eq!(asked(), before, "a call waited under a capture guard");
                drop(guard);
            });
        });
        drop((a, b));
        scene.end();
    });
}

#[test]
fn a_guard_of_captures_waits_for_heaps_that_poll() {
    explore(500, || {
        let scene = scene(4);
        let a = scene.tenant("a");
        let heap = Heap::builder(&a).addresses(32 * G).build().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let streams = [scene.stream(), scene.stream()];
                // The second stream needs memory that the first used.
                for (size, stream) in [(3 * G, 0), (4 * G, 1), (2 * G, 0)] {
                    match heap.allocate(size, 1, &streams[stream]) {
                        Ok(_) | Err(BlockError::Capturing(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                heap.trim().unwrap();
            });
            scope.spawn(|| {
                let guard = scene.pool.capture_guard();
                let asked = || {
                    let calls = scene.rig.device.calls();
                    let polls = [Call::StreamQuery, Call::EventQuery, Call::EventRecord];
                    polls.map(|call| calls.count(call))
                };
                let before = asked();
                for _ in 0..8 {
                    yield_now();
                }
                assert_eq!(asked(), before, "a heap polled under a capture guard");
                drop(guard);
            });
        });
        drop((a, heap));
    });
}

fn verified_at(block: &Block, offset: u64, owner: u64) {
    let mut bytes = [0; 8];
    block.read(offset, &mut bytes).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), owner, "at {offset}");
}

/// A waker that a thread can wait for.
#[derive(Default)]
struct Bell {
    rung: shuttle::sync::Mutex<bool>,
    told: shuttle::sync::Condvar,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rung.lock().unwrap() = true;
        self.told.notify_all();
    }
}

/// Polls a future once.
fn poll<F: Future + Unpin>(future: &mut F, bell: &Arc<Bell>) -> Poll<F::Output> {
    let waker = Waker::from(Arc::clone(bell));
    Pin::new(future).poll(&mut Context::from_waker(&waker))
}

/// Polls a future whenever it was woken. Shuttle reports a future that is never woken as a
/// deadlock.
fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    let bell = Arc::new(Bell::default());
    loop {
        if let Poll::Ready(output) = poll(&mut future, &bell) {
            return output;
        }
        let mut rung = bell.rung.lock().unwrap();
        while !*rung {
            rung = bell.told.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Creates a pool of `granules` granules with a mapper.
fn mapped(granules: u64) -> (Scene<Nothing>, Mapper) {
    let rig = model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let scene = Scene::new(rig, granules, |builder| builder.mapper(&mapper).build());
    (scene, mapper)
}

#[test]
fn futures_are_woken_by_whatever_comes_free() {
    explore(500, || {
        let (scene, mapper) = mapped(8);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let stream = scene.stream();
        let mut held = vec![a.try_allocate(3 * G).unwrap()];
        held.push(a.block(4 * G).home_stream(&stream).try_allocate().unwrap());
        held.push(a.try_allocate(G).unwrap());
        thread::scope(|scope| {
            scope.spawn(|| drop(scene.had(block_on(a.allocate_async(2 * G)))));
            scope.spawn(|| {
                drop(scene.had(block_on(
                    b.block(4 * G).home_stream(&stream).allocate_async(),
                )))
            });
            scope.spawn(|| {
                let lease = held[0].lease();
                held.clear();
                drop(lease);
            });
            scope.spawn(|| drop(scene.had(b.try_allocate(2 * G))));
        });
        drop((a, b, stream));
        mapper.stop();
        scene.end();
    });
}

#[test]
fn a_future_is_dropped_while_it_is_granted() {
    explore(750, || {
        let (scene, mapper) = mapped(8);
        let a = scene.tenant("a");
        let bell = Arc::new(Bell::default());
        let mut grows = a.block(2 * G).capacity(8 * G).try_allocate().unwrap();
        let held = a.try_allocate(5 * G).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut allocation = a.allocate_async(2 * G);
                let mut growth = grows.grow_to_async(4 * G);
                drop((poll(&mut allocation, &bell), poll(&mut growth, &bell)));
                yield_now();
                drop(growth);
                assert_eq!(grows.size(), 2 * G);
                drop(allocation);
                // The slot belongs to another block while the mapper may still be working on it.
                drop(grows);
                if let Some(next) = scene.had(a.block(3 * G).capacity(8 * G).try_allocate()) {
                    yield_now();
                    assert!(a.stats().in_use >= next.size());
                    drop(next);
                }
            });
            scope.spawn(|| drop(held));
        });
        // Memory that the mapper was placing when the future was dropped.
        mapper.stop();
        assert_eq!(a.stats().in_use, 0);
        drop(a);
        scene.end();
    });
}

#[test]
fn a_future_is_dropped_while_its_hook_runs_and_another_request_passes_it() {
    explore(500, || {
        let (scene, mapper) = mapped(4);
        let evictable = Arc::new(shuttle::sync::Mutex::new(None));
        let evicts = Arc::clone(&evictable);
        let giver = scene.pool.tenant("giver").on_pressure(move |_| {
            let given = evicts.lock().unwrap().take();
            yield_now();
            drop(given);
        });
        let giver = giver.register().unwrap();
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        *evictable.lock().unwrap() = Some(giver.try_allocate(2 * G).unwrap());
        let held = giver.try_allocate(2 * G).unwrap();
        let bell = Arc::new(Bell::default());
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut all = a.allocate_async(4 * G);
                drop(poll(&mut all, &bell));
                yield_now();
                drop(all);
            });
            scope.spawn(|| drop(scene.had(block_on(b.allocate_async(2 * G)))));
            scope.spawn(|| drop(held));
        });
        let kept = evictable.lock().unwrap().take();
        drop(kept);
        mapper.stop();
        assert_eq!(scene.look().in_use, 0);
        drop((giver, a, b));
        scene.end();
    });
}

#[test]
fn blocks_sleep_and_wake_beside_a_limit_that_falls_and_one_who_waits() {
    explore(500, || {
        let scene = scene(4);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let block = a.block(2 * G).capacity(4 * G).try_allocate().unwrap();
        let cached = a.try_allocate(G).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                drop(cached);
                a.blocks().sleep(Contents::Discard).unwrap();
                assert_eq!(a.stats().in_use, 0);
                yield_now();
                match a.blocks().wake() {
                    Ok(_) => assert!(!block.is_asleep()),
                    Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                }
            });
            scope.spawn(|| {
                scene.pool.set_limit(Limit::Bytes(2 * G)).unwrap();
                let _ = scene.pool.trim(0);
                yield_now();
                scene.pool.set_limit(Limit::Bytes(scene.limit)).unwrap();
            });
            scope.spawn(|| {
                let wanted = b.block(2 * G).timeout(FOREVER).allocate();
                drop(scene.claim(wanted.unwrap()));
            });
        });
        a.blocks().wake().unwrap();
        assert!(!block.is_asleep());
        drop((block, a, b));
        scene.end();
    });
}

#[test]
fn a_vector_grows_while_a_region_of_its_tenant_withdraws_and_another_tenant_takes_it() {
    explore(500, || {
        let scene = scene(4);
        let (a, b) = (scene.tenant("a"), scene.tenant("b"));
        let stream = scene.stream();
        let region = a.region(4 * G).largest_extent(G).home_stream(&stream);
        let mut vector = DeviceVec::<u8>::from_region(region.reserve().unwrap(), &stream).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for granules in 1..=3 {
                    if vector.resize((granules * G) as usize, 1).is_ok() {
                        assert!(vector.held() >= granules * G);
                    }
                    yield_now();
                }
                vector.clear();
                vector.shrink_to_fit().unwrap();
            });
            scope.spawn(|| {
                let mut region = a.region(2 * G).largest_extent(G).reserve().unwrap();
                for _ in 0..2 {
                    if region.commit(0..2 * G).is_ok() {
                        region.decommit_after(0..2 * G, &[]).unwrap();
                        yield_now();
                    }
                }
                let _ = region.purge();
            });
            scope.spawn(|| {
                let wanted = b.block(4 * G).timeout(FOREVER).allocate();
                drop(scene.claim(wanted.unwrap()));
            });
        });
        drop((vector, a, b, stream));
        scene.end();
    });
}

#[test]
fn futures_hear_that_the_mapper_ends() {
    explore(500, || {
        let (scene, mapper) = mapped(4);
        let a = scene.tenant("a");
        let held = a.try_allocate(4 * G).unwrap();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let refused = block_on(a.allocate_async(2 * G)).unwrap_err();
                    assert_eq!(refused, BlockError::NoMapper);
                });
            }
            scope.spawn(|| mapper.stop());
        });
        drop((held, a));
        scene.end();
    });
}

#[test]
fn news_are_lost_to_none_who_listened_before() {
    explore(500, || {
        let (scene, mapper) = mapped(4);
        let a = scene.tenant("a");
        let stream = scene.stream();
        let held = [0; 4].map(|_| a.block(G).home_stream(&stream).try_allocate().unwrap());
        thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    let freed = scene.pool.freed();
                    if let Some(block) = scene.had(a.try_allocate(4 * G)) {
                        return drop(block);
                    }
                    block_on(freed).unwrap();
                }
            });
            scope.spawn(|| held.into_iter().for_each(drop));
        });
        drop((a, stream));
        mapper.stop();
        scene.end();
    });
}

#[test]
fn futures_wait_while_a_pool_is_not_closed() {
    explore(250, || {
        let (scene, mapper) = mapped(4);
        let a = scene.tenant("a");
        let held = a.try_allocate(4 * G).unwrap();
        let clone = scene.pool.clone();
        thread::scope(|scope| {
            scope.spawn(|| drop(scene.had(block_on(a.allocate_async(2 * G)))));
            scope.spawn(|| drop(clone.close().unwrap_err()));
            scope.spawn(|| drop(held));
        });
        drop(a);
        mapper.stop();
        scene.end();
    });
}

/// Records a stream through a registration, launches a kernel on it that reads the registered memory,
/// and ends the registration, beside an operation that takes the memory away.
fn use_ends_beside<T: Send + 'static>(
    make: fn(&Rig<Nothing>, &Stream) -> (T, Registration),
    take: fn(T, &Stream),
) {
    explore(300, move || {
        let rig = model();
        let [stream, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let (owner, registration) = make(&rig, &other);
        thread::scope(|scope| {
            let (rig, stream, other) = (&rig, &stream, &other);
            scope.spawn(move || {
                registration.record_use(stream).unwrap();
                rig.machine.hold_until_awaited(D0, stream.as_raw());
                rig.kernel(stream, &[(registration.address(), G)], &[]);
                drop(registration);
            });
            scope.spawn(move || take(owner, other));
        });
        assert_eq!(rig.machine.hazards(), 0);
        rig.machine.release_all_streams(D0);
        drop((stream, other));
    });
}

/// A region that shares its memory with a fork.
fn forked(rig: &Rig<Nothing>, _: &Stream) -> ((Region, Region), Registration) {
    let mut region = Region::reserve(&rig.device, G).unwrap();
    region.commit(0..G).unwrap();
    let fork = region.fork(&[]).unwrap();
    let registration = region.register(0..G).unwrap();
    ((region, fork), registration)
}

/// Repeats an operation until no registration prevents it.
fn until_unregistered<T>(mut operate: impl FnMut() -> Result<T, MemoryError>) -> T {
    loop {
        match operate() {
            Err(MemoryError::Registered { .. }) => yield_now(),
            outcome => return outcome.unwrap(),
        }
    }
}

#[test]
fn a_decommit_waits_for_a_stream_that_a_registration_records_meanwhile() {
    use_ends_beside(forked, |(mut region, _fork), _| {
        until_unregistered(|| region.decommit_after(0..G, &[]));
        region.purge().unwrap();
    });
    use_ends_beside(forked, |(mut region, _fork), _| {
        until_unregistered(|| region.decommit(0..G));
        region.purge().unwrap();
    });
}

#[test]
fn unsharing_waits_for_a_stream_that_a_registration_records_meanwhile() {
    use_ends_beside(forked, |(mut region, _fork), other| {
        until_unregistered(|| region.unshare(0..G, other, &[]));
    });
}

#[test]
fn a_vector_waits_for_a_stream_that_a_registration_records_while_it_is_dropped() {
    fn vector(rig: &Rig<Nothing>, home: &Stream) -> (DeviceVec<u8>, Registration) {
        let mut vector = DeviceVec::new(&rig.device, home, G as usize).unwrap();
        vector.resize(G as usize, 1).unwrap();
        let registration = vector.register().unwrap();
        (vector, registration)
    }
    use_ends_beside(vector, |vector, _| drop(vector));
}
