//! Streams and events.

use super::super::asker::{Asker, GRANULE};
use super::super::library::{at, read, write};
use super::{Case, case};

/// The legacy default stream and the thread's own, as numbers.
const DEFAULTS: [(&str, u64); 3] = [("null", 0), ("legacy", 1), ("per_thread", 2)];

pub(super) const CASES: &[Case] = &[
    case("stream.priority", |a| {
        for priority in [0i32, -1, -5, -6, -100, 1, 100] {
            a.part(priority);
            let rest = [1, priority as u32 as u64];
            let stream = a.get("cuStreamCreateWithPriority", 0u64, &rest);
            a.tell_last("cuStreamGetPriority", &[stream], 77i32);
        }
        a.part("flags_2");
        a.get("cuStreamCreateWithPriority", 0u64, &[2, 0]);
    }),
    case("stream.queries", |a| {
        for flags in [0u64, 1] {
            let stream = a.made("cuStreamCreate", &[flags]);
            a.part(format_args!("created_{flags}"));
            about(a, stream);
        }
        for (part, stream) in DEFAULTS {
            a.part(part);
            about(a, stream);
        }
    }),
    case("stream.ids", |a| {
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
        for name in [
            "cuStreamGetFlags",
            "cuStreamGetPriority",
            "cuStreamGetId",
            "cuStreamGetCtx",
            "cuStreamIsCapturing",
        ] {
            a.ask(name, name, &[0, 0]);
        }
        a.ask("create", "cuStreamCreate", &[0, 0]);
    }),
    case("stream.destroy_null", |a| destroy_default(a, 0)),
    case("stream.destroy_legacy", |a| destroy_default(a, 1)),
    case("stream.destroy_per_thread", |a| destroy_default(a, 2)),
    case("stream.destroyed", |a| {
        let stream = a.stream();
        a.say("cuStreamDestroy_v2", &[stream]);
        a.say("cuStreamQuery", &[stream]);
    }),
    case("stream.destroy_v1", |a| {
        let stream = a.stream();
        a.say("cuStreamDestroy", &[stream]);
    }),
    case("stream.nonsense", |a| {
        a.say("cuStreamQuery", &[0x1234]);
    }),
    case("stream.of_other_context", |a| {
        let stream = a.stream();
        a.context();
        for name in ["cuStreamQuery", "cuStreamSynchronize"] {
            a.ask(name, name, &[stream]);
        }
        a.part("context");
        let context = a.get_last("cuStreamGetCtx", &[stream], 0u64);
        a.note(context == a.primary);
        a.part("memset");
        let memory = a.alloc(512);
        a.say("cuMemsetD8Async", &[memory, 1, 16, stream]);
        a.part("event");
        let event = a.event(2);
        a.say("cuEventRecord", &[event, stream]);
        a.ask("wait", "cuStreamWaitEvent", &[stream, event, 0]);
        a.ask("destroy", "cuStreamDestroy_v2", &[stream]);
    }),
    case("stream.without_context", |a| {
        let stream = a.stream();
        let event = a.event(2);
        a.need("cuCtxSetCurrent", &[0]);
        let mut word = 7u64;
        a.ask_each(&[
            ("cuStreamQuery", &[stream]),
            ("cuStreamSynchronize", &[stream]),
            ("cuStreamGetCtx", &[stream, at(&mut word)]),
            ("cuStreamGetFlags", &[stream, at(&mut word)]),
            ("cuEventRecord", &[event, stream]),
            ("cuEventQuery", &[event]),
            ("cuEventSynchronize", &[event]),
            ("cuStreamWaitEvent", &[stream, event, 0]),
            ("cuEventDestroy_v2", &[event]),
            ("cuStreamDestroy_v2", &[stream]),
        ]);
    }),
    case("stream.per_thread", per_thread),
    case("stream.host_function", host_functions),
    case("stream.values", values),
    case("stream.attributes", |a| {
        let (one, two) = (a.stream(), a.stream());
        a.ask("copy", "cuStreamCopyAttributes", &[one, two]);
        for attribute in [1u64, 2, 3, 8, 99] {
            a.part(attribute);
            let first = [one, attribute];
            let value = a.get_last("cuStreamGetAttribute", &first, [0u64; 8]);
            a.note(format_args!("{:x?}", value[0]));
        }
    }),
    case("stream.device", |a| {
        let stream = a.stream();
        a.tell_last("cuStreamGetDevice", &[stream], 77i32);
        a.get_last("cuStreamGetDevice", &[0], 77i32);
        a.part("ctx_v2");
        let first = [stream, at(&mut 0u64)];
        a.tell_last("cuStreamGetCtx_v2", &first, 7u64);
    }),
    case("event.flags", |a| {
        for flags in 0..=8u64 {
            a.part(flags);
            a.get("cuEventCreate", 0u64, &[flags]);
        }
    }),
    case("event.unrecorded", |a| {
        let event = a.event(0);
        a.say("cuEventQuery", &[event]);
        a.say("cuEventSynchronize", &[event]);
        a.say("cuStreamWaitEvent", &[0, event, 0]);
        a.say("cuEventDestroy_v2", &[event]);
    }),
    case("event.elapsed", elapsed),
    case("event.elapsed_apart", |a| {
        let (primary, one) = (a.primary, a.event(0));
        a.need("cuEventRecord", &[one, 0]);
        a.need("cuCtxSynchronize", &[]);
        let made = a.context();
        let (two, three) = (a.event(0), a.event(0));
        a.need("cuEventRecord", &[two, 0]);
        a.need("cuEventRecord", &[three, 0]);
        a.need("cuCtxSynchronize", &[]);
        for (part, context) in [("first", primary), ("second", made)] {
            a.need("cuCtxSetCurrent", &[context]);
            for name in ["cuEventElapsedTime", "cuEventElapsedTime_v2"] {
                a.part(format_args!("{part}.{name}"));
                let time = a.get(name, -1f32, &[one, two]);
                let time = a.get(name, time, &[two, one]);
                a.note(if time == -1.0 { "unwritten" } else { "written" });
                a.get(name, time, &[two, three]);
            }
        }
    }),
    case("event.elapsed_null", |a| {
        let event = a.event(0);
        a.need("cuEventRecord", &[event, 0]);
        a.say("cuEventElapsedTime", &[0, event, event]);
    }),
    case("event.record_flags", |a| {
        let event = a.event(2);
        for flags in [0u64, 1, 2] {
            a.ask(flags, "cuEventRecordWithFlags", &[event, 0, flags]);
        }
        a.ask("wait_1", "cuStreamWaitEvent", &[0, event, 1]);
        a.ask("wait_2", "cuStreamWaitEvent", &[0, event, 2]);
    }),
    case("event.null", |a| {
        a.say("cuEventQuery", &[0]);
        a.say("cuEventRecord", &[0, 0]);
        a.say("cuEventSynchronize", &[0]);
        a.say("cuEventDestroy_v2", &[0]);
        a.say("cuStreamWaitEvent", &[0, 0, 0]);
    }),
    case("event.destroyed", |a| {
        let event = a.event(2);
        a.say("cuEventDestroy_v2", &[event]);
        a.say("cuEventQuery", &[event]);
    }),
    case("event.of_other_context", |a| {
        let event = a.event(2);
        a.context();
        let stream = a.stream();
        a.ask_each(&[
            ("cuEventQuery", &[event]),
            ("cuEventRecord", &[event, stream]),
            ("cuStreamWaitEvent", &[stream, event, 0]),
            ("cuEventSynchronize", &[event]),
            ("cuEventDestroy_v2", &[event]),
        ]);
    }),
];

