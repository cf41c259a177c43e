//! Pinned and registered host memory.

use super::super::library::at;
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("pinned.flags", |a| {
        a.enter();
        for flags in 0..=8u64 {
            let (mut address, mut got) = (0u64, 77u32);
            a.part(flags);
            a.say("cuMemHostAlloc", &[at(&mut address), 4096, flags]);
            a.say("cuMemHostGetFlags", &[at(&mut got), address]);
            a.note(got);
        }
        a.part("alloc_host");
        let (mut address, mut got) = (0u64, 77u32);
        a.say("cuMemAllocHost_v2", &[at(&mut address), 4096]);
        a.say("cuMemHostGetFlags", &[at(&mut got), address]);
        a.note(got);
        a.part("interior");
        a.say("cuMemHostGetFlags", &[at(&mut got), address + 64]);
    }),
    case("pinned.small", |a| {
        a.enter();
        let (one, two) = (a.pinned(100, 0), a.pinned(100, 0));
        a.part("distance");
        a.note(one.abs_diff(two));
        a.part("alignment");
        a.note(1u64 << one.trailing_zeros().min(21));
    }),
    case("pinned.refused", |a| {
        a.enter();
        let mut address = 7u64;
        a.part("0");
        a.say("cuMemHostAlloc", &[at(&mut address), 0, 0]);
        a.say("cuMemAllocHost_v2", &[at(&mut address), 0]);
        a.part("null");
        a.say("cuMemHostAlloc", &[0, 4096, 0]);
        a.part("free_null");
        a.say("cuMemFreeHost", &[0]);
        a.part("free_foreign");
        a.say("cuMemFreeHost", &[pages(1)]);
        a.part("free_interior");
        let pinned = a.pinned(4096, 0);
        a.say("cuMemFreeHost", &[pinned + 64]);
        a.part("free_twice");
        a.say("cuMemFreeHost", &[pinned]);
        a.say("cuMemFreeHost", &[pinned]);
        a.part("flags_of_foreign");
        let mut got = 77u32;
        a.say("cuMemHostGetFlags", &[at(&mut got), pages(1)]);
    }),
    case("pinned.device_pointer", |a| {
        a.enter();
        let pinned = a.pinned(8192, 2);
        let plain = a.alloc(4096);
        let mut managed = 0u64;
        a.need("cuMemAllocManaged", &[at(&mut managed), 4096, 1]);
        for (part, address) in [
            ("own", pinned),
            ("interior", pinned + 64),
            ("foreign", pages(1)),
            ("device", plain),
            ("managed", managed),
            ("null", 0),
        ] {
            let mut got = 7u64;
            a.part(part);
            a.say("cuMemHostGetDevicePointer_v2", &[at(&mut got), address, 0]);
            a.note(match got {
                7 => "unwritten",
                0 => "null",
                got if got == address => "same",
                _ => "other",
            });
        }
        let mut got = 7u64;
        a.part("flags_1");
        a.say("cuMemHostGetDevicePointer_v2", &[at(&mut got), pinned, 1]);
        a.part("null_out");
        a.say("cuMemHostGetDevicePointer_v2", &[0, pinned, 0]);
        a.part("not_mapped");
        let unmapped = a.pinned(4096, 0);
        a.say("cuMemHostGetDevicePointer_v2", &[at(&mut got), unmapped, 0]);
        a.note(got == unmapped);
    }),
    case("register.usual", |a| {
        a.enter();
        let memory = pages(4);
        a.part("whole");
        a.say("cuMemHostRegister_v2", &[memory, 4 * 4096, 0]);
        a.part("flags");
        let mut flags = 77u32;
        a.say("cuMemHostGetFlags", &[at(&mut flags), memory]);
        a.note(flags);
        a.part("device_pointer");
        let mut got = 7u64;
        a.say("cuMemHostGetDevicePointer_v2", &[at(&mut got), memory, 0]);
        a.note(got == memory);
        a.part("twice");
        a.say("cuMemHostRegister_v2", &[memory, 4 * 4096, 0]);
        a.part("overlap");
        a.say("cuMemHostRegister_v2", &[memory + 4096, 4096, 0]);
        a.part("free_host");
        a.say("cuMemFreeHost", &[memory]);
        a.part("unregister_interior");
        a.say("cuMemHostUnregister", &[memory + 4096]);
        a.part("unregister");
        a.say("cuMemHostUnregister", &[memory]);
        a.part("unregister_twice");
        a.say("cuMemHostUnregister", &[memory]);
        a.part("v1");
        a.say("cuMemHostRegister", &[memory, 4096, 0]);
        a.say("cuMemHostUnregister", &[memory]);
    }),
    case("register.odd", |a| {
        a.enter();
        let memory = pages(4);
        for (part, from, bytes) in [
            ("unaligned", memory + 64, 100u64),
            ("unaligned_size", memory, 100),
            ("size_0", memory, 0),
            ("null", 0, 4096),
            ("unmapped", 4096, 4096),
        ] {
            a.part(part);
            if a.say("cuMemHostRegister_v2", &[from, bytes, 0]) {
                let (mut start, mut size) = (0u64, 0u64);
                a.say("cuPointerGetAttribute", &[at(&mut start), 11, from]);
                a.say("cuPointerGetAttribute", &[at(&mut size), 12, from]);
                a.note(format_args!("{} {size}", start.wrapping_sub(memory)));
                a.say("cuMemHostUnregister", &[from]);
            }
        }
    }),
    case("register.flags", |a| {
        a.enter();
        for flags in [1u64, 2, 3, 4, 8, 16] {
            let memory = pages(1);
            a.part(flags);
            if a.say("cuMemHostRegister_v2", &[memory, 4096, flags]) {
                let mut got = 77u32;
                a.say("cuMemHostGetFlags", &[at(&mut got), memory]);
                a.note(got);
                a.say("cuMemHostUnregister", &[memory]);
            }
        }
    }),
    case("register.others", |a| {
        a.enter();
        a.part("pinned");
        let pinned = a.pinned(4096, 0);
        a.say("cuMemHostRegister_v2", &[pinned, 4096, 0]);
        a.part("unregister_pinned");
        a.say("cuMemHostUnregister", &[pinned]);
        a.part("unregister_null");
        a.say("cuMemHostUnregister", &[0]);
        a.part("device");
        let plain = a.alloc(4096);
        a.say("cuMemHostRegister_v2", &[plain, 4096, 0]);
    }),
    case("register.copy", |a| {
        a.enter();
        let memory = pages(1);
        a.need("cuMemHostRegister_v2", &[memory, 4096, 0]);
        super::super::library::write(memory, 42);
        let device = a.alloc(4096);
        a.say("cuMemcpyHtoDAsync_v2", &[device, memory, 16, 0]);
        a.say("cuMemcpyDtoDAsync_v2", &[memory + 64, device, 16, 0]);
        a.need("cuStreamSynchronize", &[0]);
        a.note(super::super::library::read(memory + 64));
        a.part("memset");
        a.say("cuMemsetD8_v2", &[memory, 9, 16]);
        a.note(super::super::library::read(memory));
    }),
];

/// Returns the address of pages of ordinary memory that are never freed.
pub(super) fn pages(count: usize) -> u64 {
    let bytes: &'static mut [u8] = Box::leak(vec![0u8; (count + 1) * 4096].into_boxed_slice());
    let start = at(bytes);
    start.next_multiple_of(4096)
}
