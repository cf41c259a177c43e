//! How much CPU memory a heap takes for what it keeps track of.
//!
//! `unsafe` is used to count allocations. The model's own tables are counted too.
#![allow(unsafe_code)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{GIB, MIB, model};
use cuvmm::{Allocation, Heap, Limit, Pool};
use fastrand::Rng;

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: The system's allocator does everything; the count changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: The caller keeps this function's contract, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: As in `alloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The bytes of CPU memory that a heap takes, its live allocations, and the bytes that it holds.
type Figures = (u64, u64, u64);

/// Allocates sizes until `live` bytes are live, four times as many in all, and frees allocations at
/// random. Then frees every second one by address, so that no free range is beside another. Returns
/// the figures before and after that.
fn taken(live: u64, size: impl Fn(&mut Rng) -> u64) -> [Figures; 2] {
    let rig = model();
    let limit = Limit::Bytes(32 * GIB);
    let (_pool, tenant, stream) = common::with_stream(
        &rig,
        Pool::builder(&rig.device).limit(limit).build().unwrap(),
    );
    let mut random = Rng::with_seed(7);
    let mut all: Vec<Allocation> = Vec::with_capacity(1 << 18);
    let before = BYTES.load(Ordering::Relaxed);
    let heap = Heap::builder(&tenant).build().unwrap();
    let (mut bytes, mut allocated) = (0, 0);
    while allocated < 4 * live {
        let size = size(&mut random);
        while bytes + size > live {
            bytes -= all.swap_remove(random.usize(..all.len())).size();
        }
        all.push(heap.allocate(size, 1, &stream).unwrap());
        bytes += size;
        allocated += size;
    }
    let figures = || {
        let stats = heap.stats();
        let taken = (BYTES.load(Ordering::Relaxed) - before) as u64;
        (taken, stats.allocations, stats.held)
    };
    let busy = figures();
    all.sort_unstable_by_key(|it| it.address().0);
    let mut count = 0;
    all.retain(|_| {
        count += 1;
        count % 2 == 0
    });
    [busy, figures()]
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_heap_takes_little_cpu_memory() {
    let cases = [
        taken(80 * MIB, |_| 512),
        taken(160 * MIB, |random| 512 * random.u64(1..16)),
        taken(GIB, |random| 512 * random.u64(1..1024)),
        taken(4 * GIB, |random| MIB + 512 * random.u64(..16384)),
        taken(16 * GIB, |random| MIB * random.u64(1..512)),
    ];
    for [busy, halved] in cases {
        let within = |each, (taken, live, held): Figures| taken <= each * live + held / 1000;
        assert!(within(64, busy), "{busy:?}");
        assert!(within(125, halved), "{halved:?}");
    }
}
