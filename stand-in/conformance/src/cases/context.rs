//! Virtual-memory calls from a thread that has no current context.

use cuvmm_driver::{AccessFlags, DeviceAddress, DriverError};

use super::capture::on_thread;
use crate::{Answer, Answered, Bench, Case, Rule};

pub(super) const CASES: &[Case] = &Rule::new("no-context-needed").cases([
    Case::new("no_context.reserve", "Reserve.", |b| {
        elsewhere(b, |b| b.addresses(1).map(drop))
    }),
    Case::new("no_context.create", "Create.", |b| {
        elsewhere(b, |b| b.physical(1).map(drop))
    }),
    Case::new("no_context.map", "Map.", |b| {
        let (base, size, handle) = (b.addresses(1)?, b.granule(), b.physical(1)?);
        elsewhere(b, move |b| b.map(base, size, 0, handle, 0))
    }),
    Case::new("no_context.set_access", "Grant access.", |b| {
        let base = b.lay("x")?;
        elsewhere(b, move |b| b.grant(base, 1, AccessFlags::READ_WRITE))
    }),
    Case::new("no_context.unmap", "Unmap.", |b| {
        let (base, _) = b.open(1)?;
        elsewhere(b, move |b| b.unmap(base, b.granule()))
    }),
    Case::new("no_context.release", "Release.", |b| {
        let handle = b.physical(1)?;
        elsewhere(b, move |b| b.release(handle))
    }),
    Case::new("no_context.address_free", "Free addresses.", |b| {
        let base = b.addresses(1)?;
        elsewhere(b, move |b| b.free_reservation(base, b.granule()))
    }),
    Case::new("no_context.retain", "Retain.", |b| {
        let (base, _) = b.open(1)?;
        elsewhere(b, move |b| b.retain(base).map(drop))
    }),
    Case::new(
        "no_context.all",
        "From reserve to free, on one thread.",
        |b| {
            elsewhere(b, |b| {
                let size = b.granule();
                let base: DeviceAddress = b.addresses(1)?;
                let handle = b.place(base, 1)?;
                b.grant(base, 1, AccessFlags::READ_WRITE)?;
                b.unmap(base, size)?;
                b.release(handle)?;
                b.free_reservation(base, size)
            })
        },
    ),
]);

/// Makes calls on a thread that was just started, so that no context is current on it.
fn elsewhere(
    b: &mut Bench,
    ask: impl FnOnce(&mut Bench) -> Result<(), DriverError> + Send,
) -> Answered {
    Ok(Answer::code(&on_thread(|| ask(b))))
}
