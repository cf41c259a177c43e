//! Work on a stream of another context or device than the current one and the memory's. Cases of two
//! devices answer `one-device` on one.

use super::super::asker::{Asker, GRANULE};
use super::super::library::{at, read, write};
use super::{Case, case};

/// A question with the memory and the stream apart. It is asked with two contexts of one device, and
/// with two devices.
macro_rules! apart {
    ($($ask:ident,)*) => {
        pub(super) const CASES: &[Case] = &[
            $(
                case(concat!("apart.context.", stringify!($ask)), |a| two_contexts(a, $ask)),
                case(concat!("apart.device.", stringify!($ask)), |a| two_devices(a, $ask)),
            )*
            case("apart.device.pool_copy", |a| two_devices(a, pool_copy)),
            case("apart.device.enabled_memset", |a| enabled(a, |a, there| {
                a.say("cuMemsetD8_v2", &[there, 1, 16]);
            })),
            case("apart.device.enabled_copy", |a| enabled(a, |a, there| {
                let here = a.alloc(4096);
                a.say("cuMemcpyDtoD_v2", &[here, there, 16]);
            })),
            case("apart.device.enabled_large", |a| enabled(a, |a, there| {
                a.say("cuMemsetD8_v2", &[there, 1, 4096]);
                let here = a.alloc(GRANULE);
                a.say("cuMemcpyDtoD_v2", &[here, there, 4096]);
            })),
        ];
    };
}

apart! {
    device_to_device,
    any_to_any,
    to_device,
    to_host,
    memory_of_both,
    fill,
    fill_there,
    fill_wide,
    fill_pinned,
    mapping,
    fill_mapping,
    alloc_async,
    alloc_from_pool,
    free_async,
    prefetch,
    function,
    events,
    capture,
    graph,
    registered,
    values,
}

/// The current context's memory, and a stream and memory of the other one.
struct Apart {
    here: u64,
    there: u64,
    stream: u64,
}

/// Makes another context, makes a stream and memory there, and returns to the first one.
fn made_in(a: &mut Asker, other: u64) -> Apart {
    a.need("cuCtxPushCurrent_v2", &[other]);
    let (stream, there) = (a.stream(), a.alloc(GRANULE));
    a.need("cuMemsetD8_v2", &[there, 3, GRANULE]);
    a.need("cuCtxSynchronize", &[]);
    a.need("cuCtxPopCurrent_v2", &[0]);
    let here = a.alloc(GRANULE);
    a.need("cuMemsetD8_v2", &[here, 4, GRANULE]);
    a.need("cuCtxSynchronize", &[]);
    Apart {
        here,
        there,
        stream,
    }
}

fn two_contexts(a: &mut Asker, ask: fn(&mut Asker, &Apart)) {
    let other = a.context();
    a.need("cuCtxPopCurrent_v2", &[0]);
    let apart = made_in(a, other);
    ask(a, &apart);
}

fn two_devices(a: &mut Asker, ask: fn(&mut Asker, &Apart)) {
    let Some(other) = a.peer() else { return };
    let apart = made_in(a, other);
    ask(a, &apart);
}

/// Asks with the access of the first device's context to the second's enabled, and waits.
fn enabled(a: &mut Asker, ask: fn(&mut Asker, u64)) {
    let Some(other) = a.peer() else { return };
    let apart = made_in(a, other);
    a.say("cuCtxEnablePeerAccess", &[other, 0]);
    ask(a, apart.there);
    a.say("cuCtxSynchronize", &[]);
    let byte = a.first_byte(apart.there);
    a.note(byte);
}

/// Waits for the stream, and adds the code and the first byte of the memory to the answer.
fn settle(a: &mut Asker, apart: &Apart, memory: u64) {
    a.say("cuStreamSynchronize", &[apart.stream]);
    let byte = a.first_byte(memory);
    a.note(byte);
}

fn copied_here(a: &mut Asker, apart: &Apart, copy: &str) {
    let to = apart.here + 4096;
    a.need("cuMemsetD8_v2", &[to, 5, 16]);
    a.need("cuCtxSynchronize", &[]);
    a.say(copy, &[to, apart.here, 16, apart.stream]);
    settle(a, apart, to);
}

fn device_to_device(a: &mut Asker, apart: &Apart) {
    copied_here(a, apart, "cuMemcpyDtoDAsync_v2");
}

