//! A KV cache: the keys and values of sequences grow token by token at stable addresses.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;
use std::time::Duration;

use cuvmm::kv::{Layout, Part, Shape};
use cuvmm::{Device, KvCache, Limit, Mapper, Pool, Stream};

/// A small model: 32 KiB per token.
const SHAPE: Shape = Shape {
    layers: 8,
    kv_heads: 8,
    head_size: 128,
    element_bytes: 2,
    max_tokens: 4096,
    max_sequences: 64,
};

/// The time of a decode step's kernels, which are none here. On a GPU they take longer.
const STEP: Duration = Duration::from_millis(1);

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let mapper = Mapper::start(&device)?;
    let limit = Limit::Bytes(512 << 20);
    let pool = Pool::builder(&device)
        .limit(limit)
        .mapper(&mapper)
        .build()?;
    let tenant = pool.tenant("model").register()?;
    let stream = Stream::new(&device)?;

    for layout in [Layout::TokenMajor, Layout::LayerMajor] {
        let cache = KvCache::builder(&tenant, &stream, SHAPE).layout(layout);
        let cache = cache.build()?;
        println!(
            "{layout:?}: {} tokens per granule, at least {} MiB per sequence",
            cache.tokens_per_granule(),
            cache.least_memory() >> 20,
        );
    }

    let mut cache = KvCache::builder(&tenant, &stream, SHAPE).build()?;
    let fits = cache.admission()?;
    println!("a sequence of {} tokens fits", fits.now.sequence);

    // Three prompts, whose rows a prefill kernel would write.
    let prompts = [700, 40, 1200];
    let sequences = prompts.map(|tokens| cache.create(tokens));
    let [first, second, third] = sequences;
    let (first, second, third) = (first?, second?, third?);
    let row = vec![7; 2 * SHAPE.kv_heads as usize * SHAPE.head_size as usize];
    cache.write_rows(first, 3, Part::Key, 699, &row)?;
    let address = cache.view(first)?.key(3).ok_or("no such layer")?.address();

    // A decode step appends one token to each sequence in one call, which appends all of them or
    // none. The mapper's thread makes the driver calls between the steps.
    let before = device.calls();
    let mapped = device.mapper_calls();
    let step = [(first, 1), (second, 1), (third, 1)];
    for _ in 0..500 {
        cache.append(&step)?;
        std::thread::sleep(STEP);
    }
    let calls = device.calls().since(&before).total();
    let ahead = device.mapper_calls().since(&mapped).total();
    println!("500 steps: {calls} driver calls, {ahead} of them on the mapper's thread");

    // A view passes the address, the shape and the strides to a kernel.
    let keys = cache.view(first)?.key(3).ok_or("no such layer")?;
    assert_eq!(keys.address(), address, "the sequence does not move");
    println!(
        "keys of layer 3: {:?} elements, strides {:?}, at {address}",
        keys.shape(),
        keys.strides(),
    );
    let mut back = vec![0; row.len()];
    cache.read_rows(first, 3, Part::Key, 699, &mut back)?;
    assert_eq!(back, row, "the rows do not move");

    // The next sequence reuses the memory of a freed one without a driver call.
    cache.free(third)?;
    let before = device.calls();
    let next = cache.create(900)?;
    println!(
        "a sequence of 900 tokens after one of 1700: {} driver calls",
        device.calls().since(&before).total()
    );
    cache.truncate(next, 100)?;
    let stats = cache.stats();
    println!(
        "{} tokens take {} MiB; {} MiB held, {} MiB of it precommitted; {} MiB idle",
        stats.tokens,
        stats.live >> 20,
        stats.held >> 20,
        stats.precommitted >> 20,
        stats.idle >> 20,
    );
    let refused = cache.append(&[(first, 1), (next, 4000)]);
    println!(
        "too long: {}",
        refused.err().ok_or("the tokens were appended")?
    );
    Ok(())
}
