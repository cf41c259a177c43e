//! Tensors that candle allocates by itself, within a tenant's limit.

use candle_core::{DType, Tensor};

use super::rig::rig;

const MIB: usize = 1 << 20;

/// Returns a tensor of candle's own.
fn own(rig: &super::rig::Rig, mib: usize) -> candle_core::Result<Tensor> {
    Tensor::ones(mib * MIB / 4, DType::F32, rig.gpu.candle())
}

#[test]
fn candles_own_tensors_are_within_the_tenants_limit() {
    // In granules of 2 MiB: 256 MiB for them, 32 MiB for exchanges, and 32 MiB for blocks.
    let Some(rig) = rig("candles_own_tensors_are_within_the_tenants_limit", 160) else {
        return;
    };
    let before = own(&rig, 64).unwrap();
    let intermediates = rig.memory.intermediates(256 << 20).unwrap();
    assert_eq!(rig.stats().committed, 288 << 20);
    let one = own(&rig, 192).unwrap();
    let refused = own(&rig, 128).unwrap_err();
    assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
    let stats = intermediates.pool().stats().unwrap();
    assert_eq!(stats.maximum, 256 << 20);
    assert!((192 << 20..=256 << 20).contains(&stats.in_use), "{stats:?}");
    assert!(
        rig.tenant
            .try_allocate(64 << 20)
            .unwrap_err()
            .is_out_of_memory()
    );
    // It is another tensor of candle's own, which does not count.
    let sum = before.sum_all().unwrap().to_scalar::<f32>().unwrap();
    assert_eq!(sum, (64 * MIB / 4) as f32);
    assert!(rig.memory.intermediates(32 << 20).is_err(), "the limit");
    drop(one);
    rig.gpu.candle().synchronize().unwrap();
    drop(own(&rig, 192).unwrap());
    rig.gpu.candle().synchronize().unwrap();
    drop(intermediates);
    assert_eq!(rig.stats().committed, 0);
    drop(own(&rig, 512).unwrap());
    rig.nothing_went_wrong();
}
