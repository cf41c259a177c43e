//! Streams and events.

use super::super::asker::{Asker, GRANULE};
use super::super::library::at;
use super::{Case, case};

/// The legacy default stream and the thread's own, as numbers.
const DEFAULTS: [(&str, u64); 3] = [("null", 0), ("legacy", 1), ("per_thread", 2)];

pub(super) const CASES: &[Case] = &[
    case("stream.priority", |a| {
        a.enter();
        for priority in [0i32, -1, -5, -6, -100, 1, 100] {
            a.part(priority);
            let (mut stream, mut got) = (0u64, 77i32);
            let arguments = [at(&mut stream), 1, priority as u32 as u64];
            a.say("cuStreamCreateWithPriority", &arguments);
            a.say("cuStreamGetPriority", &[stream, at(&mut got)]);
            a.note(got);
        }
        a.part("flags_2");
        let mut stream = 0u64;
        a.say("cuStreamCreateWithPriority", &[at(&mut stream), 2, 0]);
    }),
    case("stream.queries", |a| {
        let primary = a.enter();
        for flags in [0u64, 1] {
            let mut stream = 0u64;
            a.need("cuStreamCreate", &[at(&mut stream), flags]);
            a.part(format_args!("created_{flags}"));
            about(a, stream, primary);
        }
        for (part, stream) in DEFAULTS {
            a.part(part);
            about(a, stream, primary);
        }
    }),
    case("stream.ids", |a| {
        a.enter();
        let (one, two) = (a.stream(), a.stream());
        let mut ids = [0u64; 5];
        for (id, stream) in ids.iter_mut().zip([one, two, 0, 1, 2]) {
            a.need("cuStreamGetId", &[stream, at(id)]);
        }
        a.part("created_differ");
        a.note(ids[0] != ids[1]);
        a.part("null_is_legacy");
        a.note(ids[2] == ids[3]);
        a.part("per_thread_is_legacy");
        a.note(ids[4] == ids[3]);
        a.part("step");
        a.note(ids[1].wrapping_sub(ids[0]));
    }),
    case("stream.null_out", |a| {
        a.enter();
        for name in [
            "cuStreamGetFlags",
            "cuStreamGetPriority",
            "cuStreamGetId",
            "cuStreamGetCtx",
            "cuStreamIsCapturing",
        ] {
            a.part(name);
            a.say(name, &[0, 0]);
        }
        a.part("create");
        a.say("cuStreamCreate", &[0, 0]);
    }),
    case("stream.destroy_null", |a| destroy_default(a, 0)),
    case("stream.destroy_legacy", |a| destroy_default(a, 1)),
    case("stream.destroy_per_thread", |a| destroy_default(a, 2)),
    case("stream.destroyed", |a| {
        a.enter();
        let stream = a.stream();
        a.say("cuStreamDestroy_v2", &[stream]);
        a.say("cuStreamQuery", &[stream]);
    }),
    case("stream.destroy_v1", |a| {
        a.enter();
        let stream = a.stream();
        a.say("cuStreamDestroy", &[stream]);
    }),
    case("stream.nonsense", |a| {
        a.enter();
        a.say("cuStreamQuery", &[0x1234]);
    }),
    case("stream.of_other_context", |a| {
        let primary = a.enter();
        let stream = a.stream();
        let mut made = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut made), 0, 0]);
        for (name, arguments) in [
            ("cuStreamQuery", &[stream] as &[u64]),
            ("cuStreamSynchronize", &[stream]),
        ] {
            a.part(name);
            a.say(name, arguments);
        }
        a.part("context");
        let mut context = 0u64;
        a.say("cuStreamGetCtx", &[stream, at(&mut context)]);
        a.note(context == primary);
        a.part("memset");
        let memory = a.alloc(512);
        a.say("cuMemsetD8Async", &[memory, 1, 16, stream]);
        a.part("event");
        let event = a.event(2);
        a.say("cuEventRecord", &[event, stream]);
        a.part("wait");
        a.say("cuStreamWaitEvent", &[stream, event, 0]);
        a.part("destroy");
        a.say("cuStreamDestroy_v2", &[stream]);
    }),
    case("stream.without_context", |a| {
        a.enter();
        let stream = a.stream();
        let event = a.event(2);
        a.need("cuCtxSetCurrent", &[0]);
        let mut word = 7u64;
        for (name, arguments) in [
            ("cuStreamQuery", &[stream] as &[u64]),
            ("cuStreamSynchronize", &[stream]),
            ("cuStreamGetCtx", &[stream, at(&mut word)]),
            ("cuStreamGetFlags", &[stream, at(&mut word)]),
            ("cuEventRecord", &[event, stream]),
            ("cuEventQuery", &[event]),
            ("cuEventSynchronize", &[event]),
            ("cuStreamWaitEvent", &[stream, event, 0]),
            ("cuEventDestroy_v2", &[event]),
            ("cuStreamDestroy_v2", &[stream]),
        ] {
            a.part(name);
            a.say(name, arguments);
        }
    }),
    case("stream.per_thread", per_thread),
    case("stream.host_function", host_functions),
    case("stream.values", values),
    case("stream.attributes", |a| {
        a.enter();
        let (one, two) = (a.stream(), a.stream());
        a.part("copy");
        a.say("cuStreamCopyAttributes", &[one, two]);
        for attribute in [1u64, 2, 3, 8, 99] {
            let mut value = [0u64; 8];
            a.part(attribute);
            a.say("cuStreamGetAttribute", &[one, attribute, at(&mut value)]);
            a.note(format_args!("{:x?}", value[0]));
        }
    }),
    case("stream.device", |a| {
        a.enter();
        let stream = a.stream();
        let mut device = 77i32;
        a.say("cuStreamGetDevice", &[stream, at(&mut device)]);
        a.note(device);
        a.say("cuStreamGetDevice", &[0, at(&mut device)]);
        a.part("ctx_v2");
        let (mut context, mut green) = (0u64, 7u64);
        let arguments = [stream, at(&mut context), at(&mut green)];
        a.say("cuStreamGetCtx_v2", &arguments);
        a.note(green);
    }),
    case("event.flags", |a| {
        a.enter();
        for flags in 0..=8u64 {
            let mut event = 0u64;
            a.part(flags);
            a.say("cuEventCreate", &[at(&mut event), flags]);
        }
    }),
    case("event.unrecorded", |a| {
        a.enter();
        let event = a.event(0);
        a.say("cuEventQuery", &[event]);
        a.say("cuEventSynchronize", &[event]);
        a.say("cuStreamWaitEvent", &[0, event, 0]);
        a.say("cuEventDestroy_v2", &[event]);
    }),
    case("event.elapsed", elapsed),
    case("event.elapsed_apart", |a| {
        let primary = a.enter();
        let (one, mut made, mut time) = (a.event(0), 0u64, -1f32);
        a.need("cuEventRecord", &[one, 0]);
        a.need("cuCtxSynchronize", &[]);
        a.need("cuCtxCreate_v2", &[at(&mut made), 0, 0]);
        let (two, three) = (a.event(0), a.event(0));
        a.need("cuEventRecord", &[two, 0]);
        a.need("cuEventRecord", &[three, 0]);
        a.need("cuCtxSynchronize", &[]);
        for (part, context) in [("first", primary), ("second", made)] {
            a.need("cuCtxSetCurrent", &[context]);
            for name in ["cuEventElapsedTime", "cuEventElapsedTime_v2"] {
                a.part(format_args!("{part}.{name}"));
                a.say(name, &[at(&mut time), one, two]);
                a.say(name, &[at(&mut time), two, one]);
                a.note(if time == -1.0 { "unwritten" } else { "written" });
                a.say(name, &[at(&mut time), two, three]);
                time = -1.0;
            }
        }
    }),
    case("event.elapsed_null", |a| {
        a.enter();
        let event = a.event(0);
        a.need("cuEventRecord", &[event, 0]);
        a.say("cuEventElapsedTime", &[0, event, event]);
    }),
    case("event.record_flags", |a| {
        a.enter();
        let event = a.event(2);
        for flags in [0u64, 1, 2] {
            a.part(flags);
            a.say("cuEventRecordWithFlags", &[event, 0, flags]);
        }
        a.part("wait_1");
        a.say("cuStreamWaitEvent", &[0, event, 1]);
        a.part("wait_2");
        a.say("cuStreamWaitEvent", &[0, event, 2]);
    }),
    case("event.null", |a| {
        a.enter();
        a.say("cuEventQuery", &[0]);
        a.say("cuEventRecord", &[0, 0]);
        a.say("cuEventSynchronize", &[0]);
        a.say("cuEventDestroy_v2", &[0]);
        a.say("cuStreamWaitEvent", &[0, 0, 0]);
    }),
    case("event.destroyed", |a| {
        a.enter();
        let event = a.event(2);
        a.say("cuEventDestroy_v2", &[event]);
        a.say("cuEventQuery", &[event]);
    }),
    case("event.of_other_context", |a| {
        a.enter();
        let event = a.event(2);
        let mut made = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut made), 0, 0]);
        let stream = a.stream();
        for (name, arguments) in [
            ("cuEventQuery", &[event] as &[u64]),
            ("cuEventRecord", &[event, stream]),
            ("cuStreamWaitEvent", &[stream, event, 0]),
            ("cuEventSynchronize", &[event]),
            ("cuEventDestroy_v2", &[event]),
        ] {
            a.part(name);
            a.say(name, arguments);
        }
    }),
];

