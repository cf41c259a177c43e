//! Memory pools: how a pool divides its memory, and pools of managed memory.

use cuvmm_driver::{
    AllocationType, DeviceAddress, DriverError, HandleTypes, Location, MemPoolAttribute,
    MemPoolHandle, MemPoolProps,
};

use super::mem_pools::{figures, plain};
use super::places::NOWHERE;
use super::sizes::{KIB, MIB};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Rule};

/// The number of small allocations of a case: 64 bytes each, which is 2.5 MB in pieces.
const MANY: usize = 5000;

pub(super) const CASES: &[Case] = &Rule::new("memory-pool-division").cases([
    Case::new(
        "mem_pool_parts.maximum_2",
        "Many small allocations of a pool with a maximum of 2 MiB.",
        |b| many(b, limited(b, 2 * MIB)),
    ),
    Case::new(
        "mem_pool_parts.maximum_2_posix_fd",
        "Many small allocations of a pool for export with a maximum of 2 MiB.",
        |b| many(b, shared(limited(b, 2 * MIB))),
    ),
    Case::new(
        "mem_pool_parts.maximum_64",
        "Many small allocations of a pool with a maximum of 64 MiB.",
        |b| many(b, limited(b, 64 * MIB)),
    ),
    Case::new(
        "mem_pool_parts.no_maximum",
        "Many small allocations of a pool without a maximum.",
        |b| many(b, plain(b)),
    ),
    Case::new(
        "mem_pool_parts.host_numa",
        "Many small allocations of a pool of the host's NUMA node 0.",
        |b| many(b, MemPoolProps::at(Location::host_numa(0))),
    ),
    Case::new(
        "mem_pool_parts.host_numa_posix_fd",
        "Many small allocations of a pool of the host's NUMA node 0, for export.",
        |b| many(b, shared(MemPoolProps::at(Location::host_numa(0)))),
    ),
    Case::new(
        "mem_pool_parts.host",
        "Many small allocations of a pool of host memory.",
        |b| many(b, MemPoolProps::at(Location::HOST)),
    ),
    Case::new(
        "mem_pool_parts.managed_device",
        "A pool of managed memory of a device.",
        |b| managed(b, Location::device(b.device())),
    ),
    Case::new(
        "mem_pool_parts.managed_nowhere",
        "A pool of managed memory without a location.",
        |b| managed(b, NOWHERE),
    ),
    Case::new(
        "mem_pool_parts.managed_host",
        "A pool of managed memory of the host.",
        |b| managed(b, Location::HOST),
    ),
    Case::new(
        "mem_pool_parts.managed_host_numa",
        "A pool of managed memory of the host's NUMA node 0.",
        |b| managed(b, Location::host_numa(0)),
    ),
    Case::new(
        "mem_pool_parts.managed_posix_fd",
        "A pool of managed memory, for export.",
        |b| {
            let props = shared(of_managed(Location::device(b.device())));
            Ok(Answer::code(&b.pool(&props)))
        },
    ),
    Case::new(
        "mem_pool_parts.managed_maximum",
        "A pool of managed memory with a maximum.",
        |b| {
            let props = MemPoolProps {
                maximum: 2 * MIB,
                ..of_managed(Location::device(b.device()))
            };
            Ok(Answer::code(&b.pool(&props)))
        },
    ),
    Case::new(
        "mem_pool_parts.managed_location",
        "The access of device and host to a pool of managed memory, and a grant to the host.",
        |b| {
            let device = Location::device(b.device());
            let pool = b.pool(&of_managed(device))?;
            let of_device = b.pool_access(pool, device);
            let of_host = b.pool_access(pool, Location::HOST);
            let figure = |access: &Result<cuvmm_driver::AccessFlags, DriverError>| match access {
                Ok(flags) => flags.0.to_string(),
                Err(_) => "refused".to_owned(),
            };
            Ok(Answer::named("device", &of_device)
                .with("value", figure(&of_device))
                .then("host", &of_host)
                .with("value", figure(&of_host)))
        },
    ),
    Case::new(
        "mem_pool_parts.managed_current",
        "A pool of managed memory as the current one.",
        |b| {
            let pool = b.pool(&of_managed(Location::device(b.device())))?;
            Ok(Answer::code(&b.set_current_pool(pool)))
        },
    ),
    Case::new(
        "mem_pool_parts.sizes",
        "How far allocations of several sizes begin behind the end of the one before.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            let mut end = b.alloc_from(pool, 1, stream)?.0 + 1;
            let mut answer = Answer::value("behind 1");
            for size in [513, 4096, 64 * KIB, 512] {
                let address = b.alloc_from(pool, size, stream)?;
                let gap = address.0.wrapping_sub(end) as i64;
                answer = answer.with(&size.to_string(), gap);
                end = address.0 + size;
            }
            Ok(answer)
        },
    ),
    Case::new(
        "mem_pool_parts.steps",
        "The figures after each of four allocations of 24 MiB, and after one of 8 MiB.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            let mut answer = Answer::value(figures(b, pool)?);
            for size in [24, 24, 24, 24, 8] {
                b.alloc_from(pool, size * MIB, stream)?;
                answer = answer.with(&size.to_string(), figures(b, pool)?);
            }
            Ok(answer)
        },
    ),
    Case::new(
        "mem_pool_parts.full",
        "The number of allocations of 64 KiB that a pool with a maximum of 1 byte gives.",
        |b| {
            let pool = b.pool(&limited(b, 1))?;
            let (given, last) = allocated(b, pool, 64 * KIB, MANY)?;
            Ok(Answer::value(given.len()).then("then", &last))
        },
    ),
    Case::new(
        "mem_pool_parts.again",
        "A small allocation is freed and allocated again on its stream: is the address the same?",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            b.alloc_from(pool, 64, stream)?;
            let first = b.alloc_from(pool, 64, stream)?;
            b.free_async(first, stream)?;
            let at_once = b.alloc_from(pool, 64, stream)?;
            b.free_async(at_once, stream)?;
            b.synchronize(stream)?;
            let waited = b.alloc_from(pool, 64, stream)?;
            Ok(Answer::value(bit(at_once == first)).with("waited", bit(waited == first)))
        },
    ),
    Case::new(
        "mem_pool_parts.one_stays",
        "The figures in bytes when all but one of many small allocations are freed, and all.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            let (given, _) = allocated(b, pool, 64, 100)?;
            for &address in &given[1..] {
                b.free_async(address, stream)?;
            }
            b.driver().context_synchronize(b.device())?;
            let answer = Answer::value(in_bytes(b, pool)?);
            b.free_async(given[0], stream)?;
            b.driver().context_synchronize(b.device())?;
            Ok(answer.with("none", in_bytes(b, pool)?))
        },
    ),
]);