/// Notes the queries of one stream.
fn about(a: &mut Asker, stream: u64) {
    a.tell_last("cuStreamGetFlags", &[stream], 77u32);
    a.tell_last("cuStreamGetPriority", &[stream], 77i32);
    let context = a.get_last("cuStreamGetCtx", &[stream], 7u64);
    a.note(context == a.primary);
    a.say("cuStreamQuery", &[stream]);
    a.say("cuStreamSynchronize", &[stream]);
}

fn destroy_default(a: &mut Asker, stream: u64) {
    a.say("cuStreamDestroy_v2", &[stream]);
    a.say("cuStreamQuery", &[stream]);
}

/// Uses the thread's own default stream, by its number and by the functions for it.
fn per_thread(a: &mut Asker) {
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
        let last = arguments.last().copied().unwrap_or(0);
        a.ask(format_args!("{name}.{last}"), name, arguments);
    }
    a.part("alloc_async");
    let address = a.get("cuMemAllocAsync", 0u64, &[512, 2]);
    a.say("cuMemFreeAsync", &[address, 2]);
    a.ask("capture_null", "cuStreamBeginCapture_v2", &[0, 0]);
    a.ask("capture_legacy", "cuStreamBeginCapture_v2", &[1, 0]);
    a.ask("capture_per_thread", "cuStreamBeginCapture_v2", &[2, 2]);
    a.get_last("cuStreamEndCapture", &[2], 0u64);
}

