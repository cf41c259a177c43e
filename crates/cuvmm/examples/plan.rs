//! Tries operations in advance, to compare what 8 GiB cost when they are committed in steps of 2 MiB
//! and when they are committed at once.
//!
//! The operations run on the model driver, whose calls cost what they cost on an H200: its clock and
//! the device's counters say what they take. Where there is a GPU, they also run on it.
//! `cuvmm plan FILE` does this with operations that are written in a file.

mod support;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuvmm::driver::model::ModelDriver;
use cuvmm::driver::{Call, DriverKind};
use cuvmm::error::MemoryError;
use cuvmm::{Device, Region};

const GIB: u64 = 1 << 30;

/// Reserves 64 GiB and commits 8 GiB of them, `by` bytes at a time. Prints and returns how many
/// physicals were created.
fn commit(device: &Device, by: u64, clock: impl Fn() -> Duration) -> Result<u64, MemoryError> {
    let (calls, begun) = (device.calls(), clock());
    let mut region = Region::reserve(device, 64 * GIB)?;
    for at in (0..8 * GIB).step_by(by as usize) {
        region.commit(at..at + by)?;
    }
    let took = clock() - begun;
    let created = device.calls().since(&calls).count(Call::MemCreate);
    println!(
        "{} MiB at a time: {took:?} for {created} extents, {} MiB held",
        by >> 20,
        region.held() >> 20
    );
    Ok(created)
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let model = Arc::new(ModelDriver::default());
    let device = Device::open(model.clone(), 0)?;
    println!("expected:");
    let grown = commit(&device, 2 << 20, || model.clock())?;
    let once = commit(&device, 8 * GIB, || model.clock())?;
    assert!(grown > once && model.live().is_nothing());

    let driver = support::driver()?;
    if driver.kind() == DriverKind::Cuda {
        let (device, begun) = (Device::open(driver, 0)?, Instant::now());
        println!("measured:");
        commit(&device, 2 << 20, || begun.elapsed())?;
        commit(&device, 8 * GIB, || begun.elapsed())?;
    }

    // Twice the device's memory does not fit, and the error says why.
    let much = 2 * device.total_memory();
    let mut region = Region::reserve(&device, much)?;
    let refused = region.commit(0..much).err().ok_or("it fits")?;
    println!("{} GiB do not fit: {refused}", much >> 30);
    Ok(())
}
