//! Cases that public bug reports of other allocators describe.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::attention::{Scene, build};
use crate::common::books::{balanced, figures};
use crate::common::{self, G, MIB, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::BlockError;
use cuvmm::heap::Preset;
use cuvmm::kv::Layout;
use cuvmm::{Allocation, Contents, Heap, Limit, Pool, Stream};

/// Makes a pool of `mib` MiB with a heap, and a stream.
fn heap(rig: &Rig<Nothing>, mib: u64) -> (Pool, Heap, Stream) {
    let pool = common::pool(rig, mib * MIB / G);
    let tenant = pool.tenant("a").register().unwrap();
    let heap = Heap::builder(&tenant).build().unwrap();
    (pool, heap, Stream::new(&rig.device).unwrap())
}

#[test]
fn a_request_larger_than_any_free_range_is_served_from_several() {
    let rig = common::model();
    let (_pool, heap, stream) = heap(&rig, 256);
    let allocate = |mib: u64| heap.allocate(mib * MIB, 1, &stream);
    let mut all: Vec<Allocation> = (0..8).map(|_| allocate(32).unwrap()).collect();
    for at in [6, 4, 2, 0] {
        drop(all.remove(at));
    }
    assert_eq!(heap.stats().largest_run, 32 * MIB);
    drop(allocate(128).unwrap());
    assert!(allocate(130).is_err(), "more than is free");
}

/// Frees every other one of 128 allocations of 8 MiB, which take all that the pool has, and asks
/// for `mib` MiB.
fn half_in_holes(
    (preset, graphs): (Preset, bool),
    mib: u64,
    check: impl FnOnce(Result<Allocation, BlockError>),
) {
    let rig = common::model();
    let pool = common::pool(&rig, 1024 * MIB / G);
    let tenant = pool.tenant("a").register().unwrap();
    let heap = Heap::builder(&tenant).preset(preset).for_graphs(graphs);
    let heap = heap.build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let allocate = |mib: u64| heap.allocate(mib * MIB, 1, &stream);
    // Extents of other sizes than 8 MiB may leave too little in several pieces for the last one. New
    // memory is never larger than the limit leaves, or many more would be missing.
    let all: Vec<Allocation> = std::iter::from_fn(|| allocate(8).ok()).take(128).collect();
    assert!(all.len() >= 127, "{}", all.len());
    let (live, freed): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    drop(freed);
    check(allocate(mib));
    drop(live);
}

#[test]
fn holes_of_whole_extents_are_joined() {
    for graphs in [false, true] {
        half_in_holes((Preset::Tight, graphs), 512, |memory| drop(memory.unwrap()));
    }
}

/// The preset that maps seldom asks for much more than a request. Where other tenants leave less, the heap
/// takes as much as the request needs.
#[test]
fn a_heap_takes_all_that_other_tenants_leave() {
    for preset in [Preset::Tight, Preset::Fast] {
        for (graphs, others) in [(false, 512), (false, 530), (true, 512), (true, 530)] {
            let rig = common::model();
            let pool = common::pool(&rig, 1024 * MIB / G);
            let other = pool.tenant("other").register().unwrap();
            let other = other.try_allocate(others * MIB).unwrap();
            let tenant = pool.tenant("a").register().unwrap();
            let heap = Heap::builder(&tenant).preset(preset).for_graphs(graphs);
            let heap = heap.build().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let mut all: Vec<Allocation> = vec![];
            let refused = loop {
                match heap.allocate(8 * MIB, 1, &stream) {
                    Ok(memory) => all.push(memory),
                    Err(error) => break error,
                }
            };
            let (count, most) = (all.len() as u64, (1024 - others) / 8);
            assert!(count + 1 >= most, "{preset:?}, {graphs}: {count} of {most}");
            assert!(refused.is_out_of_memory(), "{refused}");
            balanced(&rig, &pool);
            drop((all, other));
        }
    }
}

/// An extent that a hole shares with memory in use cannot be mapped elsewhere in part.
#[test]
fn holes_in_extents_in_use_are_stranded_and_the_error_says_why() {
    for graphs in [false, true] {
        half_in_holes((Preset::Fast, graphs), 256, stranded);
    }
}

fn stranded(memory: Result<Allocation, BlockError>) {
    let error = memory.unwrap_err();
    let shortage = error.shortage().expect("memory is short");
    assert!(shortage.stranded > 0, "{error}");
    assert!(
        shortage.available + shortage.stranded >= shortage.wanted,
        "{error}"
    );
    let text = error.to_string();
    assert!(text.contains("stranded in extents in use"), "{text}");
    assert!(text.contains("an extent is mapped as a whole"), "{text}");
    assert!(
        text.contains("a heap for graphs keeps all extents"),
        "{text}"
    );
}

#[test]
fn a_limit_that_was_lowered_and_restored() {
    let rig = common::model();
    let (pool, heap, stream) = heap(&rig, 256);
    let allocate = |mib: u64| heap.allocate(mib * MIB, 1, &stream);
    for _ in 0..3 {
        let kept = allocate(64).unwrap();
        drop(allocate(128).unwrap());
        let change = pool.set_limit(Limit::Bytes(96 * MIB)).unwrap();
        assert_eq!((change.limit, change.excess), (96 * MIB, 0));
        assert!(allocate(64).is_err());
        drop(allocate(32).unwrap());
        pool.set_limit(Limit::Bytes(256 * MIB)).unwrap();
        drop(allocate(192).unwrap());
        drop(kept);
        balanced(&rig, &pool);
    }
}

#[test]
fn wakes_and_growth_that_fail_change_nothing() {
    let rig = common::model();
    let (pool, tenant) = common::tenancy(&rig, 16);
    let other = pool.tenant("b").register().unwrap();
    let mut block = tenant.block(8 * G).capacity(32 * G).allocate().unwrap();
    tenant.blocks().sleep(Contents::Discard).unwrap();
    let taken = other.try_allocate(12 * G).unwrap();
    for _ in 0..3 {
        assert!(tenant.blocks().wake().unwrap_err().is_out_of_memory());
        assert!(block.is_asleep());
        assert_eq!(figures(&pool).committed, 12 * G);
    }
    drop(taken);
    tenant.blocks().wake().unwrap();
    for _ in 0..3 {
        assert!(block.try_grow_to(17 * G).unwrap_err().is_out_of_memory());
        assert_eq!((block.size(), figures(&pool).in_use), (8 * G, 8 * G));
    }
    block.try_grow_to(16 * G).unwrap();
    balanced(&rig, &pool);
}

/// Allocates, frees, trims and changes the limit: twelve operations, each tried again if it fails.
fn twelve_operations(rig: &Rig<Nothing>, pool: &Pool, heap: &Heap, stream: &Stream) {
    let mut live: Vec<Allocation> = vec![];
    for operation in 0..12_u64 {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let done = match operation {
                0 | 1 | 3 | 5 | 9 => {
                    let size = (operation + 1) * G / 2;
                    let allocated = heap.allocate(size, 1, stream);
                    allocated.map(|it| live.push(it)).is_ok()
                }
                2 | 6 => {
                    drop(live.remove(0));
                    true
                }
                4 | 8 => heap.trim().is_ok(),
                7 => pool.trim(0).is_ok(),
                10 => pool.set_limit(Limit::Bytes(24 * G)).is_ok(),
                _ => pool.set_limit(Limit::Bytes(32 * G)).is_ok(),
            };
            let live: u64 = live.iter().map(Allocation::size).sum();
            assert_eq!(heap.stats().live, live);
            balanced(rig, pool);
            if done {
                break;
            }
            assert!(attempts < 3, "operation {operation} fails without a fault");
        }
    }
}

