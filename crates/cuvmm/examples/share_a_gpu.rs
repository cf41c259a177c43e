//! Two models share one device. Each has a guarantee, idle memory moves to the model that needs it,
//! and a refused allocation explains the shortage in figures.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::error::BlockError;
use cuvmm::{Device, Limit, Pool, Stream};

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
    let code = pool.tenant("code").guarantee(16 * MIB).register()?;
    let streams = [Stream::new(&device)?, Stream::new(&device)?];

    // A single model may use everything except the other model's guarantee.
    let busy = chat.allocate_on(&streams[0], 32 * MIB)?;
    let cache = chat.allocate_on(&streams[0], 16 * MIB)?;
    println!("chat uses 48 MiB");
    show(&pool);

    // Freed memory is available to the other model once the work that used it has completed.
    drop(cache);
    streams[0].synchronize()?;
    let weights = code.allocate_on(&streams[1], 32 * MIB)?;
    let mut seen = [1; 8];
    weights.read(0, &mut seen)?;
    assert_eq!(seen, [0; 8], "no tenant sees another tenant's data");
    println!("code uses 32 MiB, 16 MiB of it idle memory of chat");
    show(&pool);

    // All memory is in use now. The error says which tenant holds how much.
    match chat.try_allocate(8 * MIB) {
        Err(BlockError::OutOfMemory(shortage)) => {
            println!("chat is refused\n{shortage}");
            let (holder, held) = shortage
                .holders
                .first()
                .ok_or("the error lists no holder")?;
            println!(
                "it requested {} MiB, {} MiB are available, and {holder} holds {} MiB",
                shortage.wanted / MIB,
                shortage.available / MIB,
                held / MIB,
            );
        }
        other => return Err(format!("expected an out-of-memory error: {other:?}").into()),
    }

    drop((busy, weights, chat, code));
    pool.close()?;
    Ok(())
}

fn show(pool: &Pool) {
    for tenant in pool.stats().tenants {
        println!(
            "  {}: {} MiB in use, {} MiB idle, {} MiB guaranteed",
            tenant.name,
            tenant.in_use / MIB,
            (tenant.cached + tenant.pending_free) / MIB,
            tenant.guarantee / MIB,
        );
    }
}
