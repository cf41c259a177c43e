//! A buffer that outgrows the device. Its overflow is in host memory at the next addresses, and
//! moves to the device under the same addresses when memory becomes free.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::driver::{DeviceAttribute, Location};
use cuvmm::{Device, HostExtents, Place, Region, Stream};

const HALF: u64 = 32 << 20;

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let driver = support::driver()?;
    let device = Device::open(driver.clone(), 0)?;
    // The NUMA node nearest to the device, or -1 on a host without NUMA.
    let nearest = driver.device_attribute(device.ordinal(), DeviceAttribute::HOST_NUMA_ID)?;
    let host = Place::HostNuma(nearest.max(0));
    let stream = Stream::new(&device)?;

    // Creating host memory takes ten times as long as copying to it, so it is created in advance.
    let ready = HostExtents::new(&device, nearest.max(0), 2 * HALF);
    ready.prepare(HALF, 1)?;
    let mut region = Region::builder(&device, 4 * HALF)
        .largest_extent(HALF)
        .host_extents(&ready)
        .reserve()?;
    let address = region.address();
    region.commit(0..HALF)?;
    region.commit_at(HALF..2 * HALF, &host)?;
    for extent in region.extents() {
        println!(
            "{} MiB at {} on {}",
            extent.size >> 20,
            extent.address,
            extent.location
        );
    }

    // The device sees one range across both kinds of memory.
    let bytes: Vec<u8> = (0..2 * HALF).map(|byte| (byte % 251) as u8).collect();
    region.write(&stream, 0, &bytes)?;
    let pointer = region.host_pointer(HALF..2 * HALF)?;
    println!("the host accesses its half at {pointer:p}");

    // Move the spilled half to the device, then everything to the host.
    let moved = region.relocate(HALF..2 * HALF, &Place::from(&device), &stream)?;
    assert_eq!((moved, region.address()), (HALF, address));
    assert_eq!(
        ready.ready(),
        2 * HALF,
        "the vacated host memory is kept for reuse"
    );
    let mut seen = vec![0; bytes.len()];
    region.read(&stream, 0, &mut seen)?;
    assert!(seen == bytes, "the contents are the same on the device");
    let on_device = Location::device(device.ordinal());
    assert!(
        region
            .extents()
            .iter()
            .all(|extent| extent.location == on_device)
    );
    region.relocate(0..2 * HALF, &host, &stream)?;
    region.read(&stream, 0, &mut seen)?;
    assert!(seen == bytes, "the contents are the same on the host");
    assert!(
        region
            .extents()
            .iter()
            .all(|extent| extent.location != on_device)
    );
    println!(
        "all {} MiB spilled, at the same addresses",
        region.held() >> 20
    );
    Ok(())
}
