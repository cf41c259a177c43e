//! Managed memory: allocating, accessing, moving. A few MiB only: too much of it can hang a shared
//! GPU.

use cuvmm_driver::{
    DeviceAddress, DeviceAttribute, DriverError, Location, Ordinal, RangeAttribute, StreamHandle,
};

use super::advice::place_told;
use super::host_memory::cpu;
use super::places::{CURRENT_NODE, NOWHERE};
use super::sizes::MIB;
use super::waits::beside;
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

const GLOBAL: u32 = 1;
const HOST: u32 = 2;
const SIZE: u64 = 4 * MIB;
/// The host's page size is this or larger, and then the answers show it.
const PAGE: u64 = 4096;

const LAST: [RangeAttribute; 2] = [
    RangeAttribute::LAST_PREFETCH_LOCATION_TYPE,
    RangeAttribute::LAST_PREFETCH_LOCATION_ID,
];

pub(super) const ALLOC: &[Case] = &Rule::new("managed").cases([
    Case::new(
        "managed.ok",
        "A few MiB, accessible to all processors.",
        |b| made(b, SIZE, GLOBAL),
    ),
    Case::new("managed.host_flag", "Accessible to the host first.", |b| {
        made(b, SIZE, HOST)
    }),
    Case::new("managed.size_0", "No bytes.", |b| made(b, 0, GLOBAL)),
    Case::new("managed.flags_0", "Neither flag.", |b| made(b, SIZE, 0)),
    Case::new("managed.flags_both", "Both flags.", |b| {
        made(b, SIZE, GLOBAL | HOST)
    }),
    Case::new("managed.free", "Allocated and freed.", |b| {
        let address = b.managed(SIZE, GLOBAL)?;
        Ok(Answer::code(&b.free(address)))
    }),
    Case::new("managed.free_twice", "Freed twice.", |b| {
        let address = b.managed(SIZE, GLOBAL)?;
        b.free(address)?;
        Ok(Answer::code(&b.free(address)))
    }),
    Case::new("managed.memset", "Filled by the device.", |b| {
        let address = b.managed(SIZE, GLOBAL)?;
        Ok(Answer::code(&b.fill(address, 3, SIZE)))
    })
    .warmed_by(touched),
    Case::new(
        "managed.cpu_reads",
        "Written by the device, read by the CPU.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            b.fill(address, 3, SIZE)?;
            cpu(b, address.0)
        },
    )
    .needing(&[Need::Memory])
    .warmed_by(touched),
    Case::new(
        "managed.device_reads_cpu",
        "Written by the CPU, read by the device.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            if !b.cpu_writes(address, 5) {
                return Ok(Answer::value("no memory"));
            }
            Ok(Answer::value(b.read(address)?[0]))
        },
    )
    .needing(&[Need::Memory])
    .warmed_by(touched),
    Case::new(
        "managed.cpu_writes_beside_kernel",
        "The CPU writes while a kernel runs that uses other memory.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            beside(b, |b| {
                b.cpu_writes(address, 5);
                Ok(())
            })
        },
    )
    .needing(&[Need::Memory, Need::Kernels])
    .warmed_by(touched),
    Case::new(
        "managed.page_aligned",
        "Is the address of an odd size a multiple of 4 KiB?",
        |b| {
            b.managed(12345, GLOBAL)?;
            let address = b.managed(1, GLOBAL)?;
            Ok(Answer::value(bit(address.0.is_multiple_of(4096))))
        },
    ),
    Case::new(
        "managed.attributes",
        "The attributes that the driver reports.",
        |b| {
            let ask = |attribute| b.driver().device_attribute(b.device(), attribute);
            let beside = ask(DeviceAttribute::CONCURRENT_MANAGED_ACCESS)?;
            let answer = Answer::value(ask(DeviceAttribute::MANAGED_MEMORY)?);
            Ok(answer.with("beside the host", beside))
        },
    ),
    Case::new(
        "managed.other_device",
        "Filled by a device other than the allocating one.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let filled = b.fill_from(Ordinal(1), address, 3, SIZE);
            let sync = b.driver().context_synchronize(Ordinal(1));
            Ok(Answer::code(&filled).then("sync", &sync))
        },
    )
    .needing(&[Need::TwoDevices]),
]);

