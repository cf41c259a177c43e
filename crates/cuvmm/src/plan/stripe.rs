//! One range of addresses whose memory alternates between several devices.

use crate::device::Device;
use crate::error::Error;
use crate::own::{Access, Place};
use crate::region::{Layout, Region};

/// Creates a region of the device `home` that is open to `guests` and fully committed: `unit` bytes
/// on each of `devices` in turn. All or nothing.
pub(super) fn striped(
    home: &Device,
    guests: &[&Device],
    devices: &[&Device],
    (size, unit): (u64, u64),
) -> Result<Region, Error> {
    let places = devices.iter().map(|&device| Place::from(device));
    let mut builder = Region::builder(home, size).layout(Layout::round_robin(places, unit));
    for guest in guests.iter().filter(|guest| !guest.is_same(home)) {
        builder = builder.open_to(guest, Access::ReadWrite);
    }
    let mut region = builder.reserve()?;
    region.commit(0..region.size())?;
    Ok(region)
}
