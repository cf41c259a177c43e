//! Creating physical memory: sizes, locations, types, and initial contents.

use cuvmm_driver::{
    AccessFlags, AllocationType, DeviceAddress, DriverError, HandleTypes, Location, LocationKind,
    Ordinal, PhysicalProps,
};

use super::places::{CURRENT_NODE, NOWHERE, place};
use super::sizes::{KIB, MIB, TIB};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

pub(super) const SIZE: &[Case] = &Rule::new("create-size").cases([
    Case::new("create.ok", "One granule of plain device memory.", |b| {
        sized(b, 2 * MIB)
    }),
    Case::new("create.size_0", "No bytes.", |b| sized(b, 0)),
    Case::new("create.size_1", "One byte.", |b| sized(b, 1)),
    Case::new("create.size_64K", "64 KiB is less than a granule.", |b| {
        sized(b, 64 * KIB)
    }),
    Case::new("create.size_1M", "Half a granule.", |b| sized(b, MIB)),
    Case::new("create.size_3M", "One and a half granules.", |b| {
        sized(b, 3 * MIB)
    }),
    Case::new("create.size_1T", "1 TiB, more than any device has.", |b| {
        sized(b, TIB)
    }),
    Case::new(
        "create.size_max_aligned",
        "The largest multiple of a granule.",
        |b| sized(b, u64::MAX - (2 * MIB - 1)),
    ),
]);

pub(super) const CREATE_FLAGS: &[Case] = &Rule::new("create-flags").cases([
    Case::new("create.flags_1", "Flags must be 0.", |b| {
        let (size, props) = (b.granule(), b.props());
        Ok(Answer::code(&b.create(size, &props, 1)))
    }),
    Case::new(
        "create.handles_differ",
        "Two physicals have different handles.",
        |b| {
            let (first, second) = (b.physical(1)?, b.physical(1)?);
            Ok(Answer::value(bit(first != second)))
        },
    ),
]);

pub(super) const PLACE: &[Case] = &Rule::new("create-location").cases([
    Case::new("create.device_-1", "Device -1.", |b| {
        made(b, PhysicalProps::device(Ordinal(-1)))
    }),
    Case::new(
        "create.device_99",
        "Device 99, which does not exist.",
        |b| made(b, PhysicalProps::device(Ordinal(99))),
    ),
    Case::new("create.loc_invalid", "Location type 0.", |b| {
        made(b, PhysicalProps::at(NOWHERE))
    }),
    Case::new(
        "create.loc_bad_99",
        "Location type 99 does not exist.",
        |b| made(b, PhysicalProps::at(place(LocationKind(99), 0))),
    ),
    Case::new("create.loc_host", "Host memory.", |b| {
        made(b, PhysicalProps::at(Location::HOST))
    }),
    Case::new(
        "create.loc_host_numa0",
        "Memory of host NUMA node 0.",
        |b| made(b, PhysicalProps::at(Location::host_numa(0))),
    ),
    Case::new(
        "create.loc_host_numa99",
        "Memory of a node that does not exist.",
        |b| made(b, PhysicalProps::at(Location::host_numa(99))),
    ),
    Case::new(
        "create.loc_host_numa_current",
        "Memory of the thread's own node.",
        |b| made(b, PhysicalProps::at(CURRENT_NODE)),
    ),
]);

pub(super) const TYPE: &[Case] = &Rule::new("create-type").cases([
    Case::new(
        "create.type_invalid",
        "Allocation type 0, which is invalid.",
        |b| typed(b, AllocationType::INVALID),
    ),
    Case::new(
        "create.type_2_managed",
        "Managed memory is not created this way.",
        |b| typed(b, AllocationType::MANAGED),
    ),
]);

pub(super) const CREATE_HANDLE_TYPES: &[Case] = &Rule::new("create-handle-types").cases([
    Case::new(
        "create.handle_posix_fd",
        "Exportable as a file descriptor.",
        |b| with_handles(b, HandleTypes::POSIX_FD),
    ),
    Case::new("create.handle_win32", "A Windows handle on Linux.", |b| {
        with_handles(b, HandleTypes::WIN32)
    }),
    Case::new("create.handle_fabric", "A fabric handle.", |b| {
        with_handles(b, HandleTypes::FABRIC)
    }),
    Case::new(
        "create.handle_bad_0x40",
        "An unknown handle type bit.",
        |b| with_handles(b, HandleTypes::from_bits_retain(0x40)),
    ),
]);