pub(super) const MOVES: &[Case] = &Rule::new("managed-moves").cases([
    Case::new("managed.prefetch_dev", "Moved to the device.", |b| {
        let device = Location::device(b.device());
        moved(b, device)
    })
    .warmed_by(touched),
    Case::new("managed.prefetch_host", "Moved to the host.", |b| {
        moved(b, Location::HOST)
    })
    .warmed_by(touched),
    Case::new(
        "managed.prefetch_vmm_ptr",
        "A mapping is not managed.",
        |b| {
            let (address, _) = b.open(1)?;
            let device = Location::device(b.device());
            Ok(Answer::code(&b.prefetch(address, b.granule(), device)))
        },
    ),
    Case::new(
        "managed.prefetch_numa_0",
        "Moved to a node of the host.",
        |b| moved(b, Location::host_numa(0)),
    )
    .warmed_by(touched),
    Case::new(
        "managed.prefetch_numa_current",
        "Moved to the node of this thread.",
        |b| moved(b, CURRENT_NODE),
    )
    .warmed_by(touched),
    Case::new(
        "managed.prefetch_numa_999",
        "To a node that does not exist.",
        |b| prefetched(b, 0, SIZE, Location::host_numa(999)),
    ),
    Case::new(
        "managed.prefetch_device_99",
        "To a device that does not exist.",
        |b| prefetched(b, 0, SIZE, Location::device(Ordinal(99))),
    ),
    Case::new("managed.prefetch_nowhere", "To an invalid location.", |b| {
        prefetched(b, 0, SIZE, NOWHERE)
    }),
    Case::new("managed.prefetch_size_0", "No bytes.", |b| {
        prefetched(b, 0, 0, Location::HOST)
    }),
    Case::new(
        "managed.prefetch_past_end",
        "One page beyond the end.",
        |b| prefetched(b, 0, SIZE + PAGE, Location::HOST),
    ),
    Case::new(
        "managed.prefetch_one_byte",
        "A byte in the middle of a page: the location reported for its page and for the next.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let inside = DeviceAddress(address.0 + PAGE + 7);
            let outcome = b.prefetch(inside, 1, Location::HOST);
            let (page, next) = (address.0 + PAGE, address.0 + 2 * PAGE);
            Ok(Answer::code(&outcome)
                .with("page", place_told(b, LAST, DeviceAddress(page), PAGE)?)
                .with("next", place_told(b, LAST, DeviceAddress(next), PAGE)?))
        },
    ),
    Case::new(
        "managed.prefetch_told",
        "The last location of each half, and of both together.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let other = DeviceAddress(address.0 + SIZE / 2);
            let fresh = place_told(b, LAST, address, SIZE)?;
            b.prefetch(address, SIZE, Location::HOST)?;
            let device = Location::device(b.device());
            b.prefetch(address, SIZE / 2, device)?;
            let first = place_told(b, LAST, address, SIZE / 2)?;
            let second = place_told(b, LAST, other, SIZE / 2)?;
            let both = place_told(b, LAST, address, SIZE)?;
            b.prefetch(other, SIZE / 2, Location::host_numa(0))?;
            let node = place_told(b, LAST, other, SIZE / 2)?;
            Ok(Answer::value(fresh)
                .with("first", first)
                .with("second", second)
                .with("both", both)
                .with("on a node", node))
        },
    )
    .warmed_by(touched),
    Case::new(
        "managed.prefetch_told_at_once",
        "The reported location before the prefetch has run.",
        |b| {
            let address = b.managed(SIZE, GLOBAL)?;
            let stream = b.spinning()?;
            let outcome = b.prefetch_on(stream, address, SIZE, Location::HOST);
            let told = place_told(b, LAST, address, SIZE);
            let running = !b.stream_is_done(stream)?;
            b.synchronize(stream)?;
            Ok(Answer::code(&outcome)
                .with("told", told?)
                .with("still running", bit(running)))
        },
    )
    .needing(&[Need::Kernels])
    .warmed_by(touched),
]);

/// Makes a device access managed memory. At the first access the driver allocates 124 MiB for its
/// own use, and keeps them.
fn touched(b: &mut Bench) -> Result<(), DriverError> {
    let address = b.managed(SIZE, GLOBAL)?;
    b.fill(address, 3, SIZE)?;
    b.synchronize(StreamHandle::NULL)?;
    b.free(address)
}

fn made(b: &mut Bench, size: u64, flags: u32) -> Answered {
    Ok(Answer::code(&b.managed(size, flags)))
}

fn moved(b: &mut Bench, to: Location) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    b.fill(address, 3, SIZE)?;
    let outcome = b.prefetch(address, SIZE, to);
    let sync = b.synchronize(StreamHandle::NULL);
    Ok(Answer::code(&outcome).then("sync", &sync))
}

/// Prefetches `size` bytes from an offset on, and waits for it.
fn prefetched(b: &mut Bench, offset: u64, size: u64, to: Location) -> Answered {
    let address = b.managed(SIZE, GLOBAL)?;
    let outcome = b.prefetch(DeviceAddress(address.0 + offset), size, to);
    let sync = b.synchronize(StreamHandle::NULL);
    Ok(Answer::code(&outcome).then("sync", &sync))
}
