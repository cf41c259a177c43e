//! Queries of the granularity.

use cuvmm_driver::{GranularityKind, Location, Ordinal, PhysicalProps};

use super::share::props;

use crate::{Answer, Answered, Bench, Case, Rule};

const MINIMUM: GranularityKind = GranularityKind::MINIMUM;

pub(super) const CASES: &[Case] = &Rule::new("granularity").cases([
    Case::new(
        "granularity.minimum",
        "Of plain device memory, the minimum.",
        |b| value(b, b.props(), MINIMUM),
    ),
    Case::new(
        "granularity.recommended",
        "Of plain device memory, the recommended one.",
        |b| value(b, b.props(), GranularityKind::RECOMMENDED),
    ),
    Case::new(
        "granularity.bad_option",
        "An option that does not exist.",
        |b| code(b, b.props(), GranularityKind(2)),
    ),
    Case::new(
        "granularity.bad_device",
        "Of device 99, which does not exist.",
        |b| code(b, PhysicalProps::device(Ordinal(99)), MINIMUM),
    ),
    Case::new(
        "granularity.host_numa0",
        "Of memory of host NUMA node 0.",
        |b| value(b, PhysicalProps::at(Location::host_numa(0)), MINIMUM),
    ),
    Case::new("granularity.host", "Of host memory.", |b| {
        code(b, PhysicalProps::at(Location::HOST), MINIMUM)
    }),
    Case::new(
        "granularity.posix_fd",
        "Of memory that can be exported.",
        |b| value(b, props(b), MINIMUM),
    ),
    Case::new("granularity.compressed", "Of compressible memory.", |b| {
        let props = PhysicalProps {
            compression: 1,
            ..b.props()
        };
        value(b, props, MINIMUM)
    }),
]);

fn code(b: &Bench, props: PhysicalProps, kind: GranularityKind) -> Answered {
    let outcome = b.driver().allocation_granularity(&props, kind);
    Ok(Answer::code(&outcome))
}

fn value(b: &Bench, props: PhysicalProps, kind: GranularityKind) -> Answered {
    let outcome = b.driver().allocation_granularity(&props, kind);
    Ok(Answer::code(&outcome).with("value", outcome.unwrap_or(0)))
}