/// Notes the queries of one stream.
fn about(a: &mut Asker, stream: u64, primary: u64) {
    let (mut flags, mut priority, mut context) = (77u32, 77i32, 7u64);
    a.say("cuStreamGetFlags", &[stream, at(&mut flags)]);
    a.note(flags);
    a.say("cuStreamGetPriority", &[stream, at(&mut priority)]);
    a.note(priority);
    a.say("cuStreamGetCtx", &[stream, at(&mut context)]);
    a.note(context == primary);
    a.say("cuStreamQuery", &[stream]);
    a.say("cuStreamSynchronize", &[stream]);
}

fn destroy_default(a: &mut Asker, stream: u64) {
    a.enter();
    a.say("cuStreamDestroy_v2", &[stream]);
    a.say("cuStreamQuery", &[stream]);
}

/// Uses the thread's own default stream, by its number and by the functions for it.
fn per_thread(a: &mut Asker) {
    a.enter();
    let memory = a.alloc(GRANULE);
    let event = a.event(2);
    for (name, arguments) in [
        ("cuMemsetD8Async", &[memory, 5, 16, 2] as &[u64]),
        ("cuMemsetD8Async_ptsz", &[memory, 5, 16, 0]),
        ("cuEventRecord", &[event, 2]),
        ("cuEventRecord_ptsz", &[event, 0]),
        ("cuStreamWaitEvent", &[2, event, 0]),
        ("cuStreamQuery_ptsz", &[0]),
        ("cuStreamSynchronize_ptsz", &[0]),
        ("cuMemsetD8_v2_ptds", &[memory, 6, 16]),
    ] {
        a.part(format_args!(
            "{name}.{}",
            arguments.last().copied().unwrap_or(0)
        ));
        a.say(name, arguments);
    }
    a.part("alloc_async");
    let mut address = 0u64;
    a.say("cuMemAllocAsync", &[at(&mut address), 512, 2]);
    a.say("cuMemFreeAsync", &[address, 2]);
    a.part("capture_null");
    a.say("cuStreamBeginCapture_v2", &[0, 0]);
    a.part("capture_legacy");
    a.say("cuStreamBeginCapture_v2", &[1, 0]);
    a.part("capture_per_thread");
    a.say("cuStreamBeginCapture_v2", &[2, 2]);
    let mut graph = 0u64;
    a.say("cuStreamEndCapture", &[2, at(&mut graph)]);
}

