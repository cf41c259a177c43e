//! Models that sleep and wake, with the same tensors and contents.

use candle_core::{DType, Tensor};
use candle_nn::Module as _;
use cuvmm::{Contents, HostStore};
use cuvmm_candle::error::{CacheError, TensorError, WeightsError};
use cuvmm_candle::{KvCache, Weights};

use super::rig::{G, bits, numbers, rig};

#[test]
fn a_model_sleeps_and_wakes() {
    let Some(rig) = rig("a_model_sleeps_and_wakes", 40) else {
        return;
    };
    let mut weights = Weights::new(&rig.memory, 8 * G).unwrap();
    weights.insert("weight", &numbers(&[100, 64], 1)).unwrap();
    weights.insert("bias", &numbers(&[100], 2)).unwrap();
    let layer = candle_nn::linear(64, 100, weights.var_builder(DType::F32)).unwrap();
    let input = rig.numbers(&[3, 64], DType::F32, 3);
    let expected = bits(&layer.forward(&input).unwrap());
    let mut cache = KvCache::new(&rig.memory, 2, 10_000);
    let a = rig.numbers(&[1, 2, 9000, 64], DType::F32, 4);
    cache.append(&a, &a).unwrap();
    rig.candle().synchronize().unwrap();

    let store = HostStore::builder(rig.gpu.device())
        .pinned(32 * G)
        .build()
        .unwrap();
    for _ in 0..3 {
        let slept = rig.tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        assert_eq!((slept.blocks, rig.stats().committed), (5, 0));
        // Operations of this crate refuse to use memory that is not there.
        let one = rig.numbers(&[1, 2, 1, 64], DType::F32, 5);
        let error = cache.append(&one, &one).unwrap_err();
        assert!(error.to_string().contains("asleep"), "{error}");
        let error = cache.k_cache_mut().append(&one).unwrap_err();
        let candle_core::Error::Cuda(error) = error else {
            panic!("{error}")
        };
        assert!(
            matches!(error.downcast_ref(), Some(CacheError::Asleep)),
            "{error}"
        );
        let error = weights.insert("more", &numbers(&[4], 2)).unwrap_err();
        let asleep = matches!(
            error,
            WeightsError::Tensor {
                source: TensorError::Asleep,
                ..
            }
        );
        assert!(asleep, "{error}");

        // Meanwhile another tenant takes all of the memory.
        let other = rig.pool.tenant("other").register().unwrap();
        let block = other.allocate_on(rig.gpu.stream(), 40 * G).unwrap();
        drop(block);
        rig.gpu.stream().synchronize().unwrap();
        drop(other);

        rig.tenant.blocks().wake().unwrap();
        assert_eq!(bits(&layer.forward(&input).unwrap()), expected);
        assert_eq!(bits(&cache.k().unwrap().unwrap()), bits(&a));
        rig.candle().synchronize().unwrap();
    }
    // It grows further at the same addresses.
    let (keys, values) = cache
        .append(&a.narrow(2, 0, 900).unwrap(), &a.narrow(2, 0, 900).unwrap())
        .unwrap();
    let longer = Tensor::cat(&[&a, &a.narrow(2, 0, 900).unwrap()], 2).unwrap();
    assert_eq!((bits(&keys), bits(&values)), (bits(&longer), bits(&longer)));
    rig.nothing_went_wrong();
}

/// The weights stay, and the cache's contents are discarded.
#[test]
fn a_cache_sleeps_alone_and_is_forgotten() {
    let Some(rig) = rig("a_cache_sleeps_alone_and_is_forgotten", 40) else {
        return;
    };
    let mut weights = Weights::new(&rig.memory, G).unwrap();
    weights.insert("weight", &numbers(&[100, 64], 1)).unwrap();
    let mut cache = KvCache::new(&rig.memory, 2, 100_000);
    let a = rig.numbers(&[1, 2, 10, 64], DType::F32, 4);
    let handed_out = cache.append(&a, &a).unwrap();
    rig.candle().synchronize().unwrap();
    let slept = rig
        .tenant
        .blocks()
        .tag("kv")
        .sleep(Contents::Discard)
        .unwrap();
    assert_eq!((slept.blocks, slept.kept), (4, 0));
    let seen = weights.get("weight").unwrap();
    assert_eq!(
        bits(seen),
        bits(&numbers(&[100, 64], 1).to_device(rig.candle()).unwrap())
    );
    // Blocks are freed while asleep, and their tensors dropped.
    cache.reset();
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (4 * G, 5));
    drop(handed_out);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 1));
    cache.append(&a, &a).unwrap();
    assert_eq!(bits(&cache.v().unwrap().unwrap()), bits(&a));
    rig.nothing_went_wrong();
}
