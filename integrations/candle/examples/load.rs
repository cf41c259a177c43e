//! A model's weights, loaded into one block of a tenant, and a candle layer made from them.
//!
//! Needs a GPU.

use anyhow::{Context as _, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module as _, VarBuilder, linear};
use cuvmm::{Limit, Pool};
use cuvmm_candle::{Gpu, Memory, Weights};

/// Runs the example.
///
/// # Errors
/// Any error of the libraries.
pub fn main() -> anyhow::Result<()> {
    let gpu = Gpu::open(0)?;
    let pool = Pool::builder(gpu.device())
        .limit(Limit::Bytes(1 << 30))
        .build()?;
    let tenant = pool.tenant("model").register()?;
    let memory = Memory::new(&gpu, &tenant);

    // A file as models are distributed.
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    let weight = Tensor::randn(0f32, 1.0, (512, 256), &Device::Cpu)?;
    let bias = Tensor::randn(0f32, 1.0, 512, &Device::Cpu)?;
    let tensors = [("out.weight", weight), ("out.bias", bias)];
    candle_core::safetensors::save(&tensors.clone().into_iter().collect(), &file)?;

    let weights = Weights::load(&memory, &[&file], Some(DType::BF16))?;
    println!(
        "{} tensors in {} KiB, packed into {} block",
        weights.tensors().len(),
        weights.bytes() >> 10,
        tenant.stats().blocks
    );

    // A layer over the block, and the layer that candle itself would have made.
    let ours = linear(256, 512, weights.var_builder(DType::BF16).pp("out"))?;
    let theirs = tensors.map(|(name, tensor)| (name.to_owned(), tensor));
    let theirs = VarBuilder::from_tensors(theirs.into(), DType::BF16, gpu.candle());
    let theirs = linear(256, 512, theirs.pp("out"))?;
    let input = Tensor::randn(0f32, 1.0, (3, 256), gpu.candle())?.to_dtype(DType::BF16)?;
    let bits = |tensor: Tensor| tensor.to_dtype(DType::F32)?.to_vec2::<f32>();
    ensure!(
        bits(ours.forward(&input)?)? == bits(theirs.forward(&input)?)?,
        "differs"
    );

    // The layer keeps its memory after the weights are dropped.
    drop(weights);
    println!("{} KiB kept by the layer", gpu.sweep() >> 10);
    ensure!(
        bits(ours.forward(&input)?)? == bits(theirs.forward(&input)?)?,
        "differs"
    );
    drop(ours);
    println!("{} KiB kept after it is dropped", gpu.sweep() >> 10);
    ensure!(tenant.stats().blocks == 0, "a block is left");
    weights_that_do_not_fit(&memory)
}

fn weights_that_do_not_fit(memory: &Memory) -> anyhow::Result<()> {
    let refused = Weights::new(memory, 2 << 30)
        .err()
        .context("there was room")?;
    println!("too many: {refused}");
    Ok(())
}
