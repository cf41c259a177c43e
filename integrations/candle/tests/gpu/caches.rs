//! Caches: equal to candle-nn's own bit for bit, and their place in memory.

use candle_core::{DType, Tensor};
use candle_nn::kv_cache::KvCache as Theirs;
use cuvmm_candle::error::CacheError;
use cuvmm_candle::{Cache, Gpu, KvCache, Memory, Order, shortage};

use super::rig::{G, Rig, bits, rig};

fn attention(query: &Tensor, keys: &Tensor, values: &Tensor) -> Tensor {
    let scores = query.matmul(&keys.t().unwrap()).unwrap();
    let weights = candle_nn::ops::softmax_last_dim(&scores).unwrap();
    weights.matmul(values).unwrap()
}

/// Returns the first address of a tensor's storage.
fn address(tensor: &Tensor) -> u64 {
    use candle_core::cuda_backend::cudarc::driver::DevicePtr as _;
    let (storage, _) = tensor.storage_and_layout();
    let candle_core::Storage::Cuda(storage) = &*storage else {
        panic!("on a GPU")
    };
    let slice = storage.as_cuda_slice::<f32>().unwrap();
    slice.device_ptr(slice.stream()).0
}

fn cause(error: &candle_core::Error) -> &CacheError {
    match error {
        candle_core::Error::Cuda(error) => error.downcast_ref().unwrap(),
        error => panic!("{error}"),
    }
}

/// Appends of all sizes to both caches, in every order, type and batch, with attention over the
/// results.
#[test]
fn a_cache_is_the_same_as_candles_own() {
    let Some(rig) = rig("a_cache_is_the_same_as_candles_own", 2000) else {
        return;
    };
    let mut seed = 0;
    for (batch, heads, size, dtype) in [
        (1, 2, 64, DType::F32),
        (3, 4, 128, DType::BF16),
        (2, 1, 16, DType::F16),
        (1, 8, 256, DType::BF16),
        (1, 3, 80, DType::BF16),
        (2, 2, 96, DType::F32),
    ] {
        for order in [Order::Heads, Order::Tokens] {
            let mut ours = KvCache::new(&rig.memory, 2, 20_000).with_order(order);
            let mut theirs = Theirs::new(2, 512);
            // Past the end of a granule in every kind of row.
            for count in [1, 7, 1, 1, 3000, 1, 1, 6000, 1, 9000, 1] {
                let [k, v] = [0, 1].map(|_| {
                    seed += 1;
                    rig.numbers(&[batch, heads, count, size], dtype, seed)
                });
                let (keys, values) = ours.append(&k, &v).unwrap();
                let (their_keys, their_values) = theirs.append(&k, &v).unwrap();
                assert_eq!(keys.shape(), their_keys.shape());
                assert_eq!(ours.current_seq_len(), theirs.current_seq_len());
                let query = rig.numbers(&[batch, heads, 1, size], dtype, seed + 1000);
                let whole = |tensor: &Tensor| match order {
                    Order::Tokens => tensor.contiguous().unwrap(),
                    _ => tensor.clone(),
                };
                assert_eq!(
                    bits(&attention(&query, &whole(&keys), &whole(&values))),
                    bits(&attention(&query, &their_keys, &their_values)),
                    "attention over {} tokens of {batch}x{heads}x{size} {dtype:?} {order:?}",
                    ours.current_seq_len()
                );
            }
            let [ours_all, theirs_all] = [(ours.k(), ours.v()), (theirs.k(), theirs.v())]
                .map(|(k, v)| [k, v].map(|tensor| bits(&tensor.unwrap().unwrap())));
            assert_eq!(ours_all, theirs_all);
        }
    }
    rig.nothing_went_wrong();
}