extern "C" fn add_one(data: *mut std::ffi::c_void) {
    super::super::library::write(data.expose_provenance() as u64, 1);
}

extern "C" fn add_two(_stream: u64, status: i32, data: *mut std::ffi::c_void) {
    super::super::library::write(data.expose_provenance() as u64, 2 + status as u8);
}

/// Runs functions of the host on a stream.
fn host_functions(a: &mut Asker) {
    a.enter();
    let stream = a.stream();
    let function = add_one as *const () as u64;
    let callback = add_two as *const () as u64;
    let mut done = [0u8; 8];
    a.part("launch");
    a.say("cuLaunchHostFunc", &[stream, function, at(&mut done)]);
    a.need("cuStreamSynchronize", &[stream]);
    a.note(super::super::library::read(at(&mut done)));
    a.part("callback");
    a.say("cuStreamAddCallback", &[stream, callback, at(&mut done), 0]);
    a.need("cuStreamSynchronize", &[stream]);
    a.note(super::super::library::read(at(&mut done)));
    a.part("callback_flags");
    a.say("cuStreamAddCallback", &[stream, callback, at(&mut done), 1]);
    a.part("null");
    a.say("cuLaunchHostFunc", &[stream, 0, 0]);
    a.say("cuStreamAddCallback", &[stream, 0, 0, 0]);
    a.part("default");
    a.say("cuLaunchHostFunc", &[0, function, at(&mut done)]);
    a.need("cuStreamSynchronize", &[0]);
}

