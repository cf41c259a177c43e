//! Compaction of regions: at all places, beside faults and waiting requests, and in a pool.

use crate::common::books::books;
use crate::common::{self, D0, G, pool};
use crate::compact::{extents, on_the_host, shows, stamp};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::MemoryError;
use cuvmm::{Access, HostExtents, Layout, Place, Region, Stream};

fn sums(region: &Region) {
    let it = region.stats();
    let parts =
        it.committed + it.pending_free + it.stranded + it.quarantined + region.zero_backed();
    assert_eq!(it.held, parts, "{it:?}");
}

on_both! {
    fn a_region_in_host_memory_is_compacted(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = on_the_host(rig, &stream);
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        region.decommit_after(9 * G..12 * G, &[]).unwrap();
        let done = region.compact(&stream);
        shows(rig, &region, &stream, &[]);
        let done = done.unwrap();
        assert_eq!(done.given_back, 7 * G);
        assert_eq!(extents(&region), [(0, 4), (8, 1), (12, 4)]);
        sums(&region);
    }

    fn memory_that_moved_to_the_host_is_compacted(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let ready = HostExtents::new(&rig.device, 0, 64 * G);
        ready.prepare(8 * G, 2).unwrap();
        ready.prepare(4 * G, 2).unwrap();
        let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G).host_extents(&ready);
        let mut region = common::committed(builder, 16 * G);
        stamp(&mut region, &stream);
        region.relocate(0..8 * G, &Place::HostNuma(0), &stream).unwrap();
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        let done = region.compact(&stream);
        shows(rig, &region, &stream, &[]);
        let done = done.unwrap();
        assert_eq!(done.given_back, 4 * G);
        assert_eq!(extents(&region), [(0, 4), (8, 8)]);
        sums(&region);
    }

    fn stripes_over_two_devices_are_compacted(rig) {
        let second = rig.second();
        let stream = Stream::new(&rig.device).unwrap();
        let stripes = [Place::from(&rig.device), Place::from(&second)];
        let layout = Layout::round_robin(stripes, 4 * G);
        let mut region = common::committed(Region::builder(&rig.device, 16 * G).layout(layout), 16 * G);
        region.grant(&second, Access::ReadWrite).unwrap();
        stamp(&mut region, &stream);
        region.decommit_after(5 * G..7 * G, &[]).unwrap();
        region.decommit_after(8 * G..11 * G, &[]).unwrap();
        let before: Vec<_> = region.extents().iter().map(|it| (it.offset, it.location)).collect();
        let done = region.compact(&stream).unwrap();
        assert_eq!(done.given_back, 5 * G);
        for extent in region.extents() {
            let old = before.iter().rfind(|it| it.0 <= extent.offset).unwrap();
            assert_eq!(old.1, extent.location);
        }
        shows(rig, &region, &stream, &[]);
        let other = Stream::new(&second).unwrap();
        shows(rig, &region, &other, &[]);
        sums(&region);
    }

    fn zeros_behind_holes_stay_and_holes_of_a_cut_can_have_them(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G);
        let mut region = common::committed(builder, 8 * G);
        stamp(&mut region, &stream);
        region.back_with_zeros(0..16 * G).unwrap();
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        region.back_with_zeros(0..16 * G).unwrap();
        let done = region.compact(&stream).unwrap();
        assert_eq!(done.given_back, 4 * G);
        sums(&region);
        assert_eq!(region.zero_backed(), 8 * G);
        region.back_with_zeros(0..16 * G).unwrap();
        assert_eq!(region.zero_backed(), 12 * G);
        shows(rig, &region, &stream, &[]);
        if rig.keeps_bytes() {
            assert_eq!(common::copy(rig, region.address().0 + 5 * G), Some([0; 4]));
        }
        sums(&region);
        region.commit(0..16 * G).unwrap();
        stamp(&mut region, &stream);
        shows(rig, &region, &stream, &[]);
        assert_eq!(region.compact(&stream).unwrap().steps, 0);
        region.decommit_after(1..16 * G, &[]).unwrap_err();
        region.decommit_after(G..16 * G, &[]).unwrap();
        region.compact(&stream).unwrap();
        assert_eq!(region.stats().stranded, 0);
    }

    fn triple_failures_keep_the_sums(rig) {
        let calls = [
            Call::MemAddressReserve, Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap,
            Call::MemcpyDtoDAsync, Call::StreamSynchronize, Call::EventCreate, Call::EventRecord,
            Call::EventSynchronize,
        ];
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..600 {
            let in_pool = round % 2 == 0;
            let pool = common::limited(rig, 64).largest_extent(8 * G).build().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G);
            let tenant = pool.tenant("a").register().unwrap();
            let mut region = match in_pool {
                true => builder.in_tenant(&tenant).home_stream(&stream).reserve().unwrap(),
                false => builder.reserve().unwrap(),
            };
            region.commit(0..16 * G).unwrap();
            stamp(&mut region, &stream);
            region.decommit_after(3 * G..8 * G, &[]).unwrap();
            region.decommit_after(9 * G..12 * G, &[]).unwrap();
            for _ in 0..random.u64(3..9) {
                let fault = Fault::nth(random.u64(1..14), CUresult::CUDA_ERROR_UNKNOWN);
                rig.faults.arm(fault.of(calls[random.usize(0..calls.len())]));
            }
            let outcome = region.compact(&stream);
            rig.faults.disarm();
            shows(rig, &region, &stream, &[]);
            let it = region.stats();
            let parts = it.committed + it.pending_free + it.stranded + it.quarantined;
            assert_eq!(it.held, parts, "round {round}: {outcome:?} {it:?} {:?}", extents(&region));
            if !matches!(outcome, Err(MemoryError::Lost { .. })) {
                assert_eq!(region.committed(), 8 * G, "round {round}: {outcome:?}");
                if in_pool {
                    common::books::balanced(rig, &pool);
                }
                let again = region.compact(&stream);
                shows(rig, &region, &stream, &[]);
                let _ = again;
                sums(&region);
            } else if in_pool {
                common::books::figures(&pool);
            }
            drop(region);
            drop(tenant);
            pool.close().unwrap();
            drop(stream);
            assert_eq!(rig.machine.live().physicals, 0, "round {round} {outcome:?}");
        }
    }

    fn a_compaction_frees_memory_for_one_that_waits(rig) {
        let pool = pool(rig, 24);
        let stream = Stream::new(&rig.device).unwrap();
        let [tenant, other] = common::tenants(&pool);
        let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G);
        let mut region = common::committed(builder.in_tenant(&tenant).home_stream(&stream), 16 * G);
        stamp(&mut region, &stream);
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        region.decommit_after(10 * G..16 * G, &[]).unwrap();
        let waiter = std::thread::spawn(move || {
            let block = other.block(16 * G).timeout(std::time::Duration::from_secs(60));
            block.allocate().map(drop)
        });
        region.compact(&stream).unwrap();
        waiter.join().unwrap().unwrap();
        shows(rig, &region, &stream, &[]);
        books(rig, &pool);
    }

    fn what_is_in_place_after_a_loss_is_counted(rig) {
        for in_pool in [false, true] {
            let pool = pool(rig, 64);
            let stream = Stream::new(&rig.device).unwrap();
            let builder = Region::builder(&rig.device, 8 * G).largest_extent(8 * G);
            let tenant = pool.tenant("a").register().unwrap();
            let mut region = match in_pool {
                true => builder.in_tenant(&tenant).home_stream(&stream).reserve().unwrap(),
                false => builder.reserve().unwrap(),
            };
            region.commit(0..8 * G).unwrap();
            stamp(&mut region, &stream);
            region.decommit_after(7 * G..8 * G, &[]).unwrap();
            rig.faults.forget();
            // Three mappings lie beside. The third in place is refused; of the two before it, the
            // second is taken out again, and the first stays.
            rig.faults.arm(Fault::nth(6, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
            rig.faults.arm(Fault::nth(6, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
            rig.faults.arm(Fault::nth(7, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
            let lost = region.compact(&stream);
            rig.faults.disarm();
            assert!(matches!(lost, Err(MemoryError::Lost { .. })), "{lost:?}");
            shows(rig, &region, &stream, &[]);
            sums(&region);
            if in_pool {
                books(rig, &pool);
            }
            region.purge().unwrap();
            region.commit(0..8 * G).unwrap();
            assert_eq!(extents(&region).iter().map(|it| it.1).sum::<u64>(), 8);
        }
    }

    fn mappings_at_their_limit(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G).mapping_limit(2);
        let mut region = common::committed(builder, 16 * G);
        stamp(&mut region, &stream);
        region.decommit_after(7 * G..8 * G, &[]).unwrap();
        region.decommit_after(12 * G..16 * G, &[]).unwrap();
        let done = region.compact(&stream).unwrap();
        assert_eq!((done.kept.partly_used, done.given_back), (G, 4 * G), "three extents are too many");
        shows(rig, &region, &stream, &[]);
        sums(&region);
    }

    fn a_held_lease_of_work_on_another_stream_after_the_drain(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let home = Stream::new(&rig.device).unwrap();
        let (pool, tenant) = common::tenancy(rig, 64);
        let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G);
        let mut region = common::committed(builder.in_tenant(&tenant).home_stream(&home), 16 * G);
        stamp(&mut region, &stream);
        // Whole extents withdrawn behind held work, and a part.
        rig.machine.hold_until_awaited(D0, home.as_raw());
        rig.kernel(&home, &[], &[(region.address(), 16 * G, 9)]);
        region.decommit_after(6 * G..16 * G, std::slice::from_ref(&home)).unwrap();
        let done = region.compact(&stream).unwrap();
        assert_eq!(done.given_back, 10 * G);
        books(rig, &pool);
        region.commit(6 * G..16 * G).unwrap();
        if rig.keeps_bytes() {
            let mut bytes = [0; 8];
            region.read(&stream, 7 * G, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 8]);
            region.read(&stream, 5 * G, &mut bytes).unwrap();
            assert_eq!(bytes, [9; 8]);
        }
        books(rig, &pool);
    }
}
