//! Two models take turns with memory that holds one of them: whoever is not asked sleeps, its
//! weights in host memory, its cache given up, its addresses kept.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;
use std::time::{Duration, Instant};

use cuvmm::error::SleepError;
use cuvmm::{Block, Contents, Device, HostStore, Limit, Pool, Stream, Tenant};

const MIB: u64 = 1 << 20;

/// A model: weights that must survive, and a cache that need not.
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

    /// Weights are kept, the cache is not; the work that uses them is waited for.
    fn sleep(&self, store: &HostStore) -> Result<(), Box<dyn Error>> {
        let begun = Instant::now();
        let patient = self.tenant.blocks().timeout(Duration::from_secs(10));
        let kept = patient
            .clone()
            .tag("weights")
            .sleep(Contents::Keep(store))?;
        let given = kept.given + patient.sleep(Contents::Discard)?.given;
        println!(
            "{} sleeps: {} MiB given up, {} kept, in {:.1?}",
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
        assert_eq!(last, [self.seed; 4096], "the weights are what they were");
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
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(64 * MIB))
        .build()?;
    let stream = Stream::new(&device)?;
    // Before it is needed: getting host memory is slower than copying to it.
    let store = HostStore::builder(&device).pinned(96 * MIB).build()?;

    let first = Model::load(&pool, &stream, 1)?;
    let address = first.weights.address();
    first.sleep(&store)?;
    let second = Model::load(&pool, &stream, 2)?;

    // Both at once do not fit, and the error says what is missing.
    match first.tenant.blocks().wake() {
        Err(SleepError::Block { cause, .. }) => println!("not yet: {cause}"),
        other => return Err(format!("there should be no memory left: {other:?}").into()),
    }
    for _ in 0..2 {
        second.sleep(&store)?;
        first.wake()?;
        first.sleep(&store)?;
        second.wake()?;
    }

    // The weights alone: the cache is not needed yet.
    second.sleep(&store)?;
    first.tenant.blocks().tag("weights").wake()?;
    assert_eq!(first.weights.address(), address);
    assert!(first.cache.is_asleep() && !first.weights.is_asleep());
    let stats = first.tenant.stats();
    println!(
        "{} has {} MiB, and {} asleep",
        stats.name,
        stats.in_use / MIB,
        stats.asleep / MIB,
    );
    drop((first, second));
    pool.close()?;
    Ok(())
}
