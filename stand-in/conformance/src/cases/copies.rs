//! Copies and fills: what is refused at the call, and the state of the context afterwards.

use cuvmm_driver::{AccessFlags, DeviceAddress, DriverError};

use crate::{Answer, Answered, Bench, Case, Need, Rule};

pub(super) const RIGHTS: &[Case] = &Rule::new("copy-rights").cases([
    Case::new("copy.open", "Memory that may be read and written.", |b| {
        each(b, Some(AccessFlags::READ_WRITE))
    }),
    Case::new(
        "copy.before_set_access",
        "A mapping before access is granted.",
        |b| each(b, None),
    ),
    Case::new("copy.readonly", "Memory that may only be read.", |b| {
        each(b, Some(AccessFlags::READ))
    }),
    Case::new(
        "copy.none",
        "A mapping whose access was removed again.",
        |b| {
            let base = b.lay("X-")?;
            b.grant(base, 2, AccessFlags::READ_WRITE)?;
            b.grant(base, 2, AccessFlags::NONE)?;
            attempts(b, base)
        },
    ),
    Case::new("copy.unmapped", "Reserved, and nothing mapped.", |b| {
        let base = b.addresses(2)?;
        attempts(b, base)
    }),
    Case::new("copy.after_unmap", "A mapping that was removed.", |b| {
        let (base, _) = b.open(2)?;
        b.unmap(base, 2 * b.granule())?;
        attempts(b, base)
    }),
    Case::new(
        "copy.d2d_ro_source",
        "From memory that may only be read.",
        |b| {
            let (source, destination) = pair(b, AccessFlags::READ, AccessFlags::READ_WRITE)?;
            Ok(Answer::code(&b.copy(destination, source, 64)))
        },
    ),
    Case::new(
        "copy.d2d_ro_dest",
        "To memory that may only be read.",
        |b| {
            let (source, destination) = pair(b, AccessFlags::READ_WRITE, AccessFlags::READ)?;
            Ok(Answer::code(&b.copy(destination, source, 64)))
        },
    ),
    Case::new(
        "copy.d2d_closed_source",
        "From memory without access.",
        |b| {
            let (source, destination) = pair(b, AccessFlags::NONE, AccessFlags::READ_WRITE)?;
            Ok(Answer::code(&b.copy(destination, source, 64)))
        },
    ),
    Case::new(
        "copy.readonly.value",
        "The contents from before the access was lowered.",
        |b| {
            let (address, _) = b.open(1)?;
            b.fill(address, 7, 64)?;
            b.grant(address, 1, AccessFlags::READ)?;
            // The fill is refused, so it must have no effect.
            let _ = b.fill(address, 8, 64);
            Ok(Answer::value(b.read(address)?[0]))
        },
    )
    .needing(&[Need::Memory]),
    Case::new(
        "copy.context_unharmed",
        "After a refusal, valid work still runs.",
        |b| {
            let (good, _) = b.open(1)?;
            let bad = b.addresses(1)?;
            let refused = b.fill(bad, 1, 64);
            let sync = b.driver().context_synchronize(b.device());
            let after = b.fill(good, 1, 64);
            Ok(Answer::code(&refused)
                .then("sync", &sync)
                .then("after", &after))
        },
    ),
    Case::new("copy.value", "Written, then read back.", |b| {
        let (address, _) = b.open(1)?;
        b.write(address, &[1, 2, 3, 4])?;
        b.copy(DeviceAddress(address.0 + 64), address, 4)?;
        let bytes = b.read(DeviceAddress(address.0 + 64))?;
        Ok(Answer::value(format!("{bytes:?}")))
    })
    .needing(&[Need::Memory]),
]);

