//! Many small extents of which a heap makes few large ones.

use std::sync::Arc;

use crate::common::sweep::{sweep_partly, text};
use crate::common::{self, D0, MIB, Rig, model};
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{Call, HandleTypes};
use cuvmm::share::Offered;
use cuvmm::{Allocation, Block, Heap, Limit, Offer, Pool, Stream};

/// Small allocations, and the request that they could serve together.
const SMALL: u64 = 8 * MIB;
const COUNT: u64 = 8;

/// Half of the largest extent under the limit.
const MEDIUM: u64 = 64 * MIB;

struct World {
    // Fields in drop order.
    live: Vec<Allocation>,
    heap: Heap,
    others: Option<Block>,
    stream: Stream,
    pool: Pool,
}

fn world(rig: &Rig<Nothing>, held: bool) -> World {
    world_with(rig, (2, 0), held)
}

/// Makes a heap in a pool of 4 GiB, with `large` live allocations of 256 MiB, and with free extents:
/// `medium` of [`MEDIUM`] bytes, and some of [`SMALL`] bytes each. If it is `held`, work that uses the
/// small ones is not complete.
fn world_with(rig: &Rig<Nothing>, (large, medium): (u64, u64), held: bool) -> World {
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(4096 * MIB));
    let (pool, tenant) =
        common::with_tenant(pool.shareable(HandleTypes::POSIX_FD).build().unwrap());
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let allocate = |size: u64| heap.allocate(size, 1, &stream).unwrap();
    let live: Vec<Allocation> = (0..large).map(|_| allocate(256 * MIB)).collect();
    let medium: Vec<Allocation> = (0..medium).map(|_| allocate(MEDIUM)).collect();
    let small: Vec<Allocation> = (0..COUNT).map(|_| allocate(SMALL)).collect();
    drop(medium);
    if held {
        rig.machine.hold(D0, stream.as_raw());
        let writes = small.iter().map(|it| (it.address(), it.size(), 1));
        rig.kernel(&stream, &[], &writes.collect::<Vec<_>>());
    }
    drop(small);
    World {
        live,
        heap,
        others: None,
        stream,
        pool,
    }
}

impl World {
    fn request(&mut self) -> Result<(), String> {
        let size = COUNT * SMALL;
        let memory = text(self.heap.allocate(size, 1, &self.stream))?;
        self.live.push(memory);
        Ok(())
    }

    /// Makes the request. Returns the numbers of extents before and after, and of extents that were
    /// unmapped.
    fn counted(&mut self) -> (u64, u64, u64) {
        let (stats, calls) = (self.heap.stats(), self.pool.calls());
        self.request().unwrap();
        let after = self.heap.stats();
        assert_eq!(after.held, stats.held);
        let calls = self.pool.calls().since(&calls);
        let released = calls.count(Call::MemRelease);
        assert_eq!(calls.count(Call::MemUnmap), released);
        (stats.extents, after.extents, released)
    }
}

#[test]
fn a_request_that_many_small_extents_could_serve_gets_a_large_one() {
    let rig = model();
    let mut world = world(&rig, false);
    let (before, after, released) = world.counted();
    assert_eq!((released, after), (COUNT, before - COUNT + 1));
    // The next request of this size finds it whole.
    let calls = world.pool.calls();
    drop(world.live.pop());
    world.request().unwrap();
    assert_eq!(world.pool.calls().since(&calls).count(Call::MemMap), 0);
}

// I-118
#[test]
fn extents_that_work_may_still_use_are_not_merged() {
    let rig = model();
    let mut world = world(&rig, true);
    let (before, after, released) = world.counted();
    assert_eq!(
        (released, after),
        (0, before),
        "it is stitched behind the work"
    );
    rig.machine.release_all_streams(D0);
}

// I-118
#[test]
fn only_extents_whose_own_work_is_complete_are_merged() {
    let rig = model();
    let mut world = world(&rig, false);
    world.heap.refresh();
    let allocate = |size: u64| world.heap.allocate(size, 1, &world.stream).unwrap();
    let busy: Vec<Allocation> = (0..COUNT / 2).map(|_| allocate(SMALL)).collect();
    rig.machine.hold(D0, world.stream.as_raw());
    let writes = busy.iter().map(|it| (it.address(), it.size(), 1));
    rig.kernel(&world.stream, &[], &writes.collect::<Vec<_>>());
    drop(busy);
    let (before, after, released) = world.counted();
    assert_eq!((released, after), (COUNT / 2, before - COUNT / 2 + 1));
    rig.machine.release_all_streams(D0);
}

#[test]
fn work_is_polled_only_where_it_decides_about_a_merge() {
    let rig = model();
    let mut world = world_with(&rig, (2, 4), false);
    let mut request = |size: u64| {
        let calls = world.pool.calls();
        let memory = world.heap.allocate(size, 1, &world.stream).unwrap();
        world.live.push(memory);
        let calls = world.pool.calls().since(&calls);
        let polls = calls.count(Call::EventQuery) + calls.count(Call::StreamQuery);
        (polls > 0, calls.count(Call::MemRelease))
    };
    // Two new extents would replace four, which gains nothing.
    assert_eq!(request(4 * MEDIUM), (false, 0));
    assert_eq!(request(COUNT * SMALL), (true, COUNT));
}

/// Another process may have what was offered, so that a release would give nothing back.
#[cfg(target_os = "linux")]
#[test]
fn extents_that_were_exported_are_not_merged() {
    let rig = model();
    let mut world = world(&rig, false);
    let small = world.heap.allocate(SMALL, 1, &world.stream).unwrap();
    let small = Arc::new(small);
    drop(Offer::several(&[Offered::Allocation(&small)]).unwrap());
    drop(small);
    let (before, after, released) = world.counted();
    assert_eq!((released, after), (0, before));
}

// I-118
#[test]
fn extents_stay_where_the_tenant_might_not_get_their_memory_again() {
    let rig = model();
    let mut world = world(&rig, false);
    let other = world.pool.tenant("b").register().unwrap();
    let left = 4096 * MIB - world.pool.stats().committed;
    let block = other.block(left - COUNT * SMALL + SMALL).try_allocate();
    world.others = Some(block.unwrap());
    let (before, after, released) = world.counted();
    assert_eq!((released, after), (0, before));
}

// I-118
#[test]
fn every_failure_leaves_what_is_live() {
    let calls = sweep_partly(
        |rig| world(rig, false),
        |_, world| world.request(),
        |world| {
            let stats = world.heap.stats();
            (stats.live, stats.allocations, world.live.len())
        },
    );
    // Each small extent is unmapped and released; one is created, mapped and opened.
    assert!(calls >= 2 * COUNT + 3, "{calls}");
}

#[test]
fn a_heap_that_may_hold_little_more_keeps_its_extents() {
    let rig = model();
    // Seven sixteenths of what it may hold are in use.
    let mut world = world_with(&rig, (7, 0), false);
    let (_, _, released) = world.counted();
    assert_eq!(released, 0);
}
