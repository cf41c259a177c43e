//! Queries about addresses, and older calls that do not accept mappings.

use cuvmm_driver::{AccessFlags, DeviceAddress, PointerAttribute};

use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case};

const RANGE: &str = "address-range";
const ATTRIBUTES: &str = "pointer-attributes";
const LEGACY: &str = "legacy-doors";
const DMA_BUF: &str = "dma-buf";

pub(super) const CASES: &[Case] = &[
    Case::new(
        "addr_range.open",
        RANGE,
        "Queried at the start of a mapping with access.",
        |b| {
            let base = b.lay("X-")?;
            b.grant(base, 2, AccessFlags::READ_WRITE)?;
            Ok(range(b, base, base))
        },
    ),
    Case::new(
        "addr_range.open_interior",
        RANGE,
        "Queried inside a mapping with access.",
        |b| {
            let base = b.lay("X-")?;
            b.grant(base, 2, AccessFlags::READ_WRITE)?;
            Ok(range(b, base, b.at(base, 1)))
        },
    ),
    Case::new(
        "addr_range.open_of_several",
        RANGE,
        "Queried in the second of two mappings with access.",
        |b| {
            let base = b.lay("X-X-")?;
            b.grant(base, 4, AccessFlags::READ_WRITE)?;
            Ok(range(b, b.at(base, 2), b.at(base, 2)))
        },
    ),
    Case::new(
        "addr_range.vmm",
        RANGE,
        "Queried at the start of a mapping without access.",
        |b| {
            let base = b.lay("X-")?;
            Ok(range(b, base, base))
        },
    ),
    Case::new(
        "addr_range.interior",
        RANGE,
        "Queried inside a mapping without access.",
        |b| {
            let base = b.lay("X-")?;
            Ok(range(b, base, b.at(base, 1)))
        },
    ),
    Case::new(
        "addr_range.of_several",
        RANGE,
        "Queried in the second of two mappings without access.",
        |b| {
            let base = b.lay("X-X-")?;
            Ok(range(b, b.at(base, 2), b.at(base, 2)))
        },
    ),
    Case::new(
        "addr_range.unmapped",
        RANGE,
        "Queried where nothing is mapped.",
        |b| {
            let base = b.addresses(1)?;
            Ok(Answer::code(&b.driver().address_range(b.device(), base)))
        },
    ),
    Case::new(
        "ptr_attr.memory_type",
        ATTRIBUTES,
        "The kind of memory of a mapping.",
        |b| attribute(b, PointerAttribute::MEMORY_TYPE),
    ),
    Case::new(
        "ptr_attr.ordinal",
        ATTRIBUTES,
        "The device of a mapping.",
        |b| attribute(b, PointerAttribute::DEVICE_ORDINAL),
    ),
    Case::new(
        "ptr_attr.is_managed",
        ATTRIBUTES,
        "Is a mapping managed?",
        |b| attribute(b, PointerAttribute::IS_MANAGED),
    ),
    Case::new(
        "ptr_attr.allowed_handle_types",
        ATTRIBUTES,
        "Of memory made without handle types.",
        |b| attribute(b, PointerAttribute::ALLOWED_HANDLE_TYPES),
    ),
    Case::new(
        "ptr_attr.range_size",
        ATTRIBUTES,
        "The size of the mapped range.",
        |b| attribute(b, PointerAttribute::RANGE_SIZE),
    ),
    Case::new(
        "ptr_attr.buffer_id",
        ATTRIBUTES,
        "Do two mappings differ?",
        |b| {
            let base = b.lay("xx")?;
            let id = |at| {
                b.driver().pointer_attribute(
                    b.device(),
                    b.at(base, at),
                    PointerAttribute::BUFFER_ID,
                )
            };
            let (first, second) = (id(0), id(1));
            Ok(Answer::code(&first).with("differ", bit(first != second)))
        },
    ),
    Case::new(
        "ptr_attr.unmapped",
        ATTRIBUTES,
        "Where nothing is mapped.",
        |b| {
            let base = b.addresses(1)?;
            Ok(Answer::code(&ask(b, base, PointerAttribute::MEMORY_TYPE)))
        },
    ),
    Case::new(
        "ptr_attr.range_start_size",
        ATTRIBUTES,
        "The start, with nothing mapped.",
        |b| {
            let base = b.addresses(1)?;
            Ok(Answer::code(&ask(
                b,
                base,
                PointerAttribute::RANGE_START_ADDR,
            )))
        },
    ),
    Case::new(
        "ipc_get_mem_handle.vmm",
        LEGACY,
        "Legacy sharing of a mapping.",
        |b| {
            let (address, _) = b.open(1)?;
            Ok(Answer::code(
                &b.driver().ipc_mem_handle(b.device(), address),
            ))
        },
    ),
    Case::new(
        "cuMemFree.vmm_ptr",
        LEGACY,
        "The plain free, on a mapping.",
        |b| {
            let (address, _) = b.open(1)?;
            let outcome = b.free(address);
            Ok(Answer::code(&outcome).with("readable", b.reads(address)))
        },
    ),
    Case::new(
        "cuMemFreeAsync.vmm_ptr",
        LEGACY,
        "The stream-ordered free, on a mapping.",
        |b| {
            let (address, _) = b.open(1)?;
            let stream = b.stream()?;
            let outcome = b.free_async(address, stream);
            Ok(Answer::code(&outcome)
                .then("sync", &b.synchronize(stream))
                .with("readable", b.reads(address)))
        },
    ),
    Case::new(
        "cuMemFreeAsync.vmm_interior",
        LEGACY,
        "The stream-ordered free, within a mapping.",
        |b| {
            let (address, _) = b.open(1)?;
            let stream = b.stream()?;
            let within = DeviceAddress(address.0 + 4096);
            let outcome = b.free_async(within, stream);
            Ok(Answer::code(&outcome)
                .then("sync", &b.synchronize(stream))
                .with("readable", b.reads(address)))
        },
    ),
    Case::new(
        "cuMemFreeAsync.vmm_unmapped",
        LEGACY,
        "The stream-ordered free, where addresses are reserved and nothing is mapped.",
        |b| {
            let base = b.addresses(1)?;
            let stream = b.stream()?;
            let outcome = b.free_async(base, stream);
            Ok(Answer::code(&outcome).then("sync", &b.synchronize(stream)))
        },
    ),
    Case::new("dmabuf.vmm", DMA_BUF, "Over one mapping.", |b| {
        dma_buf(b, "X-", 2)
    }),
    Case::new("dmabuf.part", DMA_BUF, "Over half of a mapping.", |b| {
        dma_buf(b, "X-", 1)
    }),
    Case::new(
        "dmabuf.two_mappings",
        DMA_BUF,
        "Over two adjacent mappings.",
        |b| dma_buf(b, "X-X-", 4),
    ),
    Case::new(
        "dmabuf.over_hole",
        DMA_BUF,
        "Over mapping, hole, mapping.",
        |b| dma_buf(b, "X-..X-", 6),
    ),
    Case::new(
        "dmabuf.page",
        DMA_BUF,
        "Over a page of the host within a mapping.",
        |b| dma_buf_within(b, 65_536),
    ),
    Case::new(
        "dmabuf.part_of_page",
        DMA_BUF,
        "Over a part of a page of the host.",
        |b| dma_buf_within(b, 512),
    ),
];

