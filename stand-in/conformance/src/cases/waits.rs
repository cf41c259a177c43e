//! Calls that wait for a running kernel: the plain free waits, the virtual-memory calls do not. So
//! only the library keeps memory mapped that a kernel is using.

use cuvmm_driver::{AccessFlags, DriverError, StreamHandle};

use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Need};

const RULE: &str = "nothing-waits";
const KERNELS: &[Need] = &[Need::Kernels];

/// The duration of the kernel: far longer than a call that does not wait, even a slow one.
const SPIN_MS: u32 = 200;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "waits.create_map_set_access",
        RULE,
        "Beside a running kernel.",
        |b| {
            let base = b.addresses(1)?;
            beside(b, |b| {
                b.place(base, 1)?;
                b.grant(base, 1, AccessFlags::READ_WRITE)
            })
        },
    )
    .needing(KERNELS),
    Case::new(
        "waits.unmap_release_free",
        RULE,
        "Beside a running kernel.",
        |b| {
            let (base, handle) = b.open(1)?;
            beside(b, |b| {
                b.unmap(base, b.granule())?;
                b.release(handle)?;
                b.free_reservation(base, b.granule())
            })
        },
    )
    .needing(KERNELS),
    Case::new("waits.export", RULE, "Beside a running kernel.", |b| {
        let handle = super::share::exportable(b)?;
        beside(b, |b| super::share::descriptor(b, handle).map(drop))
    })
    .needing(KERNELS),
    Case::new("waits.cuMemFree", RULE, "The plain free.", |b| {
        let plain = b.alloc(b.granule())?;
        beside(b, |b| b.free(plain))
    })
    .needing(KERNELS),
    Case::new(
        "waits.free_managed",
        RULE,
        "The plain free of managed memory.",
        |b| {
            let managed = b.managed(b.granule(), 1)?;
            beside(b, |b| b.free(managed))
        },
    )
    .needing(KERNELS),
];

/// Runs `act` while a kernel runs, and reports if the kernel was still running afterwards.
pub(super) fn beside(
    b: &mut Bench,
    act: impl FnOnce(&mut Bench) -> Result<(), DriverError>,
) -> Answered {
    let Some(kernels) = b.kernels() else {
        return Ok(Answer::value("no kernels"));
    };
    let stream = b.stream()?;
    // The first launch may load the kernel, which takes time that is not to be measured.
    kernels.spin(b.device(), stream, 0)?;
    b.synchronize(stream)?;
    kernels.spin(b.device(), stream, SPIN_MS)?;
    let outcome = act(b);
    let running = !b.stream_is_done(stream)?;
    b.synchronize(stream)?;
    b.synchronize(StreamHandle::NULL)?;
    Ok(Answer::code(&outcome).with("still running", bit(running)))
}
