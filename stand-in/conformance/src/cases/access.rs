//! Access to mappings.

use cuvmm_driver::{AccessDesc, AccessFlags, DeviceAddress, Location, Ordinal};

use super::places::{NOWHERE, open_to};
use super::sizes::{KIB, MIB};
use crate::answer::code;
use crate::{Answer, Answered, Bench, Case, Rule};

const HERE: Location = Location::device(Ordinal(0));
const NO_DEVICE: Location = Location::device(Ordinal(99));

pub(super) const WHOLE: &[Case] = &Rule::new("access-whole-mappings").cases([
    Case::new("access.whole", "One mapping, whole.", |b| {
        granted(b, "X-", 0, 2, &[0])
    }),
    Case::new("access.part_low", "The first half of a mapping.", |b| {
        granted(b, "X-", 0, 1, &[0])
    }),
    Case::new("access.part_high", "The second half of a mapping.", |b| {
        granted(b, "X-", 1, 1, &[0])
    }),
    Case::new("access.whole_of_two", "Two mappings in one call.", |b| {
        granted(b, "X-X-", 0, 4, &[0, 2])
    }),
    Case::new("access.one_of_two", "The first of two mappings.", |b| {
        granted(b, "X-X-", 0, 2, &[0, 2])
    }),
    Case::new(
        "access.one_and_half",
        "One mapping and half of the next.",
        |b| granted(b, "X-X-", 0, 3, &[0, 2]),
    ),
    Case::new(
        "access.half_and_one",
        "Half of a mapping and the next.",
        |b| granted(b, "X-X-", 1, 3, &[0, 2]),
    ),
]);

pub(super) const HOLES: &[Case] = &Rule::new("access-holes").cases([
    Case::new("access.hole_between", "Mapping, hole, mapping.", |b| {
        granted(b, "X-..X-", 0, 6, &[0, 4])
    }),
    Case::new("access.hole_at_start", "Hole, mapping.", |b| {
        granted(b, "..X-", 0, 4, &[2])
    }),
    Case::new("access.hole_at_end", "Mapping, hole.", |b| {
        granted(b, "X-..", 0, 4, &[0])
    }),
    Case::new(
        "access.nothing_mapped",
        "A reservation without a mapping.",
        |b| granted(b, "....", 0, 4, &[]),
    ),
    Case::new("access.unreserved", "Addresses that were freed.", |b| {
        let base = b.addresses(2)?;
        b.free_reservation(base, 2 * b.granule())?;
        Ok(Answer::code(&b.grant(base, 2, AccessFlags::READ_WRITE)))
    }),
]);

pub(super) const ARGUMENTS: &[Case] = &Rule::new("access-arguments").cases([
    Case::new("access.size_0", "No bytes.", |b| bytes(b, 0, 0)),
    Case::new(
        "access.unaligned_ptr",
        "From the middle of a granule.",
        |b| bytes(b, 4 * KIB, 2 * MIB),
    ),
    Case::new("access.unaligned_size", "One and a half granules.", |b| {
        bytes(b, 0, 3 * MIB)
    }),
    Case::new("access.count_0", "No access descriptors.", |b| {
        described(b, &[])
    }),
    Case::new("access.flags_2", "Write without read.", |b| flagged(b, 2)),
    Case::new("access.flags_4", "An access that does not exist.", |b| {
        flagged(b, 4)
    }),
    Case::new(
        "access.device_99",
        "For a device that does not exist.",
        |b| described(b, &[open_to(NO_DEVICE)]),
    ),
    Case::new("access.loc_invalid", "For location type 0.", |b| {
        described(b, &[open_to(NOWHERE)])
    }),
    Case::new(
        "access.two_desc_one_bad",
        "A valid access descriptor and an invalid one.",
        |b| {
            let good = open_to(HERE);
            described(b, &[good, open_to(NO_DEVICE)])
        },
    ),
]);

pub(super) const OTHERS: &[Case] = &Rule::new("access-of-the-host").cases([
    Case::new("access.loc_host", "For the CPU, on device memory.", |b| {
        described(b, &[open_to(Location::HOST)])
    }),
    Case::new(
        "access.loc_numa_for_device_mem",
        "For a node, on device memory.",
        |b| described(b, &[open_to(Location::host_numa(0))]),
    ),
]);

