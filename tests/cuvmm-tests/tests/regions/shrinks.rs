//! Regions that are expected to shrink at their end: a decommit there releases most of the memory.

use std::cell::RefCell;

use crate::common::books::books;
use crate::common::{self, G, Rig, cases};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::error::ArgumentError;
use cuvmm::region::RegionBuilder;
use cuvmm::{DeviceVec, Pool, Region, Stream};

fn extents(region: &Region) -> Vec<(u64, u64)> {
    let extents = region.extents();
    let granules = extents.iter().map(|it| (it.offset / G, it.size / G));
    granules.collect()
}

fn sizes(region: &Region) -> Vec<u64> {
    extents(region).into_iter().map(|(_, size)| size).collect()
}

fn builders(rig: &Rig<impl Backing>, pool: &Pool, granules: u64, each: impl Fn(RegionBuilder<'_>)) {
    each(Region::builder(&rig.device, granules * G).expect_shrink(true));
    let tenant = pool.tenant("a").register().unwrap();
    each(tenant.region(granules * G).expect_shrink(true));
}

on_both! {
    fn after_a_decommit_of_its_end_it_holds_its_bytes_and_a_quarter_or_16_mib(rig) {
        let pool = common::pool(rig, 256);
        builders(rig, &pool, 200, |builder| {
            let mut region = common::committed(builder, 200 * G);
            for kept in (1..200).rev() {
                region.decommit_after(kept * G..(kept + 1) * G, &[]).unwrap();
                region.purge().unwrap();
                assert_eq!(region.committed(), kept * G);
                let stranded = region.held() - kept * G;
                assert!(stranded < (kept * G / 4).max(8 * G), "{kept}: {stranded}");
            }
        });
        books(rig, &pool);
    }

    fn no_program_makes_an_end_that_strands_more(rig) {
        for seed in 0..u64::from(cases(16)) {
            let mut random = fastrand::Rng::with_seed(seed);
            let pool = common::pool(rig, 320);
            let stream = Stream::new(&rig.device).unwrap();
            let largest = G << random.u32(0..10);
            let random = RefCell::new(random);
            builders(rig, &pool, 200, |builder| {
                let mut random = random.borrow_mut();
                let mut region = builder.largest_extent(largest).reserve().unwrap();
                let mut forks = vec![];
                for _ in 0..60 {
                    let to = random.u64(1..=200) * G;
                    // All granules from 0 on are committed.
                    let end = region.committed();
                    match random.u8(0..12) {
                        0..3 if to > end => drop(region.commit(end..to)),
                        // Also what is committed already.
                        3 => drop(region.commit(random.u64(0..=end / G) * G..to.max(end))),
                        4 if to > end => drop(region.grow_to(to)),
                        5..9 if to < end => region.decommit_after(to..end, &[]).unwrap(),
                        9 => drop(region.compact(&stream).unwrap()),
                        10 => forks.extend(region.fork(&[])),
                        11 => forks.clear(),
                        _ => {}
                    }
                    region.purge().unwrap();
                    let stranded = region.held() - region.committed();
                    let kept = region.committed();
                    assert!(stranded == 0 || stranded < (kept / 4).max(8 * G), "{kept}: {stranded}");
                }
            });
        }
    }

    fn each_run_of_committed_bytes_has_the_shape(rig) {
        let pool = common::pool(rig, 256);
        builders(rig, &pool, 128, |builder| {
            let mut region = builder.reserve().unwrap();
            region.commit(64 * G..84 * G).unwrap();
            assert_eq!(extents(&region), [(64, 8), (72, 8), (80, 4)]);
            // Behind committed bytes a commit goes on where they end; before them it begins anew.
            region.commit(84 * G..128 * G).unwrap();
            assert_eq!(sizes(&region)[3..], [8, 8, 8, 8, 8, 4]);
            region.commit(24 * G..64 * G).unwrap();
            assert_eq!(sizes(&region)[..5], [8; 5]);
            region.decommit_after(24 * G..128 * G, &[]).unwrap();
            region.purge().unwrap();
            region.commit(0..128 * G).unwrap();
            assert_eq!(sizes(&region), [[8; 8].to_vec(), [16; 4].to_vec()].concat());
        });
    }

    fn other_regions_have_the_fewest_extents(rig) {
        let region = common::region(rig, 128 * G, 128 * G);
        assert_eq!(sizes(&region), [128]);
        let builder = Region::builder(&rig.device, 32 * G).expect_shrink(true);
        let region = common::committed(builder.largest_extent(4 * G), 32 * G);
        assert_eq!(sizes(&region), [4; 8]);
        let refused = Region::builder(&rig.device, G).expect_shrink(true).largest_extent(3 * G);
        let expected = ArgumentError::NotPowerOfTwo { what: "bytes of an extent", value: 3 * G };
        assert_eq!(refused.reserve().err(), Some(expected.into()));
    }

    fn a_vector_in_it_shrinks_to_fit(rig) {
        let pool = common::pool(rig, 256);
        let stream = Stream::new(&rig.device).unwrap();
        builders(rig, &pool, 256, |builder| {
            let region = builder.reserve().unwrap();
            let mut vector = DeviceVec::<u32>::from_region(region, &stream).unwrap();
            let elements = |granules: u64| (granules * G / 4) as usize;
            vector.reserve(elements(160)).unwrap();
            vector.resize(elements(100), 1).unwrap();
            vector.shrink_to_fit().unwrap();
            stream.synchronize().unwrap();
            let held = vector.held();
            assert!(held - 100 * G < 25 * G, "{held}");
            vector.truncate(elements(10));
            vector.shrink_to_fit().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(vector.held(), 16 * G);
        });
        books(rig, &pool);
    }

    fn a_compaction_keeps_the_shape(rig) {
        let pool = common::pool(rig, 256);
        let stream = Stream::new(&rig.device).unwrap();
        builders(rig, &pool, 128, |builder| {
            let mut region = common::committed(builder, 128 * G);
            region.decommit_after(78 * G..128 * G, &[]).unwrap();
            assert_eq!(region.compact(&stream).unwrap().given_back, 50 * G);
            assert_eq!(sizes(&region)[8..], [8, 4, 2]);
            assert_eq!(region.held(), region.committed());
        });
        books(rig, &pool);
    }
}
