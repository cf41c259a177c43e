//! A range striped across two devices, written by one and read by the other.
//!
//! Runs on GPUs, or on the host driver, which models two devices, where there is none. With a
//! single GPU all stripes are on it.

mod support;

use std::error::Error;

use cuvmm::{Access, Device, Layout, Place, Region, Stream};

const STRIPE: u64 = 8 << 20;
const SIZE: u64 = 64 << 20;

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let driver = support::driver()?;
    let other = if driver.device_count()? > 1 { 1 } else { 0 };
    let writer = Device::open(driver.clone(), 0)?;
    let reader = Device::open(driver, other)?;
    println!(
        "device 0 can access device {other}: {}",
        writer.can_reach(&reader)?
    );

    let stripes = [Place::from(&writer), Place::from(&reader)];
    let mut region = Region::builder(&writer, SIZE)
        .layout(Layout::round_robin(stripes, STRIPE))
        .reserve()?;
    region.commit(0..SIZE)?;
    for extent in region.extents().iter().take(3) {
        println!(
            "{:>9} bytes at offset {:>9} on {}",
            extent.size, extent.offset, extent.location
        );
    }

    // Peer access is granted explicitly, because it costs page table updates on that device.
    if !reader.is_same(&writer) {
        region.grant(&reader, Access::Read)?;
    }
    let written: Vec<u8> = (0..SIZE).map(|byte| (byte / 4096) as u8).collect();
    region.write(&Stream::new(&writer)?, 0, &written)?;
    let mut read = vec![0; written.len()];
    let stream = Stream::new(&reader)?;
    region.read(&stream, 0, &mut read)?;
    assert!(read == written, "the reader sees the writer's bytes");

    // Access can be revoked once the device has no work running on the range.
    if !reader.is_same(&writer) {
        region.revoke(&reader)?;
        assert_eq!(region.access_of(&reader), Access::None);
        let refused = region.read(&stream, 0, &mut read);
        println!(
            "without access: {}",
            refused.err().ok_or("the read succeeded")?
        );
    }
    Ok(())
}
