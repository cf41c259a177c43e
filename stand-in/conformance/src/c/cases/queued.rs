//! Asynchronous copies of host memory behind work that runs: when they return, and when they read
//! and write the host.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::super::asker::Asker;
use super::super::library::{at, read, write};
use super::functions::{RELEASED, STARTED, blocks, launch, note_order, wait_for};
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("queued.to_pageable", |a| {
        for bytes in [40, 4096, 1 << 20] {
            to_host(a, "cuMemcpyDtoHAsync_v2", bytes, false);
        }
    }),
    case("queued.to_pageable_any", |a| {
        to_host(a, "cuMemcpyAsync", 4096, false);
    }),
    case("queued.to_pinned", |a| {
        to_host(a, "cuMemcpyDtoHAsync_v2", 4096, true);
        to_host(a, "cuMemcpyAsync", 4096, true);
    }),
    case("queued.from_pageable", |a| {
        for bytes in [40, 4096, 1 << 20] {
            from_host(a, "cuMemcpyHtoDAsync_v2", bytes, false);
        }
    }),
    case("queued.from_pageable_any", |a| {
        from_host(a, "cuMemcpyAsync", 4096, false);
    }),
    case("queued.from_pinned", |a| {
        from_host(a, "cuMemcpyHtoDAsync_v2", 4096, true);
        from_host(a, "cuMemcpyAsync", 4096, true);
    }),
    case("queued.host_to_host", |a| host_to_host(a, [false, false])),
    case("queued.pinned_to_pinned", |a| host_to_host(a, [true, true])),
    case("queued.pageable_to_pinned", |a| {
        host_to_host(a, [false, true]);
    }),
    case("queued.pinned_to_pageable", |a| {
        host_to_host(a, [true, false]);
    }),
    case("queued.registered", |a| {
        let (stream, device) = (a.stream(), a.alloc(4096));
        let host = super::host::pages(1);
        a.need("cuMemHostRegister_v2", &[host, 4096, 0]);
        write(host, 5);
        a.part("from");
        behind(a, stream, "cuMemcpyHtoDAsync_v2", &[device, host, 16]);
        write(host, 9);
        release(a, stream);
        let byte = a.first_byte(device);
        a.note(byte);
        a.part("to");
        behind(a, stream, "cuMemcpyDtoHAsync_v2", &[host, device, 16]);
        release(a, stream);
    }),
    case("queued.rectangle_to_pageable", |a| {
        let (stream, device) = (a.stream(), a.alloc(4096));
        let host = super::host::pages(1);
        // From device memory (type 2) to host memory (type 1), four rows of sixteen bytes.
        let mut copy = [0, 0, 2, 0, device, 0, 64, 0, 0, 1, host, 0, 0, 64, 16, 4u64];
        behind(a, stream, "cuMemcpy2DAsync_v2", &[at(&mut copy)]);
        release(a, stream);
    }),
];

/// Calls a function on a stream on which a function runs, which another thread ends after a while,
/// and notes whether the call returned before that.
fn behind(a: &mut Asker, stream: u64, name: &str, arguments: &[u64]) {
    STARTED.store(false, Ordering::SeqCst);
    RELEASED.store(false, Ordering::SeqCst);
    launch(a, stream, blocks);
    wait_for(&STARTED);
    let arguments = [arguments, &[stream]].concat();
    thread::spawn(|| {
        thread::sleep(Duration::from_millis(300));
        RELEASED.store(true, Ordering::SeqCst);
    });
    a.say(name, &arguments);
    note_order(a, &RELEASED);
}

/// Lets the function end, and waits for the stream.
fn release(a: &mut Asker, stream: u64) {
    wait_for(&RELEASED);
    a.need("cuStreamSynchronize", &[stream]);
}

fn host_memory(a: &mut Asker, bytes: u64, pinned: bool) -> u64 {
    match pinned {
        true => a.pinned(bytes, 0),
        false => super::host::pages(bytes.div_ceil(4096) as usize),
    }
}

/// Copies to the host, and notes whether the bytes are there when the call returns.
fn to_host(a: &mut Asker, name: &str, bytes: u64, pinned: bool) {
    let (stream, device) = (a.stream(), a.alloc(bytes));
    let host = host_memory(a, bytes, pinned);
    a.need("cuMemsetD8_v2", &[device, 5, bytes]);
    a.need("cuCtxSynchronize", &[]);
    a.part(format_args!("{name}.{bytes}"));
    behind(a, stream, name, &[host, device, bytes]);
    a.note(read(host + bytes - 1));
    release(a, stream);
    a.note(read(host + bytes - 1));
}

/// Copies from the host, changes the source when the call returns, and notes which bytes arrived.
fn from_host(a: &mut Asker, name: &str, bytes: u64, pinned: bool) {
    let (stream, device) = (a.stream(), a.alloc(bytes));
    let host = host_memory(a, bytes, pinned);
    write(host + bytes - 1, 5);
    a.part(format_args!("{name}.{bytes}"));
    behind(a, stream, name, &[device, host, bytes]);
    write(host + bytes - 1, 9);
    release(a, stream);
    let byte = a.first_byte(device + bytes - 1);
    a.note(byte);
}

fn host_to_host(a: &mut Asker, [from, to]: [bool; 2]) {
    let stream = a.stream();
    let (from, to) = (host_memory(a, 4096, from), host_memory(a, 4096, to));
    write(from, 5);
    behind(a, stream, "cuMemcpyAsync", &[to, from, 16]);
    a.note(read(to));
    release(a, stream);
}
