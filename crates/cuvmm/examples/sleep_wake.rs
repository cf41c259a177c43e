//! Two models take turns in memory that fits only one. The idle model sleeps: its weights move to
//! host memory, its cache is discarded, and its addresses stay reserved.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;
use std::time::{Duration, Instant};

use cuvmm::error::SleepError;
use cuvmm::{Block, Contents, Device, HostStore, Limit, Pool, Stream, Tenant};

const MIB: u64 = 1 << 20;

/// A model with weights that must survive sleep, and a cache that need not.
struct Model {
    tenant: Tenant,
    weights: Block,
    cache: Block,
    seed: u8,
}

impl Model {
    fn load(pool: &Pool, stream: &Stream, seed: u8) -> Result<Self, Box<dyn Error>> {
        let tenant = pool.tenant(format!("model {seed}")).register()?;
        let block = |tag: &'static str, size| {
            let block = tenant.block(size).tag(tag).home_stream(stream);
            block.allocate()
        };
        let (weights, cache) = (block("weights", 48 * MIB)?, block("cache", 8 * MIB)?);
        weights.write(0, &vec![seed; weights.size() as usize])?;
        Ok(Self {
            tenant,
            weights,
            cache,
            seed,
        })
    }

    /// Keeps the weights and discards the cache, after waiting for work that uses them.
    fn sleep(&self, store: &HostStore) -> Result<(), Box<dyn Error>> {
        let begun = Instant::now();
        let patient = self.tenant.blocks().timeout(Duration::from_secs(10));
        let kept = patient
            .clone()
            .tag("weights")
            .sleep(Contents::Keep(store))?;
        let given = kept.given + patient.sleep(Contents::Discard)?.given;
        println!(
            "{} sleeps: {} MiB released, {} MiB kept, in {:.1?}",
            self.tenant.name(),
            given / MIB,
            kept.kept / MIB,
            begun.elapsed(),
        );
        Ok(())
    }

    fn wake(&self) -> Result<(), Box<dyn Error>> {
        let begun = Instant::now();
        let woken = self.tenant.blocks().wake()?;
        let took = begun.elapsed();
        let mut last = [0; 4096];
        self.weights
            .read(self.weights.size() - last.len() as u64, &mut last)?;
        assert_eq!(last, [self.seed; 4096], "the weights are unchanged");
        println!(
            "{} wakes: {} MiB at the same addresses, in {took:.1?}",
            self.tenant.name(),
            woken.mapped / MIB,
        );
        Ok(())
    }
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(64 * MIB))
        .build()?;
    let stream = Stream::new(&device)?;
    // Created in advance: allocating host memory takes longer than copying to it.
    let store = HostStore::builder(&device).pinned(96 * MIB).build()?;

    let first = Model::load(&pool, &stream, 1)?;
    let address = first.weights.address();
    first.sleep(&store)?;
    let second = Model::load(&pool, &stream, 2)?;

    // Both models do not fit at once. The error says how much memory is missing.
    match first.tenant.blocks().wake() {
        Err(SleepError::Block { cause, .. }) => println!("cannot wake yet: {cause}"),
        other => return Err(format!("expected an out-of-memory error: {other:?}").into()),
    }
    for _ in 0..2 {
        second.sleep(&store)?;
        first.wake()?;
        first.sleep(&store)?;
        second.wake()?;
    }

    // Wake the weights alone; the cache is not needed yet.
    second.sleep(&store)?;
    first.tenant.blocks().tag("weights").wake()?;
    assert_eq!(first.weights.address(), address);
    assert!(first.cache.is_asleep() && !first.weights.is_asleep());
    let stats = first.tenant.stats();
    println!(
        "{} has {} MiB in use and {} MiB asleep",
        stats.name,
        stats.in_use / MIB,
        stats.asleep / MIB,
    );
    drop((first, second));
    pool.close()?;
    Ok(())
}
