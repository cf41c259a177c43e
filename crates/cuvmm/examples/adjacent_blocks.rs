//! A multichannel recording that grows while it is made. Its channels are adjacent blocks: a kernel
//! sees one strided tensor, and each channel grows in place.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::{Block, Device, Limit, Pool, Stream, Tenant};

const MIB: u64 = 1 << 20;
const CHANNELS: usize = 4;

/// Bytes per sample.
const SAMPLE: u64 = 4;

/// Returns sample `n` of a channel.
fn sample(channel: usize, n: u64) -> f32 {
    channel as f32 + (n % 4096) as f32 / 4096.0
}

fn samples(channel: usize, range: std::ops::Range<u64>) -> Vec<u8> {
    let samples = range.map(|n| sample(channel, n));
    samples.flat_map(f32::to_le_bytes).collect()
}

/// Grows every channel to `size` bytes in one call, which grows all of them or none.
fn grow(tenant: &Tenant, channels: &mut [Block], size: u64) -> Result<(), Box<dyn Error>> {
    let mut pairs: Vec<_> = channels.iter_mut().map(|block| (block, size)).collect();
    Ok(tenant.grow_all(&mut pairs)?)
}

/// Returns the distance from each channel to the next, which must be the same for all.
fn stride(channels: &[Block]) -> Result<u64, Box<dyn Error>> {
    let distances = channels
        .windows(2)
        .map(|two| two[1].address().0 - two[0].address().0);
    let mut distances: Vec<u64> = distances.collect();
    distances.dedup();
    match distances[..] {
        [stride] => Ok(stride),
        _ => Err(format!("the distances between channels differ: {distances:?}").into()),
    }
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let limit = Limit::Bytes(40 * MIB);
    let pool = Pool::builder(&device).limit(limit).build()?;
    let tenant = pool.tenant("recorder").register()?;
    let stream = Stream::new(&device)?;

    // Reserve 12 MiB of addresses per channel and back 2 MiB of them with memory.
    let channel = || {
        let block = tenant.block(2 * MIB).capacity(12 * MIB);
        block.home_stream(&stream)
    };
    let mut channels = channel().allocate_adjacent(CHANNELS)?;
    let stride = stride(&channels)?;
    let addresses: Vec<_> = channels.iter().map(Block::address).collect();

    let mut recorded = 0;
    for size in [2, 4, 6, 8].map(|size| size * MIB) {
        let before = pool.calls().total();
        grow(&tenant, &mut channels, size)?;
        let calls = pool.calls().total() - before;
        // A kernel or a copy from the instrument would write here, after the existing samples.
        let end = size / SAMPLE;
        for (index, channel) in channels.iter().enumerate() {
            channel.write(recorded * SAMPLE, &samples(index, recorded..end))?;
        }
        recorded = end;
        println!(
            "[{CHANNELS}, {recorded}] at {}, strides [{}, 1], after {calls} driver calls",
            addresses[0],
            stride / SAMPLE,
        );
        let now: Vec<_> = channels.iter().map(Block::address).collect();
        assert_eq!(now, addresses, "no channel moves");
    }

    // 12 MiB per channel exceed the limit of the pool. No channel grows.
    let refused = grow(&tenant, &mut channels, 12 * MIB);
    println!("refused: {}", refused.err().ok_or("all channels grew")?);
    assert!(channels.iter().all(|channel| channel.size() == 8 * MIB));

    // All samples are where the strides say.
    for (index, channel) in channels.iter().enumerate() {
        let mut bytes = vec![0; channel.size() as usize];
        channel.read(0, &mut bytes)?;
        assert!(bytes == samples(index, 0..recorded), "channel {index}");
        let first = addresses[0].0 + index as u64 * stride;
        assert_eq!(channel.address().0, first, "channel {index}");
        let last = &bytes[bytes.len() - SAMPLE as usize..];
        println!(
            "channel {index} at {}: last sample {}",
            channel.address(),
            f32::from_le_bytes(last.try_into()?),
        );
    }

    // The next recording reuses the addresses and their memory without a driver call.
    drop(channels);
    let before = pool.calls().total();
    let channels = channel().allocate_adjacent(CHANNELS)?;
    let calls = pool.calls().total() - before;
    let again: Vec<_> = channels.iter().map(Block::address).collect();
    assert_eq!(again, addresses, "the freed row is reused");
    println!("the next recording takes {calls} driver calls");
    drop((channels, tenant));
    pool.close()?;
    Ok(())
}