/// Token dimensions other than the second to last, as in some models.
#[test]
fn tokens_may_be_any_dimension() {
    let Some(rig) = rig("tokens_may_be_any_dimension", 64) else {
        return;
    };
    for (shape, dim) in [
        (vec![2, 5, 4, 64], 1),
        (vec![5, 64], 0),
        (vec![3, 5, 64], 1),
        (vec![2, 2, 2, 5], 3),
        (vec![2, 3, 2, 5, 32], 3),
    ] {
        for order in [Order::Heads, Order::Tokens] {
            let mut ours = KvCache::new(&rig.memory, dim, 64).with_order(order);
            let mut theirs = Theirs::new(dim, 64);
            for seed in 0..3 {
                let k = rig.numbers(&shape, DType::F32, seed);
                let v = rig.numbers(&shape, DType::F32, seed + 100);
                let (keys, values) = ours.append(&k, &v).unwrap();
                let (their_keys, their_values) = theirs.append(&k, &v).unwrap();
                assert_eq!(keys.dims(), their_keys.dims());
                assert_eq!(bits(&keys), bits(&their_keys), "{shape:?} {dim} {order:?}");
                assert_eq!(bits(&values), bits(&their_values));
            }
        }
    }
    rig.nothing_went_wrong();
}

/// The cache never moves, tensors that were returned stay unchanged, and memory comes by the
/// granule.
#[test]
fn a_cache_grows_in_place() {
    let Some(rig) = rig("a_cache_grows_in_place", 64) else {
        return;
    };
    // 2 heads of 64 floats: 8192 tokens for each granule and row.
    let mut cache = KvCache::new(&rig.memory, 2, 100_000);
    assert_eq!(
        (
            cache.allocated(),
            rig.stats().blocks,
            cache.current_seq_len()
        ),
        (0, 0, 0)
    );
    assert!(cache.k().unwrap().is_none());
    let piece = rig.numbers(&[1, 2, 8191, 64], DType::F32, 1);
    let one = rig.numbers(&[1, 2, 1, 64], DType::F32, 2);
    let (first, _) = cache.append(&piece, &piece).unwrap();
    assert_eq!((rig.stats().blocks, cache.allocated()), (4, 4 * G));
    assert_eq!(rig.stats().tags.get("kv"), Some(&(4 * G)));
    let begin = address(&first);

    // Until the end of the granule, no call is made and no memory is taken.
    let calls = rig.gpu.device().calls();
    cache.append(&one, &one).unwrap();
    let made = rig.gpu.device().calls().since(&calls);
    assert_eq!(made.count(cuvmm::driver::Call::MemCreate), 0);
    assert_eq!(made.count(cuvmm::driver::Call::MemMap), 0);
    assert_eq!(cache.allocated(), 4 * G);
    let (last, _) = cache.append(&one, &one).unwrap();
    assert_eq!((cache.current_seq_len(), cache.allocated()), (8193, 8 * G));
    assert_eq!(address(&last), begin);
    assert_eq!(bits(&first), bits(&piece));
    assert_eq!(bits(&last.narrow(2, 0, 8191).unwrap()), bits(&piece));
    assert_eq!(bits(&last.narrow(2, 8192, 1).unwrap()), bits(&one));
    assert_eq!(last.stride()[2..], [64, 1]);
    assert!(rig.stats().committed <= 16 * G, "{:?}", rig.stats());

    // In the other order one row holds all heads.
    let mut packed = Cache::new(&rig.memory, 2, 100_000).with_order(Order::Tokens);
    packed.append(&piece).unwrap();
    assert_eq!((packed.allocated(), rig.stats().blocks), (2 * G, 5));
    packed.append(&one).unwrap();
    assert_eq!(
        (packed.allocated(), packed.current_seq_len()),
        (2 * G, 8192)
    );
    packed.append(&one).unwrap();
    assert_eq!(packed.allocated(), 3 * G);
    let packed = packed.current_data().unwrap().unwrap();
    assert_eq!((packed.dims(), bits(&packed)), (last.dims(), bits(&last)));
    rig.nothing_went_wrong();
}