fn any_to_any(a: &mut Asker, apart: &Apart) {
    copied_here(a, apart, "cuMemcpyAsync");
}

fn to_device(a: &mut Asker, apart: &Apart) {
    let pinned = a.pinned(4096, 0);
    write(pinned, 6);
    let arguments = [apart.here, pinned, 1, apart.stream];
    a.say("cuMemcpyHtoDAsync_v2", &arguments);
    settle(a, apart, apart.here);
}

fn to_host(a: &mut Asker, apart: &Apart) {
    let pinned = a.pinned(4096, 0);
    let arguments = [pinned, apart.here, 1, apart.stream];
    a.say("cuMemcpyDtoHAsync_v2", &arguments);
    settle(a, apart, apart.here);
    a.note(read(pinned));
}

fn memory_of_both(a: &mut Asker, apart: &Apart) {
    let (here, there) = (apart.here, apart.there);
    a.say("cuMemcpyDtoDAsync_v2", &[here, there, 16, apart.stream]);
    settle(a, apart, here);
    a.say("cuMemcpyDtoDAsync_v2", &[there + 64, here, 16, 0]);
    a.say("cuCtxSynchronize", &[]);
}

fn filled(a: &mut Asker, apart: &Apart, memory: u64) {
    a.say("cuMemsetD8Async", &[memory, 7, 16, apart.stream]);
    settle(a, apart, memory);
}

fn fill(a: &mut Asker, apart: &Apart) {
    filled(a, apart, apart.here);
}

fn fill_there(a: &mut Asker, apart: &Apart) {
    filled(a, apart, apart.there);
}

fn fill_wide(a: &mut Asker, apart: &Apart) {
    let arguments = [apart.there, 0x0708, 16, apart.stream];
    a.say("cuMemsetD16Async", &arguments);
    settle(a, apart, apart.there);
}

fn fill_pinned(a: &mut Asker, apart: &Apart) {
    let pinned = a.pinned(4096, 0);
    a.say("cuMemsetD8Async", &[pinned, 7, 16, apart.stream]);
    a.say("cuStreamSynchronize", &[apart.stream]);
    a.note(read(pinned));
}

/// Copies memory that is mapped for the current device only.
fn mapping(a: &mut Asker, apart: &Apart) {
    let mapped = a.mapping(true);
    let arguments = [mapped, apart.here, 16, apart.stream];
    a.say("cuMemcpyDtoDAsync_v2", &arguments);
    settle(a, apart, mapped);
}

fn fill_mapping(a: &mut Asker, apart: &Apart) {
    let mapped = a.mapping(true);
    filled(a, apart, mapped);
}

/// Adds the device of memory to the answer.
fn note_device(a: &mut Asker, memory: u64) {
    /// The attribute of the device's number.
    const ORDINAL: u64 = 9;
    a.tell("cuPointerGetAttribute", 77i32, &[ORDINAL, memory]);
}

fn alloc_async(a: &mut Asker, apart: &Apart) {
    let memory = a.get("cuMemAllocAsync", 0u64, &[4096, apart.stream]);
    note_device(a, memory);
    a.say("cuMemFreeAsync", &[memory, apart.stream]);
    a.say("cuStreamSynchronize", &[apart.stream]);
}

fn alloc_from_pool(a: &mut Asker, apart: &Apart) {
    let arguments = [4096, a.default_pool(), apart.stream];
    let memory = a.get("cuMemAllocFromPoolAsync", 0u64, &arguments);
    note_device(a, memory);
}

fn free_async(a: &mut Asker, apart: &Apart) {
    let memory = a.alloc_async(4096);
    a.need("cuStreamSynchronize", &[0]);
    a.say("cuMemFreeAsync", &[memory, apart.stream]);
    a.say("cuStreamSynchronize", &[apart.stream]);
}

