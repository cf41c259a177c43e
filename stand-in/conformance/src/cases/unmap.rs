//! Removing mappings.

use cuvmm_driver::{AccessFlags, DeviceAddress};

use super::sizes::{KIB, MIB};
use crate::answer::code;
use crate::{Answer, Answered, Bench, Case, Rule};

pub(super) const WHOLE: &[Case] = &Rule::new("unmap-whole-mappings").cases([
    Case::new("unmap.whole", "One mapping, whole.", |b| {
        taken(b, "X-", 0, 2, &[0])
    }),
    Case::new("unmap.part_low", "The first half of a mapping.", |b| {
        taken(b, "X-", 0, 1, &[0])
    }),
    Case::new("unmap.part_high", "The second half of a mapping.", |b| {
        taken(b, "X-", 1, 1, &[0])
    }),
    Case::new("unmap.two_whole", "Two mappings in one call.", |b| {
        taken(b, "X-X-", 0, 4, &[0, 2])
    }),
    Case::new("unmap.one_of_two", "The second of two mappings.", |b| {
        taken(b, "X-X-", 2, 2, &[0, 2])
    }),
    Case::new(
        "unmap.one_and_half",
        "One mapping and half of the next.",
        |b| taken(b, "X-X-", 0, 3, &[0, 2]),
    ),
    Case::new(
        "unmap.half_and_one",
        "Half of a mapping and the next.",
        |b| taken(b, "X-X-", 1, 3, &[0, 2]),
    ),
]);

pub(super) const HOLES: &[Case] = &Rule::new("unmap-holes").cases([
    Case::new("unmap.hole_between", "Mapping, hole, mapping.", |b| {
        taken(b, "X-..X-", 0, 6, &[0, 4])
    }),
    Case::new(
        "unmap.nothing_mapped",
        "A reservation without a mapping.",
        |b| taken(b, "....", 0, 4, &[]),
    ),
    Case::new("unmap.twice", "A mapping that was removed already.", |b| {
        let base = b.lay("X-")?;
        b.unmap(base, 2 * b.granule())?;
        Ok(Answer::code(&b.unmap(base, 2 * b.granule())))
    }),
    Case::new(
        "unmap.whole_reservation_one_mapped",
        "Hole, mapping, hole.",
        |b| taken(b, "..X-....", 0, 8, &[2]),
    ),
    Case::new(
        "unmap.past_end",
        "From a mapping to beyond the reservation.",
        |b| taken(b, "..X-", 2, 4, &[2]),
    ),
    Case::new("unmap.unreserved", "Addresses that were freed.", |b| {
        let base = b.addresses(2)?;
        b.free_reservation(base, 2 * b.granule())?;
        Ok(Answer::code(&b.unmap(base, 2 * b.granule())))
    }),
]);

pub(super) const ARGUMENTS: &[Case] = &Rule::new("unmap-arguments").cases([
    Case::new("unmap.size_0", "No bytes.", |b| bytes(b, 0, 0)),
    Case::new("unmap.unaligned", "From the middle of a granule.", |b| {
        bytes(b, 4 * KIB, 4 * MIB)
    }),
    Case::new("unmap.unaligned_size", "One and a half granules.", |b| {
        bytes(b, 0, 3 * MIB)
    }),
]);

/// Unmaps a range of a picture, and reports for some places if a mapping is left to grant access
/// to.
fn taken(b: &mut Bench, picture: &str, from: u64, granules: u64, places: &[u64]) -> Answered {
    let base = b.lay(picture)?;
    let outcome = b.unmap(b.at(base, from), granules * b.granule());
    let answer = Answer::code(&outcome);
    if places.is_empty() {
        return Ok(answer);
    }
    let left: Vec<_> = places
        .iter()
        .map(|place| code(&b.grant(b.at(base, *place), 2, AccessFlags::READ_WRITE)))
        .collect();
    Ok(answer.with("set_access_after", left.join(" ")))
}

/// Unmaps a range given in bytes, in a mapping of two granules.
fn bytes(b: &mut Bench, from: u64, size: u64) -> Answered {
    let base = b.lay("X-")?;
    let outcome = b.unmap(DeviceAddress(base.0 + from), size);
    let left = b.grant(base, 2, AccessFlags::READ_WRITE);
    Ok(Answer::code(&outcome).then("set_access_after", &left))
}
