//! Mapping a physical at an address.

use cuvmm_driver::{AccessFlags, DeviceAddress, DriverError, PhysicalHandle};

use super::sizes::{GIB, KIB, MIB};
use crate::{Answer, Answered, Bench, Case, Need, Rule};

pub(super) const WHOLE: &[Case] = &Rule::new("map-whole").cases([
    Case::new("map.ok", "A physical of two granules, whole.", |b| {
        sized(b, 2, 0, 2)
    }),
    Case::new("map.offset_2M", "The second of two granules.", |b| {
        sized(b, 2, 1, 1)
    }),
    Case::new(
        "map.offset_whole",
        "The whole size, from the second granule on.",
        |b| sized(b, 2, 1, 2),
    ),
    Case::new("map.offset_bad", "From the middle of a granule.", |b| {
        let (base, handle) = table(b)?;
        Ok(Answer::code(&b.map(base, 2 * MIB, 4 * KIB, handle, 0)))
    }),
    Case::new(
        "map.size_part_of_handle",
        "The first of two granules.",
        |b| sized(b, 2, 0, 1),
    ),
    Case::new(
        "map.size_larger_than_handle",
        "Four granules of two.",
        |b| sized(b, 2, 0, 4),
    ),
]);

pub(super) const ARGUMENTS: &[Case] = &Rule::new("map-arguments").cases([
    Case::new("map.size_0", "No bytes.", |b| sized(b, 2, 0, 0)),
    Case::new(
        "map.ptr_unaligned",
        "Between two pages of a granule.",
        |b| displaced(b, 4 * KIB),
    ),
    Case::new("map.ptr_1M", "In the middle of a granule.", |b| {
        displaced(b, MIB)
    }),
    Case::new("map.flags_1", "Flags must be 0.", |b| {
        let (base, handle) = table(b)?;
        Ok(Answer::code(&b.map(base, 4 * MIB, 0, handle, 1)))
    }),
    Case::new("map.handle_0", "Handle 0.", |b| {
        let base = b.addresses(2)?;
        mapped(b, base, PhysicalHandle::NULL)
    }),
]);

pub(super) const PLACE: &[Case] = &Rule::new("map-place").cases([
    Case::new("map.unreserved", "Addresses that were freed.", |b| {
        let base = b.addresses(2)?;
        b.free_reservation(base, 2 * b.granule())?;
        let handle = b.physical(2)?;
        mapped(b, base, handle)
    }),
    Case::new(
        "map.past_end",
        "Starts in the reservation, ends behind it.",
        |b| {
            let base = b.addresses(2)?;
            let handle = b.physical(2)?;
            mapped(b, b.at(base, 1), handle)
        },
    ),
    Case::new(
        "map.wholly_outside",
        "Starts where the reservation ends.",
        |b| {
            let base = b.addresses(2)?;
            let handle = b.physical(2)?;
            mapped(b, b.at(base, 2), handle)
        },
    ),
    Case::new(
        "map.across_two_reservations",
        "Half in one, half in the next.",
        |b| {
            let Some((first, _)) = adjacent(b)? else {
                return Ok(no_neighbours());
            };
            let handle = b.physical(2)?;
            mapped(b, b.at(first, 1), handle)
        },
    )
    .isolated(),
]);

pub(super) const OVERLAP: &[Case] = &Rule::new("map-overlap").cases([
    Case::new("map.adjacent", "Next to another mapping.", |b| beside(b, 4)),
    Case::new("map.overlap_same", "On another mapping.", |b| beside(b, 2)),
    Case::new("map.overlap_part", "On the end of another mapping.", |b| {
        beside(b, 3)
    }),
    Case::new(
        "map.overlap_from_below",
        "On the start of another mapping.",
        |b| beside(b, 1),
    ),
    Case::new(
        "map.failed_changes_nothing",
        "After a refusal, the hole is free.",
        |b| {
            let base = b.lay("X-..")?;
            let handle = b.physical(2)?;
            let refused = b.map(b.at(base, 1), 4 * MIB, 0, handle, 0);
            let placed = b.map(b.at(base, 2), 4 * MIB, 0, handle, 0);
            Ok(Answer::code(&refused).then("then beside it", &placed))
        },
    ),
]);

