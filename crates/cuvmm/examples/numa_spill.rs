//! A buffer that outgrows the device: what does not fit lies in host memory at the next address, and
//! moves to the device when there is room, under the same addresses.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::driver::{DeviceAttribute, Location};
use cuvmm::{Device, HostExtents, Place, Region, Stream};

const HALF: u64 = 32 << 20;

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let driver = support::driver()?;
    let device = Device::open(driver.clone(), 0)?;
    // The node nearest to the device; -1 on a host without NUMA.
    let nearest = driver.device_attribute(device.ordinal(), DeviceAttribute::HOST_NUMA_ID)?;
    let host = Place::HostNuma(nearest.max(0));
    let stream = Stream::new(&device)?;

    // Host memory takes ten times as long to make as to copy to: it is made beforehand.
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

    // One range for the device, across the seam.
    let bytes: Vec<u8> = (0..2 * HALF).map(|byte| (byte % 251) as u8).collect();
    region.write(&stream, 0, &bytes)?;
    let pointer = region.host_pointer(HALF..2 * HALF)?;
    println!("the host reaches its half at {pointer:p}");

    // Room on the device: the spilled half moves there, and back.
    let moved = region.relocate(HALF..2 * HALF, &Place::from(&device), &stream)?;
    assert_eq!((moved, region.address()), (HALF, address));
    assert_eq!(
        ready.ready(),
        2 * HALF,
        "what it moved away from lies ready too"
    );
    let mut seen = vec![0; bytes.len()];
    region.read(&stream, 0, &mut seen)?;
    assert!(seen == bytes, "no byte was lost on the way");
    let on_device = Location::device(device.ordinal());
    assert!(
        region
            .extents()
            .iter()
            .all(|extent| extent.location == on_device)
    );
    region.relocate(0..2 * HALF, &host, &stream)?;
    region.read(&stream, 0, &mut seen)?;
    assert!(seen == bytes, "nor on the way back");
    assert!(
        region
            .extents()
            .iter()
            .all(|extent| extent.location != on_device)
    );
    println!(
        "all of it spilled, {} MiB, nothing of it moved",
        region.held() >> 20
    );
    Ok(())
}
