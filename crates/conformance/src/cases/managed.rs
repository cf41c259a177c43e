//! Managed memory. A few MiB only: too much of it can hang a GPU that others share.

use cuvmm_driver::{Advice, DriverError, Location, RangeAttribute, StreamHandle};

use super::sizes::MIB;
use crate::{Answer, Answered, Bench, Case, Need};

const ALLOC: &str = "managed";
const MOVES: &str = "managed-moves";

const GLOBAL: u32 = 1;
const HOST: u32 = 2;
const SIZE: u64 = 4 * MIB;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "managed.ok",
        ALLOC,
        "A few MiB, to be touched by all.",
        |b| made(b, SIZE, GLOBAL),
    ),
    Case::new(
        "managed.host_flag",
        ALLOC,
        "To be touched by the host first.",
        |b| made(b, SIZE, HOST),
    ),
    Case::new("managed.size_0", ALLOC, "No bytes.", |b| made(b, 0, GLOBAL)),
    Case::new("managed.flags_0", ALLOC, "Neither flag.", |b| {
        made(b, SIZE, 0)
    }),
    Case::new("managed.flags_both", ALLOC, "Both flags.", |b| {
        made(b, SIZE, GLOBAL | HOST)
    }),
    Case::new("managed.free", ALLOC, "Given back.", |b| {
        let address = b.managed(SIZE, GLOBAL)?;
        Ok(Answer::code(&b.free(address)))
    }),
    Case::new("managed.free_twice", ALLOC, "Given back once more.", |b| {
        let address = b.managed(SIZE, GLOBAL)?;
        b.free(address)?;
        Ok(Answer::code(&b.free(address)))
    }),
    Case::new("managed.memset", ALLOC, "Filled by the device.", |b| {
        let address = b.managed(SIZE, GLOBAL)?;
        Ok(Answer::code(&b.fill(address, 3, SIZE)))
    })
    .warmed_by(touched),
    Case::new(
        "managed.cpu_reads",
        ALLOC,
        "What the device wrote, read by the CPU.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            b.fill(address, 3, SIZE)?;
            Ok(match b.cpu_reads(address.0)? {
                Some(byte) => Answer::value(byte),
                None => Answer::value("no memory"),
            })
        },
    )
    .needing(&[Need::Memory])
    .warmed_by(touched),
    Case::new("managed.prefetch_dev", MOVES, "Moved to the device.", |b| {
        let device = Location::device(b.device());
        moved(b, device)
    })
    .warmed_by(touched),
    Case::new("managed.prefetch_host", MOVES, "Moved to the host.", |b| {
        moved(b, Location::HOST)
    })
    .warmed_by(touched),
    Case::new(
        "managed.prefetch_vmm_ptr",
        MOVES,
        "A mapping is not managed.",
        |b| {
            let (address, _) = b.open(1)?;
            Ok(Answer::code(&b.prefetch(
                address,
                b.granule(),
                Location::device(b.device()),
            )))
        },
    ),
    Case::new(
        "managed.advise_read_mostly",
        MOVES,
        "Advice, and what is then in force.",
        |b| advised(b, Advice::SET_READ_MOSTLY, RangeAttribute::READ_MOSTLY),
    ),
    Case::new(
        "managed.advise_preferred",
        MOVES,
        "Preferred at the device.",
        |b| {
            advised(
                b,
                Advice::SET_PREFERRED_LOCATION,
                RangeAttribute::PREFERRED_LOCATION,
            )
        },
    ),
    Case::new(
        "managed.range_attr_fresh",
        MOVES,
        "What is in force without advice.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let ask = |attribute| {
                b.driver()
                    .range_attribute(b.device(), address, SIZE, attribute)
            };
            Ok(Answer::value(ask(RangeAttribute::READ_MOSTLY)?)
                .with("preferred", ask(RangeAttribute::PREFERRED_LOCATION)?))
        },
    ),
];

/// A device that touches managed memory for the first time makes the driver take 124 MiB of it to
/// manage with, which it keeps.
fn touched(b: &mut Bench) -> Result<(), DriverError> {
    let address = b.managed(SIZE, GLOBAL)?;
    b.fill(address, 3, SIZE)?;
    b.synchronize(StreamHandle::NULL)?;
    b.free(address)
}

fn made(b: &mut Bench, size: u64, flags: u32) -> Answered {
    Ok(Answer::code(&b.managed(size, flags)))
}

fn moved(b: &mut Bench, to: Location) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    b.fill(address, 3, SIZE)?;
    let outcome = b.prefetch(address, SIZE, to);
    let sync = b.synchronize(StreamHandle::NULL);
    Ok(Answer::code(&outcome).then("sync", &sync))
}

fn advised(b: &mut Bench, advice: Advice, attribute: RangeAttribute) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    let device = Location::device(b.device());
    let outcome = b.driver().advise(b.device(), address, SIZE, advice, device);
    let value = b
        .driver()
        .range_attribute(b.device(), address, SIZE, attribute);
    let answer = Answer::code(&outcome).then("range_attr", &value);
    Ok(match value {
        Ok(value) => answer.with("value", value),
        Err(_) => answer,
    })
}