/// Queries the range at an address. The answer is relative to `origin`.
fn range(b: &Bench, origin: DeviceAddress, at: DeviceAddress) -> Answer {
    let outcome = b.driver().address_range(b.device(), at);
    let answer = Answer::code(&outcome);
    let Ok((start, size)) = outcome else {
        return answer;
    };
    let offset = start.0.wrapping_sub(origin.0).cast_signed();
    answer.with("offset", offset).with("size", size)
}

fn ask(
    b: &Bench,
    address: DeviceAddress,
    attribute: PointerAttribute,
) -> Result<u64, cuvmm_driver::DriverError> {
    b.driver().pointer_attribute(b.device(), address, attribute)
}

fn attribute(b: &mut Bench, attribute: PointerAttribute) -> Answered {
    let (address, _) = b.open(2)?;
    let outcome = ask(b, address, attribute);
    Ok(Answer::code(&outcome).with("value", outcome.unwrap_or(0)))
}

/// Exports `bytes` bytes at an offset of `bytes`. A page of the host has up to 64 KiB.
fn dma_buf_within(b: &mut Bench, bytes: u64) -> Answered {
    let (address, _) = b.open(1)?;
    let at = DeviceAddress(address.0 + bytes);
    Ok(Answer::code(&b.dma_buf(at, bytes)))
}

fn dma_buf(b: &mut Bench, picture: &str, granules: u64) -> Answered {
    let base = b.lay(picture)?;
    for (index, letter) in picture.bytes().enumerate() {
        if letter == b'X' {
            b.grant(b.at(base, index as u64), 2, AccessFlags::READ_WRITE)?;
        }
    }
    Ok(Answer::code(&b.dma_buf(base, granules * b.granule())))
}
