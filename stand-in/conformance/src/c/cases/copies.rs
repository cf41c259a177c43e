//! Copies whose direction follows from the addresses, fills of wider elements, copies of rectangles.

use super::super::asker::{Asker, GRANULE};
use super::super::library::{at, read, write};
use super::host::pages;
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("memcpy.directions", directions),
    case("memcpy.refused", |a| {
        let device = a.alloc(4096);
        let host = pages(1);
        let mapped = a.reserve(2 * GRANULE);
        a.map(mapped, false);
        for (part, to, from, bytes) in [
            ("size_0", device, host, 0u64),
            ("size_0_null", 0, 0, 0),
            ("size_0_unknown", 4096, 8192, 0),
            ("from_closed", device, mapped, 16),
            ("to_closed", mapped, device, 16),
        ] {
            a.ask(part, "cuMemcpy", &[to, from, bytes]);
        }
    }),
    case("memcpy.to_reserved", |a| {
        let (device, reserved) = (a.alloc(4096), a.reserve(GRANULE));
        a.say("cuMemcpy", &[reserved, device, 16]);
    }),
    case("memcpy.past_the_end", |a| {
        let device = a.alloc(4096);
        a.say("cuMemcpy", &[device, pages(1000), 3 << 20]);
    }),
    case("memcpy.null_host", |a| {
        let device = a.alloc(4096);
        a.say("cuMemcpy", &[device, 0, 16]);
    }),
    case("memcpy.unknown_host", |a| {
        let device = a.alloc(4096);
        a.say("cuMemcpy", &[device, 4096, 16]);
    }),
    case("memcpy.null_source", |a| {
        let device = a.alloc(4096);
        a.ask("htod_0", "cuMemcpyHtoD_v2", &[device, 0, 0]);
        a.ask("dtoh_0", "cuMemcpyDtoH_v2", &[0, device, 0]);
        a.ask("dtod_0", "cuMemcpyDtoD_v2", &[0, 0, 0]);
        a.part("htod_0_unknown");
        a.say("cuMemcpyHtoD_v2", &[4096, pages(1), 0]);
        a.ask("htod", "cuMemcpyHtoD_v2", &[device, 0, 16]);
        a.ask("dtoh", "cuMemcpyDtoH_v2", &[0, device, 16]);
    }),
    case("memcpy.dtod_of_host", |a| {
        let device = a.alloc(4096);
        let pinned = a.pinned(4096, 0);
        write(pinned, 5);
        a.ask("pinned_source", "cuMemcpyDtoD_v2", &[device, pinned, 16]);
        a.part("pinned_destination");
        a.say("cuMemcpyDtoD_v2", &[pinned + 64, device, 16]);
        a.note(read(pinned + 64));
        a.part("pageable_source");
        a.say("cuMemcpyDtoD_v2", &[device, pages(1), 16]);
    }),
    case("memcpy.htod_of_device", |a| {
        let (one, two) = (a.alloc(4096), a.alloc(4096));
        a.need("cuMemsetD8_v2", &[two, 3, 16]);
        a.say("cuMemcpyHtoD_v2", &[one, two, 16]);
        let byte = a.first_byte(one);
        a.note(byte);
    }),
    case("memcpy.peer", |a| {
        let primary = a.primary;
        let (one, two) = (a.alloc(4096), a.alloc(4096));
        a.need("cuMemsetD8_v2", &[two, 3, 16]);
        a.part("same_context");
        a.say("cuMemcpyPeer", &[one, primary, two, primary, 16]);
        let byte = a.first_byte(one);
        a.note(byte);
        a.part("async");
        a.say("cuMemcpyPeerAsync", &[one, primary, two, primary, 16, 0]);
        a.ask("size_0", "cuMemcpyPeer", &[one, primary, two, primary, 0]);
    }),
    case("memcpy.peer_null_context", |a| {
        let primary = a.primary;
        let (one, two) = (a.alloc(4096), a.alloc(4096));
        a.say("cuMemcpyPeer", &[one, 0, two, primary, 16]);
        a.say("cuMemcpyPeer", &[one, primary, two, 0, 16]);
    }),
    case("memset.wide", wide),
    case("memset.two_dimensions", |a| {
        let memory = a.alloc(4096);
        a.need("cuMemsetD8_v2", &[memory, 0, 4096]);
        for (name, value) in [
            ("cuMemsetD2D8_v2", 1u64),
            ("cuMemsetD2D16_v2", 0x0202),
            ("cuMemsetD2D32_v2", 0x0303_0303),
        ] {
            a.ask(name, name, &[memory, 64, value, 4, 3]);
            let mut bytes = [0u8; 256];
            a.need("cuMemcpyDtoH_v2", &[at(&mut bytes), memory, 256]);
            a.note(bytes.iter().filter(|&&byte| byte == value as u8).count());
        }
        a.ask("pitch_small", "cuMemsetD2D8_v2", &[memory, 2, 1, 4, 3]);
        a.ask("height_0", "cuMemsetD2D8_v2", &[memory, 64, 1, 4, 0]);
        a.ask("width_0", "cuMemsetD2D8_v2", &[memory, 64, 1, 0, 4]);
        a.ask("pitch_0_one_row", "cuMemsetD2D8_v2", &[memory, 0, 1, 4, 1]);
    }),
    case("memcpy.two_dimensions", rectangles),
];

