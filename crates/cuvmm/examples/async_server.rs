//! An async server whose requests wait for GPU memory without blocking a thread. Each request holds
//! a block while it runs, and the model sleeps while it is idle.
//!
//! The example uses tokio on one thread. The library depends on no runtime.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;
use std::time::Duration;

use cuvmm::{BlockError, Contents, Device, HostStore, Limit, Mapper, Pool, Tenant};

const MIB: u64 = 1 << 20;

/// Serves one request with a cache that starts small and grows with the answer.
async fn answer(tenant: Tenant, number: u8) -> Result<u8, BlockError> {
    // Two requests fit and can both grow; a third one does not fit. With smaller first allocations,
    // requests that already hold memory could all wait for more.
    let cache = tenant.block(6 * MIB).capacity(8 * MIB);
    let mut cache = cache.allocate_async().await?;
    // The model would compute here.
    tokio::time::sleep(Duration::from_millis(2)).await;
    cache.grow_to_async(8 * MIB).await?;
    cache.write(6 * MIB, &[number; 64])?;
    let mut bytes = [0; 64];
    cache.read(6 * MIB, &mut bytes)?;
    Ok(bytes[0])
}

/// Serves sixteen requests, two at a time.
async fn serve(pool: &Pool, device: &Device) -> Result<(), Box<dyn Error>> {
    let tenant = pool.tenant("model").register()?;
    let weights = tenant.block(8 * MIB).tag("weights");
    let weights = weights.allocate_async().await?;
    weights.write(0, b"weights")?;

    let mut requests = tokio::task::JoinSet::new();
    for number in 0..16 {
        requests.spawn(answer(tenant.clone(), number));
    }
    let mut answered = 0;
    while let Some(served) = requests.join_next().await {
        served??;
        answered += 1;
    }
    println!("{answered} requests were answered");

    // A canceled request: dropping its future leaves nothing behind.
    let all = tenant.allocate_async(24 * MIB);
    let gave_up = tokio::time::timeout(Duration::from_millis(5), all).await;
    println!("canceled: {}", gave_up.is_err());

    // The model is idle: another thread copies its weights to host memory.
    let store = HostStore::builder(device).pinned(8 * MIB).build()?;
    let slept = tenant.blocks().sleep_async(Contents::Keep(&store)).await?;
    println!("{} MiB sleep", slept.kept / MIB);
    // Another model uses the memory in the meantime. Waking waits until it is free again.
    let other = pool.tenant("other").register()?;
    let theirs = other.allocate_async(24 * MIB).await?;
    let waking = tenant.blocks().timeout(Duration::from_secs(60));
    let (woken, ()) = tokio::join!(waking.wake_async(), async {
        tokio::time::sleep(Duration::from_millis(2)).await;
        drop(theirs);
    });
    println!("{} MiB woke", woken?.restored / MIB);
    let mut bytes = [0; 7];
    weights.read(0, &mut bytes)?;
    match &bytes == b"weights" {
        true => Ok(()),
        false => Err("the weights have changed".into()),
    }
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    // The mapper's thread serves the futures.
    let mapper = Mapper::start(&device)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(24 * MIB))
        .mapper(&mapper)
        .build()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    runtime.block_on(serve(&pool, &device))?;
    Ok(())
}
