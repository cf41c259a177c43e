//! Advice for managed memory: what is accepted, and what is then in force, and where.

use cuvmm_driver::{
    Advice, DeviceAddress, DriverError, Location, LocationKind, Ordinal, RangeAttribute,
};

use super::sizes::MIB;
use super::waits::beside;
use crate::answer::code;
use crate::{Answer, Answered, Bench, Case, Need};

/// The recordings list these rules as those of managed memory.
const MOVES: &str = "managed-moves";
const ADVICE: &str = "managed-advice";

const GLOBAL: u32 = 1;
const SIZE: u64 = 4 * MIB;

const PREFERRED: [RangeAttribute; 2] = [
    RangeAttribute::PREFERRED_LOCATION_TYPE,
    RangeAttribute::PREFERRED_LOCATION_ID,
];
pub(super) const NODE: Location = Location::host_numa(0);
const NO_NODE: Location = Location::host_numa(999);
const NO_DEVICE: Location = Location::device(Ordinal(99));

pub(super) const CASES: &[Case] = &[
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
        "The attribute without advice.",
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
    Case::new("managed.in_force_fresh", ADVICE, "Without advice.", |b| {
        after(b, |_| vec![])
    }),
    Case::new(
        "managed.unset_read_mostly",
        ADVICE,
        "Advised, then undone.",
        |b| {
            after(b, |_| {
                vec![
                    (Advice::SET_READ_MOSTLY, Location::HOST),
                    (Advice::UNSET_READ_MOSTLY, Location::HOST),
                ]
            })
        },
    ),
    Case::new(
        "managed.unset_preferred",
        ADVICE,
        "Advised, then undone with another location named.",
        |b| {
            after(b, |here| {
                vec![
                    (Advice::SET_PREFERRED_LOCATION, here),
                    (Advice::UNSET_PREFERRED_LOCATION, Location::HOST),
                ]
            })
        },
    ),
    Case::new("managed.preferred_host", ADVICE, "At the host.", |b| {
        after(b, |_| {
            vec![(Advice::SET_PREFERRED_LOCATION, Location::HOST)]
        })
    }),
    Case::new(
        "managed.preferred_numa_0",
        ADVICE,
        "At a node of the host.",
        |b| after(b, |_| vec![(Advice::SET_PREFERRED_LOCATION, NODE)]),
    ),
    Case::new(
        "managed.preferred_again",
        ADVICE,
        "At the device, then at the host.",
        |b| {
            after(b, |here| {
                vec![
                    (Advice::SET_PREFERRED_LOCATION, here),
                    (Advice::SET_PREFERRED_LOCATION, Location::HOST),
                ]
            })
        },
    ),
    Case::new(
        "managed.accessed_by_device",
        ADVICE,
        "By the device.",
        |b| after(b, |here| vec![(Advice::SET_ACCESSED_BY, here)]),
    ),
    Case::new("managed.accessed_by_host", ADVICE, "By the host.", |b| {
        after(b, |_| vec![(Advice::SET_ACCESSED_BY, Location::HOST)])
    }),
    Case::new(
        "managed.unset_accessed_by",
        ADVICE,
        "By device and host, and no longer by the device.",
        |b| {
            after(b, |here| {
                vec![
                    (Advice::SET_ACCESSED_BY, here),
                    (Advice::SET_ACCESSED_BY, Location::HOST),
                    (Advice::UNSET_ACCESSED_BY, here),
                ]
            })
        },
    ),
    Case::new(
        "managed.unset_what_was_not_set",
        ADVICE,
        "Three kinds of advice undone that were not given.",
        |b| {
            after(b, |here| {
                vec![
                    (Advice::UNSET_READ_MOSTLY, here),
                    (Advice::UNSET_PREFERRED_LOCATION, here),
                    (Advice::UNSET_ACCESSED_BY, here),
                ]
            })
        },
    ),
    Case::new(
        "managed.advice_together",
        ADVICE,
        "Mostly read, at the host, by the device: all at once.",
        |b| {
            after(b, |here| {
                vec![
                    (Advice::SET_READ_MOSTLY, here),
                    (Advice::SET_PREFERRED_LOCATION, Location::HOST),
                    (Advice::SET_ACCESSED_BY, here),
                ]
            })
        },
    ),
    Case::new(
        "managed.advise_twice",
        ADVICE,
        "The same advice once more.",
        |b| {
            after(b, |here| {
                vec![
                    (Advice::SET_ACCESSED_BY, here),
                    (Advice::SET_ACCESSED_BY, here),
                ]
            })
        },
    ),
    Case::new(
        "managed.read_mostly_device_99",
        ADVICE,
        "Mostly read, naming a device that does not exist.",
        |b| after(b, |_| vec![(Advice::SET_READ_MOSTLY, NO_DEVICE)]),
    ),
    Case::new(
        "managed.preferred_device_99",
        ADVICE,
        "At a device that does not exist.",
        |b| after(b, |_| vec![(Advice::SET_PREFERRED_LOCATION, NO_DEVICE)]),
    ),
    Case::new(
        "managed.preferred_numa_999",
        ADVICE,
        "At a node that does not exist.",
        |b| after(b, |_| vec![(Advice::SET_PREFERRED_LOCATION, NO_NODE)]),
    ),
    Case::new(
        "managed.accessed_by_device_99",
        ADVICE,
        "By a device that does not exist.",
        |b| after(b, |_| vec![(Advice::SET_ACCESSED_BY, NO_DEVICE)]),
    ),
    Case::new(
        "managed.accessed_by_numa_0",
        ADVICE,
        "By a node of the host.",
        |b| after(b, |_| vec![(Advice::SET_ACCESSED_BY, NODE)]),
    ),
    Case::new("managed.advise_99", ADVICE, "Unknown advice.", |b| {
        after(b, |here| vec![(Advice(99), here)])
    }),
    Case::new(
        "managed.accessed_by_two",
        ADVICE,
        "By two devices and the host.",
        |b| {
            after(b, |here| {
                vec![
                    (Advice::SET_ACCESSED_BY, here),
                    (Advice::SET_ACCESSED_BY, Location::device(Ordinal(1))),
                    (Advice::SET_ACCESSED_BY, Location::HOST),
                ]
            })
        },
    )
    .needing(&[Need::TwoDevices]),
    Case::new(
        "managed.advise_beside_kernel",
        ADVICE,
        "Beside a running kernel.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            beside(b, |b| {
                b.driver().advise(
                    b.device(),
                    address,
                    SIZE,
                    Advice::SET_READ_MOSTLY,
                    Location::HOST,
                )
            })
        },
    )
    .needing(&[Need::Kernels]),
];

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

/// Gives several pieces of advice for all of a new allocation in turn, and reports the refused ones
/// and what is in force at the end.
fn after(b: &mut Bench, advice: impl FnOnce(Location) -> Vec<(Advice, Location)>) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    let (device, here) = (b.device(), Location::device(b.device()));
    let mut refused = String::new();
    for (advice, place) in advice(here) {
        let outcome = b.driver().advise(device, address, SIZE, advice, place);
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
    let ask = |attribute| {
        b.driver()
            .range_attribute(b.device(), address, size, attribute)
    };
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
    let ask = |attribute| {
        b.driver()
            .range_attribute(b.device(), address, size, attribute)
    };
    let (kind, id) = (LocationKind(ask(kind)?), ask(id)?);
    Ok(match kind {
        LocationKind::INVALID => "nowhere".to_owned(),
        kind => Location { kind, id }.to_string(),
    })
}
