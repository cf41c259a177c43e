//! Attention over a KV cache that grows in place, compared bit for bit with candle-nn's own.
//!
//! Needs a GPU.

use anyhow::{Context as _, ensure};
use candle_core::{DType, Device, Result, Tensor};
use cuvmm::{Limit, Pool};
use cuvmm_candle::{Gpu, KvCache, Memory};

const BATCH: usize = 2;
const HEADS: usize = 4;
const SIZE: usize = 128;

/// Returns keys, values and a query for `count` tokens, from random numbers.
fn tokens(count: usize, device: &Device) -> Result<[Tensor; 3]> {
    let made =
        || Tensor::randn(0f32, 1.0, (BATCH, HEADS, count, SIZE), device)?.to_dtype(DType::BF16);
    Ok([made()?, made()?, made()?])
}

fn attention(query: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
    let scores = (query.matmul(&keys.t()?)? / (SIZE as f64).sqrt())?;
    candle_nn::ops::softmax_last_dim(&scores)?.matmul(values)
}

/// Runs the example.
///
/// # Errors
/// Any error of the libraries.
pub fn main() -> anyhow::Result<()> {
    let gpu = Gpu::open(0)?;
    let pool = Pool::builder(gpu.device())
        .limit(Limit::Bytes(8 << 30))
        .build()?;
    let tenant = pool.tenant("model").register()?;
    let memory = Memory::new(&gpu, &tenant);

    // The line that a model changes: addresses for 128 Ki tokens, memory for the existing ones.
    let mut ours = KvCache::new(&memory, 2, 128 << 10);
    let mut theirs = candle_nn::kv_cache::KvCache::new(2, 4096);

    // A prompt, then single tokens, past the end of a granule.
    let steps = std::iter::once(8000).chain(std::iter::repeat_n(1, 400));
    let mut calls = gpu.device().calls();
    for count in steps {
        let [k, v, query] = tokens(count, gpu.candle())?;
        let query = query.narrow(2, count - 1, 1)?;
        let (keys, values) = ours.append(&k, &v)?;
        let seen = attention(&query, &keys, &values)?;
        let (keys, values) = theirs.append(&k, &v)?;
        let expected = attention(&query, &keys, &values)?;
        let bits = |tensor: Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        ensure!(
            bits(seen)? == bits(expected)?,
            "differs at {}",
            ours.current_seq_len()
        );

        let made = gpu
            .device()
            .calls()
            .since(&calls)
            .count(cuvmm::driver::Call::MemCreate);
        if made > 0 {
            println!(
                "{:>6} tokens: {made:>3} extents more, {} MiB in the cache",
                ours.current_seq_len(),
                ours.allocated() >> 20
            );
        }
        calls = gpu.device().calls();
    }

    let keys = ours.k()?.context("there are tokens")?;
    println!("keys of {:?}, strides of {:?}", keys.dims(), keys.stride());
    drop(keys);
    let refused = ours.truncate(1 << 20);
    println!("too many: {}", refused.err().context("it has that many")?);
    ours.truncate(8000)?;
    println!("{} tokens kept", ours.current_seq_len());
    ours.reset();
    let stats = tenant.stats();
    let idle = stats.committed - stats.in_use - stats.padding;
    println!(
        "{} MiB in use, {} MiB for the next",
        stats.in_use >> 20,
        idle >> 20
    );
    Ok(())
}
