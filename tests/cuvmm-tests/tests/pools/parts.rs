//! Memory that a block gives up is memory again: a compaction gives the pool the part of an extent
//! behind the end of a block that has shrunk.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::common::books::{balanced, books};
use crate::common::compaction::{CALLS, assert_stamped, exact, sizes, stamp, stamp_all};
use crate::common::executor::Task;
use crate::common::{self, D0, G};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call, HandleTypes};
use cuvmm::error::BlockError;
use cuvmm::{Block, Mapper, Stream, Tenant};

/// Allocates a block, and stamps both ends of each granule with its number.
fn stamped(tenant: &Tenant, stream: &Stream, granules: u64) -> Block {
    let block = tenant.block(granules * G).home_stream(stream);
    let block = block.try_allocate().unwrap();
    stamp_all(&block);
    block
}

on_both! {
    fn half_of_an_extent_serves_another_tenant(rig) {
        let pool = exact(rig, 16).build().unwrap();
        let [llama, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = stamped(&llama, &stream, 8);
        let address = block.address();
        block.shrink_to(4 * G).unwrap();
        assert_eq!(llama.stats().stranded, 4 * G);
        assert!(other.try_allocate(12 * G).is_err(), "the rest lies in one extent with the block");
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.copied, done.steps), (4 * G, 4 * G, 1));
        assert_eq!((done.in_use, done.no_space, done.exported, done.shared), (0, 0, 0, 0));
        assert_eq!((sizes(&block), block.address()), (vec![4], address));
        let stats = llama.stats();
        assert_eq!((stats.committed, stats.stranded, stats.in_use), (4 * G, 0, 4 * G));
        assert_stamped(rig, &block);
        let twelve = other.try_allocate(12 * G).unwrap();
        drop(twelve);
        books(rig, &pool);
        // The block grows again at its addresses.
        block.try_grow_to(8 * G).unwrap();
        assert_eq!(block.address(), address);
        block.shrink_to(4 * G).unwrap();
        assert_stamped(rig, &block);
        assert_eq!(pool.compact(|_| true).unwrap().given_back, 4 * G);
        let again = pool.compact(|_| true).unwrap();
        assert_eq!((again.steps, again.given_back), (0, 0));
    }

    fn a_block_keeps_its_size_in_whole_granules(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let mut block = stamped(&tenant, &stream, 24);
        assert_eq!(sizes(&block), [8, 8, 8]);
        block.shrink_to(13 * G + 1).unwrap();
        let done = tenant.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.copied), (10 * G, 6 * G));
        assert_eq!((done.extents_before, done.extents_after), (3, 3));
        assert_eq!(sizes(&block), [8, 4, 2]);
        assert_eq!(tenant.stats().committed, 14 * G);
        assert_stamped(rig, &block);
        // Where it ends with an extent, nothing is copied.
        block.shrink_to(8 * G).unwrap();
        let done = tenant.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.copied, done.extents_after), (6 * G, 0, 1));
        block.shrink_to(1).unwrap();
        tenant.compact(|_| true).unwrap();
        assert_eq!((tenant.stats().committed, sizes(&block)), (G, vec![1]));
        books(rig, &pool);
    }

    fn the_least_to_copy_comes_first(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 17).build().unwrap());
        let (mut large, mut small) = (stamped(&tenant, &stream, 8), stamped(&tenant, &stream, 8));
        large.shrink_to(7 * G).unwrap();
        small.shrink_to(G).unwrap();
        let mut copied = vec![];
        let done = pool.compact(|so_far| {
            copied.push(so_far.copied / G);
            true
        });
        let done = done.unwrap();
        assert_eq!((done.given_back, done.no_space), (8 * G, 0));
        assert_eq!(copied, [1, 8]);
        assert_eq!((sizes(&large), sizes(&small)), (vec![4, 2, 1], vec![1]));
        assert_stamped(rig, &large);
        assert_stamped(rig, &small);
        balanced(rig, &pool);
    }

    fn a_tenant_compacts_its_own_blocks(rig) {
        let pool = exact(rig, 64).build().unwrap();
        let [one, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let (mut mine, mut theirs) = (stamped(&one, &stream, 8), stamped(&other, &stream, 8));
        mine.shrink_to(3 * G).unwrap();
        theirs.shrink_to(3 * G).unwrap();
        let done = one.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.extents_before, done.extents_after), (5 * G, 1, 2));
        assert_eq!((one.stats().committed, other.stats().committed), (3 * G, 8 * G));
        assert_eq!((sizes(&mine), sizes(&theirs)), (vec![2, 1], vec![8]));
    }

    fn without_room_for_the_live_part_the_extent_stays(rig) {
        let pool = exact(rig, 11).build().unwrap();
        let [tenant, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = stamped(&tenant, &stream, 8);
        block.shrink_to(4 * G).unwrap();
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.no_space, done.given_back), (1, 0));
        assert_eq!(sizes(&block), [8]);
        assert!(rig.machine.live().physical_bytes <= 11 * G);
        assert_stamped(rig, &block);
        // Three granules are there.
        block.shrink_to(3 * G).unwrap();
        assert_eq!(pool.compact(|_| true).unwrap().given_back, 5 * G);
        assert_eq!(other.try_allocate(8 * G).unwrap().size(), 8 * G);
        balanced(rig, &pool);
    }

    fn what_stays_is_counted_by_its_reason(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).shareable(HandleTypes::POSIX_FD).build().unwrap());
        let blocks = || stamped(&tenant, &stream, 8);
        let (mut leased, mut busy, mut exported, mut forked) = (blocks(), blocks(), blocks(), blocks());
        let fork = forked.fork(8 * G, 8 * G).unwrap();
        drop(exported.export(HandleTypes::POSIX_FD).unwrap());
        for block in [&mut leased, &mut busy, &mut exported, &mut forked] {
            block.shrink_to(4 * G).unwrap();
        }
        let lease = leased.lease();
        rig.held_kernel(&stream, &[], &[(busy.address(), G, 1)]);
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.copied), (0, 0), "all are on one stream: {done:?}");
        rig.machine.release_stream(D0, stream.as_raw());
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.in_use, done.exported, done.given_back), (1, 1, 4 * G), "{done:?}");
        assert_eq!([&leased, &busy, &exported, &forked].map(|it| sizes(it)[0]), [8, 4, 8, 8]);
        drop((lease, fork));
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.in_use, done.exported), (0, 1));
        assert_eq!(sizes(&leased), [4]);
        balanced(rig, &pool);
    }

    fn every_driver_call_of_a_cut_failed_once_and_twice(rig) {
        for twice in [false, true] {
            for k in 1.. {
                let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
                let mut block = stamped(&tenant, &stream, 16);
                block.shrink_to(15 * G).unwrap();
                rig.faults.forget();
                let refused = CUresult::CUDA_ERROR_UNKNOWN;
                rig.faults.arm(common::nth_of(k, refused, CALLS));
                if twice {
                    rig.faults.arm(common::nth_of(k + 1, refused, CALLS));
                }
                let outcome = pool.compact(|_| true);
                let hit = rig.faults.injected() > 0;
                rig.faults.disarm();
                assert_stamped(rig, &block);
                assert_eq!(tenant.stats().in_use, 15 * G, "{k}: {outcome:?}");
                let is_whole = sizes(&block) == [8, 8];
                assert!(is_whole || sizes(&block) == [8, 4, 2, 1], "{k}: {:?}", sizes(&block));
                balanced(rig, &pool);
                drop((block, tenant));
                pool.close().unwrap();
                assert_eq!(rig.machine.live().physicals, 0, "call {k}");
                if !hit {
                    assert!(k > 10, "only {k} calls were failed");
                    break;
                }
            }
        }
    }

    fn what_several_failures_lose_is_said(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let mut block = stamped(&tenant, &stream, 8);
        block.shrink_to(7 * G).unwrap();
        rig.faults.forget();
        // Three mappings lie beside. The third in place is refused, and the two before it cannot be
        // unmapped any more.
        rig.faults.arm(Fault::nth(6, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
        rig.faults.arm(Fault::from(5, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
        let lost = pool.compact(|_| true);
        rig.faults.disarm();
        assert!(matches!(lost, Err(BlockError::Lost { .. })), "{lost:?}");
        assert_eq!(sizes(&block), [4, 2], "what is in place has its bytes");
        if rig.keeps_bytes() {
            let mut bytes = [0; 8];
            block.read(5 * G, &mut bytes).unwrap();
            assert_eq!(bytes, stamp(5));
        }
        drop((block, tenant));
        pool.close().unwrap();
        assert_eq!(rig.machine.live().physicals, 0);
    }

    // I-87
    fn a_movable_block_gives_under_pressure_what_it_has_given_up(rig) {
        let pool = exact(rig, 16).build().unwrap();
        let [llama, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let block = llama.block(8 * G).home_stream(&stream).movable(true);
        let mut block = block.try_allocate().unwrap();
        stamp_all(&block);
        block.shrink_to(3 * G).unwrap();
        // Under a lease, and under work that was launched under it, the memory stays.
        let lease = block.lease();
        assert!(other.try_allocate(12 * G).is_err());
        rig.held_kernel(&stream, &[(block.address(), G)], &[]);
        drop(lease);
        assert!(other.try_allocate(12 * G).is_err());
        assert_eq!((sizes(&block), llama.stats().committed), (vec![8], 8 * G));
        rig.machine.release_stream(D0, stream.as_raw());
        // Also the work of another stream that used it is waited for.
        let further = Stream::new(&rig.device).unwrap();
        let lease = block.lease();
        rig.held_kernel(&further, &[(block.address(), G)], &[]);
        lease.record_use(&further).unwrap();
        drop(lease);
        assert!(other.try_allocate(12 * G).is_err());
        rig.machine.release_stream(D0, further.as_raw());
        let guard = pool.capture_guard();
        assert!(other.try_allocate(12 * G).is_err(), "a guard lives");
        drop(guard);
        let twelve = other.try_allocate(12 * G).unwrap();
        assert_eq!((sizes(&block), llama.stats().committed), (vec![2, 1], 3 * G));
        assert_stamped(rig, &block);
        drop(twelve);
        block.try_grow_to(8 * G).unwrap();
        books(rig, &pool);
    }

    fn only_blocks_whose_owners_agreed_are_moved(rig) {
        let (_pool, tenant, stream) = common::with_stream(rig, exact(rig, 16).build().unwrap());
        let mut block = stamped(&tenant, &stream, 8);
        block.shrink_to(3 * G).unwrap();
        assert!(tenant.try_allocate(12 * G).is_err());
        assert_eq!(sizes(&block), [8]);
    }

    fn memory_of_a_movable_block_does_not_make_the_next_block_movable(rig) {
        let (_pool, tenant, stream) = common::with_stream(rig, exact(rig, 16).build().unwrap());
        let block = tenant.block(8 * G).home_stream(&stream).movable(true);
        drop(block.try_allocate().unwrap());
        let mut block = stamped(&tenant, &stream, 8);
        block.shrink_to(3 * G).unwrap();
        assert!(tenant.try_allocate(12 * G).is_err());
        assert_eq!(sizes(&block), [8]);
        // Nor does a plain block's memory make a movable block plain.
        drop(block);
        let block = tenant.block(8 * G).home_stream(&stream).movable(true);
        let mut block = block.try_allocate().unwrap();
        block.shrink_to(3 * G).unwrap();
        assert_eq!(tenant.try_allocate(12 * G).unwrap().size(), 12 * G);
    }

    fn a_future_gets_the_memory_when_a_lease_ends(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let (_pool, tenant) = common::with_tenant(exact(rig, 16).mapper(&mapper).build().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let block = tenant.block(8 * G).home_stream(&stream).movable(true);
        let mut block = block.try_allocate().unwrap();
        stamp_all(&block);
        block.shrink_to(3 * G).unwrap();
        let lease = block.lease();
        let waiting = Task::waiting(tenant.allocate_async(12 * G));
        drop(lease);
        assert_eq!(waiting.finish().unwrap().size(), 12 * G);
        assert_stamped(rig, &block);
    }

    fn a_tenants_own_limit_is_met_by_its_own_blocks(rig) {
        let pool = exact(rig, 64).build().unwrap();
        let (one, other) = (
            pool.tenant("one").limit(16 * G).register().unwrap(),
            pool.tenant("other").register().unwrap(),
        );
        let stream = Stream::new(&rig.device).unwrap();
        let movable = |tenant: &Tenant| {
            let block = tenant.block(8 * G).home_stream(&stream).movable(true);
            let mut block = block.try_allocate().unwrap();
            stamp_all(&block);
            block.shrink_to(2 * G).unwrap();
            block
        };
        let (mine, theirs) = (movable(&one), movable(&other));
        let more = one.try_allocate(13 * G).unwrap();
        assert_eq!((sizes(&mine), sizes(&theirs)), (vec![2], vec![8]));
        assert_stamped(rig, &mine);
        drop(more);
        balanced(rig, &pool);
    }

    fn nobody_gives_below_a_guarantee(rig) {
        let pool = exact(rig, 16).build().unwrap();
        let (kept, other) = (
            pool.tenant("kept").guarantee(8 * G).register().unwrap(),
            pool.tenant("other").register().unwrap(),
        );
        let stream = Stream::new(&rig.device).unwrap();
        let block = kept.block(8 * G).home_stream(&stream).movable(true);
        let mut block = block.try_allocate().unwrap();
        block.shrink_to(2 * G).unwrap();
        assert!(other.try_allocate(9 * G).is_err());
        assert_eq!(sizes(&block), [8]);
    }

    fn a_request_that_waits_gets_the_memory_when_a_lease_ends(rig) {
        let pool = exact(rig, 16).build().unwrap();
        let (send, sent) = mpsc::channel();
        let tenant = pool.tenant("a").on_shortage(move |_| send.send(()).unwrap());
        let tenant = tenant.register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let block = tenant.block(8 * G).home_stream(&stream).movable(true);
        let mut block = block.try_allocate().unwrap();
        stamp_all(&block);
        block.shrink_to(3 * G).unwrap();
        let lease = block.lease();
        std::thread::scope(|scope| {
            let waits = || tenant.block(12 * G).timeout(Duration::from_secs(60)).allocate();
            let waiting = scope.spawn(waits);
            // The hook is called before the request waits.
            sent.recv().unwrap();
            drop(lease);
            assert_eq!(waiting.join().unwrap().unwrap().size(), 12 * G);
        });
        assert_stamped(rig, &block);
    }

    fn who_leases_and_launches_meets_no_hazard_beside_who_presses(rig) {
        let pool = exact(rig, 16).build().unwrap();
        let [llama, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let block = llama.block(8 * G).home_stream(&stream).movable(true);
        let mut block = block.try_allocate().unwrap();
        stamp_all(&block);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut served = 0;
                while !done.load(Ordering::Relaxed) || served == 0 {
                    let pressing = other.block(11 * G).timeout(Duration::from_millis(20));
                    served += u32::from(pressing.allocate().is_ok());
                }
            });
            for turn in 0..200 {
                let lease = block.lease();
                let (reads, writes) = (vec![(lease.address(), 3 * G)], vec![]);
                rig.kernel(&stream, &reads, &writes);
                drop(lease);
                match turn % 4 {
                    0 => block.shrink_to(3 * G).unwrap(),
                    2 => drop(block.grow_to(8 * G)),
                    _ => {}
                }
            }
            drop(block.shrink_to(3 * G));
            done.store(true, Ordering::Relaxed);
        });
        block.shrink_to(3 * G).unwrap();
        assert_stamped(rig, &block);
        balanced(rig, &pool);
    }
}