#[test]
fn a_fault_in_every_call_of_twelve_operations() {
    for code in common::sweep::CODES {
        for k in 1.. {
            let rig = common::model();
            let (pool, heap, stream) = heap(&rig, 64);
            rig.faults.forget();
            rig.faults.arm(Fault::nth(k, code));
            twelve_operations(&rig, &pool, &heap, &stream);
            let injected = rig.faults.injected();
            rig.faults.disarm();
            drop((heap, stream));
            pool.close().unwrap();
            if injected == 0 {
                assert!(k > 10, "{k} calls");
                break;
            }
        }
    }
}

#[test]
fn a_churn_of_115_000_allocations_leaves_nothing() {
    let rig = common::model();
    let (pool, heap, stream) = heap(&rig, 512);
    let mut live: Vec<Allocation> = vec![];
    let mut number = 1_u64;
    let mut random = || {
        number = number
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        number >> 33
    };
    let mut made = 0;
    while made < 115_000 {
        let size = match random() % 8 {
            0 => 1 + random() % (8 * MIB),
            _ => 1 + random() % 65_536,
        };
        live.push(heap.allocate(size, 1, &stream).unwrap());
        made += 1;
        while live.len() > 32 {
            let victim = random() as usize % live.len();
            drop(live.swap_remove(victim));
        }
    }
    let most = heap.stats().peak_held;
    assert!(most <= 2 * heap.stats().peak_live, "{most}");
    drop(live);
    heap.trim().unwrap();
    pool.trim(0).unwrap();
    assert_eq!((heap.stats().live, balanced(&rig, &pool).free), (0, 0));
    assert_eq!(rig.machine.live().physical_bytes, 0);
}

