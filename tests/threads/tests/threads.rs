//! Many threads on one pool. CI runs this test under ThreadSanitizer.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../cuvmm-tests/tests/common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::G;
use cuvmm::error::BlockError;
use cuvmm::{Block, Growth, Limit, Mapper, Pool, Stream};

const THREADS: u64 = 8;

fn stamp(block: &Block, owner: u64) {
    block.write(0, &owner.to_le_bytes()).unwrap();
    block.write(block.size() - 8, &owner.to_le_bytes()).unwrap();
}

fn verify(block: &Block, owner: u64) {
    for offset in [0, block.size() - 8] {
        let mut bytes = [0; 8];
        block.read(offset, &mut bytes).unwrap();
        assert_eq!(
            u64::from_le_bytes(bytes),
            owner,
            "another owner wrote to this block"
        );
    }
}

#[test]
fn eight_threads_allocate_grow_and_free_on_one_pool() {
    eight_threads(false);
}

#[test]
fn eight_threads_and_a_mapper() {
    eight_threads(true);
}

fn eight_threads(mapped: bool) {
    let rig = common::host();
    let limit = 48 * G;
    let mapper = mapped.then(|| Mapper::start(&rig.device).unwrap());
    let mut builder = Pool::builder(&rig.device)
        .limit(Limit::Bytes(limit))
        .growth(Growth::Part(2));
    if let Some(mapper) = &mapper {
        builder = builder.mapper(mapper).free_target(4 * G);
    }
    let pool = builder.build().unwrap();
    let tenants =
        ["a", "b", "c"].map(|name| pool.tenant(name).guarantee(8 * G).register().unwrap());
    let served = AtomicU64::new(0);
    let refused = AtomicU64::new(0);
    let rounds = if cfg!(debug_assertions) { 300 } else { 1500 };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (rig, pool, tenants, served, refused) = (&rig, &pool, &tenants, &served, &refused);
            scope.spawn(move || {
                let mut dice = fastrand::Rng::with_seed(thread);
                let stream = Stream::new(&rig.device).unwrap();
                let mut held: Vec<(Block, u64)> = vec![];
                for round in 0..rounds {
                    let owner = thread << 32 | round;
                    match dice.u64(..9) {
                        0..=3 => {
                            let tenant = &tenants[dice.usize(..tenants.len())];
                            let size = 1 + dice.u64(..6);
                            let mut builder = tenant.block(size * G).capacity(16 * G);
                            if dice.bool() {
                                builder = builder.home_stream(&stream);
                            }
                            let got = if dice.u8(..4) == 0 {
                                builder.timeout(Duration::from_millis(1)).allocate()
                            } else {
                                builder.try_allocate()
                            };
                            match got {
                                Ok(block) => {
                                    stamp(&block, owner);
                                    held.push((block, owner));
                                    served.fetch_add(1, Ordering::Relaxed);
                                }
                                Err(BlockError::OutOfMemory(_)) => {
                                    refused.fetch_add(1, Ordering::Relaxed);
                                }
                                Err(error) => panic!("{error}"),
                            }
                        }
                        4 => {
                            if let Some((block, owner)) = held.last_mut() {
                                let size = (block.size() + G).min(block.capacity());
                                if block.try_grow_to(size).is_ok() {
                                    stamp(block, *owner);
                                }
                            }
                        }
                        5 => {
                            if let Some((block, owner)) = held.first_mut() {
                                block.shrink_to((block.size() / 2).max(8)).unwrap();
                                stamp(block, *owner);
                            }
                        }
                        6 => {
                            let stats = pool.stats();
                            assert!(stats.committed + stats.free <= limit);
                            pool.trim(limit / 2).unwrap();
                        }
                        7 => {
                            // No work is queued here, so the compaction only meets operations on
                            // blocks.
                            pool.compact(|done| done.steps < 2).unwrap();
                        }
                        _ => {
                            if !held.is_empty() {
                                let index = dice.usize(..held.len());
                                let (block, owner) = held.swap_remove(index);
                                verify(&block, owner);
                                let lease = (dice.bool()).then(|| block.lease());
                                drop(block);
                                drop(lease);
                            }
                        }
                    }
                    if held.len() > 4 {
                        let (block, owner) = held.remove(0);
                        verify(&block, owner);
                    }
                }
                for (block, owner) in held {
                    verify(&block, owner);
                }
            });
        }
    });
    assert!(served.into_inner() > 100);
    assert_eq!(pool.stats().in_use, 0);
    drop(tenants);
    pool.close().unwrap();
    drop(mapper);
    common::nothing_left(rig);
}

#[test]
fn waiting_threads_are_all_served_in_the_end() {
    let rig = common::model();
    let pool = Pool::builder(&rig.device)
        .limit(Limit::Bytes(4 * G))
        .build()
        .unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..20 {
                    let block = tenant
                        .block(3 * G)
                        .timeout(Duration::from_secs(60))
                        .allocate()
                        .unwrap();
                    std::thread::yield_now();
                    drop(block);
                }
            });
        }
    });
    drop((tenant, pool));
    common::nothing_left(rig);
}
