//! A pool that makes room for another program while its models go on: limits and guarantees change
//! while it runs, and memory that is in use is waited for.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::error::PoolError;
use cuvmm::{Device, Limit, Pool};

const MIB: u64 = 1 << 20;

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(64 * MIB))
        .build()?;
    let chat = pool.tenant("chat").guarantee(16 * MIB).register()?;
    let batch = pool.tenant("batch").register()?;

    let weights = chat.allocate(12 * MIB)?;
    let work = batch.allocate(24 * MIB)?;
    drop(batch.allocate(16 * MIB)?);

    // Another program needs half of it. What is idle goes back to the driver at once.
    let change = pool.set_limit(Limit::Bytes(32 * MIB))?;
    println!(
        "now at most {} MiB: {} MiB went back, {} MiB are in use beyond that",
        change.limit / MIB,
        change.taken_back / MIB,
        change.excess / MIB
    );

    // Nothing more is charged, and what is freed goes back too.
    if let Err(refused) = batch.allocate(2 * MIB) {
        println!("meanwhile: {refused}");
    }
    drop(work);
    println!("after the batch: {} MiB", pool.stats().committed / MIB);

    // Guarantees fit the limit at any time: they are lowered first.
    match pool.set_limit(Limit::Bytes(8 * MIB)) {
        Err(error @ PoolError::BelowGuarantees { .. }) => println!("refused: {error}"),
        other => return Err(format!("{other:?}").into()),
    }
    let chat_again = pool.find_tenant("chat").ok_or("no such tenant")?;
    chat_again.set_guarantee(4 * MIB)?;
    let change = pool.set_limit(Limit::Bytes(8 * MIB))?;
    println!("8 MiB: {} MiB are in use beyond that", change.excess / MIB);

    // The other program has gone.
    pool.set_limit(Limit::Bytes(64 * MIB))?;
    chat.set_guarantee(16 * MIB)?;
    batch.set_limit(32 * MIB)?;
    for tenant in pool.tenants() {
        let stats = tenant.stats();
        println!(
            "{}: {} MiB guaranteed, at most {} MiB",
            stats.name,
            stats.guarantee / MIB,
            stats.limit / MIB
        );
    }
    drop(weights);
    Ok(())
}
