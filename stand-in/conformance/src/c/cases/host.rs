//! Pinned and registered host memory.
//!
//! `unsafe` is used to unmap memory that is registered.
#![allow(unsafe_code)]

use super::super::asker::{alignment, written};
use super::super::library::{at, read, write};
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("pinned.flags", |a| {
        for flags in 0..=8u64 {
            a.part(flags);
            let address = a.get("cuMemHostAlloc", 0u64, &[4096, flags]);
            a.tell("cuMemHostGetFlags", 77u32, &[address]);
        }
        a.part("alloc_host");
        let address = a.get("cuMemAllocHost_v2", 0u64, &[4096]);
        a.tell("cuMemHostGetFlags", 77u32, &[address]);
        a.part("interior");
        a.get("cuMemHostGetFlags", 77u32, &[address + 64]);
    }),
    case("pinned.small", |a| {
        let (one, two) = (a.pinned(100, 0), a.pinned(100, 0));
        a.part("distance");
        a.note(one.abs_diff(two));
        a.part("alignment");
        a.note(alignment(one));
    }),
    case("pinned.refused", |a| {
        a.part("0");
        a.get("cuMemHostAlloc", 7u64, &[0, 0]);
        a.get("cuMemAllocHost_v2", 7u64, &[0]);
        a.ask("null", "cuMemHostAlloc", &[0, 4096, 0]);
        a.ask("free_null", "cuMemFreeHost", &[0]);
        a.ask("free_foreign", "cuMemFreeHost", &[pages(1)]);
        a.part("free_interior");
        let pinned = a.pinned(4096, 0);
        a.say("cuMemFreeHost", &[pinned + 64]);
        a.ask("free_twice", "cuMemFreeHost", &[pinned]);
        a.say("cuMemFreeHost", &[pinned]);
        a.part("flags_of_foreign");
        a.get("cuMemHostGetFlags", 77u32, &[pages(1)]);
    }),
    case("pinned.device_pointer", |a| {
        let pinned = a.pinned(8192, 2);
        let plain = a.alloc(4096);
        let managed = a.managed(4096);
        for (part, address) in [
            ("own", pinned),
            ("interior", pinned + 64),
            ("foreign", pages(1)),
            ("device", plain),
            ("managed", managed),
            ("null", 0),
        ] {
            a.part(part);
            let got = a.get("cuMemHostGetDevicePointer_v2", 7u64, &[address, 0]);
            let same = got == address;
            a.note(written(got, if same { "same" } else { "other" }));
        }
        a.part("flags_1");
        a.get("cuMemHostGetDevicePointer_v2", 7u64, &[pinned, 1]);
        a.ask("null_out", "cuMemHostGetDevicePointer_v2", &[0, pinned, 0]);
        a.part("not_mapped");
        let unmapped = a.pinned(4096, 0);
        let got = a.get("cuMemHostGetDevicePointer_v2", 7u64, &[unmapped, 0]);
        a.note(got == unmapped);
    }),
    case("register.usual", |a| {
        let memory = pages(4);
        a.ask("whole", "cuMemHostRegister_v2", &[memory, 4 * 4096, 0]);
        a.part("flags");
        a.tell("cuMemHostGetFlags", 77u32, &[memory]);
        a.part("device_pointer");
        let got = a.get("cuMemHostGetDevicePointer_v2", 7u64, &[memory, 0]);
        a.note(got == memory);
        a.ask("twice", "cuMemHostRegister_v2", &[memory, 4 * 4096, 0]);
        a.ask("overlap", "cuMemHostRegister_v2", &[memory + 4096, 4096, 0]);
        a.ask("free_host", "cuMemFreeHost", &[memory]);
        a.part("unregister_interior");
        a.say("cuMemHostUnregister", &[memory + 4096]);
        a.ask("unregister", "cuMemHostUnregister", &[memory]);
        a.ask("unregister_twice", "cuMemHostUnregister", &[memory]);
        a.ask("v1", "cuMemHostRegister", &[memory, 4096, 0]);
        a.say("cuMemHostUnregister", &[memory]);
    }),
    case("register.odd", |a| {
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
                let start = a.get("cuPointerGetAttribute", 0u64, &[11, from]);
                let size = a.get("cuPointerGetAttribute", 0u64, &[12, from]);
                a.note(format_args!("{} {size}", start.wrapping_sub(memory)));
                a.say("cuMemHostUnregister", &[from]);
            }
        }
    }),
    case("register.flags", |a| {
        for flags in [1u64, 2, 3, 4, 8, 16] {
            let memory = pages(1);
            a.part(flags);
            if a.say("cuMemHostRegister_v2", &[memory, 4096, flags]) {
                a.tell("cuMemHostGetFlags", 77u32, &[memory]);
                a.say("cuMemHostUnregister", &[memory]);
            }
        }
    }),
    case("register.others", |a| {
        a.part("pinned");
        let pinned = a.pinned(4096, 0);
        a.say("cuMemHostRegister_v2", &[pinned, 4096, 0]);
        a.ask("unregister_pinned", "cuMemHostUnregister", &[pinned]);
        a.ask("unregister_null", "cuMemHostUnregister", &[0]);
        a.part("device");
        let plain = a.alloc(4096);
        a.say("cuMemHostRegister_v2", &[plain, 4096, 0]);
    }),
    case("register.side_by_side", |a| {
        let memory = pages(2);
        a.need("cuMemHostRegister_v2", &[memory, 4096, 0]);
        let device = a.alloc(8192);
        for (part, bytes) in [("within", 4096), ("beyond", 8192)] {
            a.ask(part, "cuMemcpyHtoDAsync_v2", &[device, memory, bytes, 0]);
            a.say("cuMemcpyDtoHAsync_v2", &[memory, device, bytes, 0]);
            a.say("cuStreamSynchronize", &[0]);
        }
        a.need("cuMemHostRegister_v2", &[memory + 4096, 4096, 0]);
        a.ask(
            "over_two",
            "cuMemcpyHtoDAsync_v2",
            &[device, memory, 8192, 0],
        );
        a.say("cuMemcpyDtoHAsync_v2", &[memory, device, 8192, 0]);
        a.say("cuStreamSynchronize", &[0]);
        a.ask(
            "over_two_waiting",
            "cuMemcpyHtoD_v2",
            &[device, memory, 8192],
        );
        a.say("cuMemcpyDtoH_v2", &[memory, device, 8192]);
    }),
    case("register.unmapped_first", |a| {
        let memory = mapped(0);
        a.need("cuMemHostRegister_v2", &[memory, MAPPED as u64, 0]);
        unmap(memory);
        a.ask("unregister", "cuMemHostUnregister", &[memory]);
        a.ask("unregister_twice", "cuMemHostUnregister", &[memory]);
        a.part("again");
        let memory = mapped(0);
        a.need("cuMemHostRegister_v2", &[memory, MAPPED as u64, 0]);
        unmap(memory);
        // Other memory at the address of memory that is still registered.
        let other = mapped(memory);
        a.note(other == memory);
        a.say("cuMemHostRegister_v2", &[other, MAPPED as u64, 0]);
        a.say("cuMemHostUnregister", &[memory]);
        a.say("cuMemHostRegister_v2", &[other, MAPPED as u64, 0]);
        a.say("cuMemHostUnregister", &[other]);
    }),
    case("register.copy", |a| {
        let memory = pages(1);
        a.need("cuMemHostRegister_v2", &[memory, 4096, 0]);
        write(memory, 42);
        let device = a.alloc(4096);
        a.say("cuMemcpyHtoDAsync_v2", &[device, memory, 16, 0]);
        a.say("cuMemcpyDtoDAsync_v2", &[memory + 64, device, 16, 0]);
        a.need("cuStreamSynchronize", &[0]);
        a.note(read(memory + 64));
        a.ask("memset", "cuMemsetD8_v2", &[memory, 9, 16]);
        a.note(read(memory));
    }),
];

const MAPPED: usize = 2 << 20;

/// Maps pages, at an address if it is not 0.
fn mapped(address: u64) -> u64 {
    let at = std::ptr::with_exposed_provenance_mut(address as usize);
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: the kernel chooses unused addresses; a wish is no replacement.
    let got = unsafe { libc::mmap(at, MAPPED, access, flags, -1, 0) };
    got.addr() as u64
}

fn unmap(address: u64) {
    let at = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: the pages are this case's own, and nothing refers to them.
    unsafe { libc::munmap(at, MAPPED) };
}

/// Returns the address of pages of ordinary memory that are never freed.
pub(super) fn pages(count: usize) -> u64 {
    let bytes: &'static mut [u8] = Box::leak(vec![0u8; (count + 1) * 4096].into_boxed_slice());
    let start = at(bytes);
    start.next_multiple_of(4096)
}
