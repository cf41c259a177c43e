//! Checks of which devices can be given access to which memory.

use super::access::{Access, AccessGrant};
use super::place::Place;
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
use crate::size::Granularity;

/// Checks that a device can be given access to memory at a place.
pub(crate) fn reachable(device: &Device, place: &Place) -> Result<(), MemoryError> {
    let Place::Device(owner) = place else {
        return Ok(());
    };
    owner.check_driver(device)?;
    if !fits(device.granule(), owner) {
        return Err(MemoryError::Granularity {
            place: place.location(),
            granularity: owner.granularity(),
            home: device.granularity(),
        });
    }
    if !device.can_reach(owner)? {
        return Err(MemoryError::Unreachable {
            device: device.location(),
            place: place.location(),
        });
    }
    Ok(())
}

/// Checks the devices that are to be given access to memory of `home`. Each must be another device
/// of the same driver, must not have access already, must be named once, and must be able to access
/// the memory (`cuDeviceCanAccessPeer`).
pub(crate) fn check_guests(
    home: &Device,
    have: &[AccessGrant],
    guests: &[AccessGrant],
) -> Result<(), MemoryError> {
    let mut known = vec![home];
    known.extend(have.iter().filter_map(AccessGrant::named));
    for guest in guests {
        let Some(device) = guest.named() else {
            continue;
        };
        device.check_driver(home)?;
        if known.iter().any(|it| it.is_same(device)) {
            let device = device.location();
            return Err(ArgumentError::HasAccess(device).into());
        }
        if guest.access() == Access::None {
            let what = "the access of a device";
            return Err(ArgumentError::Zero(what).into());
        }
        reachable(device, &home.into())?;
        known.push(device);
    }
    Ok(())
}

/// Returns `true` if memory of a device can be divided into granules of another.
fn fits(granule: Granularity, owner: &Device) -> bool {
    granule.divides(owner.granularity()) && granule.bytes() >= owner.granularity()
}
