//! Memory pools: properties, attributes, access, the current pool, the end.

use cuvmm_driver::{
    AccessDesc, AccessFlags, AllocationType, DeviceAddress, DriverError, HandleTypes, Location,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, Ordinal, PointerAttribute, StreamHandle,
};

use super::places::{CURRENT_NODE, NOWHERE, open_to};
use super::sizes::MIB;
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

const TWO: &[Need] = &[Need::TwoDevices];

/// The size of allocations: more than a pool obtains at once for small ones.
pub(super) const PART: u64 = 64 * MIB;

pub(super) const CREATE: &[Case] = &Rule::new("memory-pools").cases([
    Case::new("mem_pool.ok", "Created and destroyed.", |b| {
        let pool = b.pool(&plain(b))?;
        Ok(Answer::value("created").then("destroy", &b.destroy_pool(pool)))
    }),
    Case::new("mem_pool.no_such_device", "Memory of device 99.", |b| {
        created(b, MemPoolProps::device(Ordinal(99)))
    }),
    Case::new("mem_pool.no_location", "Memory nowhere.", |b| {
        created(b, MemPoolProps::at(NOWHERE))
    }),
    Case::new("mem_pool.host", "Memory of the host.", |b| {
        created(b, MemPoolProps::at(Location::HOST))
    }),
    Case::new(
        "mem_pool.host_numa",
        "Memory of the host's NUMA node 0.",
        |b| created(b, MemPoolProps::at(Location::host_numa(0))),
    ),
    Case::new(
        "mem_pool.host_numa_99",
        "Memory of a NUMA node that does not exist.",
        |b| created(b, MemPoolProps::at(Location::host_numa(99))),
    ),
    Case::new(
        "mem_pool.host_numa_current",
        "Memory of the current NUMA node.",
        |b| created(b, MemPoolProps::at(CURRENT_NODE)),
    ),
    Case::new(
        "mem_pool.host_shareable",
        "Memory of the host, for export.",
        |b| {
            let props = MemPoolProps {
                handle_types: HandleTypes::POSIX_FD,
                ..MemPoolProps::at(Location::HOST)
            };
            created(b, props)
        },
    ),
    Case::new("mem_pool.posix_fd", "For export.", |b| {
        typed(b, HandleTypes::POSIX_FD)
    }),
    Case::new("mem_pool.fabric", "As fabric handles.", |b| {
        typed(b, HandleTypes::FABRIC)
    }),
    Case::new("mem_pool.win32", "As Win32 handles.", |b| {
        typed(b, HandleTypes::WIN32)
    }),
    Case::new("mem_pool.type_0x40", "As an unknown type.", |b| {
        typed(b, HandleTypes::from_bits_retain(0x40))
    }),
    Case::new(
        "mem_pool.allocation_type_0",
        "With no allocation type.",
        |b| {
            let props = MemPoolProps {
                allocation_type: AllocationType::INVALID,
                ..plain(b)
            };
            created(b, props)
        },
    ),
    Case::new(
        "mem_pool.maximum",
        "How many quarters of its maximum a pool gives.",
        |b| {
            let (pool, stream) = (capped(b)?, b.stream()?);
            for given in 0..8 {
                let memory = b.alloc_from(pool, PART, stream);
                if memory.is_err() {
                    return Ok(Answer::value(given).then("then", &memory));
                }
            }
            Ok(Answer::value("all"))
        },
    ),
    Case::new(
        "mem_pool.maximum_in_one",
        "All of its maximum at once, and more.",
        |b| {
            let (pool, stream) = (capped(b)?, b.stream()?);
            let more = b.alloc_from(pool, 5 * PART, stream);
            let all = b.alloc_from(pool, 4 * PART, stream);
            Ok(Answer::named("more", &more).then("all", &all))
        },
    ),
    Case::new(
        "mem_pool.maximum_1",
        "An allocation of 2 MiB from a pool with a maximum of one byte.",
        |b| {
            let props = MemPoolProps {
                maximum: 1,
                ..plain(b)
            };
            let (pool, stream) = (b.pool(&props)?, b.stream()?);
            Ok(Answer::code(&b.alloc_from(pool, 2 * MIB, stream)))
        },
    ),
    Case::new("mem_pool.size_0", "An allocation of 0 bytes.", |b| {
        let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
        Ok(Answer::code(&b.alloc_from(pool, 0, stream)))
    }),
    Case::new(
        "mem_pool.destroy_used",
        "Destroyed while memory is in use, which is then filled and freed.",
        |b| {
            let (pool, stream, address) = allocated(b)?;
            let destroyed = b.destroy_pool(pool);
            let filled = b.fill_async(address, 1, PART, stream);
            let freed = b.free_async(address, stream);
            Ok(Answer::code(&destroyed)
                .then("fill", &filled)
                .then("free", &freed)
                .then("sync", &b.synchronize(stream)))
        },
    ),
    Case::new("mem_pool.destroy_twice", "Destroyed twice.", |b| {
        let pool = b.pool(&plain(b))?;
        b.destroy_pool(pool)?;
        Ok(Answer::code(&b.destroy_pool(pool)))
    })
    .isolated(),
    Case::new(
        "mem_pool.destroyed_used",
        "An allocation from a destroyed pool that still has one.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            b.alloc_from(pool, PART, stream)?;
            b.destroy_pool(pool)?;
            let figure = b.pool_attribute(pool, MemPoolAttribute::USED_MEM_CURRENT);
            let memory = b.alloc_from(pool, PART, stream);
            Ok(Answer::named("attribute", &figure).then("allocate", &memory))
        },
    )
    .isolated(),
    Case::new("mem_pool.destroy_null", "The null handle.", |b| {
        Ok(Answer::code(&b.destroy_pool(MemPoolHandle::NULL)))
    })
    .isolated(),
    Case::new(
        "mem_pool.destroy_default",
        "The default pool of the device.",
        |b| {
            let pool = b.driver().default_mem_pool(b.device())?;
            Ok(Answer::code(&b.destroy_pool(pool)))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool.pointer",
        "What the attributes of an address say of its pool.",
        |b| {
            let (pool, _, address) = allocated(b)?;
            let ask = |what| b.pointer_attribute(address, what);
            let handle = ask(PointerAttribute::MEMPOOL_HANDLE)?;
            Ok(Answer::value(bit(handle == pool.0))
                .with("type", ask(PointerAttribute::MEMORY_TYPE)?)
                .with("size", ask(PointerAttribute::RANGE_SIZE)?)
                .with("handle types", ask(PointerAttribute::ALLOWED_HANDLE_TYPES)?))
        },
    ),
]);