pub(super) const ALIAS: &[Case] = &Rule::new("map-alias").cases([
    Case::new(
        "map.alias_second_va",
        "A physical that is mapped elsewhere too.",
        |b| {
            let (_, handle) = b.open(2)?;
            let other = b.addresses(2)?;
            mapped(b, other, handle)
        },
    ),
    Case::new("map.same_handle_twice", "Twice in one reservation.", |b| {
        let base = b.addresses(4)?;
        let handle = b.place(base, 2)?;
        mapped(b, b.at(base, 2), handle)
    }),
    Case::new(
        "alias.value",
        "What one alias writes, the other reads.",
        |b| {
            let (address, handle) = b.open(1)?;
            let other = alias(b, handle)?;
            b.fill(address, 33, 64)?;
            Ok(Answer::value(b.read(other)?[0]))
        },
    )
    .needing(&[Need::Memory]),
    Case::new(
        "alias.outlives_first",
        "An alias after the first mapping was removed.",
        |b| {
            let (address, handle) = b.open(1)?;
            let other = alias(b, handle)?;
            b.fill(address, 34, 64)?;
            b.driver().context_synchronize(b.device())?;
            let gone = b.unmap(address, b.granule());
            let value = b.read(other)?[0];
            Ok(Answer::code(&gone).with("value", value))
        },
    )
    .needing(&[Need::Memory]),
    Case::new("alias.own_rights", "Each alias has its own access.", |b| {
        let (address, handle) = b.open(1)?;
        let other = b.addresses(1)?;
        b.map(other, b.granule(), 0, handle, 0)?;
        b.grant(other, 1, AccessFlags::READ)?;
        let (first, second) = (b.fill(address, 1, 64), b.fill(other, 1, 64));
        Ok(Answer::code(&first).then("read-only alias", &second))
    }),
]);

pub(super) const MAP_RELEASED: &[Case] = &Rule::new("map-released").isolated().cases([
    Case::new("map.released_handle", "A handle that was released.", |b| {
        let base = b.addresses(1)?;
        let handle = b.physical(1)?;
        b.release(handle)?;
        Ok(Answer::code(&b.map(base, b.granule(), 0, handle, 0)))
    }),
    Case::new(
        "map.released_handle_still_mapped",
        "A handle that was released, whose memory is still mapped.",
        |b| {
            let (_, handle) = b.open(1)?;
            b.release(handle)?;
            let other = b.addresses(1)?;
            Ok(Answer::code(&b.map(other, b.granule(), 0, handle, 0)))
        },
    ),
]);

fn mapped(b: &mut Bench, address: DeviceAddress, handle: PhysicalHandle) -> Answered {
    Ok(Answer::code(&b.map(address, 4 * MIB, 0, handle, 0)))
}

/// Reserves four granules of addresses and creates a physical of two.
fn table(b: &mut Bench) -> Result<(DeviceAddress, PhysicalHandle), DriverError> {
    Ok((b.addresses(4)?, b.physical(2)?))
}

/// Maps some granules of a physical from an offset on, all counted in granules.
fn sized(b: &mut Bench, physical: u64, offset: u64, size: u64) -> Answered {
    let (base, granule) = (b.addresses(8)?, b.granule());
    let handle = b.physical(physical)?;
    let outcome = b.map(base, size * granule, offset * granule, handle, 0);
    Ok(Answer::code(&outcome))
}

fn displaced(b: &mut Bench, bytes: u64) -> Answered {
    let (base, handle) = table(b)?;
    mapped(b, DeviceAddress(base.0 + bytes), handle)
}

/// Maps two granules at an offset, where a mapping occupies granules two and three.
fn beside(b: &mut Bench, granules: u64) -> Answered {
    let base = b.lay("..X-..")?;
    let handle = b.physical(2)?;
    mapped(b, b.at(base, granules), handle)
}

fn alias(b: &mut Bench, handle: PhysicalHandle) -> Result<DeviceAddress, DriverError> {
    let other = b.addresses(1)?;
    b.map(other, b.granule(), 0, handle, 0)?;
    b.grant(other, 1, AccessFlags::READ_WRITE)?;
    Ok(other)
}

/// Makes two reservations of two granules, one directly behind the other, if possible.
pub(super) fn adjacent(
    b: &mut Bench,
) -> Result<Option<(DeviceAddress, DeviceAddress)>, DriverError> {
    let size = 2 * b.granule();
    let base = b.reserve(GIB, 0, DeviceAddress::NULL, 0)?;
    b.free_reservation(base, GIB)?;
    let first = b.reserve(size, 0, base, 0)?;
    let second = b.reserve(size, 0, b.at(first, 2), 0)?;
    Ok((second == b.at(first, 2)).then_some((first, second)))
}

/// Returns the answer if two adjacent reservations could not be made.
pub(super) fn no_neighbours() -> Answer {
    Answer::value("no neighbouring reservations to be had")
}