#[test]
fn tokens_are_taken_back_and_written_over() {
    let Some(rig) = rig("tokens_are_taken_back_and_written_over", 64) else {
        return;
    };
    let mut cache = KvCache::new(&rig.memory, 2, 64);
    let [a, b, c] = [1, 2, 3].map(|seed| rig.numbers(&[2, 2, 5, 32], DType::F32, seed));
    cache.append(&a, &b).unwrap();
    cache.append(&b, &c).unwrap();
    let refused = cache.truncate(11).unwrap_err();
    assert!(
        matches!(
            refused,
            CacheError::NotThere {
                wanted: 11,
                has: 10
            }
        ),
        "{refused}"
    );
    cache.truncate(3).unwrap();
    assert_eq!(
        (cache.current_seq_len(), cache.v_cache().current_seq_len()),
        (3, 3)
    );
    let (keys, values) = cache.append(&c, &a).unwrap();
    let expected = |first: &Tensor, then: &Tensor| {
        bits(&Tensor::cat(&[&first.narrow(2, 0, 3).unwrap(), then], 2).unwrap())
    };
    assert_eq!(bits(&keys), expected(&a, &c));
    assert_eq!(bits(&values), expected(&b, &a));
    cache.truncate(0).unwrap();
    assert_eq!(cache.k().unwrap().unwrap().dims(), [2, 2, 0, 32]);
    // Each of the two caches works separately.
    cache.k_cache_mut().append(&a).unwrap();
    assert_eq!(
        (cache.current_seq_len(), cache.v_cache().current_seq_len()),
        (5, 0)
    );
    assert_eq!(bits(&cache.k().unwrap().unwrap()), bits(&a));
    rig.nothing_went_wrong();
}

/// Tensors that were returned keep the memory; then the next cache gets it without a driver call.
#[test]
fn a_reset_gives_the_memory_back() {
    let Some(rig) = rig("a_reset_gives_the_memory_back", 64) else {
        return;
    };
    let mut cache = KvCache::new(&rig.memory, 2, 100_000);
    let a = rig.numbers(&[1, 4, 10, 64], DType::F32, 1);
    let (keys, _) = cache.append(&a, &a).unwrap();
    cache.reset();
    assert_eq!((cache.current_seq_len(), cache.allocated()), (0, 0));
    assert!(cache.v().unwrap().is_none());
    assert_eq!(
        (rig.gpu.sweep(), rig.stats().blocks),
        (4 * G, 4),
        "the keys'"
    );
    assert_eq!(bits(&keys), bits(&a));
    drop(keys);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    assert_eq!(rig.stats().committed, 8 * G);

    let calls = rig.gpu.device().calls();
    let b = rig.numbers(&[1, 4, 20, 64], DType::F32, 2);
    let (keys, values) = cache.append(&b, &b).unwrap();
    let made = rig.gpu.device().calls().since(&calls);
    for call in [cuvmm::driver::Call::MemCreate, cuvmm::driver::Call::MemMap] {
        assert_eq!(made.count(call), 0, "{call:?}");
    }
    assert_eq!((bits(&keys), bits(&values)), (bits(&b), bits(&b)));
    drop((keys, values));
    // With another shape and type.
    cache.reset();
    let c = rig.numbers(&[2, 3, 1, 128], DType::BF16, 3);
    assert_eq!(bits(&cache.append(&c, &c).unwrap().1), bits(&c));
    drop(cache);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

/// An append succeeds completely or changes nothing, and the error has the figures.
#[test]
fn memory_that_is_short_changes_nothing() {
    // Two rows of keys and two of values, of two granules each.
    let Some(rig) = rig("memory_that_is_short_changes_nothing", 9) else {
        return;
    };
    let mut cache = KvCache::new(&rig.memory, 2, 1 << 20);
    let a = rig.numbers(&[1, 2, 8192, 64], DType::F32, 1);
    cache.append(&a, &a).unwrap();
    cache.append(&a, &a).unwrap();
    assert_eq!(cache.allocated(), 8 * G);
    let error = cache.append(&a, &a).unwrap_err();
    assert!(matches!(cause(&error), CacheError::Block(_)), "{error}");
    assert!(shortage(&error).is_some(), "{error}");
    assert_eq!(
        (cache.current_seq_len(), cache.v_cache().current_seq_len()),
        (16384, 16384)
    );
    assert_eq!(cache.allocated(), 8 * G);
    assert_eq!(
        bits(&cache.k().unwrap().unwrap().narrow(2, 8192, 8192).unwrap()),
        bits(&a)
    );

    // The first tokens of another cache: the keys fit and the values do not.
    let mut other = KvCache::new(&rig.memory, 2, 1 << 20);
    let b = rig.numbers(&[1, 1, 1, 64], DType::F32, 2);
    let error = other.append(&b, &b).unwrap_err();
    assert!(matches!(cause(&error), CacheError::Block(_)), "{error}");
    assert!(shortage(&error).is_some(), "{error}");
    assert_eq!((other.current_seq_len(), other.allocated()), (0, 0));
    assert!(other.k().unwrap().is_none());
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 4));
    cache.reset();
    rig.gpu.stream().synchronize().unwrap();
    other.append(&b, &b).unwrap();
    assert_eq!(bits(&other.k().unwrap().unwrap()), bits(&b));
    rig.nothing_went_wrong();
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(rig) = rig("what_does_not_fit_is_refused", 64) else {
        return;
    };
    let mut cache = KvCache::new(&rig.memory, 2, 10);
    let a = rig.numbers(&[1, 2, 6, 64], DType::F32, 1);
    let none = a.narrow(2, 0, 0).unwrap();
    assert_eq!(cache.append(&none, &none).unwrap().0.dims(), [1, 2, 0, 64]);
    assert_eq!(rig.stats().blocks, 0);
    cache.append(&a, &a).unwrap();
    let refused = |cache: &mut KvCache, k: &Tensor, v: &Tensor| {
        let error = cache.append(k, v).unwrap_err();
        assert!(shortage(&error).is_none());
        assert_eq!(
            (cache.current_seq_len(), cache.v_cache().current_seq_len()),
            (6, 6)
        );
        assert_eq!(bits(&cache.v().unwrap().unwrap()), bits(&a));
        cause(&error).to_string()
    };
    assert_eq!(
        refused(&mut cache, &a, &a),
        "cannot append 6 tokens to 6: the cache holds at most 10"
    );
    let one = a.narrow(2, 0, 1).unwrap().contiguous().unwrap();
    for other in [
        rig.numbers(&[2, 2, 1, 64], DType::F32, 2),
        rig.numbers(&[1, 2, 1, 32], DType::F32, 2),
        rig.numbers(&[1, 2, 1, 64], DType::BF16, 2),
        rig.numbers(&[2, 1, 64], DType::F32, 2),
    ] {
        assert!(refused(&mut cache, &one, &other).contains("cannot be appended"));
        assert!(refused(&mut cache, &other, &one).contains("cannot be appended"));
    }
    let host = super::rig::numbers(&[1, 2, 1, 64], 3);
    assert!(refused(&mut cache, &one, &host).contains("another device"));

    let first = |dim, shape: &[usize], order| {
        let mut cache = Cache::new(&rig.memory, dim, 1 << 20).with_order(order);
        let error = cache
            .append(&rig.numbers(shape, DType::BF16, 1))
            .unwrap_err();
        assert_eq!((rig.gpu.sweep(), cache.allocated()), (0, 0));
        cause(&error).to_string()
    };
    assert!(
        first(2, &[8, 8, 1, 128], Order::Heads).contains("more than candle's kernels can count")
    );
    assert!(first(2, &[1, 80, 1, 128], Order::Tokens).contains("more than candle's kernels"));
    let empty = a.narrow(0, 0, 0).unwrap();
    let error = Cache::new(&rig.memory, 2, 10).append(&empty).unwrap_err();
    assert!(
        matches!(cause(&error), CacheError::NoTokens { dim: 2, .. }),
        "{error}"
    );
    assert_eq!(rig.stats().blocks, 4);
    rig.nothing_went_wrong();
}

