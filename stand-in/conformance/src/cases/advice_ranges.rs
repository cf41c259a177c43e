//! Advice for parts of managed memory: the ranges that are accepted, and what is reported for them.

use cuvmm_driver::{Advice, DeviceAddress, Location, RangeAttribute};

use super::advice::{NODE, in_force};
use super::sizes::MIB;
use crate::{Answer, Answered, Bench, Case, Rule};

const GLOBAL: u32 = 1;
const SIZE: u64 = 4 * MIB;
const HALF: u64 = SIZE / 2;
/// The host's page size is this or larger, and then the answers show it.
const PAGE: u64 = 4096;

pub(super) const CASES: &[Case] = &Rule::new("managed-advice-ranges").cases([
    Case::new("managed.advise_size_0", "No bytes.", |b| over(b, 0, 0)),
    Case::new("managed.advise_past_end", "One page beyond the end.", |b| {
        over(b, 0, SIZE + PAGE)
    }),
    Case::new("managed.advise_vmm_ptr", "A mapping is not managed.", |b| {
        let (address, _) = b.open(1)?;
        let advice = Advice::SET_READ_MOSTLY;
        let outcome = b.advise(address, b.granule(), advice, Location::HOST);
        Ok(Answer::code(&outcome))
    }),
    Case::new(
        "managed.advise_one_byte",
        "A byte in the middle of a page: its page and the next.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let page = DeviceAddress(address.0 + PAGE);
            let inside = DeviceAddress(page.0 + 7);
            let advice = Advice::SET_READ_MOSTLY;
            let outcome = b.advise(inside, 1, advice, Location::HOST);
            Ok(Answer::code(&outcome)
                .with("page", in_force(b, page, PAGE)?)
                .with("next", in_force(b, DeviceAddress(page.0 + PAGE), PAGE)?))
        },
    ),
    Case::new(
        "managed.advise_odd_range",
        "From the middle of one page into the next: both.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let inside = DeviceAddress(address.0 + 4095);
            let advice = Advice::SET_READ_MOSTLY;
            let outcome = b.advise(inside, 2, advice, Location::HOST);
            Ok(Answer::code(&outcome).with("both", in_force(b, address, 2 * PAGE)?))
        },
    ),
    Case::new(
        "managed.in_force_part",
        "One half advised: that half, the other, both.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let here = Location::device(b.device());
            for advice in [
                Advice::SET_READ_MOSTLY,
                Advice::SET_PREFERRED_LOCATION,
                Advice::SET_ACCESSED_BY,
            ] {
                b.advise(address, HALF, advice, here)?;
            }
            halves(b, address)
        },
    ),
    Case::new(
        "managed.in_force_mixed",
        "Each half with other advice: the first, the second, both.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let here = Location::device(b.device());
            let second = DeviceAddress(address.0 + HALF);
            for (start, advice, place) in [
                (address, Advice::SET_PREFERRED_LOCATION, here),
                (address, Advice::SET_ACCESSED_BY, here),
                (address, Advice::SET_ACCESSED_BY, Location::HOST),
                (second, Advice::SET_PREFERRED_LOCATION, Location::HOST),
                (second, Advice::SET_ACCESSED_BY, Location::HOST),
            ] {
                b.advise(start, HALF, advice, place)?;
            }
            halves(b, address)
        },
    ),
    Case::new(
        "managed.in_force_host_and_node",
        "One half at the host, the other at a node of it.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let second = DeviceAddress(address.0 + HALF);
            let advice = Advice::SET_PREFERRED_LOCATION;
            b.advise(address, HALF, advice, Location::HOST)?;
            b.advise(second, HALF, advice, NODE)?;
            halves(b, address)
        },
    ),
    Case::new("managed.range_attr_size_0", "No bytes.", |b| {
        asked(b, 0, 0, RangeAttribute::READ_MOSTLY)
    }),
    Case::new(
        "managed.range_attr_past_end",
        "One page beyond the end.",
        |b| asked(b, 0, SIZE + PAGE, RangeAttribute::READ_MOSTLY),
    ),
    Case::new(
        "managed.range_attr_before",
        "From one page before it.",
        |b| asked(b, PAGE.wrapping_neg(), PAGE, RangeAttribute::READ_MOSTLY),
    ),
    Case::new("managed.range_attr_99", "Attribute 99.", |b| {
        asked(b, 0, SIZE, RangeAttribute(99))
    }),
    Case::new(
        "managed.range_attr_vmm_ptr",
        "A mapping is not managed.",
        |b| {
            let (address, _) = b.open(1)?;
            let (device, size) = (b.device(), b.granule());
            let attribute = RangeAttribute::READ_MOSTLY;
            let asked = b.range_attribute(address, size, attribute);
            let users = b.driver().range_accessed_by(device, address, size);
            Ok(Answer::code(&asked).then("accessed by", &users))
        },
    ),
]);

fn over(b: &mut Bench, offset: u64, size: u64) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    let start = DeviceAddress(address.0 + offset);
    let advice = Advice::SET_READ_MOSTLY;
    let outcome = b.advise(start, size, advice, Location::HOST);
    Ok(Answer::code(&outcome).with("then", in_force(b, address, SIZE)?))
}

/// Queries an attribute, and the accessing locations, of a range of a new allocation.
fn asked(b: &mut Bench, offset: u64, size: u64, attribute: RangeAttribute) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    let start = DeviceAddress(address.0.wrapping_add(offset));
    let value = b.range_attribute(start, size, attribute);
    let users = b.driver().range_accessed_by(b.device(), start, size);
    Ok(Answer::code(&value).then("accessed by", &users))
}

/// Describes the advice in force for the two halves of an allocation, and for both together.
fn halves(b: &Bench, address: DeviceAddress) -> Answered {
    let second = DeviceAddress(address.0 + HALF);
    Ok(Answer::value(in_force(b, address, HALF)?)
        .with("second", in_force(b, second, HALF)?)
        .with("both", in_force(b, address, SIZE)?))
}
