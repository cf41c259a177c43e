//! Sequences of a model's keys and values that grow token by token, at addresses that stay.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::kv::{Layout, Part, Shape};
use cuvmm::{Device, KvCache, Limit, Mapper, Pool, Stream};

/// A small model: 32 KiB a token.
const SHAPE: Shape = Shape {
    layers: 8,
    kv_heads: 8,
    head_size: 128,
    element_bytes: 2,
    max_tokens: 4096,
    max_sequences: 64,
};

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
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
            "{layout:?}: {} tokens a granule, a sequence has {} MiB at least",
            cache.tokens_per_granule(),
            cache.least_memory() >> 20,
        );
    }

    let mut cache = KvCache::builder(&tenant, &stream, SHAPE).build()?;
    let fits = cache.admission()?;
    println!("a sequence of {} tokens would fit", fits.now.sequence);

    // Prompts of three requests, whose rows a prefill kernel writes.
    let prompts = [700, 40, 1200];
    let sequences = prompts.map(|tokens| cache.create(tokens));
    let [first, second, third] = sequences;
    let (first, second, third) = (first?, second?, third?);
    let row = vec![7; 2 * SHAPE.kv_heads as usize * SHAPE.head_size as usize];
    cache.write_rows(first, 3, Part::Key, 699, &row)?;
    let address = cache.view(first)?.key(3).ok_or("no such layer")?.address();

    // A decode step appends a token to each: one call, all or nothing.
    let before = device.calls();
    let mapped = device.mapper_calls();
    let step = [(first, 1), (second, 1), (third, 1)];
    for _ in 0..500 {
        cache.append(&step)?;
    }
    let calls = device.calls().since(&before).total();
    let ahead = device.mapper_calls().since(&mapped).total();
    println!("500 steps: {calls} driver calls, {ahead} of them on the mapper's thread");

    // What a kernel is given: an address, a shape and strides.
    let keys = cache.view(first)?.key(3).ok_or("no such layer")?;
    assert_eq!(keys.address(), address, "a sequence never moves");
    println!(
        "keys of layer 3: {:?} elements in steps of {:?} at {address}",
        keys.shape(),
        keys.strides(),
    );
    let mut back = vec![0; row.len()];
    cache.read_rows(first, 3, Part::Key, 699, &mut back)?;
    assert_eq!(back, row, "and neither do its rows");

    // What ended leaves its memory to the next, without a driver call.
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
        "{} tokens take {} MiB; held {} MiB, of that {} ahead of use; {} MiB lie ready",
        stats.tokens,
        stats.live >> 20,
        stats.held >> 20,
        stats.precommitted >> 20,
        stats.idle >> 20,
    );
    let refused = cache.append(&[(first, 1), (next, 4000)]);
    println!("too long: {}", refused.err().ok_or("there was room")?);
    Ok(())
}
