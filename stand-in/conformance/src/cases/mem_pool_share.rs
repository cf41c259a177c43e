//! Memory pools that are shared: export and import of pools and of their allocations.
//!
//! One process plays both parts, as far as the driver lets it.

use std::os::fd::AsRawFd as _;

use cuvmm_driver::{
    AccessFlags, CUresult, Call, DeviceAddress, DriverError, Exported, HandleTypes, ImportSource,
    Location, MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, StreamHandle,
};

use super::mem_pools::{PART, figures, plain};
use crate::answer::code;
use crate::{Answer, Bench, Case, Need, Rule};

const FD: HandleTypes = HandleTypes::POSIX_FD;
const MEMORY: &[Need] = &[Need::Memory];

pub(super) const CASES: &[Case] = &Rule::new("memory-pool-sharing").cases([
    Case::new(
        "mem_pool_share.ok",
        "A pool and an allocation, exported and imported.",
        |b| {
            let pool = shareable(b)?;
            let (address, _) = part(b, pool)?;
            let exported = b.export_pool(pool, FD, 0);
            let ticket = b.driver().mem_pool_export_pointer(b.device(), address);
            let answer = Answer::named("pool", &exported).then("pointer", &ticket);
            let (Ok(Exported::Fd(fd)), Ok(ticket)) = (exported, ticket) else {
                return Ok(answer);
            };
            let imported = b.import_pool(ImportSource::Fd(fd.as_raw_fd()), FD, 0);
            let answer = answer.then("import", &imported);
            let Ok(imported) = imported else {
                return Ok(answer);
            };
            let there = b.import_pointer(imported, &ticket);
            let answer = answer.then("import pointer", &there);
            let Ok(there) = there else {
                return Ok(answer);
            };
            Ok(answer.then("free", &b.free(there)))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.value",
        "The exporter's bytes, read through the importer's address.",
        |b| {
            let shared = share(b)?;
            Ok(Answer::value(code(&b.read(shared.there))).with(
                "value",
                b.read(shared.there).map_or(-1, |bytes| bytes[0].into()),
            ))
        },
    )
    .needing(MEMORY)
    .isolated(),
    Case::new(
        "mem_pool_share.allocate",
        "An allocation from an imported pool.",
        |b| {
            let shared = share(b)?;
            let memory = b.alloc_from(shared.imported, PART, shared.stream);
            Ok(Answer::code(&memory))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.current",
        "An imported pool as the current one.",
        |b| {
            let shared = share(b)?;
            Ok(Answer::code(&b.set_current_pool(shared.imported)))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.figures",
        "The figures of an imported pool with one allocation, and its release threshold.",
        |b| {
            let shared = share(b)?;
            let ask = |attribute| b.pool_attribute(shared.imported, attribute);
            let used = ask(MemPoolAttribute::USED_MEM_CURRENT);
            let reserved = ask(MemPoolAttribute::RESERVED_MEM_CURRENT);
            let threshold = ask(MemPoolAttribute::RELEASE_THRESHOLD);
            Ok(Answer::named("used", &used)
                .then("reserved", &reserved)
                .then("threshold", &threshold))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.access",
        "The device's access to an imported pool.",
        |b| {
            let shared = share(b)?;
            let access = b.pool_access(shared.imported, Location::device(b.device()));
            Ok(Answer::value(access.unwrap_or(AccessFlags(-1)).0))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.trim",
        "Whether a pool for export releases freed memory: at a synchronization, at a trim.",
        |b| {
            let pool = shareable(b)?;
            let (address, stream) = part(b, pool)?;
            b.free_async(address, stream)?;
            b.synchronize(stream)?;
            let waited = figures(b, pool)?;
            let trimmed = b.trim_pool(pool, 0);
            Ok(Answer::code(&trimmed)
                .with("waited", waited)
                .with("trimmed", figures(b, pool)?))
        },
    ),
    Case::new(
        "mem_pool_share.not_requested",
        "Export of a pool that was not created for it.",
        |b| {
            let pool = b.pool(&plain(b))?;
            Ok(Answer::code(&b.export_pool(pool, FD, 0)))
        },
    ),
    Case::new("mem_pool_share.flags_1", "Flags must be 0.", |b| {
        let pool = shareable(b)?;
        Ok(Answer::code(&b.export_pool(pool, FD, 1)))
    }),
    Case::new(
        "mem_pool_share.pointer_not_requested",
        "Export of an allocation of a pool that was not created for it.",
        |b| {
            let pool = b.pool(&plain(b))?;
            let (address, _) = part(b, pool)?;
            let ticket = b.driver().mem_pool_export_pointer(b.device(), address);
            Ok(Answer::code(&ticket))
        },
    ),
    Case::new(
        "mem_pool_share.pointer_before_pool",
        "Export of an allocation of a pool that was never exported.",
        |b| {
            let pool = shareable(b)?;
            let (address, _) = part(b, pool)?;
            let ticket = b.driver().mem_pool_export_pointer(b.device(), address);
            Ok(Answer::code(&ticket))
        },
    ),
    Case::new(
        "mem_pool_share.pointer_interior",
        "Export of an allocation by an address in its middle.",
        |b| {
            let pool = shareable(b)?;
            let (address, _) = part(b, pool)?;
            drop(b.export_pool(pool, FD, 0)?);
            let within = b.at(address, 1);
            let ticket = b.driver().mem_pool_export_pointer(b.device(), within);
            Ok(Answer::code(&ticket))
        },
    ),
    Case::new(
        "mem_pool_share.reexport",
        "Export of an imported pool.",
        |b| {
            let shared = share(b)?;
            Ok(Answer::code(&b.export_pool(shared.imported, FD, 0)))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.dev_null",
        "Import of a descriptor of another file.",
        |b| {
            let Ok(null) = std::fs::File::open("/dev/null") else {
                return Ok(Answer::value("there is no /dev/null"));
            };
            let imported = b.import_pool(ImportSource::Fd(null.as_raw_fd()), FD, 0);
            Ok(Answer::code(&imported))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.wrong_ticket",
        "Import of an allocation by data that is all zero.",
        |b| {
            let shared = share(b)?;
            let there = b.import_pointer(shared.imported, &MemPoolTicket([0; 64]));
            Ok(Answer::code(&there))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.own_pool",
        "Import of an allocation through the exporter's own pool.",
        |b| {
            let shared = share(b)?;
            let there = b.import_pointer(shared.pool, &shared.ticket);
            Ok(Answer::code(&there))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_share.peak_of_importer",
        "The maximum of the bytes in use of an imported pool, read and set to 0.",
        |b| {
            let shared = share(b)?;
            let high = MemPoolAttribute::USED_MEM_HIGH;
            let read = b.pool_attribute(shared.imported, high);
            let set = b.set_pool_attribute(shared.imported, high, 0);
            Ok(Answer::named("read", &read).then("set", &set))
        },
    )
    .isolated(),
]);

/// A pool and one allocation of it, exported and imported.
struct Shared {
    pool: MemPoolHandle,
    ticket: MemPoolTicket,
    imported: MemPoolHandle,
    there: DeviceAddress,
    stream: StreamHandle,
}

fn shareable(b: &mut Bench) -> Result<MemPoolHandle, DriverError> {
    let props = MemPoolProps {
        handle_types: FD,
        ..plain(b)
    };
    b.pool(&props)
}

/// Allocates a part and fills it, and waits for that.
fn part(b: &mut Bench, pool: MemPoolHandle) -> Result<(DeviceAddress, StreamHandle), DriverError> {
    let stream = b.stream()?;
    let address = b.alloc_from(pool, PART, stream)?;
    b.fill_async(address, 77, 64, stream)?;
    b.synchronize(stream)?;
    Ok((address, stream))
}

fn share(b: &mut Bench) -> Result<Shared, DriverError> {
    let pool = shareable(b)?;
    let (address, stream) = part(b, pool)?;
    let Exported::Fd(fd) = b.export_pool(pool, FD, 0)? else {
        let call = Call::MemPoolExportToShareableHandle;
        return Err(DriverError::new(call, CUresult::CUDA_ERROR_UNKNOWN));
    };
    let ticket = b.driver().mem_pool_export_pointer(b.device(), address)?;
    let imported = b.import_pool(ImportSource::Fd(fd.as_raw_fd()), FD, 0)?;
    let there = b.import_pointer(imported, &ticket)?;
    Ok(Shared {
        pool,
        ticket,
        imported,
        there,
        stream,
    })
}