/// Copies memory of the first device's pool by each function, on the stream of each device and with
/// the context of each device current.
fn pool_copy(a: &mut Asker, apart: &Apart) {
    let (first, mut second) = (a.made("cuCtxGetCurrent", &[]), 0u64);
    a.need("cuStreamGetCtx", &[apart.stream, at(&mut second)]);
    let (pooled, own) = (a.alloc_async(4096), a.stream());
    a.need("cuMemsetD8_v2", &[pooled, 5, 4096]);
    a.need("cuCtxSynchronize", &[]);
    let pinned = a.pinned(4096, 0);
    for (current, context) in [("here", first), ("there", second)] {
        a.need("cuCtxSetCurrent", &[context]);
        for (on, stream) in [("here", own), ("there", apart.stream)] {
            let (here, there) = (apart.here, apart.there);
            let to_device = "cuMemcpyDtoDAsync_v2";
            let peer = [there, second, pooled, first, 16, stream];
            for (part, name, arguments) in [
                ("to_here", to_device, &[here, pooled, 16, stream] as &[u64]),
                ("to_there", to_device, &[there, pooled, 16, stream]),
                ("any_here", "cuMemcpyAsync", &[here, pooled, 16, stream]),
                ("any_there", "cuMemcpyAsync", &[there, pooled, 16, stream]),
                ("peer", "cuMemcpyPeerAsync", &peer),
                (
                    "host",
                    "cuMemcpyDtoHAsync_v2",
                    &[pinned, pooled, 16, stream],
                ),
                ("fill", "cuMemsetD8Async", &[pooled, 5, 16, stream]),
            ] {
                a.ask(format_args!("{current}_on_{on}.{part}"), name, arguments);
                a.say("cuStreamSynchronize", &[stream]);
            }
        }
        a.part(format_args!("{current}.wait"));
        a.say("cuMemcpyDtoD_v2", &[apart.here, pooled, 16]);
        a.say("cuMemcpyDtoD_v2", &[apart.there, pooled, 16]);
        a.say("cuMemcpy", &[apart.there, pooled, 16]);
        a.say("cuMemcpyPeer", &[apart.there, second, pooled, first, 16]);
        a.say("cuMemcpyDtoH_v2", &[pinned, pooled, 16]);
    }
}

fn prefetch(a: &mut Asker, apart: &Apart) {
    let managed = a.managed(GRANULE);
    let arguments = [managed, GRANULE, 0, apart.stream];
    a.say("cuMemPrefetchAsync", &arguments);
    a.say("cuStreamSynchronize", &[apart.stream]);
}

fn function(a: &mut Asker, apart: &Apart) {
    let mut done = [0u8; 8];
    let function = super::streams::add_one as *const () as u64;
    let arguments = [apart.stream, function, at(&mut done)];
    a.say("cuLaunchHostFunc", &arguments);
    a.say("cuStreamSynchronize", &[apart.stream]);
    a.note(read(at(&mut done)));
}

fn events(a: &mut Asker, apart: &Apart) {
    let event = a.event(2);
    a.say("cuEventRecord", &[event, apart.stream]);
    a.say("cuEventRecord", &[event, 0]);
    a.say("cuStreamWaitEvent", &[apart.stream, event, 0]);
    a.say("cuStreamSynchronize", &[apart.stream]);
}

fn capture(a: &mut Asker, apart: &Apart) {
    let (mut status, mut graph) = (7u32, 0u64);
    a.say("cuStreamBeginCapture_v2", &[apart.stream, 2]);
    a.say("cuStreamIsCapturing", &[apart.stream, at(&mut status)]);
    a.note(status);
    a.say("cuMemsetD8Async", &[apart.there, 7, 16, apart.stream]);
    a.say("cuStreamEndCapture", &[apart.stream, at(&mut graph)]);
}

/// Launches a graph of the current context on the other's stream.
fn graph(a: &mut Asker, apart: &Apart) {
    let own = a.stream();
    let (mut graph, mut made) = (0u64, 0u64);
    a.need("cuStreamBeginCapture_v2", &[own, 2]);
    a.need("cuMemsetD8Async", &[apart.here, 7, 16, own]);
    a.need("cuStreamEndCapture", &[own, at(&mut graph)]);
    a.need("cuGraphInstantiateWithFlags", &[at(&mut made), graph, 0]);
    a.say("cuGraphLaunch", &[made, apart.stream]);
    settle(a, apart, apart.here);
}

fn registered(a: &mut Asker, apart: &Apart) {
    let host = super::host::pages(1);
    a.need("cuMemHostRegister_v2", &[host, 4096, 0]);
    write(host, 6);
    a.say("cuMemcpyAsync", &[apart.here, host, 16, apart.stream]);
    settle(a, apart, apart.here);
}

fn values(a: &mut Asker, apart: &Apart) {
    let arguments = [apart.stream, apart.there, 7, 0];
    a.say("cuStreamWriteValue32_v2", &arguments);
    a.say("cuStreamWaitValue32_v2", &arguments);
    settle(a, apart, apart.there);
}
