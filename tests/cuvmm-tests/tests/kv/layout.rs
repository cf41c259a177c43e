//! Addresses of a cache's rows, and the steps in which its memory grows, for both layouts and for
//! shapes that do not divide a granule.

use crate::common::attention::{LAYOUTS, SMALL, Scene, build};
use crate::common::{G, MIB, pool};
use crate::on_both;
use cuvmm::kv::{KvCacheBuilder, KvTensor, Layout, Part, Shape};
use cuvmm::{Growth, KvCache, Stream, Tenant};

on_both! {
    fn no_two_rows_share_a_byte_and_all_have_memory(rig) {
        for layout in LAYOUTS {
            let Scene { mut cache, .. } = Scene::new(rig, pool(rig, 64), layout, build);
            for tokens in [20, 1, 150] {
                cache.create(tokens).unwrap();
            }
            let mut heads = vec![];
            for view in cache.views() {
                let parts = |layer| [Part::Key, Part::Value].map(|part| (layer, part));
                for (layer, part) in (0..SMALL.layers).flat_map(parts) {
                    let tensor = view.tensor(layer, part).unwrap();
                    let named = match part {
                        Part::Key => view.key(layer),
                        Part::Value => view.value(layer),
                    };
                    assert_eq!(named, Some(tensor));
                    assert_eq!(tensor.shape(), [view.tokens(), 2, 2048]);
                    heads.extend(heads_of(tensor));
                }
                assert_eq!(view.key(SMALL.layers), None);
            }
            let size = 2048 * 4;
            assert_eq!(heads.len() as u64 * size, 171 * cache.bytes_per_token());
            heads.sort_unstable();
            assert!(heads.windows(2).all(|two| two[1] - two[0] >= size), "{layout:?}");
            let mapped = rig.machine.snapshot().mappings;
            let has_memory = |at: u64| {
                let mut mapped = mapped.iter().map(|it| it.address.0..it.address.0 + it.size);
                mapped.any(|range| range.contains(&at))
            };
            assert!(heads.iter().all(|&at| has_memory(at) && has_memory(at + size - 1)), "{layout:?}");
        }
    }

    fn a_sequence_grows_by_a_granule_of_each_range(rig) {
        let odd = Shape { layers: 5, ..SMALL };
        for (shape, layout, tokens, ranges) in [
            (SMALL, Layout::TokenMajor, 16, 1),
            (SMALL, Layout::LayerMajor, 128, 8),
            (odd, Layout::TokenMajor, 12, 1),
            (odd, Layout::LayerMajor, 128, 10),
        ] {
            let scene = Scene::new(rig, pool(rig, 64), layout, of(shape, |cache| cache));
            let Scene { mut cache, stream, tenant, .. } = scene;
            assert_eq!((cache.shape(), cache.layout(), cache.home_stream()), (shape, layout, &stream));
            assert_eq!(cache.tenant().stats().name, tenant.stats().name);
            assert_eq!((cache.tokens_per_granule(), cache.least_memory()), (tokens, ranges * G));
            assert_eq!(cache.bytes_per_token(), u64::from(shape.layers) * (32 << 10));
            let id = cache.create(1).unwrap();
            let held = |cache: &KvCache| (cache.stats().held, rig.machine.live().physical_bytes);
            assert_eq!(held(&cache), (ranges * G, ranges * G));
            cache.append(&[(id, tokens - 1)]).unwrap();
            assert_eq!(held(&cache), (ranges * G, ranges * G));
            assert_eq!(cache.memory_of(tokens), ranges * G);
            cache.append(&[(id, 1)]).unwrap();
            assert_eq!(held(&cache), (2 * ranges * G, 2 * ranges * G));
            assert_eq!(cache.memory_of(tokens + 1), 2 * ranges * G);
        }
    }

    fn one_token_may_take_more_than_a_granule(rig) {
        let shape = Shape { layers: 1, kv_heads: 1, head_size: 1 << 20, ..SMALL };
        for (layout, least) in [(Layout::TokenMajor, G), (Layout::LayerMajor, 2 * G)] {
            let scene = Scene::new(rig, pool(rig, 64), layout, of(shape, |cache| cache));
            let mut cache = scene.cache;
            assert_eq!((cache.tokens_per_granule(), cache.least_memory()), (0, least));
            assert_eq!((cache.bytes_per_token(), cache.memory_of(3)), (8 * MIB, 24 * MIB));
            let id = cache.create(2).unwrap();
            cache.append(&[(id, 1)]).unwrap();
            let stats = cache.stats();
            assert_eq!((stats.held, stats.padding), (24 * MIB, 0));
        }
    }

    fn options_say_in_what_steps_memory_comes(rig) {
        // Sixteen granules in extents of four, and one more token. By default growth precommits a
        // sixty-fourth, which is less than the granule that it needs.
        let changes: [(Change, u64, u64, u64); 6] = [
            (|cache| cache, 4, 17, 0),
            (|cache| cache.growth(Growth::Exact), 4, 17, 0),
            (|cache| cache.growth(Growth::Part(4)), 4, 20, 3),
            (|cache| cache.largest_extent(G), 16, 17, 0),
            (|cache| cache.largest_extent(16 * G), 1, 17, 0),
            (|cache| cache.largest_extent(16 * G).may_fork(true), 4, 17, 0),
        ];
        for (change, extents, held, precommitted) in changes {
            let scene = Scene::new(rig, pool(rig, 64), Layout::TokenMajor, of(SMALL, change));
            let Scene { tenant, mut cache, .. } = scene;
            let id = cache.create(256).unwrap();
            assert_eq!(tenant.stats().mappings, extents);
            cache.append(&[(id, 1)]).unwrap();
            let stats = cache.stats();
            assert_eq!((stats.held, stats.precommitted), (held * G, precommitted * G));
            assert_eq!(stats.padding, 17 * G - (257 << 17));
            assert_eq!(tenant.stats().precommitted, precommitted * G);
        }
    }
}

type Change = for<'a> fn(KvCacheBuilder<'a>) -> KvCacheBuilder<'a>;

/// Returns a function that builds a cache of a shape, with some options changed.
fn of(shape: Shape, change: Change) -> impl Fn(&Tenant, &Stream, Layout) -> KvCache {
    move |tenant, stream, layout| {
        let builder = KvCache::builder(tenant, stream, shape).layout(layout);
        change(builder).build().unwrap()
    }
}

/// Returns the offset of each head of each token.
fn heads_of(tensor: KvTensor<'_>) -> Vec<u64> {
    let [tokens, heads, _] = tensor.shape();
    let [token, head, element] = tensor.byte_strides();
    assert_eq!(tensor.strides(), [token / 4, head / 4, 1]);
    assert_eq!(element, 4);
    let of = |n| (0..heads).map(move |at| tensor.address().0 + n * token + at * head);
    (0..tokens).flat_map(of).collect()
}
