//! Reserving addresses: sizes, alignments, flags, and the cost in memory.

use cuvmm_driver::{DeviceAddress, DriverError};

use super::sizes::{GIB, KIB, MIB, TIB};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case};

const SIZE: &str = "reserve-size";
const ALIGNMENT: &str = "reserve-alignment";

pub(super) const CASES: &[Case] = &[
    Case::new("reserve.size_0", SIZE, "A reservation of no bytes.", |b| {
        sized(b, 0)
    }),
    Case::new(
        "reserve.size_4096",
        SIZE,
        "A page is less than a granule.",
        |b| sized(b, 4 * KIB),
    ),
    Case::new(
        "reserve.size_64K",
        SIZE,
        "64 KiB is less than a granule.",
        |b| sized(b, 64 * KIB),
    ),
    Case::new("reserve.size_1M", SIZE, "Half a granule.", |b| {
        sized(b, MIB)
    }),
    Case::new("reserve.size_3M", SIZE, "One and a half granules.", |b| {
        sized(b, 3 * MIB)
    }),
    Case::new(
        "reserve.size_2M",
        SIZE,
        "One granule; is the address a multiple of it?",
        |b| aligned_to(b, 0, 2 * MIB),
    ),
    Case::new(
        "reserve.size_max_aligned",
        SIZE,
        "The largest multiple of a granule.",
        |b| sized(b, u64::MAX - (2 * MIB - 1)),
    ),
    Case::new(
        "reserve.align_3",
        ALIGNMENT,
        "Three is no power of two.",
        |b| aligned(b, 3),
    ),
    Case::new(
        "reserve.align_3M",
        ALIGNMENT,
        "3 MiB is no power of two.",
        |b| aligned(b, 3 * MIB),
    ),
    Case::new(
        "reserve.align_4096",
        ALIGNMENT,
        "An alignment below the granule.",
        |b| aligned_to(b, 4 * KIB, 2 * MIB),
    ),
    Case::new(
        "reserve.align_1G",
        ALIGNMENT,
        "A GiB; is the address a multiple of it?",
        |b| aligned_to(b, GIB, GIB),
    ),
    Case::new(
        "reserve.flags_1",
        "reserve-flags",
        "Flags must be 0.",
        |b| {
            let size = b.granule();
            Ok(Answer::code(&b.reserve(size, 0, DeviceAddress::NULL, 1)))
        },
    ),
    Case::new(
        "reserve.2^46",
        "address-space",
        "Half of what a process can address.",
        |b| sized(b, 1 << 46),
    ),
    Case::new(
        "reserve.2^47",
        "address-space",
        "All of what a process can address.",
        |b| sized(b, 1 << 47),
    ),
    Case::new(
        "reserve.apart",
        "address-space",
        "Two reservations do not overlap.",
        apart,
    ),
    Case::new(
        "meminfo.reserve_4TiB_takes_MiB",
        "reserve-is-free",
        "The memory that 4 TiB of addresses take.",
        takes_no_memory,
    ),
];

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
