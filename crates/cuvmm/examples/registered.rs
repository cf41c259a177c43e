//! Registered memory, as NCCL or a NIC needs it: it stays mapped even when its owner is dropped.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;
use std::os::fd::AsFd as _;

use cuvmm::{Device, Region, Stream};

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let granule = device.granularity();

    // Request the properties that NCCL needs of memory, as far as the device supports them.
    let builder = Region::builder(&device, 64 * granule).for_nccl()?;
    let mut region = builder.reserve()?;
    region.commit(0..12 * granule)?;

    // `ncclCommRegister` may need each mapping by itself; the registration lists them.
    let registration = region.register(0..12 * granule)?;
    for extent in registration.extents() {
        println!("register {} MiB at {}", extent.size >> 20, extent.address);
    }

    // The rest of the region can still be committed and decommitted.
    region.commit(32 * granule..40 * granule)?;
    region.decommit_after(32 * granule..40 * granule, &[])?;
    let refused = region.decommit_after(0..4 * granule, &[]);
    println!(
        "refused: {}",
        refused
            .err()
            .ok_or("the registered memory was decommitted")?
    );

    // A NIC takes a dma-buf descriptor, which may span extents of one device.
    match registration.dma_buf(0..12 * granule) {
        Ok(buffer) => println!("exported as a dma-buf: {:?}", buffer.as_fd()),
        Err(error) => println!("no dma-buf: {error}"),
    }

    // The region may even be dropped first: the registration keeps the memory mapped.
    region.write(&stream, 0, b"sent")?;
    let address = region.address();
    drop(region);
    assert_eq!(registration.address(), address);
    registration.close()?;
    Ok(())
}