pub(super) const ACROSS: &[Case] = &Rule::new("copy-across-mappings").cases([
    Case::new(
        "copy.across_mappings",
        "Over the border of two accessible mappings.",
        |b| {
            let base = b.lay("xx")?;
            b.grant(base, 2, AccessFlags::READ_WRITE)?;
            over_border(b, base)
        },
    ),
    Case::new(
        "copy.overrun_into_unmapped",
        "Over the end of a mapping.",
        |b| {
            let base = b.lay("x.")?;
            b.grant(base, 1, AccessFlags::READ_WRITE)?;
            over_border(b, base)
        },
    ),
    Case::new(
        "copy.overrun_into_closed",
        "Into a mapping without access.",
        |b| {
            let base = b.lay("xx")?;
            b.grant(base, 1, AccessFlags::READ_WRITE)?;
            over_border(b, base)
        },
    ),
    Case::new(
        "copy.across_hole",
        "Two accessible mappings with a hole between them.",
        |b| {
            let base = b.lay("x.x")?;
            b.grant(base, 1, AccessFlags::READ_WRITE)?;
            b.grant(b.at(base, 2), 1, AccessFlags::READ_WRITE)?;
            let fill = b.fill(base, 1, 3 * b.granule());
            let sync = b.driver().context_synchronize(b.device());
            Ok(Answer::code(&fill).then("sync", &sync))
        },
    ),
]);

pub(super) const ASYNC: &[Case] = &Rule::new("copy-queued").cases([
    Case::new("copy.async_open", "Queued, on accessible memory.", |b| {
        let (address, _) = b.open(2)?;
        queued(b, address)
    }),
    Case::new(
        "copy.async_unmapped",
        "Queued, where nothing is mapped.",
        |b| {
            let address = b.addresses(2)?;
            queued(b, address)
        },
    ),
    Case::new("copy.async_value", "Queued, then read back.", |b| {
        let (address, _) = b.open(1)?;
        let stream = b.stream()?;
        b.fill_async(address, 5, 64, stream)?;
        b.write_async(address, [6, 6, 6, 6], stream)?;
        b.copy_async(DeviceAddress(address.0 + 8), address, 2, stream)?;
        let bytes = b.read_async(DeviceAddress(address.0 + 8), stream)?;
        Ok(Answer::value(format!("{bytes:?}")))
    })
    .needing(&[Need::Memory]),
]);

/// Tests a mapping of two granules with one kind of access.
fn each(b: &mut Bench, flags: Option<AccessFlags>) -> Answered {
    let base = b.lay("X-")?;
    if let Some(flags) = flags {
        b.grant(base, 2, flags)?;
    }
    attempts(b, base)
}

/// Makes a fill, a copy to the host and one from it, and a synchronization.
fn attempts(b: &mut Bench, address: DeviceAddress) -> Answered {
    let fill = b.fill(address, 1, 64);
    let write = b.write(address, &[1; 64]);
    let sync = b.driver().context_synchronize(b.device());
    Ok(Answer::named("fill", &fill)
        .with("read", b.reads(address))
        .then("write", &write)
        .then("sync", &sync))
}

/// Maps two adjacent granules, each with its own access.
fn pair(
    b: &mut Bench,
    first: AccessFlags,
    second: AccessFlags,
) -> Result<(DeviceAddress, DeviceAddress), DriverError> {
    let base = b.lay("xx")?;
    let other = b.at(base, 1);
    b.grant(base, 1, first)?;
    b.grant(other, 1, second)?;
    Ok((base, other))
}

/// Fills, reads and writes 64 bytes on both sides of the first granule's end.
fn over_border(b: &mut Bench, base: DeviceAddress) -> Answered {
    let address = DeviceAddress(base.0 + b.granule() - 64);
    let mut bytes = [0; 128];
    let fill = b.fill(address, 1, 128);
    let read = b.read_into(address, &mut bytes);
    let write = b.write(address, &bytes);
    let sync = b.driver().context_synchronize(b.device());
    Ok(Answer::named("fill", &fill)
        .then("read", &read)
        .then("write", &write)
        .then("sync", &sync))
}

/// Makes the queued variants of the calls, each followed by a synchronization of the stream.
fn queued(b: &mut Bench, address: DeviceAddress) -> Answered {
    let stream = b.stream()?;
    let other = b.at(address, 1);
    let fill = b.fill_async(address, 1, 64, stream);
    let write = b.write_async(address, [1; 4], stream);
    let read = b.read_async(address, stream);
    let copy = b.copy_async(other, address, 64, stream);
    let sync = b.synchronize(stream);
    Ok(Answer::named("fill", &fill)
        .then("write", &write)
        .then("read", &read)
        .then("copy", &copy)
        .then("sync", &sync))
}