fn limited(b: &Bench, maximum: u64) -> MemPoolProps {
    MemPoolProps {
        maximum,
        ..plain(b)
    }
}

fn shared(props: MemPoolProps) -> MemPoolProps {
    MemPoolProps {
        handle_types: HandleTypes::POSIX_FD,
        ..props
    }
}

fn of_managed(location: Location) -> MemPoolProps {
    MemPoolProps {
        allocation_type: AllocationType::MANAGED,
        ..MemPoolProps::at(location)
    }
}

/// Returns the bytes in use and reserved, and the maxima of both.
fn in_bytes(b: &Bench, pool: MemPoolHandle) -> Result<String, DriverError> {
    let get = |attribute| b.pool_attribute(pool, attribute);
    let used = get(MemPoolAttribute::USED_MEM_CURRENT)?;
    let reserved = get(MemPoolAttribute::RESERVED_MEM_CURRENT)?;
    let most = get(MemPoolAttribute::USED_MEM_HIGH)?;
    let most_reserved = get(MemPoolAttribute::RESERVED_MEM_HIGH)?;
    Ok(format!(
        "{used} of {reserved} most {most} of {most_reserved}"
    ))
}

/// Allocates until a pool refuses, or until there are enough, and returns the addresses and the
/// last outcome.
fn allocated(
    b: &mut Bench,
    pool: MemPoolHandle,
    size: u64,
    most: usize,
) -> Result<(Vec<DeviceAddress>, Result<(), DriverError>), DriverError> {
    let stream = b.stream()?;
    let mut given = Vec::new();
    while given.len() < most {
        match b.alloc_from(pool, size, stream) {
            Ok(address) => given.push(address),
            Err(error) => return Ok((given, Err(error))),
        }
    }
    Ok((given, Ok(())))
}

/// Allocates many pieces, and answers how many there were, how far they are apart and the figures,
/// also when they are freed.
fn many(b: &mut Bench, props: MemPoolProps) -> Answered {
    divided(b, &props, MANY)
}

fn managed(b: &mut Bench, location: Location) -> Answered {
    divided(b, &of_managed(location), 10)
}

fn divided(b: &mut Bench, props: &MemPoolProps, count: usize) -> Answered {
    let pool = match b.pool(props) {
        Ok(pool) => pool,
        refused => return Ok(Answer::code(&refused)),
    };
    let (given, last) = allocated(b, pool, 64, count)?;
    let apart = |two: &[DeviceAddress]| two[1].0.wrapping_sub(two[0].0) as i64;
    let mut steps: Vec<_> = given.windows(2).map(apart).collect();
    steps.dedup();
    let answer = Answer::value(given.len())
        .then("then", &last)
        .with("apart", format!("{steps:?}"))
        .with("figures", in_bytes(b, pool)?);
    let stream = b.stream()?;
    for address in given {
        b.free_async(address, stream)?;
    }
    b.driver().context_synchronize(b.device())?;
    Ok(answer.with("freed", in_bytes(b, pool)?))
}
