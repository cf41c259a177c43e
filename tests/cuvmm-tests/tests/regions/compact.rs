//! Compaction of a region: the withdrawn part of an extent is memory again.

use crate::common::books::books;
use crate::common::{self, D0, G, Rig, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, HandleTypes};
use cuvmm::error::{ArgumentError, MemoryError};
use cuvmm::region::Kept;
use cuvmm::{Layout, Place, Pool, Region, Stream};

/// A region of sixteen granules of host memory in extents of at most eight.
pub(crate) fn on_the_host(rig: &Rig<impl Backing>, stream: &Stream) -> Region {
    let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G);
    let layout = Layout::on(Place::HostNuma(0));
    let mut region = common::committed(builder.layout(layout), 16 * G);
    stamp(&mut region, stream);
    region
}

/// Writes the number of each committed granule to both ends of it.
pub(crate) fn stamp(region: &mut Region, stream: &Stream) {
    for granule in 0..region.size() / G {
        if region.is_committed(granule * G..(granule + 1) * G) {
            for at in [granule * G, (granule + 1) * G - 8] {
                region.write(stream, at, &[granule as u8 + 1; 8]).unwrap();
            }
        }
    }
}

/// A region of sixteen granules in extents of at most eight, wholly committed and stamped.
fn stamped(rig: &Rig<impl Backing>, pool: Option<&Pool>, stream: &Stream) -> Region {
    let builder = Region::builder(&rig.device, 16 * G).largest_extent(8 * G);
    let tenant = pool.map(|pool| pool.tenant("a").register().unwrap());
    let mut region = match &tenant {
        Some(tenant) => builder.in_tenant(tenant).home_stream(stream).reserve(),
        None => builder.reserve(),
    }
    .unwrap();
    region.commit(0..16 * G).unwrap();
    stamp(&mut region, stream);
    region
}

/// Checks the stamps of committed granules, and that those of `zeros` read as zero.
pub(crate) fn shows(rig: &Rig<impl Backing>, region: &Region, stream: &Stream, zeros: &[u64]) {
    for granule in 0..region.size() / G {
        if !rig.keeps_bytes() || !region.is_committed(granule * G..(granule + 1) * G) {
            continue;
        }
        let expected = match zeros.contains(&granule) {
            true => 0,
            false => granule as u8 + 1,
        };
        for at in [granule * G, (granule + 1) * G - 8] {
            let mut bytes = [0; 8];
            region.read(stream, at, &mut bytes).unwrap();
            assert_eq!(bytes, [expected; 8], "granule {granule}");
        }
    }
}

/// Returns the place and the size of each extent, in granules.
pub(crate) fn extents(region: &Region) -> Vec<(u64, u64)> {
    let extents = region.extents();
    extents
        .iter()
        .map(|extent| (extent.offset / G, extent.size / G))
        .collect()
}

/// The calls that a compaction makes.
const CALLS: &[Call] = &[
    Call::CtxSynchronize,
    Call::MemAddressReserve,
    Call::MemCreate,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::MemcpyDtoDAsync,
    Call::StreamSynchronize,
    Call::StreamIsCapturing,
];