pub(super) const ATTRIBUTES: &[Case] = &Rule::new("memory-pool-attributes").cases([
    Case::new(
        "mem_pool_attribute.defaults",
        "The settings of a new pool.",
        |b| {
            let pool = b.pool(&plain(b))?;
            let get = |attribute| b.pool_attribute(pool, MemPoolAttribute(attribute));
            Ok(Answer::value(get(1)?)
                .with("opportunistic", get(2)?)
                .with("internal", get(3)?)
                .with("threshold", get(4)?))
        },
    ),
    Case::new(
        "mem_pool_attribute.figures",
        "The figures after an allocation of 64 MiB, after its free, after a synchronization.",
        |b| {
            let (pool, stream, address) = allocated(b)?;
            let answer = Answer::value(figures(b, pool)?);
            b.free_async(address, stream)?;
            let answer = answer.with("freed", figures(b, pool)?);
            b.synchronize(stream)?;
            Ok(answer.with("waited", figures(b, pool)?))
        },
    ),
    Case::new(
        "mem_pool_attribute.one_byte",
        "The figures in bytes after an allocation of one byte.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            b.alloc_from(pool, 1, stream)?;
            let used = b.pool_attribute(pool, MemPoolAttribute::USED_MEM_CURRENT)?;
            let reserved = b.pool_attribute(pool, MemPoolAttribute::RESERVED_MEM_CURRENT)?;
            Ok(Answer::value(used).with("reserved", reserved))
        },
    ),
    Case::new(
        "mem_pool_attribute.int_5",
        "A rule of reuse that is set to 5.",
        |b| {
            let pool = b.pool(&plain(b))?;
            let rule = MemPoolAttribute::REUSE_ALLOW_OPPORTUNISTIC;
            let set = b.set_pool_attribute(pool, rule, 5);
            Ok(Answer::code(&set).with("value", b.pool_attribute(pool, rule)?))
        },
    ),
    Case::new(
        "mem_pool_attribute.high_reset",
        "The maximum of the bytes in use, set to 0 while 64 MiB are in use, after 128.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            b.alloc_from(pool, PART, stream)?;
            let address = b.alloc_from(pool, PART, stream)?;
            b.free_async(address, stream)?;
            b.synchronize(stream)?;
            let high = MemPoolAttribute::USED_MEM_HIGH;
            let before = b.pool_attribute(pool, high)? / MIB;
            let set = b.set_pool_attribute(pool, high, 0);
            let after = b.pool_attribute(pool, high)? / MIB;
            Ok(Answer::code(&set)
                .with("before", before)
                .with("after", after))
        },
    ),
    Case::new(
        "mem_pool_attribute.high_1",
        "The maximum of the bytes in use, set to 1.",
        |b| set(b, MemPoolAttribute::USED_MEM_HIGH, 1),
    ),
    Case::new(
        "mem_pool_attribute.current_0",
        "The bytes in use, set to 0.",
        |b| set(b, MemPoolAttribute::USED_MEM_CURRENT, 0),
    ),
    Case::new(
        "mem_pool_attribute.unknown",
        "An attribute that does not exist.",
        |b| set(b, MemPoolAttribute(99), 0),
    ),
    Case::new(
        "mem_pool_access.resident",
        "The access of the memory's own device, and taking it away.",
        |b| {
            let pool = b.pool(&plain(b))?;
            let own = Location::device(b.device());
            let before = b.pool_access(pool, own)?.0;
            let none = AccessDesc {
                location: own,
                flags: AccessFlags::NONE,
            };
            let taken = b.set_pool_access(pool, &[none]);
            Ok(Answer::value(before).then("none", &taken))
        },
    ),
    Case::new(
        "mem_pool_access.read_only",
        "Reading alone, for the memory's own device.",
        |b| granted(b, Location::device(b.device()), AccessFlags::READ),
    ),
    Case::new(
        "mem_pool_access.none_given",
        "Access for no location.",
        |b| {
            let pool = b.pool(&plain(b))?;
            Ok(Answer::code(&b.set_pool_access(pool, &[])))
        },
    ),
    Case::new(
        "mem_pool_access.no_such_device",
        "Access for device 99.",
        |b| {
            let far = Location::device(Ordinal(99));
            granted(b, far, AccessFlags::READ_WRITE)
        },
    ),
    Case::new(
        "mem_pool_access.host",
        "Access of the host to device memory.",
        |b| granted(b, Location::HOST, AccessFlags::READ_WRITE),
    ),
    Case::new(
        "mem_pool_access.of_host_memory",
        "The device's access to a pool of host memory, before and after a grant.",
        |b| {
            let pool = b.pool(&MemPoolProps::at(Location::host_numa(0)))?;
            let own = Location::device(b.device());
            let before = b.pool_access(pool, own)?.0;
            let set = b.set_pool_access(pool, &[open_to(own)]);
            Ok(Answer::code(&set)
                .with("before", before)
                .with("after", b.pool_access(pool, own)?.0))
        },
    ),
    Case::new(
        "mem_pool_access.peer",
        "A peer fills memory before it has access, and with access.",
        |b| {
            let (pool, stream, address) = allocated(b)?;
            b.synchronize(stream)?;
            let peer = Ordinal(1);
            let before = b.fill_from(peer, address, 1, 64);
            let set = b.set_pool_access(pool, &[open_to(Location::device(peer))]);
            let after = b.fill_from(peer, address, 1, 64);
            let sync = b.driver().context_synchronize(peer);
            Ok(Answer::named("before", &before)
                .then("set", &set)
                .then("after", &after)
                .then("sync", &sync))
        },
    )
    .needing(TWO),
]);

