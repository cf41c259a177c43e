//! One of several processes that share a device's memory through a ledger: it fills its cache block
//! by block, waits where the ledger is full, and frees the cache again.
//!
//! `processes DIRECTORY NAME [ROUNDS]`: run it in two terminals with the same directory and two
//! names, and `cuvmm top --ledger DIRECTORY` in a third.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuvmm::error::BlockError;
use cuvmm::{Contents, Device, Ledger, Pool, Tenant};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 64 * MIB;

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: processes DIRECTORY NAME [ROUNDS]";
    let (directory, name) = (arguments.next(), arguments.next());
    let (directory, name) = (directory.ok_or(usage)?, name.ok_or(usage)?);
    let rounds = arguments.next().map_or(Ok(u32::MAX), |text| text.parse())?;
    run(
        directory.as_ref(),
        &name,
        rounds,
        Duration::from_millis(200),
    )
}

/// Fills and frees the cache of a process `rounds` times, with a pause after each block.
///
/// # Errors
/// Returns any error of the library but that memory is short.
pub fn run(
    directory: &Path,
    name: &str,
    rounds: u32,
    pause: Duration,
) -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    // The tenant that `cuvmm ctl sleep` and `wake` move. This program queues no work on its blocks.
    let sleeper: Arc<Mutex<Option<Tenant>>> = Arc::default();
    let (down, up) = (Arc::clone(&sleeper), Arc::clone(&sleeper));
    let chosen = |tenant: &Mutex<Option<Tenant>>| {
        let tenant = tenant.lock().unwrap_or_else(PoisonError::into_inner);
        tenant.clone().ok_or("the tenant is not there yet")
    };
    let ledger = Ledger::builder(&device, directory)
        .limit(1024 * MIB)
        .guarantee(128 * MIB)
        .timeout(Duration::from_secs(10))
        .name(name)
        .on_sleep(move |_| {
            let blocks = chosen(&down)?;
            let slept = blocks.blocks().release(true).sleep(Contents::Discard);
            slept.map(drop).map_err(|error| error.to_string())
        })
        .on_wake(move |_| {
            let woken = chosen(&up)?.blocks().wake();
            woken.map(drop).map_err(|error| error.to_string())
        })
        .open()?;
    let pool = Pool::builder(&device).ledger(&ledger).build()?;
    let cache = pool.tenant("cache").register()?;
    let model = pool.tenant("model").register()?;
    let weights = model.allocate(BLOCK)?;
    *sleeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(model);

    for round in 0..rounds {
        let mut blocks = Vec::new();
        for _ in 0..12 {
            match cache.block(BLOCK).timeout(4 * pause).allocate() {
                Ok(block) => blocks.push(block),
                Err(BlockError::OutOfMemory(shortage)) => {
                    println!(
                        "{name}: {}",
                        shortage.to_string().lines().next().unwrap_or("")
                    );
                    break;
                }
                Err(other) => return Err(other.into()),
            }
            std::thread::sleep(pause);
        }
        println!(
            "{name}: round {round}, {} MiB in {} blocks",
            blocks.len() as u64 * BLOCK / MIB,
            blocks.len()
        );
    }
    *sleeper.lock().unwrap_or_else(PoisonError::into_inner) = None;
    drop(weights);
    Ok(())
}
