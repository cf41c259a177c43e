//! Hints to `reserve`: a wish for an address, which the driver may ignore. Each in a process of its
//! own, since what was given back before counts too.

use cuvmm_driver::{DeviceAddress, DriverError};

use super::sizes::{GIB, KIB, TIB};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case};

const HINT: &str = "reserve-hint";

pub(super) const CASES: &[Case] = &[
    Case::new(
        "reserve.hint_taken",
        HINT,
        "The address of another reservation.",
        |b| {
            let taken = b.addresses(1)?;
            hinted(b, taken)
        },
    )
    .isolated(),
    Case::new(
        "reserve.hint_unaligned",
        HINT,
        "An address between two granules.",
        |b| {
            let free = freed(b)?;
            hinted(b, DeviceAddress(free.0 + 4 * KIB))
        },
    )
    .isolated(),
    Case::new(
        "hint.inside_freed",
        HINT,
        "Inside a range that was just given back.",
        |b| {
            let free = freed(b)?;
            hinted(b, free)
        },
    )
    .isolated(),
    Case::new(
        "hint.inside_freed_beside_another",
        HINT,
        "The same, while another reservation stands.",
        |b| {
            b.addresses(1)?;
            let free = freed(b)?;
            hinted(b, free)
        },
    )
    .isolated(),
    Case::new(
        "hint.just_behind",
        HINT,
        "Just behind one's own reservation.",
        |b| {
            let own = b.addresses(1)?;
            let behind = b.at(own, 1);
            hinted(b, behind)
        },
    )
    .isolated(),
    Case::new(
        "hint.three_TiB_up",
        HINT,
        "Far away from everything, at 3 TiB.",
        |b| hinted(b, DeviceAddress(3 * TIB)),
    )
    .isolated(),
];

/// The middle of a range that was reserved and given back, so that nothing lies there.
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