on_both! {
    fn the_withdrawn_part_of_an_extent_is_memory_again(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, None, &stream);
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        region.decommit_after(9 * G..12 * G, &[]).unwrap();
        region.decommit_after(14 * G..16 * G, &[]).unwrap();
        stream.synchronize().unwrap();
        assert_eq!((region.purge().unwrap().given_back, region.held()), (0, 16 * G));
        let done = region.compact(&stream).unwrap();
        assert_eq!((done.given_back, done.copied, done.steps), (9 * G, 7 * G, 2));
        assert_eq!((done.extents_before, done.extents_after), (2, 3));
        assert_eq!((done.kept, done.kept.total()), (Kept::default(), 0));
        assert_eq!(extents(&region), [(0, 4), (8, 1), (12, 2)]);
        assert_eq!((region.held(), region.committed()), (7 * G, 7 * G));
        assert_eq!(rig.machine.live().physical_bytes, 7 * G);
        shows(rig, &region, &stream, &[]);
        let again = region.compact(&stream).unwrap();
        assert_eq!((again.steps, again.given_back), (0, 0));
        // The holes are committed again, as new memory.
        region.commit(0..16 * G).unwrap();
        shows(rig, &region, &stream, &[4, 5, 6, 7, 9, 10, 11, 14, 15]);
        assert_eq!(region.held(), 16 * G);
    }

    fn the_figures_say_what_stays_and_why(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, None, &stream);
        let figures = |region: &Region| {
            let it = region.stats();
            [it.held, it.committed, it.pending_free, it.stranded].map(|bytes| bytes / G)
        };
        assert_eq!(figures(&region), [16, 16, 0, 0]);
        region.decommit_after(5 * G..16 * G, std::slice::from_ref(&stream)).unwrap();
        assert_eq!(figures(&region), [16, 5, 8, 3]);
        assert_eq!(region.stats().fragmentation(), 3.0 / 16.0);
        stream.synchronize().unwrap();
        region.purge().unwrap();
        assert_eq!(figures(&region), [8, 5, 0, 3]);
        let registration = region.register(0..G).unwrap();
        let fork = region.fork(&[]);
        assert!(fork.is_err(), "it is registered");
        assert_eq!(region.stats().registered, 8 * G);
        let text = "10 MiB committed of 32 MiB, 16 MiB held, 6 MiB stranded, 16 MiB registered, 1 extent";
        assert_eq!(region.stats().to_string(), text);
        drop(registration);
        let fork = region.fork(&[]).unwrap();
        let stats = region.stats();
        assert_eq!((stats.shared, stats.registered, stats.largest_extent), (8 * G, 0, 8 * G));
        drop(fork);
        region.unshare(0..5 * G, &stream, &[]).unwrap();
        region.compact(&stream).unwrap();
        assert_eq!(figures(&region), [5, 5, 0, 0]);
        assert_eq!((region.stats().extents, region.stats().largest_extent), (2, 4 * G));
    }

    fn a_purge_says_what_it_leaves_and_why(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        for in_pool in [false, true] {
            let pool = common::limited(rig, 64).largest_extent(8 * G);
            let (_pool, tenant) = common::with_tenant(pool.shareable(HandleTypes::POSIX_FD).build().unwrap());
            let builder = match in_pool {
                true => tenant.region(40 * G),
                false => Region::builder(&rig.device, 40 * G).shareable(HandleTypes::POSIX_FD),
            };
            let mut region = common::committed(builder.largest_extent(8 * G), 40 * G);
            let exported = region.export(8 * G..16 * G, HandleTypes::POSIX_FD).unwrap();
            rig.held_kernel(&stream, &[], &[(region.address() + 32 * G, G, 7)]);
            for range in [7 * G..8 * G, 14 * G..16 * G, 20 * G..24 * G, 24 * G..32 * G] {
                region.decommit_after(range, &[]).unwrap();
            }
            region.decommit_after(32 * G..40 * G, std::slice::from_ref(&stream)).unwrap();
            let registration = region.register(0..G).unwrap();
            let purged = region.purge().unwrap();
            let kept = purged.kept;
            assert_eq!(purged.given_back, 8 * G);
            let reasons = [kept.pending_free, kept.partly_used, kept.registered, kept.exported, kept.shared];
            assert_eq!(reasons.map(|bytes| bytes / G), [8, 4, 1, 2, 0], "{kept:?}");
            assert_eq!((kept.total(), region.held()), (15 * G, region.committed() + 15 * G));
            assert_eq!(
                purged.to_string(),
                "16 MiB given back, kept: 16 MiB pending on GPU work, 8 MiB in extents partly used, \
                 2 MiB in registered extents, 4 MiB in exported extents"
            );
            assert_eq!(region.stats().stranded, 7 * G);
            rig.machine.release_all_streams(D0);
            drop((registration, exported));
            let done = region.compact(&stream).unwrap();
            assert_eq!((done.given_back, done.kept.exported, done.kept.total()), (13 * G, 2 * G, 2 * G));
            region.decommit_after(8 * G..14 * G, &[]).unwrap();
            let purged = region.purge().unwrap();
            assert_eq!((purged.given_back, purged.kept.to_string()), (8 * G, "nothing".to_owned()));
            assert_eq!(region.held(), region.committed());
            region.close().unwrap();
        }
    }

    fn what_the_driver_refuses_to_unmap_is_kept_and_said(rig) {
        let mut region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(G), 8 * G);
        region.decommit_after(0..8 * G, &[]).unwrap();
        rig.faults.arm(Fault::nth(3, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
        assert!(region.purge().is_err());
        rig.faults.disarm();
        assert_eq!(region.pending_free(), G);
        let purged = region.purge().unwrap();
        assert_eq!((purged.given_back, purged.kept), (G, Kept::default()));
        // The size by which memory comes back.
        assert_eq!(region.largest_extent(), G);
    }

    fn what_is_pending_goes_back_with_it(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, None, &stream);
        region.decommit_after(7 * G..16 * G, std::slice::from_ref(&stream)).unwrap();
        let done = region.compact(&stream).unwrap();
        assert_eq!((done.given_back, done.copied), (9 * G, 7 * G));
        assert_eq!(extents(&region), [(0, 4), (4, 2), (6, 1)]);
        shows(rig, &region, &stream, &[]);
    }

    fn a_pool_gets_the_memory(rig) {
        let pool = pool(rig, 24);
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, Some(&pool), &stream);
        let other = pool.tenant("b").register().unwrap();
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        region.decommit_after(10 * G..16 * G, &[]).unwrap();
        assert!(other.try_allocate(16 * G).is_err());
        let done = region.compact(&stream).unwrap();
        assert_eq!((done.given_back, done.copied), (10 * G, 6 * G));
        assert_eq!((region.held(), pool.stats().committed), (6 * G, 6 * G));
        shows(rig, &region, &stream, &[]);
        books(rig, &pool);
        let block = other.try_allocate(18 * G).unwrap();
        assert!(matches!(region.commit(4 * G..5 * G), Err(MemoryError::Pool(_))));
        drop(block);
        region.commit(4 * G..8 * G).unwrap();
        shows(rig, &region, &stream, &[4, 5, 6, 7]);
        books(rig, &pool);
    }

    fn there_need_be_memory_for_one_extent_at_a_time(rig) {
        let pool = pool(rig, 18);
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, Some(&pool), &stream);
        region.decommit_after(7 * G..8 * G, &[]).unwrap();
        region.decommit_after(10 * G..16 * G, &[]).unwrap();
        let done = region.compact(&stream).unwrap();
        // The second extent is copied first, which makes room for the first.
        assert_eq!((done.kept.total(), done.given_back), (0, 7 * G));
        shows(rig, &region, &stream, &[]);
        books(rig, &pool);
    }

    fn without_memory_for_a_copy_an_extent_stays(rig) {
        let pool = pool(rig, 17);
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, Some(&pool), &stream);
        region.decommit_after(6 * G..8 * G, &[]).unwrap();
        let done = region.compact(&stream).unwrap();
        assert_eq!((done.kept.partly_used, done.kept.total()), (2 * G, 2 * G));
        assert_eq!((done.given_back, region.held()), (0, 16 * G));
        shows(rig, &region, &stream, &[]);
        books(rig, &pool);
    }

    fn what_stays_is_counted_by_its_reason(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, None, &stream);
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        region.decommit_after(12 * G..16 * G, &[]).unwrap();
        let registration = region.register(0..G).unwrap();
        let done = region.compact(&stream).unwrap();
        assert_eq!((done.kept.registered, done.kept.total(), done.given_back), (4 * G, 4 * G, 4 * G));
        assert_eq!(extents(&region), [(0, 8), (8, 4)]);
        drop(registration);
        let fork = region.fork(&[]).unwrap();
        let done = region.compact(&stream).unwrap();
        assert_eq!((done.kept.shared, done.kept.total(), done.given_back), (4 * G, 4 * G, 0));
        drop(fork);
        region.unshare(0..4 * G, &stream, &[]).unwrap();
        assert_eq!(region.compact(&stream).unwrap().given_back, 4 * G);
        shows(rig, &region, &stream, &[]);
    }

    fn work_on_the_region_is_waited_for(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = stamped(rig, None, &stream);
        let other = Stream::new(&rig.device).unwrap();
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        rig.machine.hold_until_awaited(D0, other.as_raw());
        rig.kernel(&other, &[], &[(region.address(), 8, 9)]);
        assert_eq!(region.compact(&stream).unwrap().given_back, 4 * G);
        if rig.keeps_bytes() {
            let mut bytes = [0; 8];
            region.read(&stream, 0, &mut bytes).unwrap();
            assert_eq!(bytes, [9; 8], "the copy was made behind the kernel");
        }
    }

    fn what_touches_a_granule_commits_it(rig) {
        let mut region = Region::reserve(&rig.device, 8 * G).unwrap();
        for range in [G + 1..2 * G + 1, 0..1, G..2 * G + 1, 7 * G + 1..8 * G] {
            let refused = region.commit(range.clone()).unwrap_err();
            let MemoryError::Argument(error @ ArgumentError::MisalignedRange {
                start, end, granule: G, covering_start, covering_end,
            }) = refused else {
                panic!("{refused:?}");
            };
            assert_eq!(start..end, range);
            let covering = covering_start..covering_end;
            let says = format!("touch are bytes {covering:?}");
            assert!(error.to_string().ends_with(&says), "{error}");
            assert_eq!(region.commit_covering(range).unwrap(), covering);
            region.decommit_after(covering, &[]).unwrap();
            region.purge().unwrap();
        }
        assert_eq!(region.commit_covering(G + 1..2 * G + 1).unwrap(), G..3 * G);
        assert_eq!(region.commit_covering(5 * G..6 * G).unwrap(), 5 * G..6 * G);
        assert_eq!(region.commit_covering(8 * G - 1..8 * G).unwrap(), 7 * G..8 * G);
        assert_eq!(region.committed(), 4 * G);
        for wrong in [0..0, 8 * G - 1..8 * G + 1, u64::MAX - 1..u64::MAX] {
            let refused = region.commit_covering(wrong);
            assert!(matches!(refused, Err(MemoryError::Argument(_))), "{refused:?}");
        }
        assert_eq!(region.committed(), 4 * G);
    }

    fn a_commit_without_memory_says_how_much_there_is(rig) {
        let total = rig.device.total_memory();
        let mut region = common::region(rig, 2 * total, 4 * G);
        let free = rig.device.memory_info().unwrap().free;
        let refused = region.commit(0..total + 4 * G).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        assert!(
            matches!(refused, MemoryError::OutOfMemory { .. }),
            "{refused:?}"
        );
        let figures = |error: &MemoryError| {
            let shortage = error.shortage().unwrap();
            let of_host = shortage.memory_set_by.is_some();
            assert_eq!((shortage.limit, of_host), (total, rig.keeps_bytes()));
            (shortage.wanted, shortage.available, shortage.tenant_held)
        };
        assert_eq!(figures(&refused), (total, free, 4 * G));
        let says = refused.to_string();
        assert_eq!(says.contains("`HostOptions::capacity`"), rig.keeps_bytes(), "{says}");
        assert_eq!(region.held(), 4 * G);
    }

    // I-151
    fn addresses_of_a_copy_that_could_not_be_undone_count_until_they_are_freed(rig) {
        for closes in [true, false] {
            let pool = common::limited(rig, 64).largest_extent(8 * G).build().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let mut region = stamped(rig, Some(&pool), &stream);
            region.decommit_after(3 * G..8 * G, &[]).unwrap();
            let refused = CUresult::CUDA_ERROR_UNKNOWN;
            rig.faults.arm(Fault::from(1, refused).of(Call::MemUnmap));
            region.compact(&stream).unwrap_err();
            rig.faults.disarm();
            shows(rig, &region, &stream, &[]);
            let before = books(rig, &pool).addresses;
            assert!(before > 16 * G, "{before}");
            match closes {
                true => region.close().unwrap(),
                false => drop(region),
            }
            stream.synchronize().unwrap();
            pool.trim(0).unwrap();
            // A dropped region leaves what is stuck to the end of the pool.
            let after = books(rig, &pool).addresses;
            assert_eq!(after, if closes { 0 } else { before });
            pool.close().unwrap();
            assert_eq!(rig.machine.live().reserved_bytes, 0);
        }
    }

    fn every_driver_call_failed_once_and_twice(rig) {
        let kinds = [(false, false), (true, false), (false, true)];
        for (in_pool, on_host, twice) in kinds.into_iter().flat_map(|(a, b)| [(a, b, false), (a, b, true)]) {
            for k in 1.. {
                let pool = common::limited(rig, 64).largest_extent(8 * G).build().unwrap();
                let stream = Stream::new(&rig.device).unwrap();
                let mut region = match on_host {
                    true => on_the_host(rig, &stream),
                    false => stamped(rig, in_pool.then_some(&pool), &stream),
                };
                region.decommit_after(3 * G..8 * G, &[]).unwrap();
                rig.faults.forget();
                let refused = CUresult::CUDA_ERROR_UNKNOWN;
                rig.faults.arm(common::nth_of(k, refused, CALLS));
                if twice {
                    rig.faults.arm(common::nth_of(k + 1, refused, CALLS));
                }
                let outcome = region.compact(&stream);
                let hit = rig.faults.injected() > 0;
                rig.faults.disarm();
                shows(rig, &region, &stream, &[]);
                assert_eq!(region.committed(), 11 * G, "{k}: {outcome:?}");
                let places = extents(&region);
                let is_whole = places == [(0, 8), (8, 8)];
                assert!(is_whole || places == [(0, 2), (2, 1), (8, 8)], "{k}: {places:?}");
                if in_pool {
                    books(rig, &pool);
                }
                drop(region);
                pool.close().unwrap();
                drop(stream);
                assert_eq!(rig.machine.live().physicals, 0, "call {k}");
                if !hit {
                    assert!(k > 8, "only {k} calls were failed");
                    break;
                }
            }
        }
    }
}
