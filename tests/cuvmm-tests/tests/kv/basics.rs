//! KV caches: the addresses of rows, the memory that is held, and what is refused.
#![allow(clippy::unit_arg)]

use crate::common;
use crate::common::attention::{LAYOUTS, SMALL, Scene, assert_attends, build, fill, row};
use crate::common::books::figures;
use crate::common::sweep::{sweep, text};
use crate::common::{D0, G, Rig, mapped_pool, pool, until};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, BlockError, KvCacheError};
use cuvmm::kv::{Layout, Part, SequenceId, Shape};
use cuvmm::{Contents, Growth, KvCache, Mapper, Pool, Stream, Tenant};

fn scene(rig: &Rig<impl Backing>, granules: u64, layout: Layout) -> Scene {
    Scene::new(rig, pool(rig, granules), layout, build)
}

/// Returns a pool's committed, in-use and free bytes, mappings, and addresses.
fn books(pool: &Pool) -> [u64; 5] {
    let stats = figures(pool);
    [
        stats.committed,
        stats.in_use,
        stats.free,
        stats.mappings,
        stats.addresses,
    ]
}

on_both! {
    fn attention_reads_what_was_written_through_growth_and_reuse(rig) {
        for layout in LAYOUTS {
            let Scene { mut cache, .. } = scene(rig, 128, layout);
            let first = cache.create(10).unwrap();
            fill(&mut cache, first, 1, 0..10);
            let second = cache.create(130).unwrap();
            fill(&mut cache, second, 2, 0..130);
            let address = cache.view(first).unwrap().key(2).unwrap().address();
            cache.append(&[(first, 25), (second, 1)]).unwrap();
            fill(&mut cache, first, 1, 10..35);
            fill(&mut cache, second, 2, 130..131);
            assert_attends(rig, &cache, first, &[1; 35]);
            assert_attends(rig, &cache, second, &[2; 131]);
            // The next sequence gets its memory.
            cache.free(second).unwrap();
            cache.truncate(first, 5).unwrap();
            let third = cache.create(70).unwrap();
            fill(&mut cache, third, 3, 0..70);
            cache.append(&[(first, 128)]).unwrap();
            fill(&mut cache, first, 4, 5..133);
            let salts: Vec<u32> = (0..133).map(|token| if token < 5 { 1 } else { 4 }).collect();
            assert_attends(rig, &cache, first, &salts);
            assert_attends(rig, &cache, third, &[3; 70]);
            assert_eq!(cache.view(first).unwrap().key(2).unwrap().address(), address);
            let mut back = vec![0u8; 48 << 10];
            cache.read_rows(third, 1, Part::Value, 60, &mut back).unwrap();
            if rig.keeps_bytes() {
                let rows: Vec<f32> = (60..63).flat_map(|n| row(3, n, 1, Part::Value)).collect();
                assert!(back == bytemuck::cast_slice::<f32, u8>(&rows));
            }
        }
    }

    fn a_view_says_how_the_rows_lie(rig) {
        let Scene { tenant, stream, mut cache, .. } = scene(rig, 64, Layout::TokenMajor);
        assert_eq!((cache.tokens_per_granule(), cache.least_memory()), (16, G));
        assert_eq!((cache.bytes_per_token(), cache.memory_of(17)), (128 << 10, 2 * G));
        let id = cache.create(3).unwrap();
        let view = cache.view(id).unwrap();
        let (key, value) = (view.key(1).unwrap(), view.value(1).unwrap());
        assert_eq!((key.shape(), key.strides()), ([3, 2, 2048], [32 << 10, 2048, 1]));
        assert_eq!(value.address().0 - key.address().0, 16 << 10);
        assert!(!key.is_contiguous());
        let mut cache = build(&tenant, &stream, Layout::LayerMajor);
        assert_eq!((cache.tokens_per_granule(), cache.least_memory()), (128, 8 * G));
        assert_eq!(cache.memory_of(129), 16 * G);
        let id = cache.create(3).unwrap();
        let key = cache.view(id).unwrap().key(1).unwrap();
        assert_eq!((key.shape(), key.strides()), ([3, 2, 2048], [4096, 2048, 1]));
        assert!(key.is_contiguous());
    }

    fn the_next_sequence_takes_what_one_left_without_a_driver_call(rig) {
        for layout in LAYOUTS {
            let Scene { pool, mut cache, .. } = scene(rig, 128, layout);
            let ids = [300, 200, 120].map(|tokens| cache.create(tokens).unwrap());
            for id in ids {
                cache.free(id).unwrap();
            }
            rig.faults.forget();
            // Of a different length, longer than the sequence freed last.
            let id = cache.create(290).unwrap();
            let other = cache.create(110).unwrap();
            assert_eq!(rig.faults.total(), 0, "{layout:?}: {:?}", rig.faults.calls());
            cache.truncate(id, 200).unwrap();
            cache.append(&[(id, 90), (other, 2)]).unwrap();
            cache.free(id).unwrap();
            assert_eq!(rig.faults.total(), 0);
            // Other tenants can get it.
            let needy = pool.tenant("b").register().unwrap();
            let left = pool.stats().limit - cache.stats().held;
            drop(needy.try_allocate(left - left % G).unwrap());
            assert_eq!(cache.tokens(), 112);
        }
    }

    fn an_id_is_never_anothers(rig) {
        let Scene { tenant, stream, mut cache, .. } = scene(rig, 64, Layout::TokenMajor);
        let mut twin = build(&tenant, &stream, Layout::TokenMajor);
        let gone = cache.create(20).unwrap();
        let foreign = twin.create(20).unwrap();
        cache.free(gone).unwrap();
        let id = cache.create(20).unwrap();
        assert_ne!(id, gone);
        let number = gone.number();
        let is_gone = |error: KvCacheError| {
            assert!(matches!(
                error, KvCacheError::NoSuchSequence(sequence) if sequence == number
            ), "{error}");
        };
        is_gone(cache.free(gone).unwrap_err());
        is_gone(cache.truncate(gone, 1).unwrap_err());
        is_gone(cache.view(gone).map(|_| ()).unwrap_err());
        is_gone(cache.record_use(gone, &stream).unwrap_err());
        is_gone(cache.append(&[(id, 30), (gone, 1)]).unwrap_err());
        is_gone(cache.read_rows(gone, 0, Part::Key, 0, &mut [0; 16 << 10]).unwrap_err());
        assert!(cache.view(foreign).is_err());
        assert_eq!((cache.tokens(), cache.len()), (20, 1));
        let tokens: Vec<u64> = cache.views().map(|view| view.tokens()).collect();
        assert_eq!(tokens, [20]);
    }

    fn a_decode_step_is_all_or_nothing(rig) {
        for layout in LAYOUTS {
            let Scene { pool, mut cache, .. } = scene(rig, 40, layout);
            let ids = [16, 16, 16].map(|tokens| cache.create(tokens).unwrap());
            fill(&mut cache, ids[1], 5, 0..16);
            let before = (books(&pool), cache.stats());
            let hungry = [(ids[0], 10), (ids[1], 200), (ids[2], 380)];
            match cache.append(&hungry).unwrap_err() {
                KvCacheError::Block {
                    sequence,
                    cause: BlockError::Refused { ref cause, .. },
                } if matches!(**cause, BlockError::OutOfMemory(_)) => assert_eq!(sequence, ids[2].number(), "the others fit"),
                other => panic!("{other}"),
            }
            assert_eq!((books(&pool), cache.stats()), before);
            assert_attends(rig, &cache, ids[1], &[5; 16]);
            // A sequence that is named twice gets both counts. The counts together must fit.
            cache.append(&[(ids[0], 3), (ids[1], 0), (ids[0], 4)]).unwrap();
            assert_eq!(cache.view(ids[0]).unwrap().tokens(), 23);
            assert!(matches!(
                cache.append(&[(ids[1], 1), (ids[0], 300), (ids[0], 78)]),
                Err(KvCacheError::Tokens { sequence, tokens: 401, most: 400 }) if sequence == ids[0].number()
            ));
            assert!(matches!(
                cache.append(&[(ids[1], u64::MAX)]),
                Err(KvCacheError::Tokens { tokens: u64::MAX, most: 400, .. })
            ));
            assert_eq!(cache.tokens(), 23 + 16 + 16);
            cache.append(&[]).unwrap();
        }
    }

    fn what_cannot_be_is_refused_with_figures(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 64);
        let none = Shape { layers: 0, ..SMALL };
        assert_eq!(
            KvCache::builder(&tenant, &stream, none).build().err(),
            Some(KvCacheError::Argument(ArgumentError::Zero("layers")))
        );
        let other = Stream::new(&rig.second()).unwrap();
        assert_eq!(
            KvCache::builder(&tenant, &other, SMALL).build().err(),
            Some(KvCacheError::Argument(ArgumentError::WrongDevice("the stream")))
        );
        let mut cache = build(&tenant, &stream, Layout::TokenMajor);
        assert!(matches!(cache.create(0), Err(KvCacheError::Argument(ArgumentError::Zero("tokens of a sequence")))));
        assert!(matches!(
            cache.create(401),
            Err(KvCacheError::Argument(ArgumentError::TooLarge { value: 401, most: 400, .. }))
        ));
        let ids = [1; 6].map(|tokens| cache.create(tokens).unwrap());
        assert!(matches!(
            cache.create(1),
            Err(KvCacheError::Argument(ArgumentError::TooLarge { what: "sequences", value: 7, most: 6 }))
        ));
        let id = ids[0];
        assert!(matches!(cache.truncate(id, 0), Err(KvCacheError::Argument(ArgumentError::Zero("tokens of a sequence")))));
        assert!(matches!(
            cache.truncate(id, 2),
            Err(KvCacheError::BeyondEnd { sequence, tokens: 2, held: 1 }) if sequence == id.number()
        ));
        let mut bytes = vec![0; 32 << 10];
        assert!(matches!(
            cache.read_rows(id, 0, Part::Key, 0, &mut bytes),
            Err(KvCacheError::BeyondEnd { sequence, tokens: 2, held: 1 }) if sequence == id.number()
        ));
        assert!(matches!(
            cache.read_rows(id, 4, Part::Key, 0, &mut bytes[..16 << 10]),
            Err(KvCacheError::Argument(ArgumentError::TooLarge { what: "layer", value: 4, most: 3 }))
        ));
        assert!(matches!(
            cache.write_rows(id, 0, Part::Key, 0, &bytes[..100]),
            Err(KvCacheError::Argument(ArgumentError::Misaligned { value: 100, multiple: 16_384, .. }))
        ));
        assert!(cache.read_rows(id, 0, Part::Key, u64::MAX, &mut bytes[..16 << 10]).is_err());
        tenant.unregister();
        assert!(matches!(
            cache.append(&[(id, 20)]),
            Err(KvCacheError::Block { sequence, cause: BlockError::Refused { ref cause, .. } })
                if sequence == id.number() && matches!(**cause, BlockError::Unregistered { .. })
        ));
        // Growth within a granule does not use the pool.
        cache.append(&[(id, 1)]).unwrap();
        cache.free(id).unwrap();
    }

    fn what_lies_in_new_memory(rig) {
        let pool = pool(rig, 16);
        let stream = Stream::new(&rig.device).unwrap();
        let mut secret = vec![0u8; 16 << 10];
        let first = |cache: &KvCache, id| {
            let mut bytes = vec![1u8; 16 << 10];
            cache.read_rows(id, 0, Part::Key, 0, &mut bytes).unwrap();
            bytes[0]
        };
        let theirs = pool.tenant("theirs").register().unwrap();
        let mut cache = build(&theirs, &stream, Layout::TokenMajor);
        let id = cache.create(256).unwrap();
        secret.fill(7);
        for token in 0..256 {
            cache.write_rows(id, 0, Part::Key, token, &secret).unwrap();
        }
        cache.free(id).unwrap();
        // The same tenant's old bytes may be visible, unless memory is to be zeroed.
        let again = cache.create(250).unwrap();
        rig.shows(first(&cache, again), 7);
        cache.free(again).unwrap();
        let zeroed = KvCache::builder(&theirs, &stream, SMALL).zeroed(true);
        let mut zeroed = zeroed.build().unwrap();
        let id = zeroed.create(3).unwrap();
        for token in 0..3 {
            zeroed.write_rows(id, 0, Part::Key, token, &secret).unwrap();
        }
        zeroed.truncate(id, 1).unwrap();
        zeroed.append(&[(id, 40)]).unwrap();
        let mut rows = vec![1u8; 640 << 10];
        zeroed.read_rows(id, 0, Part::Key, 1, &mut rows).unwrap();
        if rig.keeps_bytes() {
            assert!(rows.iter().all(|&byte| byte == 0), "truncated data is visible again");
        }
        drop(zeroed);
        drop(cache);
        // Another tenant never sees them.
        let ours = pool.tenant("ours").register().unwrap();
        let mut cache = build(&ours, &stream, Layout::TokenMajor);
        let id = cache.create(256).unwrap();
        let mut rows = vec![1u8; 4 << 20];
        cache.read_rows(id, 0, Part::Key, 0, &mut rows).unwrap();
        if rig.keeps_bytes() {
            assert!(rows.iter().all(|&byte| byte == 0), "another tenant's rows are visible");
        }
    }

    fn a_graph_may_hold_a_sequence(rig) {
        for layout in LAYOUTS {
            let Scene { pool, mut cache, .. } = scene(rig, 16, layout);
            let id = cache.create(20).unwrap();
            let other = Stream::new(&rig.device).unwrap();
            cache.record_use(id, &other).unwrap();
            rig.machine.hold(D0, other.as_raw());
            let at = cache.view(id).unwrap().value(3).unwrap().address();
            rig.kernel(&other, &[], &[(at, 16 << 10, 1)]);
            cache.free(id).unwrap();
            let needy = pool.tenant("b").register().unwrap();
            // Another stream still uses all of it.
            match needy.try_allocate(16 * G).unwrap_err() {
                BlockError::OutOfMemory(short) => {
                    assert_eq!(short.available, 16 * G - cache.memory_of(20));
                }
                other => panic!("{other}"),
            }
            rig.machine.release_all_streams(D0);
            drop(needy.try_allocate(16 * G).unwrap());
        }
    }

    fn admission_is_kept(rig) {
        for layout in LAYOUTS {
            let pool = pool(rig, 48);
            let tenant = pool.tenant("a").guarantee(16 * G).register().unwrap();
            let other = pool.tenant("b").register().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let mut cache = build(&tenant, &stream, layout);
            let fits = cache.admission().unwrap();
            let granules = if layout == Layout::TokenMajor { 1 } else { 8 };
            let per = cache.tokens_per_granule();
            assert_eq!(fits.at_worst.bytes, 16 * G);
            assert_eq!(fits.at_worst.sequence, 16 / granules * per);
            assert_eq!((fits.now.bytes, fits.now.sequence), (48 * G, 400));
            assert_eq!(fits.now.each, 0, "there is no sequence");
            let theirs = other.allocate_on(&stream, 20 * G).unwrap();
            let ids = [cache.create(10).unwrap(), cache.create(10).unwrap()];
            let fits = cache.admission().unwrap();
            assert_eq!(fits.now.bytes, 28 * G - 2 * granules * G);
            assert_eq!(fits.taking_back, fits.now);
            // Exactly this number of tokens fits, and not one more.
            for id in ids {
                assert!(cache.try_append(&[(id, 391)]).is_err());
            }
            let each = fits.now.each;
            let all = |cache: &mut KvCache, more| cache.try_append(&ids.map(|id| (id, more)));
            if each < 390 {
                assert!(all(&mut cache, each + 1).is_err(), "{layout:?}: {each}");
            }
            all(&mut cache, each).unwrap();
            for id in ids {
                cache.truncate(id, 10).unwrap();
            }
            rig.device.synchronize().unwrap();
            let now = cache.admission().unwrap().now;
            let one = cache.try_create(now.sequence).unwrap();
            cache.free(one).unwrap();
            if now.sequence < 400 {
                assert!(cache.try_create(now.sequence + 1).is_err());
            }
            drop(theirs);
            let fits = cache.admission().unwrap();
            assert!(fits.taking_back.bytes > fits.now.bytes);
            let one = cache.try_create(fits.taking_back.sequence).unwrap();
            assert_eq!(cache.stats().sequences, 3);
            cache.free(one).unwrap();
        }
    }

    fn figures_add_up(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 64);
        let builder = KvCache::builder(&tenant, &stream, SMALL).tag("cache");
        let mut cache = builder.build().unwrap();
        let long = cache.create(400).unwrap();
        cache.create(20).unwrap();
        let stats = cache.stats();
        assert_eq!((stats.sequences, stats.tokens, stats.live), (2, 420, 420 << 17));
        assert_eq!((stats.held, stats.precommitted, stats.idle), (27 * G, 0, 0));
        assert_eq!(stats.padding, 12 << 17);
        assert_eq!(tenant.stats().tags["cache"], 27 * G);
        // Six extents of 4 and one of 1: the sequence ends in the fifth and keeps it, and later
        // ones can be released.
        cache.truncate(long, 300).unwrap();
        let stats = cache.stats();
        assert_eq!((stats.live, stats.held, stats.idle), (320 << 17, 22 * G, 5 * G));
        assert_eq!(stats.held, stats.live + stats.padding + stats.precommitted);
        cache.free(long).unwrap();
        let stats = cache.stats();
        assert_eq!((stats.held, stats.idle), (2 * G, 25 * G));
    }

    fn no_step_maps_memory_for_all_ranges_at_once(rig) {
        // Sequences of the same length: all 8 ranges of all of them end at tokens 128 and 256.
        let Scene { pool, mut cache, .. } = scene(rig, 6 * 24, Layout::LayerMajor);
        let step = [90; 6].map(|tokens| (cache.create(tokens).unwrap(), 1));
        let mut placed = vec![];
        for tokens in 91..=300 {
            rig.faults.forget();
            cache.append(&step).unwrap();
            placed.push(rig.faults.count(Call::MemMap));
            if tokens == 129 || tokens == 257 {
                assert_eq!(*placed.last().unwrap(), 0, "all memory was precommitted");
            }
            let stats = cache.stats();
            assert_eq!(stats.held - stats.precommitted, 6 * cache.memory_of(tokens));
        }
        assert_eq!(placed.iter().sum::<u64>(), 2 * 48, "and no more than necessary");
        assert!(placed.iter().all(|&count| count <= 4), "{placed:?}");
        assert_eq!(figures(&pool).committed, 6 * 24 * G);
    }

    fn what_lies_ahead_is_given_up_before_anybody_is_refused(rig) {
        let Scene { pool, mut cache, .. } = scene(rig, 40, Layout::LayerMajor);
        let other = pool.tenant("b").register().unwrap();
        let id = cache.create(100).unwrap();
        for _ in 0..27 {
            cache.append(&[(id, 1)]).unwrap();
        }
        assert!(cache.stats().precommitted > 4 * G, "{:?}", cache.stats());
        let theirs = other.try_allocate(32 * G).unwrap();
        assert_eq!((cache.stats().held, cache.stats().precommitted), (8 * G, 0));
        // Nothing is precommitted now. An append that needs a granule reports the shortage and
        // changes nothing.
        cache.append(&[(id, 1)]).unwrap();
        let refused = cache.append(&[(id, 1)]).unwrap_err();
        assert!(refused.is_shortage(), "{refused}");
        assert_eq!(cache.view(id).unwrap().tokens(), 128);
        drop(theirs);
        rig.device.synchronize().unwrap();
        cache.append(&[(id, 1)]).unwrap();
        fill(&mut cache, id, 6, 0..129);
        assert_attends(rig, &cache, id, &[6; 129]);
    }

    fn a_sequence_that_grows_exactly_has_nothing_ahead(rig) {
        let build = |tenant: &Tenant, stream: &Stream, layout| {
            let builder = KvCache::builder(tenant, stream, SMALL).layout(layout);
            builder.growth(Growth::Exact).build().unwrap()
        };
        let scene = Scene::new(rig, pool(rig, 40), Layout::LayerMajor, build);
        let mut cache = scene.cache;
        let id = cache.create(90).unwrap();
        for tokens in 91..=140 {
            cache.append(&[(id, 1)]).unwrap();
            assert_eq!(cache.stats().held, cache.memory_of(tokens));
        }
    }

    fn a_driver_that_refuses_what_lies_ahead_refuses_no_token(rig) {
        let Scene { mut cache, .. } = scene(rig, 128, Layout::LayerMajor);
        let ids = [90; 3].map(|tokens| cache.create(tokens).unwrap());
        let step = ids.map(|id| (id, 1));
        let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
            for nth in 1..4 {
                for id in ids {
                    cache.truncate(id, 90).unwrap();
                }
                // The precommitted memory is released, so that new memory has to be precommitted.
                rig.device.synchronize().unwrap();
                cache.tenant().blocks().sleep(Contents::Discard).unwrap();
                cache.tenant().blocks().release(true).wake().unwrap();
                rig.faults.forget();
                rig.faults.arm(Fault::nth(nth, code).of(call));
                for _ in 90..128 {
                    cache.append(&step).unwrap();
                }
                rig.faults.disarm();
                let stats = cache.stats();
                assert_eq!(stats.held - stats.precommitted, 3 * cache.memory_of(128));
                cache.append(&step).unwrap();
                assert_eq!(cache.stats().held - cache.stats().precommitted, 3 * cache.memory_of(129));
            }
        }
    }

    fn a_decode_step_makes_no_driver_call_with_a_mapper(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 160, &mapper);
        let Scene { pool, tenant, mut cache, .. } = Scene::new(rig, pool, Layout::TokenMajor, build);
        let prompts = [20u64, 27, 32, 41, 48, 55];
        let ids = prompts.map(|tokens| cache.create(tokens).unwrap());
        let own = || common::calls_without_mapper(&rig.device, &pool);
        let before = own();
        for n in 0..200 {
            // From four tokens before its first granule is full, a sequence has one precommitted.
            let ahead = prompts.iter().filter(|&&prompt| prompt.next_multiple_of(16) < prompt + n + 4);
            let ahead = ahead.count() as u64;
            until(&pool, "precommitted", || tenant.stats().precommitted >= ahead * G);
            cache.append(&ids.map(|id| (id, 1))).unwrap();
            assert!(tenant.stats().precommitted <= 12 * G);
        }
        assert_eq!(own(), before, "the appending thread makes no driver call");
        drop(cache);
        drop(tenant);
        pool.close().unwrap();
    }
}

#[test]
fn every_driver_call_failed_once() {
    struct World {
        pool: Pool,
        cache: KvCache,
        ids: Vec<SequenceId>,
    }
    for (layout, creating, appending) in [(Layout::TokenMajor, 7, 9), (Layout::LayerMajor, 32, 48)]
    {
        let world = |rig: &Rig<_>| {
            let Scene {
                pool, mut cache, ..
            } = scene(rig, 128, layout);
            let ids = vec![cache.create(10).unwrap(), cache.create(120).unwrap()];
            World { pool, cache, ids }
        };
        let picture = |world: &World| (books(&world.pool), world.cache.stats());
        let calls = sweep(
            world,
            |_, world| Ok(world.ids.push(text(world.cache.create(48))?)),
            picture,
        );
        assert_eq!(calls, creating, "{layout:?}");
        let calls = sweep(
            world,
            |_, world| {
                let step = [(world.ids[0], 130), (world.ids[1], 10)];
                text(world.cache.append(&step))
            },
            picture,
        );
        assert_eq!(calls, appending, "{layout:?}");
    }
}
