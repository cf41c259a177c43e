//! Managed memory while a stream captures.

use cuvmm_driver::{Advice, CaptureMode, DeviceAddress, DriverError, Location, RangeAttribute};

use super::capture::{during, relaxed};
use crate::{Bench, Case};

const MANAGED: &str = "capture-managed";

pub(super) const CASES: &[Case] = &[
    Case::new(
        "capture.managed_alloc",
        MANAGED,
        "Allocate during a global capture.",
        |b| {
            during(b, CaptureMode::GLOBAL, |b, _| {
                b.managed(b.granule(), 1).map(drop)
            })
        },
    ),
    Case::new(
        "capture.managed_alloc_relaxed_thread",
        MANAGED,
        "Allocate in relaxed mode.",
        |b| {
            during(b, CaptureMode::GLOBAL, |b, _| {
                relaxed(b, |b| b.managed(b.granule(), 1).map(drop))
            })
        },
    ),
    Case::new(
        "capture.managed_free",
        MANAGED,
        "Free during a global capture.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            during(b, CaptureMode::GLOBAL, |b, _| b.free(address))
        },
    ),
    Case::new(
        "capture.managed_free_relaxed_thread",
        MANAGED,
        "Free in relaxed mode.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            during(b, CaptureMode::GLOBAL, |b, _| {
                relaxed(b, |b| b.free(address))
            })
        },
    ),
    Case::new("capture.managed_advise", MANAGED, "Advise.", |b| {
        let address = b.managed(b.granule(), 1)?;
        during(b, CaptureMode::GLOBAL, |b, _| advise(b, address))
    }),
    Case::new(
        "capture.managed_advise_relaxed_thread",
        MANAGED,
        "Advise in relaxed mode.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            during(b, CaptureMode::GLOBAL, |b, _| {
                relaxed(b, |b| advise(b, address))
            })
        },
    ),
    Case::new(
        "capture.managed_query",
        MANAGED,
        "Query the advice in force.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            during(b, CaptureMode::GLOBAL, |b, _| {
                let (device, size) = (b.device(), b.granule());
                b.driver()
                    .range_attribute(device, address, size, RangeAttribute::READ_MOSTLY)
                    .map(drop)
            })
        },
    ),
    Case::new(
        "capture.managed_prefetch_other_stream",
        MANAGED,
        "Prefetch on another stream.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            let other = b.stream()?;
            during(b, CaptureMode::GLOBAL, |b, _| {
                b.prefetch_on(other, address, b.granule(), Location::HOST)
            })
        },
    ),
    Case::new(
        "capture.managed_prefetch",
        MANAGED,
        "Prefetch on the stream that captures.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            during(b, CaptureMode::GLOBAL, |b, stream| {
                b.prefetch_on(stream, address, b.granule(), Location::HOST)
            })
        },
    ),
];

fn advise(b: &Bench, address: DeviceAddress) -> Result<(), DriverError> {
    let (device, size) = (b.device(), b.granule());
    let place = Location::device(device);
    b.driver()
        .advise(device, address, size, Advice::SET_READ_MOSTLY, place)
}
