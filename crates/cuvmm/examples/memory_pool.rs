//! Memory that another library allocates by `cuMemAllocAsync`, within a tenant's limit.
//!
//! Libraries such as candle and cudarc allocate from the device's current memory pool of the driver.
//! Here a stand-in for such a library does so.
//!
//! Runs on a GPU, or on the host driver where there is none.
//!
//! `unsafe` is used for the calls that the other library would make.
#![allow(unsafe_code)]

mod support;

use std::error::Error;

use cuvmm::driver::{DeviceAddress, Ordinal};
use cuvmm::{Device, Limit, Pool, Stream};

const MIB: u64 = 1 << 20;

/// Another library, which knows nothing of tenants.
struct Library<'a> {
    device: &'a Device,
    stream: &'a Stream,
}

impl Library<'_> {
    fn allocate(&self, bytes: u64) -> Result<DeviceAddress, cuvmm::driver::DriverError> {
        let (driver, stream) = (self.device.driver(), self.stream.as_raw());
        // SAFETY: the stream is alive.
        unsafe { driver.alloc_async(Ordinal(0), bytes, stream) }
    }

    fn free(&self, at: DeviceAddress) -> Result<(), cuvmm::driver::DriverError> {
        let (driver, stream) = (self.device.driver(), self.stream.as_raw());
        // SAFETY: the memory was allocated on this stream, is used by nothing, and is freed once.
        unsafe { driver.free_async(Ordinal(0), at, stream) }
    }
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(512 * MIB))
        .build()?;
    let model = pool.tenant("model").register()?;
    let other = pool.tenant("other").register()?;

    // The tenant is charged the maximum, and 32 MiB for exchanges. All but the minimum may be lent.
    let memory = model.memory_pool(384 * MIB).minimum(64 * MIB).build()?;
    let current = memory.make_current()?;
    println!("{} MiB charged", model.stats().committed / MIB);

    let stream = Stream::new(&device)?;
    let library = Library {
        device: &device,
        stream: &stream,
    };
    let kept = library.allocate(96 * MIB)?;
    let scratch = library.allocate(256 * MIB)?;
    if let Err(refused) = library.allocate(64 * MIB) {
        println!("the library asked for 64 MiB more: {refused}");
    }
    library.free(scratch)?;
    stream.synchronize()?;

    // What the library does not use goes to a tenant that needs it.
    let block = other.allocate(256 * MIB)?;
    let stats = memory.stats()?;
    println!(
        "other has {} MiB; of the model's {} MiB {} are in use",
        block.size() / MIB,
        stats.maximum / MIB,
        stats.in_use / MIB
    );
    if let Err(refused) = memory.reserve(256 * MIB) {
        println!("{refused}");
    }
    drop(block);

    // Before its next step the model asks for room again.
    memory.reserve(256 * MIB)?;
    let scratch = library.allocate(256 * MIB)?;
    println!("{} MiB charged", model.stats().committed / MIB);
    library.free(scratch)?;
    library.free(kept)?;
    stream.synchronize()?;
    drop(current);
    Ok(())
}