pub(super) const CURRENT: &[Case] = &Rule::new("current-memory-pool").cases([
    Case::new(
        "mem_pool_current.default",
        "Is the default pool the current one?",
        |b| {
            let default = b.driver().default_mem_pool(b.device())?;
            let current = b.driver().current_mem_pool(b.device())?;
            Ok(Answer::value(bit(default == current)))
        },
    ),
    Case::new(
        "mem_pool_current.maximum",
        "`cuMemAllocAsync` beyond the maximum of the current pool.",
        |b| {
            let (pool, stream) = (capped(b)?, b.stream()?);
            b.set_current_pool(pool)?;
            let within = b.alloc_async(3 * PART, stream);
            let beyond = b.alloc_async(2 * PART, stream);
            Ok(Answer::named("within", &within).then("beyond", &beyond))
        },
    ),
    Case::new(
        "mem_pool_current.destroyed",
        "The current pool after the current one is destroyed.",
        |b| {
            let pool = b.pool(&plain(b))?;
            b.set_current_pool(pool)?;
            let destroyed = b.destroy_pool(pool);
            let default = b.driver().default_mem_pool(b.device())?;
            let current = b.driver().current_mem_pool(b.device())?;
            Ok(Answer::code(&destroyed).with("default", bit(default == current)))
        },
    ),
    Case::new(
        "mem_pool_current.host",
        "A pool of host memory as the current one.",
        |b| {
            let pool = b.pool(&MemPoolProps::at(Location::host_numa(0)))?;
            Ok(Answer::code(&b.set_current_pool(pool)))
        },
    ),
    Case::new(
        "mem_pool_current.null",
        "The null handle as the current pool.",
        |b| Ok(Answer::code(&b.set_current_pool(MemPoolHandle::NULL))),
    )
    .isolated(),
]);

