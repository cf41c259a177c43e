//! Compaction that cuts extents: random programs with faults, beside threads and futures, and in
//! pools of all kinds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::books::{balanced, books, figures};
use crate::common::compaction::exact;
use crate::common::executor::Task;
use crate::common::{self, G, Rig, limited};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::BlockError;
use cuvmm::{Block, Contents, Growth, HostStore, Mapper, Stream};

fn fill(_: &Rig<impl Backing>, block: &Block, from: u64, seed: u64) {
    for granule in from..block.size() / G {
        let bytes = (seed * 1000 + granule + 1).to_le_bytes();
        block.write(granule * G, &bytes).unwrap();
        block.write((granule + 1) * G - 8, &bytes).unwrap();
    }
}

fn shows(rig: &Rig<impl Backing>, block: &Block, seed: u64) {
    if !rig.keeps_bytes() {
        return;
    }
    for granule in 0..block.size() / G {
        for at in [granule * G, (granule + 1) * G - 8] {
            let mut bytes = [0; 8];
            block.read(at, &mut bytes).unwrap();
            assert_eq!(
                u64::from_le_bytes(bytes),
                seed * 1000 + granule + 1,
                "block {seed} granule {granule}"
            );
        }
    }
}

/// Grows a block and checks that what is new is not another's.
fn grow(rig: &Rig<impl Backing>, block: &mut Block, to: u64, seed: u64) -> bool {
    let old = block.size() / G;
    if block.try_grow_to(to * G).is_err() {
        return false;
    }
    if rig.keeps_bytes() {
        for granule in old..to {
            let mut bytes = [0; 8];
            block.read(granule * G, &mut bytes).unwrap();
            let seen = u64::from_le_bytes(bytes);
            // Mod tenants: seeds of one tenant are equal mod 2.
            assert!(
                seen == 0 || (seen / 1000) % 2 == seed % 2,
                "another tenant's bytes: {seen} in {seed}"
            );
        }
    }
    fill(rig, block, old, seed);
    true
}

const CALLS: [Call; 11] = [
    Call::MemAddressReserve,
    Call::MemCreate,
    Call::MemRelease,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::MemcpyDtoDAsync,
    Call::StreamSynchronize,
    Call::EventRecord,
    Call::EventSynchronize,
    Call::StreamQuery,
];

