//! Reserving addresses: sizes, alignments, flags, and the cost in memory.

use cuvmm_driver::{DeviceAddress, DriverError};

use super::sizes::{GIB, KIB, MIB, TIB};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Rule};

pub(super) const SIZE: &[Case] = &Rule::new("reserve-size").cases([
    Case::new("reserve.size_0", "A reservation of no bytes.", |b| {
        sized(b, 0)
    }),
    Case::new("reserve.size_4096", "A page is less than a granule.", |b| {
        sized(b, 4 * KIB)
    }),
    Case::new("reserve.size_64K", "64 KiB is less than a granule.", |b| {
        sized(b, 64 * KIB)
    }),
    Case::new("reserve.size_1M", "Half a granule.", |b| sized(b, MIB)),
    Case::new("reserve.size_3M", "One and a half granules.", |b| {
        sized(b, 3 * MIB)
    }),
    Case::new(
        "reserve.size_2M",
        "One granule; is the address a multiple of it?",
        |b| aligned_to(b, 0, 2 * MIB),
    ),
    Case::new(
        "reserve.size_max_aligned",
        "The largest multiple of a granule.",
        |b| sized(b, u64::MAX - (2 * MIB - 1)),
    ),
]);

pub(super) const ALIGNMENT: &[Case] = &Rule::new("reserve-alignment").cases([
    Case::new("reserve.align_3", "Three is no power of two.", |b| {
        aligned(b, 3)
    }),
    Case::new("reserve.align_3M", "3 MiB is no power of two.", |b| {
        aligned(b, 3 * MIB)
    }),
    Case::new(
        "reserve.align_4096",
        "An alignment below the granule.",
        |b| aligned_to(b, 4 * KIB, 2 * MIB),
    ),
    Case::new(
        "reserve.align_1G",
        "A GiB; is the address a multiple of it?",
        |b| aligned_to(b, GIB, GIB),
    ),
]);

pub(super) const RESERVE_FLAGS: &[Case] =
    &Rule::new("reserve-flags").cases([Case::new("reserve.flags_1", "Flags must be 0.", |b| {
        let size = b.granule();
        Ok(Answer::code(&b.reserve(size, 0, DeviceAddress::NULL, 1)))
    })]);

pub(super) const ADDRESS_SPACE: &[Case] = &Rule::new("address-space").cases([
    Case::new("reserve.2^46", "Half of what a process can address.", |b| {
        sized(b, 1 << 46)
    }),
    Case::new("reserve.2^47", "All of what a process can address.", |b| {
        sized(b, 1 << 47)
    }),
    Case::new("reserve.apart", "Two reservations do not overlap.", apart),
]);

pub(super) const RESERVE_IS_FREE: &[Case] = &Rule::new("reserve-is-free").cases([Case::new(
    "meminfo.reserve_4TiB_takes_MiB",
    "The memory that 4 TiB of addresses take.",
    takes_no_memory,
)]);

fn reserve(b: &mut Bench, size: u64, alignment: u64) -> Result<DeviceAddress, DriverError> {
    b.reserve(size, alignment, DeviceAddress::NULL, 0)
}

fn sized(b: &mut Bench, size: u64) -> Answered {
    Ok(Answer::code(&reserve(b, size, 0)))
}

fn aligned(b: &mut Bench, alignment: u64) -> Answered {
    Ok(Answer::code(&reserve(b, 2 * MIB, alignment)))
}

fn aligned_to(b: &mut Bench, alignment: u64, wanted: u64) -> Answered {
    let outcome = reserve(b, 2 * MIB, alignment);
    let aligned = outcome.is_ok_and(|address| address.0.is_multiple_of(wanted));
    Ok(Answer::code(&outcome).with("aligned", bit(aligned)))
}

fn apart(b: &mut Bench) -> Answered {
    let (first, second) = (b.addresses(4)?, b.addresses(4)?);
    let distance = first.0.abs_diff(second.0);
    Ok(Answer::value(bit(distance >= 4 * b.granule())))
}

fn takes_no_memory(b: &mut Bench) -> Answered {
    let before = b.free_memory()?;
    let outcome = reserve(b, 4 * TIB, 0);
    let taken = before.saturating_sub(b.free_memory()?);
    Ok(Answer::value(taken / MIB).then("outcome", &outcome))
}
