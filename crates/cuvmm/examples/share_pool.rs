//! Shares what was allocated from a memory pool of the driver (`cuMemAllocAsync`) between two
//! processes: one fills batches, the other reads them, and each batch's memory comes back.
//!
//! Runs on a GPU, or on the host driver where there is none. The taker is a second process
//! that runs this program again.

#[path = "support/process.rs"]
mod process;
mod support;

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use cuvmm::driver::HandleTypes;
use cuvmm::share::{AllocationOffer, Listener, PoolImporter};
use cuvmm::{Channel, Device, MemPool, Stream};

const MIB: u64 = 1 << 20;
const BATCHES: u8 = 10;
const BATCH: u64 = 32 * MIB;
/// Time limit for the other process, which may have to create a context on a GPU first.
const PATIENCE: Duration = Duration::from_secs(60);
/// Name of the test that runs the example.
const TEST: &str = "batches_of_a_memory_pool_go_to_another_process";

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    match process::socket() {
        None => give(&device),
        Some(socket) => take(&device, &socket),
    }
}

/// Allocates batches from a pool in the first process and sends each.
fn give(device: &Device) -> Result<(), Box<dyn Error>> {
    // A device's default pool cannot be shared.
    let refused = MemPool::default_of(device)?.export(HandleTypes::POSIX_FD);
    println!("giver: refused: {}", refused.err().ok_or("it was shared")?);

    // What this library allocates comes from this pool, and while the guard lives also what others
    // allocate by `cuMemAllocAsync` (candle, cudarc, PyTorch with `backend:cudaMallocAsync`).
    let shareable = MemPool::builder(device).shareable(HandleTypes::POSIX_FD);
    let pool = shareable.maximum(4 * BATCH).create()?;
    pool.set_release_threshold(u64::MAX)?;
    let _current = pool.make_current()?;

    let folder = tempfile::tempdir()?;
    let listener = Listener::bind(folder.path().join("socket"))?;
    let mut taker = process::again(TEST, listener.path())?.spawn()?;
    let mut channel = listener.accept(PATIENCE)?;
    channel.set_timeout(PATIENCE);
    let stream = Stream::new(device)?;
    for number in 0..BATCHES {
        // Ten batches fit a pool of four, because the memory of earlier ones comes back.
        let batch = pool.allocate_on(&stream, BATCH)?;
        batch.write(&stream, 0, &vec![number; usize::try_from(BATCH)?])?;
        channel.send_allocations(&AllocationOffer::new(&batch)?)?;
        // Dropped here, and freed when the taker has let it go.
    }
    println!(
        "giver: {} MiB are held by the taker, the pool has {} MiB",
        pool.held_elsewhere() / MIB,
        pool.stats()?.reserved / MIB
    );
    process::ended(&mut taker)?;
    assert_eq!(pool.held_elsewhere(), 0, "all memory is back");
    Ok(())
}

/// Receives the batches in the second process.
fn take(device: &Device, socket: &Path) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    let importer = PoolImporter::new(device, &stream)?;
    let mut channel = Channel::connect(socket)?;
    channel.set_timeout(PATIENCE);
    for number in 0..BATCHES {
        let batch = channel.recv_allocations(&importer)?.remove(0);
        let mut bytes = vec![0; usize::try_from(batch.size())?];
        batch.read(&stream, 0, &mut bytes)?;
        assert!(bytes.iter().all(|&byte| byte == number));
        // Dropped here: freed in this process behind the work of its stream, then given back.
    }
    println!("taker: read {BATCHES} batches of {} MiB", BATCH / MIB);
    Ok(())
}
