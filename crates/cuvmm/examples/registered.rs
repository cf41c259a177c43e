//! Memory that a NIC or NCCL has registered: it stays where it is, whatever becomes of its owner.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;
use std::os::fd::AsFd as _;

use cuvmm::{Device, Region, Stream};

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let granule = device.granularity();

    // What NCCL asks for at creation, as far as the device has it.
    let builder = Region::builder(&device, 64 * granule).for_nccl()?;
    let mut region = builder.reserve()?;
    region.commit(0..12 * granule)?;

    // Whoever registers mapping by mapping, as `ncclCommRegister` may want it, has the exact list.
    let registration = region.register(0..12 * granule)?;
    for extent in registration.extents() {
        println!("register {} MiB at {}", extent.size >> 20, extent.address);
    }

    // Meanwhile the region goes on, but for what is registered.
    region.commit(32 * granule..40 * granule)?;
    region.decommit_after(32 * granule..40 * granule, &[])?;
    let refused = region.decommit_after(0..4 * granule, &[]);
    println!("{}", refused.err().ok_or("it was pulled away")?);

    // A NIC takes a descriptor. It may span extents of one device.
    match registration.dma_buf(0..12 * granule) {
        Ok(buffer) => println!("a dma-buf: {:?}", buffer.as_fd()),
        Err(error) => println!("no dma-buf here: {error}"),
    }

    // The region may even go first: the memory goes with the registration.
    region.write(&stream, 0, b"sent")?;
    let address = region.address();
    drop(region);
    assert_eq!(registration.address(), address);
    registration.close()?;
    Ok(())
}
