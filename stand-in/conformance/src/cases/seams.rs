//! Copies and fills over the border between device memory and host memory.

use cuvmm_driver::{DeviceAddress, DriverError, Location, PhysicalProps};

use super::places::open_to;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

pub(super) const CASES: &[Case] = &Rule::new("copy-across-places").cases([
    Case::new(
        "seam.copy_to_device",
        "From the host's program into both.",
        |b| {
            let base = seam(b, true, true)?;
            let bytes = [7; 16];
            Ok(Answer::code(&b.write(before(b, base), &bytes)))
        },
    )
    .isolated(),
    Case::new(
        "seam.copy_to_host",
        "From both to the host's program.",
        |b| {
            let base = seam(b, true, true)?;
            let mut bytes = [0; 16];
            Ok(Answer::code(&b.read_into(before(b, base), &mut bytes)))
        },
    )
    .isolated(),
    Case::new(
        "seam.copy_to_device_host_first",
        "From the host's program into both, host memory first.",
        |b| {
            let base = seam(b, false, true)?;
            let bytes = [7; 16];
            Ok(Answer::code(&b.write(before(b, base), &bytes)))
        },
    )
    .isolated(),
    Case::new(
        "seam.fill_device_first",
        "A fill that begins on the device.",
        |b| filled(b, true),
    )
    .isolated(),
    Case::new(
        "seam.fill_host_first",
        "A fill that begins in host memory.",
        |b| filled(b, false),
    )
    .isolated(),
    Case::new(
        "seam.fill_host_first.value",
        "The result on both sides.",
        |b| {
            let base = seam(b, false, true)?;
            b.fill(base, 9, 2 * b.granule())?;
            b.driver().context_synchronize(b.device())?;
            let ends = [b.read(base)?, b.read(b.at(base, 1))?];
            Ok(Answer::value(format!("{} {}", ends[0][0], ends[1][0])))
        },
    )
    .isolated()
    .needing(&[Need::Memory]),
    Case::new(
        "seam.copy_on_device",
        "From both to a device's memory, and back.",
        |b| {
            let base = seam(b, true, true)?;
            let (plain, _) = b.open(2)?;
            let size = 2 * b.granule();
            let there = b.copy(plain, base, size);
            let back = b.copy(base, plain, size);
            let sync = b.driver().context_synchronize(b.device());
            Ok(Answer::code(&there).then("back", &back).then("sync", &sync))
        },
    ),
    Case::new(
        "seam.closed_to_the_host",
        "From the program into both, where the host's processors have no access.",
        |b| {
            let base = seam(b, true, false)?;
            let mut bytes = [7; 16];
            let there = b.write(before(b, base), &bytes);
            let back = b.read_into(before(b, base), &mut bytes);
            Ok(Answer::code(&there).then("back", &back))
        },
    )
    .isolated(),
    Case::new(
        "seam.one_side",
        "From the host's program to host memory alone.",
        |b| {
            let base = seam(b, true, true)?;
            Ok(Answer::code(&b.write(b.at(base, 1), &[7; 16])))
        },
    ),
]);

/// Maps a granule of the device and one of the host side by side, accessible to the device. The
/// host's granule is also accessible to its processors if `processors` is set.
fn seam(b: &mut Bench, device_first: bool, processors: bool) -> Result<DeviceAddress, DriverError> {
    let (device, node) = (Location::device(b.device()), Location::host_numa(0));
    let order = match device_first {
        true => [device, node],
        false => [node, device],
    };
    let (base, granule) = (b.addresses(2)?, b.granule());
    for (place, location) in (0..).zip(order) {
        let handle = b.create(granule, &PhysicalProps::at(location), 0)?;
        let at = b.at(base, place);
        b.map(at, granule, 0, handle, 0)?;
        let access = [open_to(device), open_to(node)];
        let places = if processors && location == node { 2 } else { 1 };
        b.set_access(at, granule, &access[..places])?;
    }
    Ok(base)
}

/// Returns the address eight bytes before the border.
fn before(b: &Bench, base: DeviceAddress) -> DeviceAddress {
    DeviceAddress(base.0 + b.granule() - 8)
}

fn filled(b: &mut Bench, device_first: bool) -> Answered {
    let base = seam(b, device_first, true)?;
    let filled = b.fill(base, 9, 2 * b.granule());
    Ok(Answer::code(&filled).then("sync", &b.driver().context_synchronize(b.device())))
}
