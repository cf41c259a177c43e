//! Physical memory on the host, mapped like a device's, and pinned host memory.

use cuvmm_driver::{
    DeviceAddress, DriverError, Location, PhysicalHandle, PhysicalProps, PointerAttribute,
};

use super::places::open_to;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

pub(super) const RULE: &[Case] = &Rule::new("host-physicals").cases([
    Case::new("hostnuma.map", "Memory of node 0, mapped.", |b| {
        let (address, handle, size) = made(b, Location::host_numa(0))?;
        Ok(Answer::code(&b.map(address, size, 0, handle, 0)))
    }),
    Case::new(
        "hostnuma.set_access_device",
        "Accessible to the device.",
        |b| {
            let device = Location::device(b.device());
            opened(b, Location::host_numa(0), &[device])
        },
    ),
    Case::new(
        "hostnuma.set_access_dev_and_host",
        "Accessible to the device and its node.",
        |b| {
            let device = Location::device(b.device());
            opened(b, Location::host_numa(0), &[device, Location::host_numa(0)])
        },
    ),
    Case::new(
        "hostnuma.set_access_host",
        "Accessible to the device and the host.",
        |b| {
            let device = Location::device(b.device());
            opened(b, Location::host_numa(0), &[device, Location::HOST])
        },
    ),
    Case::new(
        "hostmem.set_access_dev_and_host",
        "Host memory, accessible to both.",
        |b| {
            let device = Location::device(b.device());
            opened(b, Location::HOST, &[device, Location::HOST])
        },
    ),
    Case::new("hostnuma.memset_from_device", "The device fills it.", |b| {
        let address = both(b, Location::host_numa(0))?;
        let filled = b.fill(address, 9, 64);
        Ok(Answer::code(&filled).then("sync", &b.driver().context_synchronize(b.device())))
    }),
    Case::new(
        "hostnuma.attributes",
        "What is known of its address: 1 is host memory and 2 device memory.",
        |b| {
            let address = both(b, Location::host_numa(0))?;
            let ask = |attribute| b.pointer_attribute(address, attribute);
            let kind = ask(PointerAttribute::MEMORY_TYPE);
            Ok(Answer::code(&kind)
                .with("type", kind?)
                .with("device", ask(PointerAttribute::DEVICE_ORDINAL)?)
                .with("managed", ask(PointerAttribute::IS_MANAGED)?))
        },
    ),
    Case::new(
        "hostnuma.cpu_reads",
        "Written by the device, read by the CPU.",
        |b| {
            let address = both(b, Location::host_numa(0))?;
            b.fill(address, 9, 64)?;
            cpu(b, address.0)
        },
    )
    .needing(&[Need::Memory]),
    Case::new(
        "hostmem.cpu_reads",
        "Plain host memory, written by the device, read by the CPU.",
        |b| {
            let address = both(b, Location::HOST)?;
            b.fill(address, 9, 64)?;
            cpu(b, address.0)
        },
    )
    .needing(&[Need::Memory]),
]);

pub(super) const PINNED: &[Case] = &Rule::new("pinned").cases([
    Case::new(
        "pinned.ok",
        "Host memory that every device can access.",
        |b| {
            let pointer = b.pinned(4096, 0);
            let answer = Answer::code(&pointer);
            let Ok(pointer) = pointer else {
                return Ok(answer);
            };
            Ok(answer.then("free", &b.free_pinned(pointer)))
        },
    ),
    Case::new("pinned.size_0", "No bytes.", |b| {
        Ok(Answer::code(&b.pinned(0, 0)))
    }),
    Case::new(
        "pinned.device_writes",
        "Written by the device, read by the CPU.",
        |b| {
            let pointer = b.pinned(4096, 0)?;
            b.fill(DeviceAddress(pointer as u64), 12, 64)?;
            cpu(b, pointer as u64)
        },
    )
    .needing(&[Need::Memory]),
]);

pub(super) const REGISTERED: &[Case] = &Rule::new("registered").cases([
    Case::new("registered.ok", "Pages of the program.", |b| {
        let memory = pages(1);
        let answer = Answer::code(&b.register(memory, 4096));
        Ok(answer.then("unregister", &b.unregister(memory)))
    }),
    Case::new("registered.twice", "Pages that are registered.", |b| {
        let memory = pages(2);
        b.register(memory, 8192)?;
        let answer = Answer::code(&b.register(memory + 4096, 4096));
        Ok(answer.then("unregister", &b.unregister(memory + 4096)))
    }),
    Case::new(
        "registered.two_side_by_side",
        "A copy to the device that begins in one registration and ends in the next.",
        |b| {
            let memory = pages(2);
            b.register(memory, 4096)?;
            b.register(memory + 4096, 4096)?;
            let (to, stream) = (b.alloc(b.granule())?, b.stream()?);
            let over = Answer::code(&b.write_pages_async(to, memory, 8192, stream));
            Ok(over.then("within", &b.write_pages_async(to, memory, 4096, stream)))
        },
    ),
    Case::new(
        "registered.beyond",
        "A copy to the device that begins in a registration and ends behind it.",
        |b| {
            let memory = pages(2);
            b.register(memory, 4096)?;
            let (to, stream) = (b.alloc(b.granule())?, b.stream()?);
            Ok(Answer::code(&b.write_pages_async(to, memory, 8192, stream)))
        },
    ),
]);

/// Returns the address of pages of ordinary memory that are never freed.
pub(super) fn pages(count: usize) -> usize {
    let bytes: &'static mut [u8] = Box::leak(vec![0u8; (count + 1) * 4096].into_boxed_slice());
    let start = bytes.as_mut_ptr().expose_provenance();
    start.next_multiple_of(4096)
}

/// Reserves addresses and creates a physical of two granules at a location on the host.
fn made(
    b: &mut Bench,
    location: Location,
) -> Result<(DeviceAddress, PhysicalHandle, u64), DriverError> {
    let size = 2 * b.granule();
    let address = b.reserve(size, 0, DeviceAddress::NULL, 0)?;
    let handle = b.create(size, &PhysicalProps::at(location), 0)?;
    Ok((address, handle, size))
}

fn open(
    b: &mut Bench,
    location: Location,
    to: &[Location],
) -> Result<(DeviceAddress, Result<(), DriverError>), DriverError> {
    let (address, handle, size) = made(b, location)?;
    b.map(address, size, 0, handle, 0)?;
    let access: Vec<_> = to.iter().copied().map(open_to).collect();
    let outcome = b.set_access(address, size, &access);
    Ok((address, outcome))
}

fn opened(b: &mut Bench, location: Location, to: &[Location]) -> Answered {
    Ok(Answer::code(&open(b, location, to)?.1))
}

/// Maps memory at a location on the host, accessible to the device and the CPU.
fn both(b: &mut Bench, location: Location) -> Result<DeviceAddress, DriverError> {
    let device = Location::device(b.device());
    let (address, outcome) = open(b, location, &[device, location])?;
    outcome.map(|()| address)
}

pub(super) fn cpu(b: &Bench, address: u64) -> Answered {
    let byte = b.cpu_reads(address)?;
    Ok(byte.map_or(Answer::value("no memory"), Answer::value))
}
