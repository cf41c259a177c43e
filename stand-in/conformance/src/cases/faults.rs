//! Kernels that access memory without permission.
//!
//! Each of these cases loses its context, so each runs in a separate process.

use cuvmm_driver::{AccessFlags, DeviceAddress, StreamHandle};

use crate::{Answer, Answered, Bench, Case, Need};

const RULE: &str = "kernel-fault";
const KERNELS: &[Need] = &[Need::Kernels];

pub(super) const CASES: &[Case] = &[
    Case::new(
        "kernel.open",
        RULE,
        "A kernel that writes accessible memory.",
        |b| {
            let (address, _) = b.open(1)?;
            touched(b, address, true)
        },
    )
    .needing(KERNELS)
    .isolated(),
    Case::new(
        "kernel.read_readonly",
        RULE,
        "Reads memory that may only be read.",
        |b| {
            let base = b.lay("x")?;
            b.grant(base, 1, AccessFlags::READ)?;
            touched(b, base, false)
        },
    )
    .needing(KERNELS)
    .isolated(),
    Case::new(
        "fault.kernel_write_readonly",
        RULE,
        "Writes memory that may only be read.",
        |b| {
            let base = b.lay("x")?;
            b.grant(base, 1, AccessFlags::READ)?;
            touched(b, base, true)
        },
    )
    .needing(KERNELS)
    .isolated(),
    Case::new(
        "fault.kernel_no_access",
        RULE,
        "Reads a mapping without access.",
        |b| {
            let base = b.lay("x")?;
            touched(b, base, false)
        },
    )
    .needing(KERNELS)
    .isolated(),
    Case::new(
        "fault.kernel_unmapped",
        RULE,
        "Writes where nothing is mapped.",
        |b| {
            let base = b.addresses(1)?;
            touched(b, base, true)
        },
    )
    .needing(KERNELS)
    .isolated(),
    Case::new(
        "fault.kernel_then_memory_calls",
        RULE,
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
    )
    .needing(KERNELS)
    .isolated(),
];

fn touch(b: &Bench, address: DeviceAddress, write: bool) -> Result<(), cuvmm_driver::DriverError> {
    match b.kernels() {
        Some(kernels) => kernels.touch(b.device(), StreamHandle::NULL, address, write),
        None => Ok(()),
    }
}

fn touched(b: &mut Bench, address: DeviceAddress, write: bool) -> Answered {
    let launch = touch(b, address, write);
    let sync = b.driver().context_synchronize(b.device());
    Ok(Answer::named("launch", &launch).then("sync", &sync))
}
