//! Memory that lies on several devices in turn, in one range of addresses.

use crate::device::Device;
use crate::error::Error;
use crate::own::{Access, Place};
use crate::region::{Layout, Region};

/// A region of the first device that has access, open to the others, with memory everywhere: `unit`
/// bytes on each of the devices in turn. All or nothing.
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
