//! Managed memory while a stream captures.

use cuvmm_driver::{Advice, CaptureMode, DeviceAddress, DriverError, Location, RangeAttribute};

use super::capture::{during, global, relaxed};
use crate::{Bench, Case, Rule};

pub(super) const CASES: &[Case] = &Rule::new("capture-managed").cases([
    Case::new(
        "capture.managed_alloc",
        "Allocate during a global capture.",
        |b| global(b, |b| b.managed(b.granule(), 1).map(drop)),
    ),
    Case::new(
        "capture.managed_alloc_relaxed_thread",
        "Allocate in relaxed mode.",
        |b| global(b, |b| relaxed(b, |b| b.managed(b.granule(), 1).map(drop))),
    ),
    Case::new(
        "capture.managed_free",
        "Free during a global capture.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            global(b, |b| b.free(address))
        },
    ),
    Case::new(
        "capture.managed_free_relaxed_thread",
        "Free in relaxed mode.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            global(b, |b| relaxed(b, |b| b.free(address)))
        },
    ),
    Case::new("capture.managed_advise", "Advise.", |b| {
        let address = b.managed(b.granule(), 1)?;
        global(b, |b| advise(b, address))
    }),
    Case::new(
        "capture.managed_advise_relaxed_thread",
        "Advise in relaxed mode.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            global(b, |b| relaxed(b, |b| advise(b, address)))
        },
    ),
    Case::new("capture.managed_query", "Query the advice in force.", |b| {
        let address = b.managed(b.granule(), 1)?;
        global(b, |b| {
            let (device, size) = (b.device(), b.granule());
            b.driver()
                .range_attribute(device, address, size, RangeAttribute::READ_MOSTLY)
                .map(drop)
        })
    }),
    Case::new(
        "capture.managed_prefetch_other_stream",
        "Prefetch on another stream.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            let other = b.stream()?;
            global(b, |b| {
                b.prefetch_on(other, address, b.granule(), Location::HOST)
            })
        },
    ),
    Case::new(
        "capture.managed_prefetch",
        "Prefetch on the stream that captures.",
        |b| {
            let address = b.managed(b.granule(), 1)?;
            during(b, CaptureMode::GLOBAL, |b, stream| {
                b.prefetch_on(stream, address, b.granule(), Location::HOST)
            })
        },
    ),
]);

fn advise(b: &Bench, address: DeviceAddress) -> Result<(), DriverError> {
    let (device, size) = (b.device(), b.granule());
    let place = Location::device(device);
    b.driver()
        .advise(device, address, size, Advice::SET_READ_MOSTLY, place)
}
