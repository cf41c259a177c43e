//! Kernels that access memory without permission.
//!
//! Each of these cases loses its context, so each runs in a separate process.

use cuvmm_driver::{AccessFlags, DeviceAddress, StreamHandle};

use crate::{Answer, Answered, Bench, Case, Need, Rule};

const KERNELS: &[Need] = &[Need::Kernels];

pub(super) const CASES: &[Case] = &Rule::new("kernel-fault")
    .needing(KERNELS)
    .isolated()
    .cases([
        Case::new(
            "kernel.open",
            "A kernel that writes accessible memory.",
            |b| {
                let (address, _) = b.open(1)?;
                touched(b, address, true)
            },
        ),
        Case::new(
            "kernel.read_readonly",
            "Reads memory that may only be read.",
            |b| {
                let base = b.lay("x")?;
                b.grant(base, 1, AccessFlags::READ)?;
                touched(b, base, false)
            },
        ),
        Case::new(
            "fault.kernel_write_readonly",
            "Writes memory that may only be read.",
            |b| {
                let base = b.lay("x")?;
                b.grant(base, 1, AccessFlags::READ)?;
                touched(b, base, true)
            },
        ),
        Case::new(
            "fault.kernel_no_access",
            "Reads a mapping without access.",
            |b| {
                let base = b.lay("x")?;
                touched(b, base, false)
            },
        ),
        Case::new(
            "fault.kernel_unmapped",
            "Writes where nothing is mapped.",
            |b| {
                let base = b.addresses(1)?;
                touched(b, base, true)
            },
        ),
        Case::new(
            "fault.kernel_then_memory_calls",
            "Memory calls in a lost context.",
            |b| {
                let base = b.addresses(2)?;
                let handle = b.place(base, 1)?;
                b.grant(base, 1, AccessFlags::READ_WRITE)?;
                let launch = touch(b, b.at(base, 1), true);
                let sync = b.driver().context_synchronize(b.device());
                let fill = b.fill(base, 1, 64);
                let again = touch(b, base, true);
                let (size, props) = (b.granule(), b.props());
                let unmap = b.unmap(base, size);
                let release = b.release(handle);
                let create = b.create(size, &props, 0);
                let free = b.free_reservation(base, 2 * size);
                Ok(Answer::named("launch", &launch)
                    .then("sync", &sync)
                    .then("fill", &fill)
                    .then("launch again", &again)
                    .then("unmap", &unmap)
                    .then("release", &release)
                    .then("create", &create)
                    .then("free", &free))
            },
        ),
    ]);

fn touch(b: &Bench, address: DeviceAddress, write: bool) -> Result<(), cuvmm_driver::DriverError> {
    b.kernels()?
        .touch(b.device(), StreamHandle::NULL, address, write)
}

fn touched(b: &mut Bench, address: DeviceAddress, write: bool) -> Answered {
    let launch = touch(b, address, write);
    let sync = b.driver().context_synchronize(b.device());
    Ok(Answer::named("launch", &launch).then("sync", &sync))
}
