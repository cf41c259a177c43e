//! Which memory a heap takes, and in what pieces.

use crate::common::{self, MIB, Rig, model};
use cuvmm::driver::model::Nothing;
use cuvmm::heap::Preset;
use cuvmm::{Allocation, Heap, Limit, Pool, Stream};

/// Makes a pool of `mib` MiB, and a heap and a stream.
fn heap(rig: &Rig<Nothing>, mib: u64) -> (Pool, Heap, Stream) {
    heap_with(rig, mib, Preset::Tight)
}

fn heap_with(rig: &Rig<Nothing>, mib: u64, preset: Preset) -> (Pool, Heap, Stream) {
    let limit = Limit::Bytes(mib * MIB);
    let (pool, tenant) =
        common::with_tenant(Pool::builder(&rig.device).limit(limit).build().unwrap());
    let heap = Heap::builder(&tenant).preset(preset).build().unwrap();
    (pool, heap, Stream::new(&rig.device).unwrap())
}

#[test]
fn extents_are_as_large_as_most_allocations() {
    let rig = model();
    let (_pool, heap, stream) = heap(&rig, 16 << 10);
    let allocate = |mib: u64| heap.allocate(mib * MIB, 1, &stream).unwrap();
    let few = [allocate(16), allocate(16)];
    let before = heap.stats().extents;
    let first = allocate(128);
    assert_eq!(heap.stats().extents - before, 4, "it is larger than most");
    drop(few);
    let many: Vec<Allocation> = (0..8).map(|_| allocate(256)).collect();
    let before = heap.stats().extents;
    let second = allocate(128);
    assert_eq!(heap.stats().extents - before, 1, "most are larger");
    drop((first, second));
    drop(many);
}

#[test]
fn extents_are_small_near_a_limit() {
    let rig = model();
    let (_pool, heap, stream) = heap(&rig, 1024);
    let mut live = Vec::new();
    let mut extents_of_128_mib = || {
        let before = heap.stats().extents;
        live.push(heap.allocate(128 * MIB, 1, &stream).unwrap());
        heap.stats().extents - before
    };
    assert_eq!(extents_of_128_mib(), 16, "no size is known yet");
    assert_eq!(extents_of_128_mib(), 1, "as large as most allocations");
    assert_eq!(extents_of_128_mib(), 1);
    assert_eq!(extents_of_128_mib(), 16, "of 8 MiB from 448 MiB on");
}

#[test]
fn the_least_extent_grows_with_the_heap() {
    let rig = model();
    let (_pool, heap, stream) = heap(&rig, 64 << 10);
    let mut live = Vec::new();
    let mut extents_of_20_mib = || {
        let before = heap.stats().extents;
        live.push(heap.allocate(20 * MIB, 1, &stream).unwrap());
        heap.stats().extents - before
    };
    assert_eq!(extents_of_20_mib(), 3, "of 8 MiB");
    // Up to 16 GiB, of which 32 MiB are a part in 512.
    for _ in 0..820 {
        extents_of_20_mib();
    }
    assert_eq!(extents_of_20_mib(), 1);
}

#[test]
fn an_empty_chunk_that_is_kept_serves_all_that_need_its_memory() {
    let rig = model();
    let (pool, heap, stream) = heap(&rig, 4);
    let allocate = |size: u64| heap.allocate(size, 1, &stream).unwrap();
    let lone = |size: u64| {
        let memory = allocate(size);
        let address = memory.address();
        drop(memory);
        address
    };
    // Each size is freed before the next is requested.
    assert_eq!(lone(4096), lone(8192));
    drop(allocate(4 * MIB));
    lone(4096);
    let other = pool.tenant("b").register().unwrap();
    let block = other.block(4 * MIB).try_allocate().unwrap();
    assert_eq!(heap.stats().held, 0, "another tenant took it");
    drop(block);
    drop(other);
    lone(4096);
    lone(8192);
    assert_eq!(heap.trim().unwrap(), 2 * MIB);
    assert_eq!(heap.stats().held, 0);
}

#[test]
fn all_empty_chunks_serve_a_large_request() {
    let rig = model();
    let (_pool, heap, stream) = heap(&rig, 8);
    for _ in 0..3 {
        let many: Vec<Allocation> = (0..16)
            .map(|_| heap.allocate(512 << 10, 1, &stream).unwrap())
            .collect();
        drop(many);
        drop(heap.allocate(512, 1, &stream).unwrap());
        let large = heap.allocate(8 * MIB, 1, &stream).unwrap();
        assert_eq!((large.size(), heap.stats().free), (8 * MIB, 0));
    }
}

#[test]
fn a_fast_heap_joins_small_allocations_that_were_freed_when_a_large_one_needs_other_memory() {
    let rig = model();
    let (_pool, heap, stream) = heap_with(&rig, 8, Preset::Fast);
    let allocate = |size: u64| heap.allocate(size, 1, &stream).unwrap();
    let [first, second] = [allocate(4096), allocate(8192)].map(|it| it.address().0);
    assert_eq!(second, first + 4096);
    // Another small size does not take what is likely to be requested again.
    let third = allocate(12_288);
    assert_eq!(third.address().0, second + 8192);
    let again = [allocate(4096), allocate(8192)];
    assert_eq!(again.each_ref().map(|it| it.address().0), [first, second]);
    drop(again);
    drop(allocate(2 * MIB));
    assert_eq!(allocate(12_288).address().0, first);
}

#[test]
fn a_fast_heap_joins_small_allocations_that_were_freed_before_it_adds_a_chunk() {
    let rig = model();
    let (_pool, heap, stream) = heap_with(&rig, 8, Preset::Fast);
    let allocate = |size: u64| heap.allocate(size, 1, &stream).unwrap();
    let mut chunk: Vec<Allocation> = (0..512).map(|_| allocate(4096)).collect();
    let held = heap.stats().held;
    let two = [chunk.remove(7), chunk.remove(7)].map(|it| it.address());
    let joined = allocate(8192);
    assert_eq!((joined.address(), heap.stats().held), (two[0], held));
}

#[test]
fn a_large_request_of_a_fast_heap_that_takes_a_run_of_its_size_leaves_what_may_come_again() {
    let rig = model();
    let (_pool, heap, stream) = heap_with(&rig, 64, Preset::Fast);
    let allocate = |size: u64| heap.allocate(size, 1, &stream).unwrap();
    let [first, second] = [4096, 8192].map(allocate);
    let place = first.address();
    let large = allocate(8 * MIB).address();
    // Figures are of all that is free, so the caches are empty after this.
    assert!(heap.stats().free >= 8 * MIB);
    drop(first);
    let large_again = allocate(8 * MIB);
    assert_eq!(large_again.address(), large);
    assert_eq!(allocate(2048).address().0, second.address().0 + 8192);
    assert_eq!(allocate(4096).address(), place);
}
