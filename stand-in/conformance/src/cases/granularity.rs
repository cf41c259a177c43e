//! Queries of the granularity.

use cuvmm_driver::{GranularityKind, HandleTypes, Location, Ordinal, PhysicalProps};

use crate::{Answer, Answered, Bench, Case};

const RULE: &str = "granularity";

pub(super) const CASES: &[Case] = &[
    Case::new(
        "granularity.minimum",
        RULE,
        "Of plain device memory, the minimum.",
        |b| {
            let props = b.props();
            value(b, &props, GranularityKind::MINIMUM)
        },
    ),
    Case::new(
        "granularity.recommended",
        RULE,
        "Of plain device memory, the recommended one.",
        |b| {
            let props = b.props();
            value(b, &props, GranularityKind::RECOMMENDED)
        },
    ),
    Case::new(
        "granularity.bad_option",
        RULE,
        "An option that does not exist.",
        |b| {
            let props = b.props();
            code(b, &props, GranularityKind(2))
        },
    ),
    Case::new(
        "granularity.bad_device",
        RULE,
        "Of device 99, which does not exist.",
        |b| {
            code(
                b,
                &PhysicalProps::device(Ordinal(99)),
                GranularityKind::MINIMUM,
            )
        },
    ),
    Case::new(
        "granularity.host_numa0",
        RULE,
        "Of memory of host NUMA node 0.",
        |b| {
            value(
                b,
                &PhysicalProps::at(Location::host_numa(0)),
                GranularityKind::MINIMUM,
            )
        },
    ),
    Case::new("granularity.host", RULE, "Of host memory.", |b| {
        code(
            b,
            &PhysicalProps::at(Location::HOST),
            GranularityKind::MINIMUM,
        )
    }),
    Case::new(
        "granularity.posix_fd",
        RULE,
        "Of memory that can be exported.",
        |b| {
            let props = PhysicalProps {
                handle_types: HandleTypes::POSIX_FD,
                ..b.props()
            };
            value(b, &props, GranularityKind::MINIMUM)
        },
    ),
    Case::new(
        "granularity.compressed",
        RULE,
        "Of compressible memory.",
        |b| {
            let props = PhysicalProps {
                compression: 1,
                ..b.props()
            };
            value(b, &props, GranularityKind::MINIMUM)
        },
    ),
];

fn code(b: &mut Bench, props: &PhysicalProps, kind: GranularityKind) -> Answered {
    Ok(Answer::code(
        &b.driver().allocation_granularity(props, kind),
    ))
}

fn value(b: &mut Bench, props: &PhysicalProps, kind: GranularityKind) -> Answered {
    let outcome = b.driver().allocation_granularity(props, kind);
    Ok(Answer::code(&outcome).with("value", outcome.unwrap_or(0)))
}
