//! The lifetime of physical memory: references, mappings, descriptors.

use std::os::fd::{AsRawFd, OwnedFd};

use cuvmm_driver::{DeviceAddress, DriverError, HandleTypes, ImportSource, PhysicalHandle};

use super::share::{descriptor, props};
use super::sizes::MIB;
use crate::answer::bit;
use crate::{Answer, Bench, Case, Need, Rule};

/// The size of the physicals: large enough to be distinguished from memory that the driver keeps
/// for itself.
const WEIGHT: u64 = 64 * MIB;

pub(super) const REFERENCES: &[Case] = &Rule::new("lifetime-references").cases([
    Case::new("release.ok", "The one reference to a physical.", |b| {
        let handle = b.physical(1)?;
        Ok(Answer::code(&b.release(handle)))
    }),
    Case::new("release.twice", "A handle that was released.", |b| {
        let handle = b.physical(1)?;
        b.release(handle)?;
        Ok(Answer::code(&b.release(handle)))
    }),
    Case::new("release.handle_0", "The release of the null handle.", |b| {
        Ok(Answer::code(&b.release(PhysicalHandle::NULL)))
    }),
]);

pub(super) const MAPPING: &[Case] = &Rule::new("lifetime-mapping").cases([
    Case::new(
        "release.while_mapped",
        "The memory can still be read.",
        |b| {
            let (address, handle) = b.open(1)?;
            let outcome = b.release(handle);
            Ok(Answer::code(&outcome).with("readable", b.reads(address)))
        },
    ),
    Case::new(
        "release.twice_while_mapped",
        "Released twice while it is mapped.",
        |b| {
            let (_, handle) = b.open(1)?;
            b.release(handle)?;
            Ok(Answer::code(&b.release(handle)))
        },
    ),
    Case::new(
        "lifetime.mapping_keeps_MiB",
        "Returned by release, then by unmap.",
        |b| {
            let (address, handle) = weight(b)?;
            let release = returned(b, |b| b.release(handle))?;
            let unmap = returned(b, |b| b.unmap(address, WEIGHT))?;
            Ok(Answer::value(release).with("unmap", unmap))
        },
    ),
    Case::new(
        "lifetime.handle_keeps_MiB",
        "Returned by unmap, then by release.",
        |b| {
            let (address, handle) = weight(b)?;
            let unmap = returned(b, |b| b.unmap(address, WEIGHT))?;
            let release = returned(b, |b| b.release(handle))?;
            Ok(Answer::value(unmap).with("release", release))
        },
    ),
    Case::new(
        "lifetime.last_alias_frees_MiB",
        "Returned by each of two unmaps.",
        |b| {
            let (address, handle) = weight(b)?;
            let other = b.reserve(WEIGHT, 0, DeviceAddress::NULL, 0)?;
            b.map(other, WEIGHT, 0, handle, 0)?;
            b.release(handle)?;
            let first = returned(b, |b| b.unmap(address, WEIGHT))?;
            let second = returned(b, |b| b.unmap(other, WEIGHT))?;
            Ok(Answer::value(first).with("second", second))
        },
    ),
]);

pub(super) const RETAIN: &[Case] = &Rule::new("retain").cases([
    Case::new(
        "retain.same_handle",
        "Is the handle the one that was mapped?",
        |b| {
            let (address, handle) = b.open(2)?;
            let outcome = b.retain(address);
            Ok(Answer::code(&outcome).with("same", bit(outcome == Ok(handle))))
        },
    ),
    Case::new(
        "retain.interior",
        "By an address inside the mapping.",
        |b| {
            let (address, handle) = b.open(2)?;
            let outcome = b.retain(b.at(address, 1));
            Ok(Answer::code(&outcome).with("same", bit(outcome == Ok(handle))))
        },
    ),
    Case::new("retain.unmapped", "Where nothing is mapped.", |b| {
        let base = b.addresses(1)?;
        Ok(Answer::code(&b.retain(base)))
    }),
    Case::new("retain.unreserved", "Where nothing is reserved.", |b| {
        let base = b.addresses(1)?;
        b.free_reservation(base, b.granule())?;
        Ok(Answer::code(&b.retain(base)))
    }),
    Case::new(
        "retain.then_release_both",
        "Each reference is released once.",
        |b| {
            let (address, handle) = b.open(1)?;
            let again = b.retain(address)?;
            let (first, second) = (b.release(handle), b.release(again));
            Ok(Answer::code(&first.and(second)))
        },
    ),
    Case::new(
        "retain.keeps_MiB",
        "Returned by release and unmap, then by the last release.",
        |b| {
            let (address, handle) = weight(b)?;
            let again = b.retain(address)?;
            let first = returned(b, |b| b.release(handle).and(b.unmap(address, WEIGHT)))?;
            let last = returned(b, |b| b.release(again))?;
            Ok(Answer::value(first).with("last", last))
        },
    ),
    Case::new(
        "retain.after_release",
        "A released physical that is mapped.",
        |b| {
            let (address, handle) = b.open(1)?;
            b.release(handle)?;
            let again = b.retain(address);
            let base = b.addresses(1)?;
            let mapped = match again {
                Ok(again) => b.map(base, b.granule(), 0, again, 0),
                Err(error) => Err(error),
            };
            Ok(Answer::code(&again).then("map", &mapped))
        },
    ),
]);