#[test]
fn planes_of_which_one_fails_in_the_middle_grow_all_or_none() {
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        let mut failed = 0;
        for n in 1.. {
            let rig = common::model();
            let pool = common::pool(&rig, 128);
            let mut scene = Scene::new(&rig, pool, Layout::LayerMajor, build);
            let id = scene.cache.create(10).unwrap();
            let before = figures(&scene.pool).in_use;
            let refusal = CUresult::CUDA_ERROR_UNKNOWN;
            rig.faults.arm(common::nth_of(n, refusal, &[call]));
            let outcome = scene.cache.try_append(&[(id, 300)]);
            let injected = rig.faults.injected();
            rig.faults.disarm();
            if injected == 0 {
                outcome.unwrap();
                break;
            }
            if outcome.is_err() {
                failed += 1;
                assert_eq!(
                    (scene.cache.tokens(), figures(&scene.pool).in_use),
                    (10, before)
                );
                scene.cache.append(&[(id, 300)]).unwrap();
            }
            assert_eq!(scene.cache.tokens(), 310);
        }
        assert!(failed > 1, "{call:?} failed {failed} times");
    }
}

#[test]
fn queries_while_threads_free() {
    let rig = common::model();
    let (pool, heap, _stream) = heap(&rig, 512);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work = |thread: u64| {
            let stream = Stream::new(&rig.device).unwrap();
            for step in 0..500 {
                let size = 1 + (thread * 7 + step) % 9 * MIB;
                drop(heap.allocate(size, 1, &stream).unwrap());
            }
        };
        let threads: Vec<_> = (0..4)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let (pool, heap, ended) = (&pool, &heap, &ended);
        scope.spawn(move || {
            while !ended.load(Ordering::SeqCst) {
                let stats = pool.stats();
                assert!(stats.committed + stats.free <= stats.limit, "{stats:#?}");
                let stats = heap.stats();
                assert!(stats.live <= stats.held, "{stats:#?}");
            }
        });
        for thread in threads {
            thread.join().unwrap();
        }
        ended.store(true, Ordering::SeqCst);
    });
    assert_eq!(heap.stats().live, 0);
    balanced(&rig, &pool);
}

/// Whatever a heap holds in pieces, a request is served while the pool has that much new memory.
#[test]
fn a_request_that_the_pool_has_memory_for_is_served() {
    for seed in 0..u64::from(common::cases(150)) {
        let mut random = fastrand::Rng::with_seed(seed);
        let rig = common::model();
        let most = 1024 * MIB;
        let pool = common::pool(&rig, most / G);
        let other = pool.tenant("other").register().unwrap();
        let other = other.try_allocate(random.u64(1..=400) * G).unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let preset = random.choice([Preset::Tight, Preset::Fast]).unwrap();
        let graphs = random.bool();
        let heap = Heap::builder(&tenant).preset(preset).for_graphs(graphs);
        let heap = heap.build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let mut all: Vec<Allocation> = vec![];
        for step in 0..80 {
            if random.u8(0..5) < 2 && !all.is_empty() {
                drop(all.swap_remove(random.usize(0..all.len())));
                continue;
            }
            let left = most - pool.stats().committed;
            let size = match random.u8(0..5) {
                0 => random.u64(1..MIB),
                1 => random.u64(1..=20 * MIB),
                2 => random.u64(1..=200 * MIB),
                3 => left.max(1),
                _ => random.u64(1..=left.max(1)),
            };
            match heap.allocate(size, 1, &stream) {
                Ok(memory) => all.push(memory),
                Err(error) => {
                    let case = format!("seed {seed}, step {step}, {preset:?}, {graphs}");
                    assert!(error.is_out_of_memory(), "{case}: {error}");
                    assert!(size > left, "{case}: {size} of {left}: {error}");
                }
            }
        }
        balanced(&rig, &pool);
        drop((all, other));
    }
}
