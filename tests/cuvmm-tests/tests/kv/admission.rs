//! Admission: how many tokens fit, exact to the token, now, when other tenants use all they may,
//! and with memory that other tenants have cached.

use crate::common::attention::{LAYOUTS, SMALL, Scene, build};
use crate::common::{G, pool};
use crate::on_both;
use cuvmm::kv::Layout;
use cuvmm::{Block, Stream};

on_both! {
    fn what_others_have_idle_is_counted_apart(rig) {
        for layout in LAYOUTS {
            let Scene { pool, tenant, stream, mut cache } = Scene::new(rig, pool(rig, 48), layout, build);
            let other = pool.tenant("b").guarantee(6 * G).register().unwrap();
            drop(other.allocate_on(&stream, 20 * G).unwrap());
            let before = cache.admission().unwrap();
            assert_eq!((before.now.bytes, before.at_worst.bytes), (28 * G, 0));
            // All memory except the other tenant's guarantee.
            assert_eq!(before.taking_back.bytes, 42 * G);
            let held = cache.memory_of(10);
            cache.create(10).unwrap();
            let fits = cache.admission().unwrap();
            assert_eq!(fits.now.bytes, 28 * G - held);
            assert_eq!(fits.taking_back.bytes, 42 * G - held);
            // Not all of its memory is used yet.
            let each = cache.tokens_per_granule() - 10;
            assert_eq!((fits.at_worst.bytes, fits.at_worst.sequence, fits.at_worst.each), (0, 0, each));
            assert!(tenant.try_allocate(fits.taking_back.bytes + G).is_err());
            drop(tenant.try_allocate(fits.taking_back.bytes).unwrap());
            // Memory in use is not idle.
            let theirs = other.try_allocate(6 * G).unwrap();
            let fits = cache.admission().unwrap();
            assert_eq!(fits.taking_back.bytes, 42 * G - held);
            drop(theirs);
        }
    }

    fn at_worst_others_take_all_they_may(rig) {
        // Sequences of 20 and 30 tokens: 2 granules each, or 8.
        for (layout, guarantee, left, sequence, each) in [
            (Layout::TokenMajor, 12, 8, 128, 66),
            (Layout::LayerMajor, 32, 16, 256, 226),
        ] {
            let pool = pool(rig, 64);
            let tenant = pool.tenant("a").guarantee(guarantee * G).register().unwrap();
            let other = pool.tenant("b").register().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let mut cache = build(&tenant, &stream, layout);
            let ids = [20, 30].map(|tokens| cache.create(tokens).unwrap());
            let fits = cache.admission().unwrap().at_worst;
            assert_eq!((fits.bytes, fits.sequence, fits.each), (left * G, sequence, each));
            let theirs: Vec<Block> = std::iter::from_fn(|| other.try_allocate(G).ok()).collect();
            assert_eq!(theirs.len() as u64, 64 - guarantee);
            let now = cache.admission().unwrap();
            assert_eq!((now.now, now.taking_back, now.at_worst), (fits, fits, fits));
            assert!(cache.try_create(sequence + 1).is_err());
            let new = cache.try_create(sequence).unwrap();
            assert_eq!(cache.admission().unwrap().at_worst.bytes, 0);
            cache.free(new).unwrap();
            rig.device.synchronize().unwrap();
            assert!(cache.try_append(&ids.map(|id| (id, each + 1))).is_err());
            cache.try_append(&ids.map(|id| (id, each))).unwrap();
        }
    }

    fn neither_more_sequences_nor_longer_ones_than_there_may_be(rig) {
        let Scene { mut cache, .. } = Scene::new(rig, pool(rig, 64), Layout::TokenMajor, build);
        cache.create(395).unwrap();
        let short = cache.create(10).unwrap();
        // The long sequence grows as far as it may, by 5.
        let fits = cache.admission().unwrap().now;
        assert_eq!((fits.sequence, fits.each), (400, 390));
        cache.append(&[(short, 390)]).unwrap();
        assert_eq!(cache.admission().unwrap().now.each, 5);
        for _ in 2..SMALL.max_sequences {
            assert!(cache.admission().unwrap().now.sequence > 0);
            cache.create(1).unwrap();
        }
        let full = cache.admission().unwrap();
        assert!(full.now.bytes > 0);
        assert_eq!((full.now.sequence, full.taking_back.sequence), (0, 0));
        assert!(!cache.is_empty());
    }
}