pub(super) fn plain(b: &Bench) -> MemPoolProps {
    MemPoolProps::device(b.device())
}

/// Creates a plain pool and a stream, and allocates a part.
pub(super) fn allocated(
    b: &mut Bench,
) -> Result<(MemPoolHandle, StreamHandle, DeviceAddress), DriverError> {
    let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
    let address = b.alloc_from(pool, PART, stream)?;
    Ok((pool, stream, address))
}

/// Creates a pool with a maximum of four parts.
pub(super) fn capped(b: &mut Bench) -> Result<MemPoolHandle, DriverError> {
    let props = MemPoolProps {
        maximum: 4 * PART,
        ..plain(b)
    };
    b.pool(&props)
}

/// Returns the bytes in use and reserved, in MiB.
pub(super) fn figures(b: &Bench, pool: MemPoolHandle) -> Result<String, DriverError> {
    let used = b.pool_attribute(pool, MemPoolAttribute::USED_MEM_CURRENT)?;
    let reserved = b.pool_attribute(pool, MemPoolAttribute::RESERVED_MEM_CURRENT)?;
    Ok(format!("{} of {}", used / MIB, reserved / MIB))
}

fn granted(b: &mut Bench, location: Location, flags: AccessFlags) -> Answered {
    let pool = b.pool(&plain(b))?;
    let outcome = b.set_pool_access(pool, &[AccessDesc { location, flags }]);
    Ok(Answer::code(&outcome))
}

fn created(b: &mut Bench, props: MemPoolProps) -> Answered {
    Ok(Answer::code(&b.pool(&props)))
}

fn typed(b: &mut Bench, handle_types: HandleTypes) -> Answered {
    let props = MemPoolProps {
        handle_types,
        ..plain(b)
    };
    created(b, props)
}

fn set(b: &mut Bench, attribute: MemPoolAttribute, value: u64) -> Answered {
    let pool = b.pool(&plain(b))?;
    Ok(Answer::code(&b.set_pool_attribute(pool, attribute, value)))
}
