//! Exporting a physical.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

use cuvmm_driver::{
    DriverError, Exported, HandleTypes, ImportSource, PhysicalHandle, PhysicalProps,
};

use crate::answer::bit;
use crate::{Answer, Bench, Case, Rule};

/// `O_CLOEXEC` as `/proc` shows it.
const CLOSE_ON_EXEC: u64 = 0o2_000_000;

pub(super) const EXPORT: &[Case] = &Rule::new("export").cases([
    Case::new("export.ok", "As the type requested at creation.", |b| {
        let handle = exportable(b)?;
        Ok(Answer::code(&b.export(handle, HandleTypes::POSIX_FD, 0)))
    }),
    Case::new(
        "export.not_requested",
        "Of a physical created without handle types.",
        |b| {
            let handle = b.physical(1)?;
            Ok(Answer::code(&b.export(handle, HandleTypes::POSIX_FD, 0)))
        },
    ),
    Case::new("export.flags_1", "Flags must be 0.", |b| {
        let handle = exportable(b)?;
        Ok(Answer::code(&b.export(handle, HandleTypes::POSIX_FD, 1)))
    }),
    Case::new("export.fabric_of_fd", "As another type.", |b| {
        let handle = exportable(b)?;
        Ok(Answer::code(&b.export(handle, HandleTypes::FABRIC, 0)))
    }),
    Case::new("export.no_type", "As no type at all.", |b| {
        let handle = exportable(b)?;
        Ok(Answer::code(&b.export(handle, HandleTypes::empty(), 0)))
    }),
    Case::new("export.handle_0", "Handle 0.", |b| {
        let exported = b.export(PhysicalHandle::NULL, HandleTypes::POSIX_FD, 0);
        Ok(Answer::code(&exported))
    }),
    Case::new(
        "export.while_mapped",
        "While it is mapped and accessible.",
        |b| {
            let handle = exportable(b)?;
            let (address, size) = (b.addresses(1)?, b.granule());
            b.map(address, size, 0, handle, 0)?;
            Ok(Answer::code(&b.export(handle, HandleTypes::POSIX_FD, 0)))
        },
    ),
    Case::new("import.reexport", "A physical that was imported.", |b| {
        let (_, imported, _fd) = imported(b)?;
        Ok(Answer::code(&b.export(imported, HandleTypes::POSIX_FD, 0)))
    }),
]);

pub(super) const DESCRIPTOR: &[Case] = &Rule::new("export-descriptor").cases([
    Case::new(
        "export.cloexec",
        "Is the descriptor closed in a program that is started?",
        |b| {
            let fd = exported(b)?;
            let flags = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
            let flags = flags.ok().and_then(|text| {
                let line = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
                u64::from_str_radix(line.trim(), 8).ok()
            });
            Ok(Answer::value(match flags {
                Some(flags) => bit(flags & CLOSE_ON_EXEC != 0).to_string(),
                None => "unknown".to_owned(),
            }))
        },
    ),
    Case::new(
        "export.second_fd_differs",
        "Each export returns a new descriptor.",
        |b| {
            let handle = exportable(b)?;
            let first = b.export(handle, HandleTypes::POSIX_FD, 0)?;
            let second = b.export(handle, HandleTypes::POSIX_FD, 0)?;
            Ok(Answer::value(bit(number(&first) != number(&second))))
        },
    ),
    Case::new("export.fd_target", "The file behind the descriptor.", |b| {
        let fd = exported(b)?;
        let target = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        Ok(Answer::value(match target {
            Ok(target) => target.display().to_string(),
            Err(_) => "unknown".to_owned(),
        }))
    }),
]);

fn number(exported: &Exported) -> Option<i32> {
    match exported {
        Exported::Fd(fd) => Some(fd.as_raw_fd()),
        _ => None,
    }
}

/// Returns the properties of memory that can be exported as a descriptor.
pub(super) fn props(b: &Bench) -> PhysicalProps {
    PhysicalProps {
        handle_types: HandleTypes::POSIX_FD,
        ..b.props()
    }
}

/// Creates a physical of one granule that can be exported as a descriptor.
pub(super) fn exportable(b: &mut Bench) -> Result<PhysicalHandle, DriverError> {
    let props = props(b);
    b.create(b.granule(), &props, 0)
}

fn exported(b: &mut Bench) -> Result<OwnedFd, DriverError> {
    let handle = exportable(b)?;
    descriptor(b, handle)
}

pub(super) fn descriptor(b: &Bench, handle: PhysicalHandle) -> Result<OwnedFd, DriverError> {
    match b.export(handle, HandleTypes::POSIX_FD, 0)? {
        Exported::Fd(fd) => Ok(fd),
        _ => Err(DriverError::new(
            cuvmm_driver::Call::MemExportToShareableHandle,
            cuvmm_driver::CUresult::CUDA_ERROR_UNKNOWN,
        )),
    }
}

pub(super) fn imported(
    b: &mut Bench,
) -> Result<(PhysicalHandle, PhysicalHandle, OwnedFd), DriverError> {
    let handle = exportable(b)?;
    let fd = descriptor(b, handle)?;
    let imported = b.import(ImportSource::Fd(fd.as_raw_fd()), HandleTypes::POSIX_FD)?;
    Ok((handle, imported, fd))
}