pub(super) const RIGHTS: &[Case] = &Rule::new("access-rights").cases([
    Case::new("access.fresh_map", "The access to a new mapping.", |b| {
        let base = b.lay("X-")?;
        Ok(right(b, base))
    }),
    Case::new(
        "access.readonly",
        "Read only, and the access as reported.",
        |b| rights(b, &[AccessFlags::READ]),
    ),
    Case::new("access.flag_1_then_3", "Read, then read and write.", |b| {
        rights(b, &[AccessFlags::READ, AccessFlags::READ_WRITE])
    }),
    Case::new("access.flag_3_then_1", "Read and write, then read.", |b| {
        rights(b, &[AccessFlags::READ_WRITE, AccessFlags::READ])
    }),
    Case::new(
        "access.flag_3_then_0",
        "Read and write, then no access.",
        |b| rights(b, &[AccessFlags::READ_WRITE, AccessFlags::NONE]),
    ),
    Case::new(
        "access.interior",
        "Queried in the middle of a mapping.",
        |b| {
            let (address, _) = b.open(2)?;
            Ok(right(b, b.at(address, 1)))
        },
    ),
    Case::new(
        "get_access.unmapped",
        "Queried where nothing is mapped.",
        |b| {
            let base = b.addresses(1)?;
            Ok(right(b, base))
        },
    ),
    Case::new(
        "get_access.unreserved",
        "Queried where nothing is reserved.",
        |b| {
            let base = b.addresses(1)?;
            b.free_reservation(base, b.granule())?;
            Ok(right(b, base))
        },
    ),
    Case::new(
        "access.remap_forgets",
        "After unmapping and mapping again, the old access is gone.",
        |b| {
            let (address, handle) = b.open(2)?;
            b.unmap(address, 2 * b.granule())?;
            b.map(address, 2 * b.granule(), 0, handle, 0)?;
            Ok(right(b, address))
        },
    ),
]);

/// Grants access to a range of a picture, and reports which of some places can then be read.
fn granted(b: &mut Bench, picture: &str, from: u64, granules: u64, places: &[u64]) -> Answered {
    let base = b.lay(picture)?;
    let outcome = b.grant(b.at(base, from), granules, AccessFlags::READ_WRITE);
    let answer = Answer::code(&outcome);
    if places.is_empty() {
        return Ok(answer);
    }
    let readable: Vec<_> = places
        .iter()
        .map(|place| b.reads(b.at(base, *place)))
        .collect();
    Ok(answer.with("readable", readable.join(" ")))
}

/// Grants access to a range given in bytes, in a mapping of two granules.
fn bytes(b: &mut Bench, from: u64, size: u64) -> Answered {
    let base = b.lay("X-")?;
    let access = open_to(HERE);
    let outcome = b.set_access(DeviceAddress(base.0 + from), size, &[access]);
    Ok(Answer::code(&outcome))
}

/// Grants access to a mapping, and reports if the device can then read it.
fn described(b: &mut Bench, access: &[AccessDesc]) -> Answered {
    let base = b.lay("X-")?;
    let outcome = b.set_access(base, 2 * b.granule(), access);
    Ok(Answer::code(&outcome).with("readable", b.reads(base)))
}

fn flagged(b: &mut Bench, number: i32) -> Answered {
    let (location, flags) = (HERE, AccessFlags(number));
    described(b, &[AccessDesc { location, flags }])
}

fn right(b: &Bench, address: DeviceAddress) -> Answer {
    let outcome = b.driver().get_access(address, Location::device(b.device()));
    Answer::code(&outcome).with("value", outcome.map_or(0, |flags| flags.0))
}

/// Grants one access after the other, and reports what can then be done.
fn rights(b: &mut Bench, flags: &[AccessFlags]) -> Answered {
    let base = b.lay("X-")?;
    let mut outcome = Ok(());
    for flags in flags {
        outcome = outcome.and(b.grant(base, 2, *flags));
    }
    let value = b.driver().get_access(base, Location::device(b.device()))?;
    Ok(Answer::code(&outcome)
        .with("value", value.0)
        .with("read", b.reads(base))
        .with("write", code(&b.fill(base, 1, 64))))
}