pub(super) const DESCRIPTOR: &[Case] = &Rule::new("lifetime-descriptor").cases([
    Case::new(
        "lifetime.fd_keeps_memory_MiB_freed_after_release",
        "Returned by release, then by closing the descriptor.",
        |b| {
            let (handle, fd) = exported(b)?;
            let release = returned(b, |b| b.release(handle))?;
            let close = closed(b, fd)?;
            Ok(Answer::value(release).with("close", close))
        },
    ),
    Case::new(
        "lifetime.two_fds_MiB",
        "Returned by closing each of two.",
        |b| {
            let (handle, first) = exported(b)?;
            let second = descriptor(b, handle)?;
            b.release(handle)?;
            let one = closed(b, first)?;
            let two = closed(b, second)?;
            Ok(Answer::value(one).with("second", two))
        },
    ),
    Case::new(
        "lifetime.import_from_fd_alone",
        "Imported after the release.",
        |b| {
            let (handle, fd) = exported(b)?;
            b.release(handle)?;
            let imported = b.import(ImportSource::Fd(fd.as_raw_fd()), HandleTypes::POSIX_FD);
            drop(fd);
            let answer = Answer::code(&imported);
            let Ok(imported) = imported else {
                return Ok(answer);
            };
            let freed = returned(b, |b| b.release(imported))?;
            Ok(answer.with("MiB at its release", freed))
        },
    ),
    Case::new(
        "lifetime.contents_survive",
        "Contents that only the descriptor kept.",
        |b| {
            let props = props(b);
            let (address, handle) = (b.addresses(1)?, b.create(b.granule(), &props, 0)?);
            b.map(address, b.granule(), 0, handle, 0)?;
            b.grant(address, 1, cuvmm_driver::AccessFlags::READ_WRITE)?;
            b.fill(address, 77, b.granule())?;
            let fd = descriptor(b, handle)?;
            b.driver().context_synchronize(b.device())?;
            b.unmap(address, b.granule())?;
            b.release(handle)?;
            let again = b.import(ImportSource::Fd(fd.as_raw_fd()), HandleTypes::POSIX_FD)?;
            b.map(address, b.granule(), 0, again, 0)?;
            b.grant(address, 1, cuvmm_driver::AccessFlags::READ)?;
            Ok(Answer::value(b.read(address)?[3]))
        },
    )
    .needing(&[Need::Memory]),
    Case::new(
        "lifetime.fd_outlives_mapping_MiB",
        "Mapped, released, closed.",
        |b| {
            let (handle, fd) = exported(b)?;
            let address = b.reserve(WEIGHT, 0, DeviceAddress::NULL, 0)?;
            b.map(address, WEIGHT, 0, handle, 0)?;
            b.release(handle)?;
            let unmap = returned(b, |b| b.unmap(address, WEIGHT))?;
            let close = closed(b, fd)?;
            Ok(Answer::value(unmap).with("close", close))
        },
    ),
]);

fn weight(b: &mut Bench) -> Result<(DeviceAddress, PhysicalHandle), DriverError> {
    let props = b.props();
    let address = b.reserve(WEIGHT, 0, DeviceAddress::NULL, 0)?;
    let handle = b.create(WEIGHT, &props, 0)?;
    b.map(address, WEIGHT, 0, handle, 0)?;
    Ok((address, handle))
}

fn exported(b: &mut Bench) -> Result<(PhysicalHandle, OwnedFd), DriverError> {
    let props = props(b);
    let handle = b.create(WEIGHT, &props, 0)?;
    let fd = descriptor(b, handle)?;
    Ok((handle, fd))
}

/// Returns how many MiB a descriptor frees that is closed.
fn closed(b: &mut Bench, fd: OwnedFd) -> Result<u64, DriverError> {
    returned(b, |_| {
        drop(fd);
        Ok(())
    })
}

/// Returns how many MiB `act` frees.
fn returned(
    b: &mut Bench,
    act: impl FnOnce(&mut Bench) -> Result<(), DriverError>,
) -> Result<u64, DriverError> {
    let before = b.free_memory()?;
    act(b)?;
    Ok(b.free_memory()?.saturating_sub(before) / MIB)
}
