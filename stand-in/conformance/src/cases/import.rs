//! Importing a physical, here within one process.

use std::fs::File;
use std::os::fd::AsRawFd;

use cuvmm_driver::{
    AccessFlags, DeviceAddress, DriverError, HandleTypes, ImportSource, PhysicalHandle,
};

use super::share::{descriptor, exportable, imported};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

/// A number that is not a descriptor of a test process.
const NO_DESCRIPTOR: i32 = 1_000_000;

pub(super) const IMPORT: &[Case] = &Rule::new("import").cases([
    Case::new(
        "import.same_process",
        "Is the handle the one that was exported?",
        |b| {
            let handle = exportable(b)?;
            let fd = descriptor(b, handle)?;
            let again = b.import(ImportSource::Fd(fd.as_raw_fd()), HandleTypes::POSIX_FD);
            Ok(Answer::code(&again).with("same_handle", bit(again == Ok(handle))))
        },
    ),
    Case::new(
        "import.twice",
        "The same descriptor again: the same handle?",
        |b| {
            let handle = exportable(b)?;
            let fd = descriptor(b, handle)?;
            let source = ImportSource::Fd(fd.as_raw_fd());
            let first = b.import(source, HandleTypes::POSIX_FD)?;
            let second = b.import(source, HandleTypes::POSIX_FD);
            Ok(Answer::code(&second).with("same_handle", bit(second == Ok(first))))
        },
    ),
    Case::new(
        "import.dev_null",
        "A descriptor of another kind of file.",
        |b| match File::open("/dev/null") {
            Ok(file) => from_fd(b, file.as_raw_fd()),
            Err(_) => Ok(Answer::value("no /dev/null")),
        },
    ),
    Case::new("import.fd_-1", "Descriptor -1.", |b| from_fd(b, -1)),
    Case::new(
        "import.fd_closed",
        "A number that is not a descriptor.",
        |b| from_fd(b, NO_DESCRIPTOR),
    ),
    Case::new(
        "import.bad_type",
        "With a handle type that does not exist.",
        |b| {
            let handle = exportable(b)?;
            let fd = descriptor(b, handle)?;
            let unknown = HandleTypes::from_bits_retain(0x40);
            Ok(Answer::code(
                &b.import(ImportSource::Fd(fd.as_raw_fd()), unknown),
            ))
        },
    ),
    Case::new(
        "import.descriptor_stays",
        "The descriptor stays open.",
        |b| {
            let (_, _, fd) = imported(b)?;
            from_fd(b, fd.as_raw_fd())
        },
    ),
    Case::new(
        "import.props",
        "The properties that the importer gets.",
        |b| {
            let (_, handle, _fd) = imported(b)?;
            let props = b.physical_props(handle);
            let answer = Answer::code(&props);
            let Ok(props) = props else { return Ok(answer) };
            Ok(answer
                .with("type", props.allocation_type.0)
                .with("loc", props.location.kind.0)
                .with("id", props.location.id)
                .with("handles", props.handle_types.bits()))
        },
    ),
    Case::new("props.ok", "The properties that the creator gets.", |b| {
        let handle = exportable(b)?;
        let props = b.physical_props(handle);
        let answer = Answer::code(&props);
        let Ok(props) = props else { return Ok(answer) };
        Ok(answer.with("as asked", bit(props.handle_types == HandleTypes::POSIX_FD)))
    }),
    Case::new(
        "props.handle_0",
        "The properties of the null handle.",
        |b| Ok(Answer::code(&b.physical_props(PhysicalHandle::NULL))),
    ),
    Case::new("import.map", "Mapped whole.", |b| {
        let (_, handle, _fd) = imported(b)?;
        let (address, size) = (b.addresses(1)?, b.granule());
        Ok(Answer::code(&b.map(address, size, 0, handle, 0)))
    }),
    Case::new("import.map_too_large", "Mapped with a larger size.", |b| {
        let (_, handle, _fd) = imported(b)?;
        let (address, size) = (b.addresses(2)?, 2 * b.granule());
        Ok(Answer::code(&b.map(address, size, 0, handle, 0)))
    }),
    Case::new(
        "import.release_twice",
        "Each import is released once.",
        |b| {
            let (_, handle, _fd) = imported(b)?;
            b.release(handle)?;
            Ok(Answer::code(&b.release(handle)))
        },
    ),
]);

pub(super) const RIGHTS: &[Case] = &Rule::new("import-rights").cases([
    Case::new(
        "import.set_access",
        "The importer makes it readable and writable.",
        |b| {
            let (_, handle, _fd) = imported(b)?;
            let (address, size) = (b.addresses(1)?, b.granule());
            b.map(address, size, 0, handle, 0)?;
            Ok(Answer::code(&b.grant(address, 1, AccessFlags::READ_WRITE)))
        },
    ),
    Case::new("import.read.value", "Written by the exporter.", |b| {
        let (given, taken) = both_mapped(b, AccessFlags::READ_WRITE)?;
        b.fill(given, 17, 64)?;
        Ok(Answer::value(b.read(taken)?[0]))
    })
    .needing(&[Need::Memory]),
    Case::new("import.write_seen", "Written by the importer.", |b| {
        let (given, taken) = both_mapped(b, AccessFlags::READ_WRITE)?;
        b.fill(taken, 42, 64)?;
        Ok(Answer::value(b.read(given)?[0]))
    })
    .needing(&[Need::Memory]),
    Case::new(
        "import.write_of_read_only",
        "Where the exporter may only read.",
        |b| {
            let (_, taken) = both_mapped(b, AccessFlags::READ)?;
            Ok(Answer::code(&b.fill(taken, 42, 64)))
        },
    ),
]);

fn from_fd(b: &mut Bench, fd: i32) -> Answered {
    Ok(Answer::code(
        &b.import(ImportSource::Fd(fd), HandleTypes::POSIX_FD),
    ))
}

/// Maps one physical exported and imported, and returns both addresses; the first mapping has the
/// given access.
fn both_mapped(
    b: &mut Bench,
    giver: AccessFlags,
) -> Result<(DeviceAddress, DeviceAddress), DriverError> {
    let (handle, again, _fd) = imported(b)?;
    let (given, taken, size) = (b.addresses(1)?, b.addresses(1)?, b.granule());
    b.map(given, size, 0, handle, 0)?;
    b.map(taken, size, 0, again, 0)?;
    b.grant(given, 1, giver)?;
    b.grant(taken, 1, AccessFlags::READ_WRITE)?;
    Ok((given, taken))
}