/// Writes and awaits values in memory by the order of a stream.
fn values(a: &mut Asker) {
    a.enter();
    let stream = a.stream();
    let memory = a.alloc(4096);
    a.need("cuMemsetD8_v2", &[memory, 0, 64]);
    a.part("write_32");
    a.say("cuStreamWriteValue32_v2", &[stream, memory, 7, 0]);
    a.part("wait_32");
    a.say("cuStreamWaitValue32_v2", &[stream, memory, 7, 1]);
    a.part("write_64");
    a.say("cuStreamWriteValue64_v2", &[stream, memory + 8, 9, 0]);
    a.part("wait_64");
    a.say("cuStreamWaitValue64_v2", &[stream, memory + 8, 9, 0]);
    a.need("cuStreamSynchronize", &[stream]);
    a.part("read");
    let mut words = [0u64; 2];
    a.need("cuMemcpyDtoH_v2", &[at(&mut words), memory, 16]);
    a.note(format_args!("{words:?}"));
    a.part("unaligned");
    a.say("cuStreamWriteValue32_v2", &[stream, memory + 2, 7, 0]);
    a.part("wrong_address");
    a.say("cuStreamWriteValue32_v2", &[stream, 4096, 7, 0]);
}

/// Measures between events.
fn elapsed(a: &mut Asker) {
    a.enter();
    let (one, two, untimed) = (a.event(0), a.event(0), a.event(2));
    for version in ["cuEventElapsedTime", "cuEventElapsedTime_v2"] {
        let mut time = -1f32;
        a.part(format_args!("{version}.unrecorded"));
        a.say(version, &[at(&mut time), one, one]);
        a.note(time);
    }
    a.need("cuEventRecord", &[one, 0]);
    let mut time = -1f32;
    a.part("one_unrecorded");
    a.say("cuEventElapsedTime", &[at(&mut time), one, two]);
    a.need("cuEventRecord", &[two, 0]);
    a.need("cuEventRecord", &[untimed, 0]);
    a.need("cuCtxSynchronize", &[]);
    for version in ["cuEventElapsedTime", "cuEventElapsedTime_v2"] {
        a.part(format_args!("{version}.forward"));
        a.say(version, &[at(&mut time), one, two]);
        a.note((0.0..1000.0).contains(&time));
    }
    a.part("backward");
    a.say("cuEventElapsedTime", &[at(&mut time), two, one]);
    a.note(time <= 0.0);
    a.part("same");
    a.say("cuEventElapsedTime", &[at(&mut time), one, one]);
    a.note(time);
    a.part("untimed");
    a.say("cuEventElapsedTime", &[at(&mut time), one, untimed]);
    a.part("null_event");
    a.say("cuEventElapsedTime", &[at(&mut time), 0, one]);
}
