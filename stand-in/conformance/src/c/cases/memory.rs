//! Device memory outside virtual memory management, pools, and what `cuMemCreate` refuses.

use super::super::asker::{Asker, GRANULE, alignment, granules, props, written};
use super::super::library::at;
use super::{Case, alone, case};

const DMA_BUF: &str = "cuMemGetHandleForAddressRange";

pub(super) const CASES: &[Case] = &[
    case("alloc.refused", |a| {
        a.part("0");
        let address = a.get("cuMemAlloc_v2", 7u64, &[0]);
        a.note(address == 7);
        a.part("too_much");
        a.get("cuMemAlloc_v2", 7u64, &[1 << 44]);
        a.ask("null", "cuMemAlloc_v2", &[0, 512]);
        a.part("v1");
        a.get("cuMemAlloc", 7u32, &[512]);
    }),
    case("free.refused", |a| {
        let address = a.alloc(GRANULE);
        a.ask("0", "cuMemFree_v2", &[0]);
        a.ask("interior", "cuMemFree_v2", &[address + 512]);
        a.ask("unknown", "cuMemFree_v2", &[4096]);
        a.ask("twice", "cuMemFree_v2", &[address]);
        a.say("cuMemFree_v2", &[address]);
        a.part("pinned");
        let pinned = a.pinned(4096, 0);
        a.say("cuMemFree_v2", &[pinned]);
        a.part("managed");
        let managed = a.managed(4096);
        a.say("cuMemFree_v2", &[managed]);
    }),
    case("free.pool_memory", |a| {
        let address = a.alloc_async(4096);
        a.say("cuMemFree_v2", &[address]);
        a.say_kind(address);
    }),
    case("free_async.plain_memory", |a| {
        let address = a.alloc(4096);
        a.say("cuMemFreeAsync", &[address, 0]);
        a.need("cuStreamSynchronize", &[0]);
        a.say_kind(address);
    }),
    case("free_async.refused", |a| {
        a.ask("0", "cuMemFreeAsync", &[0, 0]);
        a.ask("unknown", "cuMemFreeAsync", &[4096, 0]);
        a.part("interior");
        let address = a.alloc_async(4096);
        a.say("cuMemFreeAsync", &[address + 512, 0]);
        a.ask("twice", "cuMemFreeAsync", &[address, 0]);
        a.say("cuMemFreeAsync", &[address, 0]);
    }),
    case("pool.zero_bytes", |a| {
        a.part("current");
        let address = a.get("cuMemAllocAsync", 7u64, &[0, 0]);
        a.note(written(address, "address"));
        a.ask("free", "cuMemFreeAsync", &[address, 0]);
        a.part("from_pool");
        let pool = a.default_pool();
        let address = a.get("cuMemAllocFromPoolAsync", 7u64, &[0, pool, 0]);
        a.note(written(address, "address"));
    }),
    case("pool.refused", |a| {
        a.part("null_pool");
        a.get("cuMemAllocFromPoolAsync", 7u64, &[512, 0, 0]);
        a.ask("null_out", "cuMemAllocAsync", &[0, 512, 0]);
        a.part("destroy_default");
        let pool = a.default_pool();
        a.say("cuMemPoolDestroy", &[pool]);
        a.part("attribute_99");
        a.get_last("cuMemPoolGetAttribute", &[pool, 99], 0u64);
    }),
    case("pool.rounds", |a| {
        let pool = a.default_pool();
        for bytes in [1u64, 512, 513, 4096, GRANULE, 33 << 20] {
            let address = a.alloc_async(bytes);
            let (mut reserved, mut used) = (0u64, 0u64);
            a.need("cuMemPoolGetAttribute", &[pool, 5, at(&mut reserved)]);
            a.need("cuMemPoolGetAttribute", &[pool, 7, at(&mut used)]);
            a.part(bytes);
            a.note(format_args!("used {used} reserved {reserved}"));
            a.need("cuMemFreeAsync", &[address, 0]);
            a.need("cuStreamSynchronize", &[0]);
        }
    }),
    alone("alloc.small_share", |a| {
        let before = warm(a);
        let first = a.alloc(1);
        a.part("first_takes");
        a.note(granules(before - a.free_now()));
        let second = a.alloc(1);
        a.part("distance");
        a.note(second.abs_diff(first));
        a.part("alignment");
        a.note(alignment(first));
        for _ in 0..1000 {
            a.alloc(1);
        }
        a.part("1002_take");
        a.note(granules(before - a.free_now()));
        a.part("distance_1000B");
        let (one, two) = (a.alloc(1000), a.alloc(1000));
        a.note(two.abs_diff(one));
        a.part("first_freed");
        a.need("cuMemFree_v2", &[first]);
        let again = a.alloc(1);
        a.note(again == first);
    }),
    alone("alloc.sizes_take", |a| {
        warm(a);
        for bytes in [
            512u64,
            65_536,
            1 << 20,
            (1 << 20) + 1,
            GRANULE,
            GRANULE + 1,
            3 * GRANULE,
            20 * GRANULE,
        ] {
            let before = a.free();
            let address = a.alloc(bytes);
            a.part(bytes);
            a.note(granules(before - a.free_now()));
            a.note(format_args!("aligned {}", alignment(address)));
        }
    }),
    alone("alloc.freed_returns", |a| {
        let before = warm(a);
        let many: Vec<u64> = (0..100).map(|_| a.alloc(100)).collect();
        for address in many {
            a.need("cuMemFree_v2", &[address]);
        }
        a.note(granules(before.abs_diff(a.free_now())));
        let large = a.alloc(8 * GRANULE);
        a.need("cuMemFree_v2", &[large]);
        a.note(granules(before.abs_diff(a.free_now())));
    }),
    case("alloc.contents", |a| {
        let (one, two) = (a.alloc(100), a.alloc(100));
        a.need("cuMemsetD8_v2", &[one, 1, 100]);
        a.need("cuMemsetD8_v2", &[two, 2, 100]);
        let mut bytes = [0u8; 100];
        a.say("cuMemcpyDtoH_v2", &[at(&mut bytes), one, 100]);
        a.note(bytes == [1; 100]);
        a.ask("past_the_end", "cuMemsetD8_v2", &[one, 1, 101]);
        a.say("cuMemsetD8_v2", &[one, 1, 512]);
        a.say("cuMemsetD8_v2", &[one, 1, 513]);
        a.say("cuMemsetD8_v2", &[one, 1, 1 << 20]);
    }),
    case("alloc.past_the_end_large", |a| {
        let one = a.alloc(GRANULE);
        a.say("cuMemsetD8_v2", &[one, 1, GRANULE + 1]);
    }),
    case("alloc.pitch", |a| {
        for (width, height, element) in [
            (1u64, 1u64, 4u64),
            (100, 3, 4),
            (512, 2, 8),
            (513, 2, 16),
            (1000, 10, 4),
        ] {
            a.part(format_args!("{width}x{height}"));
            let pitch = pitched(a, [width, height, element]);
            a.note(pitch);
        }
        a.part("element_3");
        pitched(a, [100, 3, 3]);
        a.part("width_0");
        pitched(a, [0, 3, 4]);
    }),
    case("create.reserved", |a| {
        for index in 0..4 {
            a.part(index);
            let mut bytes = props().map(u32::to_ne_bytes).concat();
            bytes[28 + index] = 1;
            a.get("cuMemCreate", 0u64, &[GRANULE, at(&mut *bytes), 0]);
            let rest = [at(&mut *bytes), 0];
            a.get("cuMemGetAllocationGranularity", 0u64, &rest);
        }
        a.part("win32_data");
        let mut properties = props();
        properties[4] = 64;
        a.create(properties);
        a.part("usage");
        for usage in [1u32, 2, 4, 0x8000] {
            a.create(flagged(usage << 16));
        }
        a.part("compression_2");
        a.create(flagged(2));
        a.part("rdma_2");
        a.create(flagged(2 << 8));
    }),
    case("create.null_props", |a| {
        a.get("cuMemCreate", 0u64, &[GRANULE, 0, 0]);
    }),
    case("create.pairs", |a| {
        for flags in [
            0x0000_0101u32,
            0x0001_0001,
            0x0001_0100,
            0x0002_0001,
            0x0001_0101,
        ] {
            a.part(format_args!("{flags:x}"));
            a.create(flagged(flags));
        }
    }),
    case("create.props_back", |a| {
        let handle = a.create(flagged(0x0000_0101));
        let query = "cuMemGetAllocationPropertiesFromHandle";
        let back = a.get(query, [0xAAAA_AAAAu32; 8], &[handle]);
        a.note(format_args!("{back:x?}"));
    }),
    case("dmabuf.plain", dma_buf_of_plain),
    case("dmabuf.others", |a| {
        for (part, address, bytes) in [
            ("pool", a.alloc_async(GRANULE), GRANULE),
            ("pinned", a.pinned(GRANULE, 0), GRANULE),
            ("managed", a.managed(GRANULE), GRANULE),
            ("unknown", 4096, 4096),
            ("closed_mapping", a.mapping(false), GRANULE),
        ] {
            a.part(part);
            a.get(DMA_BUF, -7i32, &[address, bytes, 1, 0]);
        }
    }),
];

