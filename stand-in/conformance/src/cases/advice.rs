//! Advice for managed memory: what is accepted, and what is then in force, and where.

use cuvmm_driver::{
    Advice, DeviceAddress, DriverError, Location, LocationKind, Ordinal, RangeAttribute,
};

use super::sizes::MIB;
use super::waits::beside;
use crate::answer::code;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

const GLOBAL: u32 = 1;
const SIZE: u64 = 4 * MIB;

const PREFERRED: [RangeAttribute; 2] = [
    RangeAttribute::PREFERRED_LOCATION_TYPE,
    RangeAttribute::PREFERRED_LOCATION_ID,
];
const READ_MOSTLY: Advice = Advice::SET_READ_MOSTLY;
const NOT_READ_MOSTLY: Advice = Advice::UNSET_READ_MOSTLY;
const PREFERRED_AT: Advice = Advice::SET_PREFERRED_LOCATION;
const NOT_PREFERRED: Advice = Advice::UNSET_PREFERRED_LOCATION;
const USED_BY: Advice = Advice::SET_ACCESSED_BY;
const NOT_USED_BY: Advice = Advice::UNSET_ACCESSED_BY;
pub(super) const NODE: Location = Location::host_numa(0);
const HERE: Location = Location::device(Ordinal(0));
const HOST: Location = Location::HOST;
const NO_NODE: Location = Location::host_numa(999);
const NO_DEVICE: Location = Location::device(Ordinal(99));

pub(super) const MOVES: &[Case] = &Rule::new("managed-moves").cases([
    Case::new(
        "managed.advise_read_mostly",
        "Advice, and what is then in force.",
        |b| advised(b, READ_MOSTLY, RangeAttribute::READ_MOSTLY),
    ),
    Case::new(
        "managed.advise_preferred",
        "Preferred at the device.",
        |b| advised(b, PREFERRED_AT, RangeAttribute::PREFERRED_LOCATION),
    ),
    Case::new(
        "managed.range_attr_fresh",
        "The attribute without advice.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let ask = |attribute| b.range_attribute(address, SIZE, attribute);
            Ok(Answer::value(ask(RangeAttribute::READ_MOSTLY)?)
                .with("preferred", ask(RangeAttribute::PREFERRED_LOCATION)?))
        },
    ),
]);

pub(super) const ADVICE: &[Case] = &Rule::new("managed-advice").cases([
    Case::new("managed.in_force_fresh", "Without advice.", |b| {
        after(b, &[])
    }),
    Case::new("managed.unset_read_mostly", "Advised, then undone.", |b| {
        after(b, &[(READ_MOSTLY, HOST), (NOT_READ_MOSTLY, HOST)])
    }),
    Case::new(
        "managed.unset_preferred",
        "Advised, then undone with another location named.",
        |b| after(b, &[(PREFERRED_AT, HERE), (NOT_PREFERRED, HOST)]),
    ),
    Case::new("managed.preferred_host", "At the host.", |b| {
        after(b, &[(PREFERRED_AT, HOST)])
    }),
    Case::new("managed.preferred_numa_0", "At a node of the host.", |b| {
        after(b, &[(PREFERRED_AT, NODE)])
    }),
    Case::new(
        "managed.preferred_again",
        "At the device, then at the host.",
        |b| after(b, &[(PREFERRED_AT, HERE), (PREFERRED_AT, HOST)]),
    ),
    Case::new("managed.accessed_by_device", "By the device.", |b| {
        after(b, &[(USED_BY, HERE)])
    }),
    Case::new("managed.accessed_by_host", "By the host.", |b| {
        after(b, &[(USED_BY, HOST)])
    }),
    Case::new(
        "managed.unset_accessed_by",
        "By device and host, and no longer by the device.",
        |b| after(b, &[(USED_BY, HERE), (USED_BY, HOST), (NOT_USED_BY, HERE)]),
    ),
    Case::new(
        "managed.unset_what_was_not_set",
        "Three kinds of advice undone that were not given.",
        |b| {
            after(
                b,
                &[
                    (NOT_READ_MOSTLY, HERE),
                    (NOT_PREFERRED, HERE),
                    (NOT_USED_BY, HERE),
                ],
            )
        },
    ),
    Case::new(
        "managed.advice_together",
        "Mostly read, at the host, by the device: all at once.",
        |b| {
            after(
                b,
                &[(READ_MOSTLY, HERE), (PREFERRED_AT, HOST), (USED_BY, HERE)],
            )
        },
    ),
    Case::new("managed.advise_twice", "The same advice once more.", |b| {
        after(b, &[(USED_BY, HERE), (USED_BY, HERE)])
    }),
    Case::new(
        "managed.read_mostly_device_99",
        "Mostly read, naming a device that does not exist.",
        |b| after(b, &[(READ_MOSTLY, NO_DEVICE)]),
    ),
    Case::new(
        "managed.preferred_device_99",
        "At a device that does not exist.",
        |b| after(b, &[(PREFERRED_AT, NO_DEVICE)]),
    ),
    Case::new(
        "managed.preferred_numa_999",
        "At a node that does not exist.",
        |b| after(b, &[(PREFERRED_AT, NO_NODE)]),
    ),
    Case::new(
        "managed.accessed_by_device_99",
        "By a device that does not exist.",
        |b| after(b, &[(USED_BY, NO_DEVICE)]),
    ),
    Case::new(
        "managed.accessed_by_numa_0",
        "By a node of the host.",
        |b| after(b, &[(USED_BY, NODE)]),
    ),
    Case::new("managed.advise_99", "Unknown advice.", |b| {
        after(b, &[(Advice(99), HERE)])
    }),
    Case::new(
        "managed.accessed_by_two",
        "By two devices and the host.",
        |b| {
            after(
                b,
                &[
                    (USED_BY, HERE),
                    (USED_BY, Location::device(Ordinal(1))),
                    (USED_BY, HOST),
                ],
            )
        },
    )
    .needing(&[Need::TwoDevices]),
    Case::new(
        "managed.advise_beside_kernel",
        "Beside a running kernel.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            beside(b, |b| b.advise(address, SIZE, READ_MOSTLY, HOST))
        },
    )
    .needing(&[Need::Kernels]),
]);