/// Copies between the kinds of memory by `cuMemcpy` and `cuMemcpyAsync`.
fn directions(a: &mut Asker) {
    let managed = a.managed(4096);
    let mapped = a.mapping(true);
    let places = [
        ("device", a.alloc(4096)),
        ("pool", a.alloc_async(4096)),
        ("mapping", mapped),
        ("pinned", a.pinned(4096, 0)),
        ("pageable", pages(1)),
        ("managed", managed),
    ];
    let check = pages(1);
    for (index, (from_name, from)) in places.into_iter().enumerate() {
        for (to_name, to) in places {
            if from == to {
                continue;
            }
            for name in ["cuMemcpy", "cuMemcpyAsync"] {
                let byte = (index + 1) as u8;
                for offset in 0..16 {
                    write(check + offset, byte);
                }
                a.need("cuMemcpy", &[from, check, 16]);
                a.part(format_args!("{name}.{from_name}_{to_name}"));
                // `cuMemcpy` ignores the stream.
                a.say(name, &[to + 16, from, 16, 0]);
                a.need("cuStreamSynchronize", &[0]);
                a.need("cuMemcpy", &[check, to + 16, 16]);
                a.note(read(check) == byte);
            }
        }
    }
}

/// Fills with elements of two and four bytes.
fn wide(a: &mut Asker) {
    let memory = a.alloc(4096);
    for (name, value, count) in [
        ("cuMemsetD16_v2", 0x1234u64, 8u64),
        ("cuMemsetD32_v2", 0x1234_5678, 4),
        ("cuMemsetD16Async", 0x4321, 8),
        ("cuMemsetD32Async", 0x8765_4321, 4),
    ] {
        a.part(name);
        a.need("cuMemsetD8_v2", &[memory, 0, 64]);
        a.say(name, &[memory, value, count, 0]);
        a.need("cuStreamSynchronize", &[0]);
        let mut bytes = [0u8; 24];
        a.need("cuMemcpyDtoH_v2", &[at(&mut bytes), memory, 24]);
        a.note(format_args!("{bytes:x?}").to_string().replace(' ', ""));
    }
    for (part, name, address, count) in [
        ("16_unaligned", "cuMemsetD16_v2", memory + 1, 4u64),
        ("32_unaligned_2", "cuMemsetD32_v2", memory + 2, 4),
        ("32_unaligned_1", "cuMemsetD32_v2", memory + 1, 4),
        ("8_count_0", "cuMemsetD8_v2", memory, 0),
        ("16_count_0", "cuMemsetD16_v2", memory, 0),
        ("32_count_0_unaligned", "cuMemsetD32_v2", memory + 1, 0),
        ("8_count_0_null", "cuMemsetD8_v2", 0, 0),
        ("8_null", "cuMemsetD8_v2", 0, 16),
        ("8_unknown", "cuMemsetD8_v2", 4096, 16),
        ("32_past_the_end", "cuMemsetD32_v2", memory, 1 << 30),
        ("32_count_overflows", "cuMemsetD32_v2", memory, 1 << 62),
    ] {
        a.ask(part, name, &[address, 1, count]);
    }
    a.part("8_pageable");
    a.say("cuMemsetD8_v2", &[pages(1), 1, 16]);
    a.part("8_pinned");
    let pinned = a.pinned(4096, 0);
    a.say("cuMemsetD8_v2", &[pinned, 7, 16]);
    a.note(read(pinned));
}

/// Copies rectangles. The structure has sixteen words; a memory type is one of the 32-bit kind.
fn rectangles(a: &mut Asker) {
    let (one, two) = (a.alloc(4096), a.alloc(4096));
    let host = pages(1);
    for offset in 0..256 {
        write(host + offset, offset as u8);
    }
    // The words: source x, y, kind, host, device, array, pitch; the destination; width, height.
    let mut to_device = [0, 0, 1, host, 0, 0, 32, 0, 0, 2, 0, one, 0, 64, 8, 4];
    let mut across = [4, 1, 2, 0, one, 0, 64, 0, 0, 2, 0, two, 0, 16, 4, 2];
    let mut back = [0, 0, 2, 0, two, 0, 16, 0, 0, 1, host, 0, 0, 8, 4, 2];
    for (part, words) in [
        ("to_device", &mut to_device),
        ("across", &mut across),
        ("back", &mut back),
    ] {
        a.part(part);
        let arguments = [at(words)];
        a.say("cuMemcpy2D_v2", &arguments);
    }
    let bytes: Vec<u8> = (0..16).map(|offset| read(host + offset)).collect();
    a.note(format!("{bytes:?}").replace(' ', ""));
    a.ask("unaligned", "cuMemcpy2DUnaligned_v2", &[at(&mut across)]);
    a.ask("async", "cuMemcpy2DAsync_v2", &[at(&mut across), 0]);
    a.need("cuStreamSynchronize", &[0]);
    a.part("pitch_small");
    across[6] = 2;
    a.say("cuMemcpy2D_v2", &[at(&mut across)]);
    a.part("kind_0");
    back[2] = 0;
    a.say("cuMemcpy2D_v2", &[at(&mut back)]);
    a.part("height_0");
    to_device[15] = 0;
    a.say("cuMemcpy2D_v2", &[at(&mut to_device)]);
}