/// Allocates once, so that the driver has what it takes at first, and returns the free memory.
fn warm(a: &mut Asker) -> u64 {
    let warm = a.alloc(GRANULE);
    a.need("cuMemFree_v2", &[warm]);
    a.free()
}

/// Returns the properties of ordinary memory with other flags: compression, RDMA, usage.
fn flagged(flags: u32) -> [u32; 8] {
    let mut props = props();
    props[6] = flags;
    props
}

/// Allocates rows of memory, and returns their distance.
fn pitched(a: &mut Asker, [width, height, element]: [u64; 3]) -> u64 {
    let mut pitch = 0u64;
    let rest = [at(&mut pitch), width, height, element];
    a.get("cuMemAllocPitch_v2", 0u64, &rest);
    pitch
}

/// Asks for dma-bufs of plain memory.
fn dma_buf_of_plain(a: &mut Asker) {
    let address = a.alloc(2 * GRANULE);
    for (part, from, bytes, kind, flags) in [
        ("whole", address, 2 * GRANULE, 1u64, 0u64),
        ("part", address + 65_536, 65_536, 1, 0),
        ("page", address + 4096, 4096, 1, 0),
        ("unaligned", address + 512, 4096, 1, 0),
        ("size_unaligned", address, 100, 1, 0),
        ("size_0", address, 0, 1, 0),
        ("past_the_end", address, 3 * GRANULE, 1, 0),
        ("kind_2", address, GRANULE, 2, 0),
        ("flags_1", address, GRANULE, 1, 1),
        ("flags_2", address, GRANULE, 1, 2),
    ] {
        a.part(part);
        let fd = a.get(DMA_BUF, -7i32, &[from, bytes, kind, flags]);
        a.note(if fd >= 0 { "fd" } else { "none" });
        if fd >= 0 {
            let target = std::fs::read_link(format!("/proc/self/fd/{fd}"));
            a.note(target.is_ok_and(|target| target.to_string_lossy().contains("dmabuf")));
        }
    }
    a.ask("null", DMA_BUF, &[0, address, GRANULE, 1, 0]);
    a.part("small");
    let small = a.alloc(4096);
    a.get(DMA_BUF, -7i32, &[small, 4096, 1, 0]);
}
