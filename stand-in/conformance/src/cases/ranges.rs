//! Queries about addresses, and older calls that do not accept mappings.

use cuvmm_driver::{AccessFlags, DeviceAddress, PointerAttribute};

use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Rule};

pub(super) const RANGE: &[Case] = &Rule::new("address-range").cases([
    Case::new(
        "addr_range.open",
        "Queried at the start of a mapping with access.",
        |b| {
            let base = b.lay("X-")?;
            b.grant(base, 2, AccessFlags::READ_WRITE)?;
            Ok(range(b, base, base))
        },
    ),
    Case::new(
        "addr_range.open_interior",
        "Queried inside a mapping with access.",
        |b| {
            let base = b.lay("X-")?;
            b.grant(base, 2, AccessFlags::READ_WRITE)?;
            Ok(range(b, base, b.at(base, 1)))
        },
    ),
    Case::new(
        "addr_range.open_of_several",
        "Queried in the second of two mappings with access.",
        |b| {
            let base = b.lay("X-X-")?;
            b.grant(base, 4, AccessFlags::READ_WRITE)?;
            Ok(range(b, b.at(base, 2), b.at(base, 2)))
        },
    ),
    Case::new(
        "addr_range.vmm",
        "Queried at the start of a mapping without access.",
        |b| {
            let base = b.lay("X-")?;
            Ok(range(b, base, base))
        },
    ),
    Case::new(
        "addr_range.interior",
        "Queried inside a mapping without access.",
        |b| {
            let base = b.lay("X-")?;
            Ok(range(b, base, b.at(base, 1)))
        },
    ),
    Case::new(
        "addr_range.of_several",
        "Queried in the second of two mappings without access.",
        |b| {
            let base = b.lay("X-X-")?;
            Ok(range(b, b.at(base, 2), b.at(base, 2)))
        },
    ),
    Case::new(
        "addr_range.unmapped",
        "Queried where nothing is mapped.",
        |b| {
            let base = b.addresses(1)?;
            Ok(Answer::code(&b.driver().address_range(b.device(), base)))
        },
    ),
]);

pub(super) const ATTRIBUTES: &[Case] = &Rule::new("pointer-attributes").cases([
    Case::new(
        "ptr_attr.memory_type",
        "The kind of memory of a mapping.",
        |b| attribute(b, PointerAttribute::MEMORY_TYPE),
    ),
    Case::new("ptr_attr.ordinal", "The device of a mapping.", |b| {
        attribute(b, PointerAttribute::DEVICE_ORDINAL)
    }),
    Case::new("ptr_attr.is_managed", "Is a mapping managed?", |b| {
        attribute(b, PointerAttribute::IS_MANAGED)
    }),
    Case::new(
        "ptr_attr.allowed_handle_types",
        "Of memory made without handle types.",
        |b| attribute(b, PointerAttribute::ALLOWED_HANDLE_TYPES),
    ),
    Case::new(
        "ptr_attr.range_size",
        "The size of the mapped range.",
        |b| attribute(b, PointerAttribute::RANGE_SIZE),
    ),
    Case::new("ptr_attr.buffer_id", "Do two mappings differ?", |b| {
        let base = b.lay("xx")?;
        let id = |at| b.pointer_attribute(b.at(base, at), PointerAttribute::BUFFER_ID);
        let (first, second) = (id(0), id(1));
        Ok(Answer::code(&first).with("differ", bit(first != second)))
    }),
    Case::new("ptr_attr.unmapped", "Where nothing is mapped.", |b| {
        let base = b.addresses(1)?;
        let kind = b.pointer_attribute(base, PointerAttribute::MEMORY_TYPE);
        Ok(Answer::code(&kind))
    }),
    Case::new(
        "ptr_attr.range_start_size",
        "The start, with nothing mapped.",
        |b| {
            let base = b.addresses(1)?;
            let start = b.pointer_attribute(base, PointerAttribute::RANGE_START_ADDR);
            Ok(Answer::code(&start))
        },
    ),
]);

pub(super) const LEGACY: &[Case] = &Rule::new("legacy-doors").cases([
    Case::new(
        "ipc_get_mem_handle.vmm",
        "Legacy sharing of a mapping.",
        |b| {
            let (address, _) = b.open(1)?;
            let handle = b.driver().ipc_mem_handle(b.device(), address);
            Ok(Answer::code(&handle))
        },
    ),
    Case::new("cuMemFree.vmm_ptr", "The plain free, on a mapping.", |b| {
        let (address, _) = b.open(1)?;
        let outcome = b.free(address);
        Ok(Answer::code(&outcome).with("readable", b.reads(address)))
    }),
    Case::new(
        "cuMemFreeAsync.vmm_ptr",
        "The stream-ordered free, on a mapping.",
        |b| {
            let (address, _) = b.open(1)?;
            freed_async(b, address, address)
        },
    ),
    Case::new(
        "cuMemFreeAsync.vmm_interior",
        "The stream-ordered free, within a mapping.",
        |b| {
            let (address, _) = b.open(1)?;
            freed_async(b, address, DeviceAddress(address.0 + 4096))
        },
    ),
    Case::new(
        "cuMemFreeAsync.vmm_unmapped",
        "The stream-ordered free, where addresses are reserved and nothing is mapped.",
        |b| {
            let base = b.addresses(1)?;
            let stream = b.stream()?;
            let outcome = b.free_async(base, stream);
            Ok(Answer::code(&outcome).then("sync", &b.synchronize(stream)))
        },
    ),
]);

pub(super) const DMA_BUF: &[Case] = &Rule::new("dma-buf").cases([
    Case::new("dmabuf.vmm", "Over one mapping.", |b| dma_buf(b, "X-", 2)),
    Case::new("dmabuf.part", "Over half of a mapping.", |b| {
        dma_buf(b, "X-", 1)
    }),
    Case::new("dmabuf.two_mappings", "Over two adjacent mappings.", |b| {
        dma_buf(b, "X-X-", 4)
    }),
    Case::new("dmabuf.over_hole", "Over mapping, hole, mapping.", |b| {
        dma_buf(b, "X-..X-", 6)
    }),
    Case::new(
        "dmabuf.page",
        "Over a page of the host within a mapping.",
        |b| dma_buf_within(b, 65_536),
    ),
    Case::new(
        "dmabuf.part_of_page",
        "Over a part of a page of the host.",
        |b| dma_buf_within(b, 512),
    ),
]);

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

fn attribute(b: &mut Bench, attribute: PointerAttribute) -> Answered {
    let (address, _) = b.open(2)?;
    let outcome = b.pointer_attribute(address, attribute);
    Ok(Answer::code(&outcome).with("value", outcome.unwrap_or(0)))
}

/// Frees an address in the order of a stream, and reports whether a mapping can be read afterwards.
fn freed_async(b: &mut Bench, mapping: DeviceAddress, address: DeviceAddress) -> Answered {
    let stream = b.stream()?;
    let outcome = b.free_async(address, stream);
    Ok(Answer::code(&outcome)
        .then("sync", &b.synchronize(stream))
        .with("readable", b.reads(mapping)))
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
