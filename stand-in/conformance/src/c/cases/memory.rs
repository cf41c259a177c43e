//! Device memory outside virtual memory management, pools, and what `cuMemCreate` refuses.

use super::super::asker::{Asker, GRANULE, granules, props};
use super::super::library::at;
use super::{Case, alone, case};

pub(super) const CASES: &[Case] = &[
    case("alloc.refused", |a| {
        a.enter();
        let mut address = 7u64;
        a.part("0");
        a.say("cuMemAlloc_v2", &[at(&mut address), 0]);
        a.note(address == 7);
        a.part("too_much");
        a.say("cuMemAlloc_v2", &[at(&mut address), 1 << 44]);
        a.part("null");
        a.say("cuMemAlloc_v2", &[0, 512]);
        a.part("v1");
        let mut narrow = 7u32;
        a.say("cuMemAlloc", &[at(&mut narrow), 512]);
    }),
    case("free.refused", |a| {
        a.enter();
        let address = a.alloc(GRANULE);
        a.part("0");
        a.say("cuMemFree_v2", &[0]);
        a.part("interior");
        a.say("cuMemFree_v2", &[address + 512]);
        a.part("unknown");
        a.say("cuMemFree_v2", &[4096]);
        a.part("twice");
        a.say("cuMemFree_v2", &[address]);
        a.say("cuMemFree_v2", &[address]);
        a.part("pinned");
        let pinned = a.pinned(4096, 0);
        a.say("cuMemFree_v2", &[pinned]);
        a.part("managed");
        let mut managed = 0u64;
        a.need("cuMemAllocManaged", &[at(&mut managed), 4096, 1]);
        a.say("cuMemFree_v2", &[managed]);
    }),
    case("free.pool_memory", |a| {
        a.enter();
        let address = a.alloc_async(4096);
        a.say("cuMemFree_v2", &[address]);
        let mut kind = 0u32;
        a.say("cuPointerGetAttribute", &[at(&mut kind), 2, address]);
    }),
    case("free_async.plain_memory", |a| {
        a.enter();
        let address = a.alloc(4096);
        a.say("cuMemFreeAsync", &[address, 0]);
        a.need("cuStreamSynchronize", &[0]);
        let mut kind = 0u32;
        a.say("cuPointerGetAttribute", &[at(&mut kind), 2, address]);
    }),
    case("free_async.refused", |a| {
        a.enter();
        a.part("0");
        a.say("cuMemFreeAsync", &[0, 0]);
        a.part("unknown");
        a.say("cuMemFreeAsync", &[4096, 0]);
        a.part("interior");
        let address = a.alloc_async(4096);
        a.say("cuMemFreeAsync", &[address + 512, 0]);
        a.part("twice");
        a.say("cuMemFreeAsync", &[address, 0]);
        a.say("cuMemFreeAsync", &[address, 0]);
    }),
    case("pool.zero_bytes", |a| {
        a.enter();
        let mut address = 7u64;
        a.part("current");
        a.say("cuMemAllocAsync", &[at(&mut address), 0, 0]);
        a.note(match address {
            0 => "null",
            7 => "unwritten",
            _ => "address",
        });
        a.part("free");
        a.say("cuMemFreeAsync", &[address, 0]);
        a.part("from_pool");
        let mut pool = 0u64;
        a.need("cuDeviceGetDefaultMemPool", &[at(&mut pool), 0]);
        address = 7;
        a.say("cuMemAllocFromPoolAsync", &[at(&mut address), 0, pool, 0]);
        a.note(match address {
            0 => "null",
            7 => "unwritten",
            _ => "address",
        });
    }),
    case("pool.refused", |a| {
        a.enter();
        let mut address = 7u64;
        a.part("null_pool");
        a.say("cuMemAllocFromPoolAsync", &[at(&mut address), 512, 0, 0]);
        a.part("null_out");
        a.say("cuMemAllocAsync", &[0, 512, 0]);
        a.part("destroy_default");
        let mut pool = 0u64;
        a.need("cuDeviceGetDefaultMemPool", &[at(&mut pool), 0]);
        a.say("cuMemPoolDestroy", &[pool]);
        a.part("attribute_99");
        let mut value = 0u64;
        a.say("cuMemPoolGetAttribute", &[pool, 99, at(&mut value)]);
    }),
    case("pool.rounds", |a| {
        a.enter();
        let mut pool = 0u64;
        a.need("cuDeviceGetDefaultMemPool", &[at(&mut pool), 0]);
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
        a.enter();
        let warm = a.alloc(GRANULE);
        a.need("cuMemFree_v2", &[warm]);
        let before = a.free();
        let first = a.alloc(1);
        a.part("first_takes");
        a.note(granules(before - a.free_now()));
        let second = a.alloc(1);
        a.part("distance");
        a.note(second.abs_diff(first));
        a.part("alignment");
        a.note(1u64 << first.trailing_zeros().min(21));
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
        a.enter();
        let warm = a.alloc(GRANULE);
        a.need("cuMemFree_v2", &[warm]);
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
            a.note(format_args!(
                "aligned {}",
                1u64 << address.trailing_zeros().min(21)
            ));
        }
    }),
    alone("alloc.freed_returns", |a| {
        a.enter();
        let warm = a.alloc(GRANULE);
        a.need("cuMemFree_v2", &[warm]);
        let before = a.free();
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
        a.enter();
        let (one, two) = (a.alloc(100), a.alloc(100));
        a.need("cuMemsetD8_v2", &[one, 1, 100]);
        a.need("cuMemsetD8_v2", &[two, 2, 100]);
        let mut bytes = [0u8; 100];
        a.say("cuMemcpyDtoH_v2", &[at(&mut bytes), one, 100]);
        a.note(bytes == [1; 100]);
        a.part("past_the_end");
        a.say("cuMemsetD8_v2", &[one, 1, 101]);
        a.say("cuMemsetD8_v2", &[one, 1, 512]);
        a.say("cuMemsetD8_v2", &[one, 1, 513]);
        a.say("cuMemsetD8_v2", &[one, 1, 1 << 20]);
    }),
    case("alloc.past_the_end_large", |a| {
        a.enter();
        let one = a.alloc(GRANULE);
        a.say("cuMemsetD8_v2", &[one, 1, GRANULE + 1]);
    }),
    case("alloc.pitch", |a| {
        a.enter();
        for (width, height, element) in [
            (1u64, 1u64, 4u64),
            (100, 3, 4),
            (512, 2, 8),
            (513, 2, 16),
            (1000, 10, 4),
        ] {
            a.part(format_args!("{width}x{height}"));
            let (mut address, mut pitch) = (0u64, 0u64);
            let arguments = [at(&mut address), at(&mut pitch), width, height, element];
            a.say("cuMemAllocPitch_v2", &arguments);
            a.note(pitch);
        }
        let (mut address, mut pitch) = (0u64, 0u64);
        a.part("element_3");
        let arguments = [at(&mut address), at(&mut pitch), 100, 3, 3];
        a.say("cuMemAllocPitch_v2", &arguments);
        a.part("width_0");
        let arguments = [at(&mut address), at(&mut pitch), 0, 3, 4];
        a.say("cuMemAllocPitch_v2", &arguments);
    }),
    case("create.reserved", |a| {
        a.enter();
        for index in 0..4 {
            a.part(index);
            let mut properties = props();
            let mut bytes = properties.map(u32::to_ne_bytes).concat();
            bytes[28 + index] = 1;
            let mut handle = 0u64;
            let arguments = [at(&mut handle), GRANULE, at(&mut *bytes), 0];
            a.say("cuMemCreate", &arguments);
            let mut size = 0u64;
            let arguments = [at(&mut size), at(&mut *bytes), 0];
            a.say("cuMemGetAllocationGranularity", &arguments);
            properties[0] = 1;
        }
        a.part("win32_data");
        let mut properties = props();
        properties[4] = 64;
        let mut handle = 0u64;
        let arguments = [at(&mut handle), GRANULE, at(&mut properties), 0];
        a.say("cuMemCreate", &arguments);
        a.part("usage");
        let mut properties = props();
        for usage in [1u32, 2, 4, 0x8000] {
            properties[6] = usage << 16;
            let arguments = [at(&mut handle), GRANULE, at(&mut properties), 0];
            a.say("cuMemCreate", &arguments);
        }
        a.part("compression_2");
        properties[6] = 2;
        let arguments = [at(&mut handle), GRANULE, at(&mut properties), 0];
        a.say("cuMemCreate", &arguments);
        a.part("rdma_2");
        properties[6] = 2 << 8;
        let arguments = [at(&mut handle), GRANULE, at(&mut properties), 0];
        a.say("cuMemCreate", &arguments);
    }),
    case("create.null_props", |a| {
        a.enter();
        let mut handle = 0u64;
        a.say("cuMemCreate", &[at(&mut handle), GRANULE, 0, 0]);
    }),
    case("create.pairs", |a| {
        a.enter();
        for flags in [
            0x0000_0101u32,
            0x0001_0001,
            0x0001_0100,
            0x0002_0001,
            0x0001_0101,
        ] {
            let mut properties = props();
            properties[6] = flags;
            let mut handle = 0u64;
            a.part(format_args!("{flags:x}"));
            let arguments = [at(&mut handle), GRANULE, at(&mut properties), 0];
            a.say("cuMemCreate", &arguments);
        }
    }),
    case("create.props_back", |a| {
        a.enter();
        let mut properties = props();
        properties[6] = 0x0000_0101;
        let mut handle = 0u64;
        let arguments = [at(&mut handle), GRANULE, at(&mut properties), 0];
        a.say("cuMemCreate", &arguments);
        let mut back = [0xAAAA_AAAAu32; 8];
        let arguments = [at(&mut back), handle];
        a.say("cuMemGetAllocationPropertiesFromHandle", &arguments);
        a.note(format_args!("{back:x?}"));
    }),
    case("dmabuf.plain", dma_buf_of_plain),
    case("dmabuf.others", |a| {
        a.enter();
        let mut fd = -7i32;
        let pool = a.alloc_async(GRANULE);
        a.part("pool");
        a.say(
            "cuMemGetHandleForAddressRange",
            &[at(&mut fd), pool, GRANULE, 1, 0],
        );
        let pinned = a.pinned(GRANULE, 0);
        a.part("pinned");
        a.say(
            "cuMemGetHandleForAddressRange",
            &[at(&mut fd), pinned, GRANULE, 1, 0],
        );
        let mut managed = 0u64;
        a.need("cuMemAllocManaged", &[at(&mut managed), GRANULE, 1]);
        a.part("managed");
        a.say(
            "cuMemGetHandleForAddressRange",
            &[at(&mut fd), managed, GRANULE, 1, 0],
        );
        a.part("unknown");
        a.say(
            "cuMemGetHandleForAddressRange",
            &[at(&mut fd), 4096, 4096, 1, 0],
        );
        let mapped = a.reserve(GRANULE);
        a.map(mapped, false);
        a.part("closed_mapping");
        a.say(
            "cuMemGetHandleForAddressRange",
            &[at(&mut fd), mapped, GRANULE, 1, 0],
        );
    }),
];

/// Asks for dma-bufs of plain memory.
fn dma_buf_of_plain(a: &mut Asker) {
    a.enter();
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
        let mut fd = -7i32;
        a.part(part);
        let arguments = [at(&mut fd), from, bytes, kind, flags];
        a.say("cuMemGetHandleForAddressRange", &arguments);
        a.note(if fd >= 0 { "fd" } else { "none" });
        if fd >= 0 {
            let target = std::fs::read_link(format!("/proc/self/fd/{fd}"));
            a.note(target.is_ok_and(|target| target.to_string_lossy().contains("dmabuf")));
        }
    }
    a.part("null");
    a.say(
        "cuMemGetHandleForAddressRange",
        &[0, address, GRANULE, 1, 0],
    );
    a.part("small");
    let small = a.alloc(4096);
    let mut fd = -7i32;
    let arguments = [at(&mut fd), small, 4096, 1, 0];
    a.say("cuMemGetHandleForAddressRange", &arguments);
}