pub(super) extern "C" fn add_one(data: *mut std::ffi::c_void) {
    write(data.expose_provenance() as u64, 1);
}

extern "C" fn add_two(_stream: u64, status: i32, data: *mut std::ffi::c_void) {
    write(data.expose_provenance() as u64, 2 + status as u8);
}

/// Runs functions of the host on a stream.
fn host_functions(a: &mut Asker) {
    let stream = a.stream();
    let function = add_one as *const () as u64;
    let callback = add_two as *const () as u64;
    let mut done = [0u8; 8];
    a.part("launch");
    a.say("cuLaunchHostFunc", &[stream, function, at(&mut done)]);
    a.need("cuStreamSynchronize", &[stream]);
    a.note(read(at(&mut done)));
    a.part("callback");
    a.say("cuStreamAddCallback", &[stream, callback, at(&mut done), 0]);
    a.need("cuStreamSynchronize", &[stream]);
    a.note(read(at(&mut done)));
    a.part("callback_flags");
    a.say("cuStreamAddCallback", &[stream, callback, at(&mut done), 1]);
    a.ask("null", "cuLaunchHostFunc", &[stream, 0, 0]);
    a.say("cuStreamAddCallback", &[stream, 0, 0, 0]);
    a.ask("default", "cuLaunchHostFunc", &[0, function, at(&mut done)]);
    a.need("cuStreamSynchronize", &[0]);
}

/// Writes and awaits values in memory by the order of a stream.
fn values(a: &mut Asker) {
    let stream = a.stream();
    let memory = a.alloc(4096);
    a.need("cuMemsetD8_v2", &[memory, 0, 64]);
    a.part("write_32");
    a.say("cuStreamWriteValue32_v2", &[stream, memory, 7, 0]);
    a.ask("wait_32", "cuStreamWaitValue32_v2", &[stream, memory, 7, 1]);
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
    let (one, two, untimed) = (a.event(0), a.event(0), a.event(2));
    for version in ["cuEventElapsedTime", "cuEventElapsedTime_v2"] {
        a.part(format_args!("{version}.unrecorded"));
        a.tell(version, -1f32, &[one, one]);
    }
    a.need("cuEventRecord", &[one, 0]);
    a.part("one_unrecorded");
    let mut time = a.get("cuEventElapsedTime", -1f32, &[one, two]);
    a.need("cuEventRecord", &[two, 0]);
    a.need("cuEventRecord", &[untimed, 0]);
    a.need("cuCtxSynchronize", &[]);
    for version in ["cuEventElapsedTime", "cuEventElapsedTime_v2"] {
        a.part(format_args!("{version}.forward"));
        a.say(version, &[at(&mut time), one, two]);
        a.note((0.0..1000.0).contains(&time));
    }
    a.ask("backward", "cuEventElapsedTime", &[at(&mut time), two, one]);
    a.note(time <= 0.0);
    a.ask("same", "cuEventElapsedTime", &[at(&mut time), one, one]);
    a.note(time);
    a.part("untimed");
    a.say("cuEventElapsedTime", &[at(&mut time), one, untimed]);
    a.ask("null_event", "cuEventElapsedTime", &[at(&mut time), 0, one]);
}