/// Caches of many layers, dropped and created again by several threads.
#[test]
fn caches_come_and_go() {
    let Some(rig) = rig("caches_come_and_go", 400) else {
        return;
    };
    let Rig { gpu, tenant, .. } = &rig;
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let rig = &rig;
            scope.spawn(move || {
                let memory = Memory::new(gpu, tenant);
                let mut kept = Vec::new();
                for round in 0..20 {
                    let seed = 1 + thread * 1000 + round;
                    let a = rig.numbers(&[1, 2, 3 + round as usize, 64], DType::F32, seed);
                    let mut layers: Vec<_> =
                        (0..3).map(|_| KvCache::new(&memory, 2, 4096)).collect();
                    for layer in &mut layers {
                        layer.append(&a, &a).unwrap();
                        let (keys, _) = layer.append(&a, &a).unwrap();
                        kept.push((keys, bits(&a)));
                    }
                    drop(layers);
                    if kept.len() > 9 {
                        for (keys, a) in kept.drain(..) {
                            let half = keys.dim(2).unwrap() / 2;
                            assert_eq!(bits(&keys.narrow(2, 0, half).unwrap()), a);
                            assert_eq!(bits(&keys.narrow(2, half, half).unwrap()), a);
                        }
                    }
                }
            });
        }
    });
    assert_eq!((gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

/// Two models with different streams, in one pool.
#[test]
fn two_models_have_a_stream_each() {
    let Some(rig) = rig("two_models_have_a_stream_each", 200) else {
        return;
    };
    let device = candle_core::Device::new_cuda_with_stream(0).unwrap();
    let beside: Gpu = rig.gpu.beside(&device).unwrap();
    let other = rig.pool.tenant("other").register().unwrap();
    let mut ours = KvCache::new(&rig.memory, 2, 1000);
    let mut theirs = KvCache::new(&Memory::new(&beside, &other), 2, 1000);
    for seed in 0..20 {
        let a = rig.numbers(&[1, 4, 30, 64], DType::F32, seed);
        let b = super::rig::numbers(&[1, 4, 30, 64], seed)
            .to_device(&device)
            .unwrap();
        assert!(matches!(
            cause(&ours.append(&b, &b).unwrap_err()),
            CacheError::WrongDevice
        ));
        let (ours, _) = ours.append(&a, &a).unwrap();
        let (theirs, _) = theirs.append(&b, &b).unwrap();
        assert_eq!(bits(&ours), bits(&theirs));
    }
    rig.nothing_went_wrong();
}

/// Returns a cache of candle with the first tokens of another.
fn copied(cache: &Theirs, seq_len: usize) -> Theirs {
    let mut copy = Theirs::new(2, 512);
    let [k, v] = [cache.k(), cache.v()].map(|all| {
        let first = all.unwrap().unwrap().narrow(2, 0, seq_len).unwrap();
        first.contiguous().unwrap()
    });
    copy.append(&k, &v).unwrap();
    copy
}

/// Forks, and forks of forks, that continue with other tokens, are truncated and continue again,
/// compared with copies of candle's own caches.
#[test]
fn forks_are_the_same_as_copies() {
    let Some(rig) = rig("forks_are_the_same_as_copies", 600) else {
        return;
    };
    let mut seed = 5000;
    for (batch, heads, order) in [
        (1, 4, Order::Tokens),
        (2, 3, Order::Heads),
        (1, 1, Order::Heads),
    ] {
        let mut numbers = |count| {
            [0, 1].map(|_| {
                seed += 1;
                rig.numbers(&[batch, heads, count, 64], DType::F32, seed)
            })
        };
        let mut append = |both: &mut (KvCache, Theirs), count: usize| {
            let [k, v] = numbers(count);
            let (ours, theirs) = both;
            let (keys, values) = ours.append(&k, &v).unwrap();
            let (their_keys, their_values) = theirs.append(&k, &v).unwrap();
            assert_eq!(bits(&keys), bits(&their_keys));
            assert_eq!(bits(&values), bits(&their_values));
        };
        let check = |(ours, theirs): &(KvCache, Theirs)| {
            assert_eq!(ours.current_seq_len(), theirs.current_seq_len());
            let pairs = [(ours.k(), theirs.k()), (ours.v(), theirs.v())];
            for (ours, theirs) in pairs {
                let [ours, theirs] = [ours, theirs].map(|all| bits(&all.unwrap().unwrap()));
                assert_eq!(ours, theirs);
            }
        };
        let fork = |both: &mut (KvCache, Theirs), seq_len| {
            (both.0.fork(seq_len).unwrap(), copied(&both.1, seq_len))
        };
        let truncate = |both: &mut (KvCache, Theirs), seq_len| {
            both.0.truncate(seq_len).unwrap();
            both.1 = copied(&both.1, seq_len);
        };
        let ours = KvCache::new(&rig.memory, 2, 60_000)
            .with_order(order)
            .with_forks();
        let mut root = (ours, Theirs::new(2, 512));
        // Rows of 256 bytes for each token and head.
        append(&mut root, 40_000);
        append(&mut root, 7);
        let alone = rig.stats().committed;
        let mut first = fork(&mut root, 40_007);
        let mut second = fork(&mut root, 33_000);
        let stats = rig.stats();
        let shared = 2 * batch as u64 * heads as u64 * 32_768 * 256;
        assert!(stats.shared >= shared, "{stats:?}");
        // The rest of each row is copied, and no more.
        let rows = 2
            * batch as u64
            * if order == Order::Heads {
                heads as u64
            } else {
                1
            };
        assert!(stats.committed <= alone + 2 * rows * 4 * G, "{stats:?}");
        let before = first.0.k().unwrap().unwrap();
        let at = address(&before);
        for both in [&mut root, &mut first, &mut second] {
            append(both, 1);
            append(both, 1500);
        }
        assert_eq!(address(&first.0.k().unwrap().unwrap()), at);
        [&root, &first, &second].into_iter().for_each(check);
        let mut third = fork(&mut first, 41_000);
        // Truncation within the common part, on both sides: rows of their own from there on.
        truncate(&mut first, 20_000);
        check(&first);
        append(&mut first, 2);
        append(&mut first, 16_000);
        assert_ne!(address(&first.0.k().unwrap().unwrap()), at);
        truncate(&mut root, 35_000);
        append(&mut root, 3000);
        [&root, &first, &second, &third].into_iter().for_each(check);
        // Tensors that were returned before are unchanged.
        assert_eq!(before.dim(2).unwrap(), 40_007);
        drop(before);
        // Without tokens nothing is shared, and the shape may differ.
        let mut none = second.0.fork(0).unwrap();
        assert_eq!((none.current_seq_len(), none.allocated()), (0, 0));
        let [k, v] = [1, 2].map(|seed| rig.numbers(&[batch, heads, 5, 32], DType::F32, seed));
        none.append(&k, &v).unwrap();
        truncate(&mut second, 1);
        drop(root);
        append(&mut second, 1);
        append(&mut third, 100);
        [&first, &second, &third].into_iter().for_each(check);
        drop((first, second));
        check(&third);
        append(&mut third, 1000);
        drop((third, none));
        rig.gpu.device().synchronize().unwrap();
        rig.gpu.sweep();
        rig.pool.trim(0).unwrap();
        assert_eq!(rig.stats().committed, 0);
    }
    rig.nothing_went_wrong();
}

#[test]
fn what_cannot_be_forked_is_refused_and_changes_nothing() {
    let Some(rig) = rig("what_cannot_be_forked_is_refused_and_changes_nothing", 40) else {
        return;
    };
    let [k, v] = [1, 2].map(|seed| rig.numbers(&[1, 4, 9000, 64], DType::F32, seed));
    let mut plain = KvCache::new(&rig.memory, 2, 60_000).with_order(Order::Tokens);
    plain.append(&k, &v).unwrap();
    assert!(matches!(plain.fork(1), Err(CacheError::MayNotFork)));
    drop(plain);
    rig.gpu.device().synchronize().unwrap();
    rig.gpu.sweep();
    rig.pool.trim(0).unwrap();
    let cache = KvCache::new(&rig.memory, 2, 60_000).with_order(Order::Tokens);
    let mut cache = cache.with_forks();
    assert_eq!(cache.fork(0).unwrap().current_seq_len(), 0);
    cache.append(&k, &v).unwrap();
    let Err(CacheError::NotThere { wanted, has }) = cache.fork(9001) else {
        panic!("more tokens than there are")
    };
    assert_eq!((wanted, has), (9001, 9000));
    // Ten granules, eight of which are shared: the rest of the keys fits twice and that of the
    // values does not.
    let taken = rig.tenant.allocate(29 * G).unwrap();
    let before = (rig.stats().committed, cache.allocated());
    let refused = cache.fork(9000).unwrap_err();
    assert!(refused.shortage().is_some(), "{refused}");
    rig.gpu.device().synchronize().unwrap();
    rig.gpu.sweep();
    rig.pool.trim(0).unwrap();
    assert_eq!((rig.stats().committed, cache.allocated()), before);
    drop(taken);
    let fork = cache.fork(9000).unwrap();
    let [ours, theirs] = [&cache, &fork].map(|cache| bits(&cache.k().unwrap().unwrap()));
    assert_eq!(ours, theirs);
    drop(fork);
    rig.gpu.device().synchronize().unwrap();
    rig.tenant.blocks().sleep(cuvmm::Contents::Discard).unwrap();
    assert!(matches!(cache.fork(1), Err(CacheError::Asleep)));
    rig.tenant.blocks().wake().unwrap();
    cache.fork(1).unwrap();
    rig.nothing_went_wrong();
}
