//! Hints to `reserve`: a preferred address, which the driver may ignore.
//!
//! Each case runs in a separate process, because earlier frees have an effect too.

use cuvmm_driver::{DeviceAddress, DriverError};

use super::sizes::{GIB, KIB, TIB};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Rule};

pub(super) const CASES: &[Case] = &Rule::new("reserve-hint").isolated().cases([
    Case::new(
        "reserve.hint_taken",
        "The address of another reservation.",
        |b| {
            let taken = b.addresses(1)?;
            hinted(b, taken)
        },
    ),
    Case::new(
        "reserve.hint_unaligned",
        "An address between two granules.",
        |b| {
            let free = freed(b)?;
            hinted(b, DeviceAddress(free.0 + 4 * KIB))
        },
    ),
    Case::new(
        "hint.inside_freed",
        "Inside a range that was just freed.",
        |b| {
            let free = freed(b)?;
            hinted(b, free)
        },
    ),
    Case::new(
        "hint.inside_freed_beside_another",
        "Inside a range that was just freed, while there is another reservation.",
        |b| {
            b.addresses(1)?;
            let free = freed(b)?;
            hinted(b, free)
        },
    ),
    Case::new(
        "hint.just_behind",
        "Directly behind the caller's own reservation.",
        |b| {
            let own = b.addresses(1)?;
            let behind = b.at(own, 1);
            hinted(b, behind)
        },
    ),
    Case::new(
        "hint.three_TiB_up",
        "Far from all reservations, at 3 TiB.",
        |b| hinted(b, DeviceAddress(3 * TIB)),
    ),
]);

/// Returns the middle of a range that was reserved and freed, so that it is free now.
fn freed(b: &mut Bench) -> Result<DeviceAddress, DriverError> {
    let base = b.reserve(GIB, 0, DeviceAddress::NULL, 0)?;
    b.free_reservation(base, GIB)?;
    Ok(DeviceAddress(base.0 + GIB / 2))
}

fn hinted(b: &mut Bench, hint: DeviceAddress) -> Answered {
    let size = b.granule();
    let outcome = b.reserve(size, 0, hint, 0);
    Ok(Answer::code(&outcome).with("honoured", bit(outcome == Ok(hint))))
}