on_both! {
    fn random_programs_with_cuts_and_faults(rig) {
        for seed in 0..120 {
            let mut random = fastrand::Rng::with_seed(seed);
            let limit = random.u64(24..80);
            let pool = limited(rig, limit).largest_extent(8 * G);
            let pool = if random.bool() { pool.growth(Growth::Exact) } else { pool };
            let pool = pool.build().unwrap();
            let tenants = [pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap()];
            let streams = [Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap()];
            let mut blocks: Vec<(u64, Block)> = vec![];
            let mut next = 2;
            let faulty = random.bool();
            for _ in 0..80 {
                match random.u64(0..10) {
                    0..=2 => {
                        let which = random.usize(0..2);
                        let size = random.u64(1..18);
                        let id = next + (next % 2 != which as u64) as u64;
                        let block = tenants[which].block(size * G).capacity(32 * G);
                        let block = match random.bool() { true => block.home_stream(&streams[random.usize(0..2)]), false => block };
                        if let Ok(block) = block.try_allocate() {
                            if rig.keeps_bytes() {
                                for granule in 0..size {
                                    let mut bytes = [0; 8];
                                    block.read(granule * G, &mut bytes).unwrap();
                                    let seen = u64::from_le_bytes(bytes);
                                    assert!(seen == 0 || (seen / 1000) % 2 == id % 2, "{seen} {id}");
                                }
                            }
                            fill(rig, &block, 0, id);
                            blocks.push((id, block));
                        }
                        next = id + 1;
                    }
                    3 if !blocks.is_empty() => {
                        let at = random.usize(0..blocks.len());
                        drop(blocks.swap_remove(at));
                    }
                    4 | 5 if !blocks.is_empty() => {
                        let at = random.usize(0..blocks.len());
                        let (_, block) = &mut blocks[at];
                        let to = random.u64(1..=block.size() / G);
                        let _ = block.shrink_to(to * G);
                    }
                    6 if !blocks.is_empty() => {
                        let at = random.usize(0..blocks.len());
                        let (id, block) = &mut blocks[at];
                        let to = (block.size() / G + random.u64(1..10)).min(32);
                        if to > block.size() / G {
                            grow(rig, block, to, *id);
                        }
                    }
                    7 if !blocks.is_empty() => {
                        let limit = random.u64(10..80);
                        let _ = pool.set_limit(cuvmm::Limit::Bytes(limit * G));
                    }
                    _ => {
                        if faulty {
                            for _ in 0..random.u64(0..4) {
                                let fault = Fault::nth(random.u64(1..12), CUresult::CUDA_ERROR_UNKNOWN);
                                rig.faults.arm(fault.of(CALLS[random.usize(0..CALLS.len())]));
                            }
                        }
                        let mut left = random.u64(1..20);
                        let go = |_: &cuvmm::pool::Compaction| { left -= 1; left > 0 };
                        let outcome = match random.bool() {
                            true => pool.compact(go),
                            false => tenants[random.usize(0..2)].compact(go),
                        };
                        rig.faults.disarm();
                        if let Err(BlockError::Lost { .. }) = outcome {
                            break;
                        }
                    }
                }
                balanced(rig, &pool);
                for (id, block) in &blocks {
                    if block.size() > 0 { shows(rig, block, *id); }
                }
            }
            drop(blocks);
            drop(tenants);
            pool.close().unwrap();
            drop(streams);
            assert_eq!(rig.machine.live().physicals, 0, "{seed}");
        }
    }

    fn leases_begin_while_a_cut_runs(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let compactor = scope.spawn(|| {
                let mut given = 0;
                while !over.load(Ordering::SeqCst) {
                    given += pool.compact(|_| true).unwrap().given_back;
                }
                given
            });
            let users: Vec<_> = (0..3).map(|number| {
                let (tenant, stream) = (tenant.clone(), &stream);
                scope.spawn(move || {
                    let mut block = tenant.block(16 * G).capacity(16 * G).home_stream(stream).try_allocate().unwrap();
                    fill(rig, &block, 0, number);
                    for round in 0..150u64 {
                        let _ = block.shrink_to((1 + round * 7 % 15) * G);
                        let lease = (round % 3 == 0).then(|| block.lease());
                        if round % 2 == 0 {
                            let writes = vec![(cuvmm::driver::DeviceAddress(block.address().0 + 64), 8, 1)];
                            let lease = block.lease();
                            rig.kernel(stream, &[], &writes);
                            drop(lease);
                        }
                        shows(rig, &block, number);
                        drop(lease);
                        let old = block.size() / G;
                        if block.try_grow_to(16 * G).is_ok() {
                            fill(rig, &block, old, number);
                        }
                    }
                })
            }).collect();
            let outcome: Vec<_> = users.into_iter().map(|user| user.join()).collect();
            over.store(true, Ordering::SeqCst);
            compactor.join().unwrap();
            outcome.into_iter().for_each(|it| it.unwrap());
        });
        books(rig, &pool);
    }

    fn a_block_in_the_place_of_a_movable_one_that_went_meanwhile_stays(rig) {
        let pool = exact(rig, 20).build().unwrap();
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let make = |granules| {
            let of = tenant.block(8 * G).home_stream(&stream).movable(true);
            let mut block = of.try_allocate().unwrap();
            block.shrink_to(granules * G).unwrap();
            block
        };
        let (_first, second) = (make(1), make(2));
        let place = second.address();
        let plain = Arc::new(Mutex::new(None));
        let comes = Arc::clone(&plain);
        let once = Mutex::new(Some((tenant.clone(), stream.clone(), second)));
        rig.faults.watch(Some(Arc::new(move |call| {
            let due = (call == Call::MemcpyDtoDAsync).then(|| once.lock().unwrap().take());
            let Some((tenant, stream, second)) = due.flatten() else {
                return;
            };
            let replaced = std::thread::spawn(move || {
                drop(second);
                let mut plain = tenant.block(8 * G).home_stream(&stream).try_allocate().unwrap();
                plain.shrink_to(2 * G).unwrap();
                plain
            });
            *comes.lock().unwrap() = Some(replaced.join().unwrap());
        })));
        // Eight granules lack, of which the first cut gives seven.
        let refused = other.try_allocate(12 * G);
        rig.faults.watch(None);
        let plain = plain.lock().unwrap().take().unwrap();
        assert_eq!(plain.address(), place);
        assert_eq!(plain.extents().len(), 1, "its owner did not agree to a cut");
        assert!(refused.is_err());
        drop(plain);
        other.try_allocate(12 * G).unwrap();
        balanced(rig, &pool);
    }

    fn blocks_sleep_go_and_fork_between_the_steps_of_a_compaction(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 96).build().unwrap());
        let store = HostStore::builder(&rig.device).limit(64 * G).build().unwrap();
        for act in 0..4 {
            let mut blocks: Vec<Block> = (1..6).map(|seed| {
                let of = tenant.block(8 * G).capacity(16 * G).home_stream(&stream);
                let mut block = of.try_allocate().unwrap();
                fill(rig, &block, 0, seed);
                block.shrink_to(seed * G).unwrap();
                block
            }).collect();
            stream.synchronize().unwrap();
            let mut range = tenant.block(2 * G).capacity(8 * G).home_stream(&stream).try_allocate().unwrap();
            range.shrink_to(0).unwrap();
            let mut made = Vec::new();
            let done = pool.compact(|so_far| {
                if so_far.steps != 2 {
                    return true;
                }
                match act {
                    0 => drop(tenant.blocks().sleep(Contents::Keep(&store)).unwrap()),
                    1 => drop(tenant.blocks().sleep(Contents::Keep(&store)).and_then(|_| tenant.blocks().wake()).unwrap()),
                    2 => drop(blocks.split_off(3)),
                    _ => made = blocks[4].try_fork(5 * G, 5 * G).into_iter().collect(),
                }
                true
            });
            let done = done.unwrap();
            assert!(!done.stopped && done.in_use == 0, "{act}: {done:?}");
            tenant.blocks().wake().unwrap();
            for (seed, block) in (1..).zip(&blocks) {
                shows(rig, block, seed);
            }
            for fork in &made {
                shows(rig, fork, 5);
            }
            assert!(range.extents().is_empty());
            balanced(rig, &pool);
            drop((blocks, range, made));
            pool.trim(0).unwrap();
            assert_eq!(books(rig, &pool).committed, 0);
        }
    }

    fn a_compaction_while_blocks_fall_asleep_leaves_them_alone(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let store = HostStore::builder(&rig.device).limit(64 * G).build().unwrap();
        let make = |tag: &'static str, seed| {
            let of = tenant.block(8 * G).home_stream(&stream).tag(tag);
            let mut block = of.try_allocate().unwrap();
            fill(rig, &block, 0, seed);
            block.shrink_to(3 * G).unwrap();
            block
        };
        let (still, other) = (make("still", 1), make("moving", 2));
        stream.synchronize().unwrap();
        let compact = |_: &cuvmm::sleep::Progress| {
            let done = pool.compact(|_| true).unwrap();
            assert!(done.copied <= 3 * G, "the one that is not moving, once");
            true
        };
        let moving = tenant.blocks().tag("moving").on_progress(&compact);
        let slept = moving.sleep(Contents::Keep(&store)).unwrap();
        assert_eq!((slept.blocks, slept.kept), (1, 3 * G));
        assert_eq!(still.extents().iter().map(|it| it.size).sum::<u64>(), 3 * G);
        balanced(rig, &pool);
        moving.wake().unwrap();
        shows(rig, &still, 1);
        shows(rig, &other, 2);
        balanced(rig, &pool);
    }

    fn a_future_is_woken_by_a_compaction(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = exact(rig, 20).mapper(&mapper).build().unwrap();
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = tenant.block(16 * G).home_stream(&stream).try_allocate().unwrap();
        fill(rig, &block, 0, 2);
        block.shrink_to(2 * G).unwrap();
        block.shrink_to(G).unwrap();
        let waiting = Task::waiting(other.allocate_async(16 * G));
        pool.compact(|_| true).unwrap();
        let got = waiting.finish();
        assert!(got.is_ok(), "{:?}", got.err());
        shows(rig, &block, 2);
        drop(got);
        books(rig, &pool);
    }

    fn a_tenant_that_is_unregistered_compacts_what_is_left(rig) {
        let (pool, tenant) = common::with_tenant(limited(rig, 64).largest_extent(8 * G).build().unwrap());
        let again = tenant.clone();
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = tenant.block(8 * G).home_stream(&stream).try_allocate().unwrap();
        block.shrink_to(3 * G).unwrap();
        tenant.unregister();
        assert_eq!(again.compact(|_| true).unwrap().given_back, 5 * G);
        drop(block);
        assert_eq!(again.compact(|_| true).unwrap().steps, 0);
        drop(again);
        figures(&pool);
    }

    fn a_block_of_a_hardened_pool_grows_again(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).hardened(cuvmm::Hardened::default()).build().unwrap());
        let mut block = tenant.block(8 * G).home_stream(&stream).try_allocate().unwrap();
        fill(rig, &block, 0, 2);
        block.shrink_to(3 * G).unwrap();
        pool.compact(|_| true).unwrap();
        shows(rig, &block, 2);
        grow(rig, &mut block, 8, 2);
        shows(rig, &block, 2);
        figures(&pool);
    }

    fn what_is_in_place_after_a_loss_is_not_reported_as_lost(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let block = tenant.block(8 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        fill(rig, &block, 0, 2);
        block.shrink_to(7 * G).unwrap();
        rig.faults.forget();
        rig.faults.arm(Fault::nth(6, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
        rig.faults.arm(Fault::nth(6, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
        rig.faults.arm(Fault::nth(7, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
        let lost = pool.compact(|_| true);
        rig.faults.disarm();
        balanced(rig, &pool);
        let Err(BlockError::Lost { offset, bytes, .. }) = lost else { panic!("{lost:?}") };
        assert_eq!((offset, bytes), (6 * G, G), "the first six granules have their bytes");
    }

    fn precommitted_memory_with_a_mapper(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 128);
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = tenant.block(16 * G).capacity(64 * G).home_stream(&stream).try_allocate().unwrap();
        fill(rig, &block, 0, 2);
        for round in 0..60u64 {
            let _ = block.shrink_to((1 + round * 7 % 15) * G + 1);
            pool.compact(|_| true).unwrap();
            let whole = block.size() / G;
            let _ = block.shrink_to(whole * G);
            shows(rig, &block, 2);
            let old = block.size() / G;
            block.try_grow_to((20 + round % 30) * G).unwrap();
            fill(rig, &block, old, 2);
            shows(rig, &block, 2);
            figures(&pool);
        }
        let _ = block;
    }
}