pub(super) const EXTRAS: &[Case] = &Rule::new("create-extras").cases([
    Case::new(
        "create.compressed",
        "Compressible memory; is it granted?",
        |b| {
            let props = PhysicalProps {
                compression: 1,
                ..b.props()
            };
            let outcome = b.create(b.granule(), &props, 0);
            let answer = Answer::code(&outcome);
            match outcome {
                Ok(handle) => Ok(answer.with("got", b.physical_props(handle)?.compression)),
                Err(_) => Ok(answer),
            }
        },
    ),
    Case::new("create.gdr", "Memory for RDMA devices.", |b| {
        made(
            b,
            PhysicalProps {
                rdma_capable: true,
                ..b.props()
            },
        )
    }),
    Case::new(
        "create.usage_bad",
        "A usage bit that does not exist.",
        |b| {
            made(
                b,
                PhysicalProps {
                    usage: 0x80,
                    ..b.props()
                },
            )
        },
    ),
]);

pub(super) const ZERO: &[Case] = &Rule::new("fresh-is-zero").needing(&[Need::Memory]).cases([
    Case::new(
        "create.reads_zero",
        "Memory of a new physical, every byte.",
        |b| {
            let (address, _) = b.open(1)?;
            Ok(Answer::value(bit(all_zero(b, address)?)))
        },
    ),
    Case::new(
        "create.recycled_reads_zero",
        "After filling and releasing others.",
        recycled,
    ),
]);

pub(super) const ACCOUNTING: &[Case] = &Rule::new("accounting").cases([
    Case::new(
        "meminfo.create_512M_takes_MiB",
        "Creating 512 MiB takes them at once.",
        |b| {
            let before = b.free_memory()?;
            let props = b.props();
            b.create(512 * MIB, &props, 0)?;
            Ok(Answer::value(before.saturating_sub(b.free_memory()?) / MIB))
        },
    ),
    Case::new(
        "meminfo.release_returns_MiB",
        "Releasing returns them.",
        |b| {
            let props = b.props();
            let handle = b.create(512 * MIB, &props, 0)?;
            let before = b.free_memory()?;
            b.release(handle)?;
            Ok(Answer::value(b.free_memory()?.saturating_sub(before) / MIB))
        },
    ),
    Case::new(
        "meminfo.failed_create_takes_MiB",
        "A refused create takes nothing.",
        |b| {
            let before = b.free_memory()?;
            let props = b.props();
            let outcome = b.create(TIB, &props, 0);
            let taken = before.saturating_sub(b.free_memory()?) / MIB;
            Ok(Answer::value(taken).then("outcome", &outcome))
        },
    ),
]);

fn sized(b: &mut Bench, size: u64) -> Answered {
    let props = b.props();
    Ok(Answer::code(&b.create(size, &props, 0)))
}

fn made(b: &mut Bench, props: PhysicalProps) -> Answered {
    Ok(Answer::code(&b.create(2 * MIB, &props, 0)))
}

fn typed(b: &mut Bench, allocation_type: AllocationType) -> Answered {
    let props = PhysicalProps {
        allocation_type,
        ..b.props()
    };
    made(b, props)
}

fn with_handles(b: &mut Bench, handle_types: HandleTypes) -> Answered {
    let props = PhysicalProps {
        handle_types,
        ..b.props()
    };
    made(b, props)
}

fn all_zero(b: &Bench, address: DeviceAddress) -> Result<bool, DriverError> {
    let mut bytes = vec![0xEE; b.granule() as usize];
    b.read_into(address, &mut bytes)?;
    Ok(bytes.iter().all(|byte| *byte == 0))
}

/// Fills eight physicals, releases them, and reads as many new ones.
fn recycled(b: &mut Bench) -> Answered {
    let (base, size) = (b.addresses(8)?, b.granule());
    for _ in 0..2 {
        let mut handles = Vec::new();
        for index in 0..8 {
            handles.push(b.place(b.at(base, index), 1)?);
        }
        b.grant(base, 8, AccessFlags::READ_WRITE)?;
        for index in 0..8 {
            if !all_zero(b, b.at(base, index))? {
                return Ok(Answer::value(0));
            }
        }
        b.fill(base, 0x5A, 8 * size)?;
        b.driver().context_synchronize(b.device())?;
        b.unmap(base, 8 * size)?;
        for handle in handles {
            b.release(handle)?;
        }
    }
    Ok(Answer::value(1))
}
