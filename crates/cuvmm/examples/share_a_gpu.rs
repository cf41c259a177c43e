//! Two models share one device: each has a guarantee, idle memory goes to whoever needs it, and
//! whoever is refused is told why, in figures.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::error::BlockError;
use cuvmm::{Device, Limit, Pool, Stream};

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
    let code = pool.tenant("code").guarantee(16 * MIB).register()?;
    let streams = [Stream::new(&device)?, Stream::new(&device)?];

    // Alone, a model may have everything but what the other is guaranteed.
    let busy = chat.allocate_on(&streams[0], 32 * MIB)?;
    let cache = chat.allocate_on(&streams[0], 16 * MIB)?;
    println!("chat uses 48 MiB");
    show(&pool);

    // What it no longer uses is the other's, as soon as the work that used it is done.
    drop(cache);
    streams[0].synchronize()?;
    let weights = code.allocate_on(&streams[1], 32 * MIB)?;
    let mut seen = [1; 8];
    weights.read(0, &mut seen)?;
    assert_eq!(seen, [0; 8], "no byte of another tenant's is ever seen");
    println!("code has 32 MiB, 16 of which were idle with chat");
    show(&pool);

    // Now all is in use. The error says who has what.
    match chat.try_allocate(8 * MIB) {
        Err(BlockError::OutOfMemory(shortage)) => {
            println!("chat is refused: {shortage}");
            let (holder, held) = shortage.holders.first().ok_or("nobody holds it")?;
            println!(
                "so: it wants {} MiB, can have {}, and {holder} holds {} MiB",
                shortage.wanted / MIB,
                shortage.available / MIB,
                held / MIB,
            );
        }
        other => return Err(format!("there should be no memory left: {other:?}").into()),
    }

    drop((busy, weights, chat, code));
    pool.close()?;
    Ok(())
}

fn show(pool: &Pool) {
    for tenant in pool.stats().tenants {
        println!(
            "  {}: {} MiB in use, {} idle, {} guaranteed",
            tenant.name,
            tenant.in_use / MIB,
            (tenant.cached + tenant.pending_free) / MIB,
            tenant.guarantee / MIB,
        );
    }
}
