//! Freeing addresses.

use cuvmm_driver::AccessFlags;

use super::map::{adjacent, no_neighbours};
use crate::{Answer, Answered, Bench, Case, Rule};

pub(super) const WHOLE: &[Case] = &Rule::new("free-whole").cases([
    Case::new("free.ok", "A whole reservation with nothing mapped.", |b| {
        freed(b, 0, 4)
    }),
    Case::new("free.part", "The first half of a reservation.", |b| {
        freed(b, 0, 2)
    }),
    Case::new("free.interior", "The second half of a reservation.", |b| {
        freed(b, 2, 2)
    }),
    Case::new("free.too_large", "More than the reservation.", |b| {
        freed(b, 0, 6)
    }),
    Case::new("free.size_0", "No bytes.", |b| freed(b, 0, 0)),
    Case::new("free.twice", "Addresses that were freed.", |b| {
        let base = b.addresses(4)?;
        b.free_reservation(base, 4 * b.granule())?;
        Ok(Answer::code(&b.free_reservation(base, 4 * b.granule())))
    }),
    Case::new(
        "free.two_as_one",
        "Two adjacent reservations in one call.",
        |b| {
            let Some((first, _)) = adjacent(b)? else {
                return Ok(no_neighbours());
            };
            Ok(Answer::code(&b.free_reservation(first, 4 * b.granule())))
        },
    )
    .isolated(),
]);

pub(super) const MAPPED: &[Case] = &Rule::new("free-mapped").cases([
    Case::new(
        "free.across_two_reservations",
        "Under a mapping over both.",
        |b| {
            let Some((first, second)) = adjacent(b)? else {
                return Ok(no_neighbours());
            };
            let (handle, size) = (b.physical(2)?, 2 * b.granule());
            b.map(b.at(first, 1), size, 0, handle, 0)?;
            let as_one = b.free_reservation(first, 2 * size);
            let low = b.free_reservation(first, size);
            let high = b.free_reservation(second, size);
            Ok(Answer::code(&as_one)
                .then("first", &low)
                .then("second", &high))
        },
    )
    .isolated(),
    Case::new(
        "free.while_mapped",
        "While there is a mapping in it.",
        |b| {
            let base = b.lay("..X-....")?;
            let outcome = b.free_reservation(base, 8 * b.granule());
            let left = b.grant(b.at(base, 2), 2, AccessFlags::READ_WRITE);
            Ok(Answer::code(&outcome).then("set_access_after", &left))
        },
    ),
    Case::new("free.after_unmap", "After the mapping was removed.", |b| {
        let base = b.lay("X-..")?;
        b.unmap(base, 4 * b.granule())?;
        Ok(Answer::code(&b.free_reservation(base, 4 * b.granule())))
    }),
    Case::new(
        "free.after_past_end",
        "After a mapping past the end was removed.",
        |b| {
            let base = b.addresses(2)?;
            let (handle, size) = (b.physical(2)?, 2 * b.granule());
            b.map(b.at(base, 1), size, 0, handle, 0)?;
            let under = b.free_reservation(base, size);
            b.unmap(b.at(base, 1), size)?;
            Ok(Answer::code(&under).then("after", &b.free_reservation(base, size)))
        },
    ),
]);

/// Frees a part, counted in granules, of a reservation of four.
fn freed(b: &mut Bench, from: u64, granules: u64) -> Answered {
    let base = b.addresses(4)?;
    let freed = b.free_reservation(b.at(base, from), granules * b.granule());
    Ok(Answer::code(&freed))
}