fn advised(b: &mut Bench, advice: Advice, attribute: RangeAttribute) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    let outcome = b.advise(address, SIZE, advice, HERE);
    let value = b.range_attribute(address, SIZE, attribute);
    let answer = Answer::code(&outcome).then("range_attr", &value);
    Ok(match value {
        Ok(value) => answer.with("value", value),
        Err(_) => answer,
    })
}

/// Gives several pieces of advice for all of a new allocation in turn, and reports the refused ones
/// and what is in force at the end.
fn after(b: &mut Bench, advice: &[(Advice, Location)]) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    let mut refused = String::new();
    for &(advice, place) in advice {
        let outcome = b.advise(address, SIZE, advice, place);
        if outcome.is_err() {
            refused = format!("{} refused {}: ", advice.0, code(&outcome));
        }
    }
    let in_force = in_force(b, address, SIZE)?;
    Ok(Answer::value(format!("{refused}{in_force}")))
}

/// Describes in a few words all advice in force for a range. Attributes without advice are left
/// out.
pub(super) fn in_force(
    b: &Bench,
    address: DeviceAddress,
    size: u64,
) -> Result<String, DriverError> {
    let ask = |attribute| b.range_attribute(address, size, attribute);
    let mut words = vec![];
    if ask(RangeAttribute::READ_MOSTLY)? != 0 {
        words.push("mostly read".to_owned());
    }
    let (number, place) = (
        ask(RangeAttribute::PREFERRED_LOCATION)?,
        place_told(b, PREFERRED, address, size)?,
    );
    if (number, &*place) != (-2, "nowhere") {
        words.push(format!("at {place} ({number})"));
    }
    let mut users = b.driver().range_accessed_by(b.device(), address, size)?;
    users.sort_unstable();
    words.extend(users.iter().map(|user| format!("by {user}")));
    if words.is_empty() {
        words.push("nothing".to_owned());
    }
    Ok(words.join(" "))
}

/// Describes a location by its kind and number. The number counts for devices and nodes only.
pub(super) fn place_told(
    b: &Bench,
    [kind, id]: [RangeAttribute; 2],
    address: DeviceAddress,
    size: u64,
) -> Result<String, DriverError> {
    let ask = |attribute| b.range_attribute(address, size, attribute);
    let (kind, id) = (LocationKind(ask(kind)?), ask(id)?);
    Ok(match kind {
        LocationKind::INVALID => "nowhere".to_owned(),
        kind => Location { kind, id }.to_string(),
    })
}
