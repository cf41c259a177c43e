//! Calls that wait for a running kernel: the plain free waits, the virtual-memory calls do not. So
//! only the library keeps memory mapped that a kernel is using.

use cuvmm_driver::{AccessFlags, DriverError, StreamHandle};

use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

const KERNELS: &[Need] = &[Need::Kernels];

pub(super) const CASES: &[Case] = &Rule::new("nothing-waits").needing(KERNELS).cases([
    Case::new(
        "waits.create_map_set_access",
        "Beside a running kernel.",
        |b| {
            let base = b.addresses(1)?;
            beside(b, |b| {
                b.place(base, 1)?;
                b.grant(base, 1, AccessFlags::READ_WRITE)
            })
        },
    ),
    Case::new(
        "waits.unmap_release_free",
        "Beside a running kernel.",
        |b| {
            let (base, handle) = b.open(1)?;
            beside(b, |b| {
                b.unmap(base, b.granule())?;
                b.release(handle)?;
                b.free_reservation(base, b.granule())
            })
        },
    ),
    Case::new("waits.export", "Beside a running kernel.", |b| {
        let handle = super::share::exportable(b)?;
        beside(b, |b| super::share::descriptor(b, handle).map(drop))
    }),
    Case::new("waits.cuMemFree", "The plain free.", |b| {
        let plain = b.alloc(b.granule())?;
        beside(b, |b| b.free(plain))
    }),
    Case::new(
        "waits.free_managed",
        "The plain free of managed memory.",
        |b| {
            let managed = b.managed(b.granule(), 1)?;
            beside(b, |b| b.free(managed))
        },
    ),
]);

/// Runs `act` while a kernel runs, and reports if the kernel was still running afterwards.
pub(super) fn beside(
    b: &mut Bench,
    act: impl FnOnce(&mut Bench) -> Result<(), DriverError>,
) -> Answered {
    let stream = b.spinning()?;
    let outcome = act(b);
    let running = !b.stream_is_done(stream)?;
    b.synchronize(stream)?;
    b.synchronize(StreamHandle::NULL)?;
    Ok(Answer::code(&outcome).with("still running", bit(running)))
}
