//! A running pool that yields memory to another program: its limit and its guarantees change while
//! its tenants work, and memory in use is released once it is freed.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::error::PoolError;
use cuvmm::{Device, Limit, Pool};

const MIB: u64 = 1 << 20;

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
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

    // Another program needs half of the memory. Cached memory goes back to the driver at once.
    let change = pool.set_limit(Limit::Bytes(32 * MIB))?;
    println!(
        "limit {} MiB: {} MiB released, {} MiB in use beyond the limit",
        change.limit / MIB,
        change.taken_back / MIB,
        change.excess / MIB
    );

    // While memory is in use beyond the limit, no allocation succeeds, and freed memory goes to the
    // driver too.
    if let Err(refused) = batch.allocate(2 * MIB) {
        println!("meanwhile: {refused}");
    }
    drop(work);
    println!(
        "after the batch: {} MiB committed",
        pool.stats().committed / MIB
    );

    // The guarantees must fit the limit, so they are lowered first.
    match pool.set_limit(Limit::Bytes(8 * MIB)) {
        Err(error @ PoolError::BelowGuarantees { .. }) => println!("refused: {error}"),
        other => return Err(format!("{other:?}").into()),
    }
    let chat_again = pool.find_tenant("chat").ok_or("no such tenant")?;
    chat_again.set_guarantee(4 * MIB)?;
    let change = pool.set_limit(Limit::Bytes(8 * MIB))?;
    println!(
        "limit 8 MiB: {} MiB in use beyond the limit",
        change.excess / MIB
    );

    // The other program has ended.
    pool.set_limit(Limit::Bytes(64 * MIB))?;
    chat.set_guarantee(16 * MIB)?;
    batch.set_limit(32 * MIB)?;
    for tenant in pool.tenants() {
        let stats = tenant.stats();
        println!(
            "{}: guarantee {} MiB, limit {} MiB",
            stats.name,
            stats.guarantee / MIB,
            stats.limit / MIB
        );
    }
    drop(weights);
    Ok(())
}
