//! Functions of the program that a stream runs: which thread, what they may do, what waits for them.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::super::asker::{Asker, GRANULE};
use super::super::library::{at, call_at};
use super::{Case, case};

pub(super) static STARTED: AtomicBool = AtomicBool::new(false);
pub(super) static RELEASED: AtomicBool = AtomicBool::new(false);
static RETURNED: AtomicBool = AtomicBool::new(false);
static OVERLAPPED: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU32 = AtomicU32::new(0);

/// The functions of the driver that a function calls, and what they answered.
static ASKED: Mutex<Vec<(&str, usize, Option<i32>)>> = Mutex::new(Vec::new());

/// The longest time that a function waits for what may never happen.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn wait_for(flag: &AtomicBool) -> bool {
    let begun = Instant::now();
    while !flag.load(Ordering::SeqCst) && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
    flag.load(Ordering::SeqCst)
}

pub(super) extern "C" fn blocks(_: *mut c_void) {
    STARTED.store(true, Ordering::SeqCst);
    OVERLAPPED.store(wait_for(&RELEASED), Ordering::SeqCst);
    RETURNED.store(true, Ordering::SeqCst);
}

extern "C" fn sleeps(_: *mut c_void) {
    STARTED.store(true, Ordering::SeqCst);
    thread::sleep(Duration::from_millis(200));
    RETURNED.store(true, Ordering::SeqCst);
}

extern "C" fn releases(_: *mut c_void) {
    RELEASED.store(true, Ordering::SeqCst);
}

extern "C" fn counts(_: *mut c_void) {
    COUNT.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn counts_too(_: u64, status: i32, _: *mut c_void) {
    COUNT.fetch_add(10 + status.unsigned_abs(), Ordering::SeqCst);
}

extern "C" fn asks(_: *mut c_void) {
    let (mut word, mut long) = (0u32, 0u64);
    let Ok(mut asked) = ASKED.lock() else { return };
    for (name, address, answer) in asked.iter_mut() {
        let address = std::ptr::with_exposed_provenance_mut::<c_void>(*address);
        let arguments: &[u64] = match *name {
            "cuStreamQuery" | "cuStreamSynchronize" | "cuMemFree_v2" => &[0],
            "cuMemAlloc_v2" => &[at(&mut long), 512],
            "cuCtxSynchronize" => &[],
            "cuLaunchHostFunc" => &[0, counts as *const () as u64, 0],
            "cuCtxGetCurrent" => &[at(&mut long)],
            "cuGetErrorName" => &[1, at(&mut long)],
            _ => &[at(&mut word)],
        };
        *answer = Some(call_at(address, arguments));
    }
}

pub(super) const CASES: &[Case] = &[
    case("function.calls", calls),
    case("function.busy", busy),
    case("function.independent_streams", |a| {
        let (one, two) = (a.stream(), a.stream());
        launch(a, one, blocks);
        launch(a, two, releases);
        a.say("cuCtxSynchronize", &[]);
        let at_once = OVERLAPPED.load(Ordering::SeqCst);
        a.note(["one-after-the-other", "at-once"][usize::from(at_once)]);
    }),
    case("function.capture", capture),
    case("function.stream_destroyed", |a| {
        let stream = a.stream();
        launch(a, stream, sleeps);
        launch(a, stream, counts);
        a.say("cuStreamDestroy_v2", &[stream]);
        a.note(RETURNED.load(Ordering::SeqCst));
        a.say("cuCtxSynchronize", &[]);
        a.note(COUNT.load(Ordering::SeqCst));
    }),
    case("function.waits.alloc", |a| waits(a, "cuMemAlloc_v2")),
    case("function.waits.free", |a| waits(a, "cuMemFree_v2")),
    case("function.waits.free_host", |a| waits(a, "cuMemFreeHost")),
    case("function.waits.alloc_host", |a| waits(a, "cuMemHostAlloc")),
    case("function.waits.memset_d8", |a| waits(a, "cuMemsetD8_v2")),
    case("function.waits.memset_d16", |a| waits(a, "cuMemsetD16_v2")),
    case("function.waits.dtod", |a| waits(a, "cuMemcpyDtoD_v2")),
    case("function.waits.htod", |a| waits(a, "cuMemcpyHtoD_v2")),
    case("function.waits.dtoh", |a| waits(a, "cuMemcpyDtoH_v2")),
    case("function.waits.create", |a| waits(a, "cuMemCreate")),
    case("function.waits.unmap", |a| waits(a, "cuMemUnmap")),
    case("function.waits.stream_destroy", |a| {
        waits(a, "cuStreamDestroy_v2");
    }),
    case("function.waits.ctx_destroy", |a| {
        waits(a, "cuCtxDestroy_v2");
    }),
    case("function.waits.other_ctx_destroy", |a| waits(a, "other")),
    case("function.waits.primary_release", |a| {
        waits(a, "cuDevicePrimaryCtxRelease_v2");
    }),
    case("function.waits.primary_reset", |a| {
        waits(a, "cuDevicePrimaryCtxReset_v2");
    }),
];

pub(super) fn launch(a: &mut Asker, stream: u64, function: extern "C" fn(*mut c_void)) {
    let function = function as *const () as u64;
    a.need("cuLaunchHostFunc", &[stream, function, 0]);
}

/// Notes whether a call has returned after what sets a flag.
pub(super) fn note_order(a: &mut Asker, flag: &AtomicBool) {
    let after = flag.load(Ordering::SeqCst);
    a.note(if after { "after-it" } else { "before-it" });
}

/// Asks which functions of the driver a function may call.
fn calls(a: &mut Asker) {
    let stream = a.stream();
    let names = [
        "cuStreamQuery",
        "cuStreamSynchronize",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuCtxSynchronize",
        "cuLaunchHostFunc",
        "cuCtxGetCurrent",
        "cuCtxGetDevice",
        "cuDeviceGetCount",
        "cuDriverGetVersion",
        "cuGetErrorName",
    ];
    if let Ok(mut asked) = ASKED.lock() {
        let found = names.iter().filter_map(|&name| {
            let address = a.library.address(name)?;
            Some((name, address.expose_provenance(), None))
        });
        asked.extend(found);
    }
    launch(a, stream, asks);
    a.need("cuStreamSynchronize", &[stream]);
    let asked = ASKED.lock().map(|asked| asked.clone()).unwrap_or_default();
    for (name, _, answer) in asked {
        a.part(name);
        a.code(answer.map(cuvmm_driver::CUresult));
    }
}

/// Asks what goes on while a function waits.
fn busy(a: &mut Asker) {
    let (stream, other, event) = (a.stream(), a.stream(), a.event(2));
    let (memory, blocking) = (a.alloc(4096), a.made("cuStreamCreate", &[0]));
    launch(a, stream, blocks);
    wait_for(&STARTED);
    for (part, name, arguments) in [
        ("query", "cuStreamQuery", &[stream] as &[u64]),
        ("memset", "cuMemsetD8Async", &[memory, 1, 16, stream]),
        ("record", "cuEventRecord", &[event, stream]),
        ("query_event", "cuEventQuery", &[event]),
        ("wait_event", "cuStreamWaitEvent", &[other, event, 0]),
        ("query_other", "cuStreamQuery", &[other]),
        ("query_null", "cuStreamQuery", &[0]),
        ("query_blocking", "cuStreamQuery", &[blocking]),
        ("memset_null", "cuMemsetD8_v2", &[memory, 1, 16]),
        ("query_null_again", "cuStreamQuery", &[0]),
    ] {
        a.part(part);
        if part == "query_null_again" {
            thread::sleep(Duration::from_millis(50));
        }
        a.say(name, arguments);
    }
    a.part("returned");
    a.note(RETURNED.load(Ordering::SeqCst));
    RELEASED.store(true, Ordering::SeqCst);
    a.ask("synchronize", "cuStreamSynchronize", &[other]);
    a.note(RETURNED.load(Ordering::SeqCst));
    a.say("cuStreamQuery", &[stream]);
}

fn capture(a: &mut Asker) {
    let (stream, memory) = (a.stream(), a.alloc(4096));
    a.part("function");
    a.need("cuStreamBeginCapture_v2", &[stream, 2]);
    a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
    a.say("cuLaunchHostFunc", &[stream, counts as *const () as u64, 0]);
    let graph = a.get_last("cuStreamEndCapture", &[stream], 0u64);
    let made = a.get("cuGraphInstantiateWithFlags", 0u64, &[graph, 0]);
    a.note(COUNT.load(Ordering::SeqCst));
    for _ in 0..2 {
        a.say("cuGraphLaunch", &[made, stream]);
    }
    a.need("cuStreamSynchronize", &[stream]);
    a.note(COUNT.load(Ordering::SeqCst));
    a.part("callback");
    a.need("cuStreamBeginCapture_v2", &[stream, 2]);
    let callback = counts_too as *const () as u64;
    a.say("cuStreamAddCallback", &[stream, callback, 0, 0]);
    a.get_last("cuStreamEndCapture", &[stream], graph);
    a.note(COUNT.load(Ordering::SeqCst));
}

/// Notes whether a call returns before a function of a stream that does not block others.
fn waits(a: &mut Asker, name: &str) {
    let other = name == "other";
    let (name, made) = match name {
        "cuCtxDestroy_v2" | "other" => ("cuCtxDestroy_v2", a.context()),
        name => (name, 0),
    };
    if other {
        a.need("cuCtxSetCurrent", &[a.primary]);
    }
    let (stream, memory, pinned) = (a.stream(), a.alloc(GRANULE), a.pinned(GRANULE, 0));
    let mapped = a.mapping(true);
    let (mut out, mut bytes) = (0u64, vec![0u8; 64]);
    let mut props = super::super::asker::props();
    let host = at(&mut *bytes);
    a.need("cuCtxSynchronize", &[]);
    launch(a, stream, sleeps);
    wait_for(&STARTED);
    let arguments: &[u64] = match name {
        "cuMemAlloc_v2" => &[at(&mut out), GRANULE],
        "cuMemFree_v2" => &[memory],
        "cuMemFreeHost" => &[pinned],
        "cuMemHostAlloc" => &[at(&mut out), GRANULE, 0],
        "cuMemsetD8_v2" | "cuMemsetD16_v2" => &[memory, 1, 16],
        "cuMemcpyDtoD_v2" => &[memory, memory + 4096, 16],
        "cuMemcpyHtoD_v2" => &[memory, host, 16],
        "cuMemcpyDtoH_v2" => &[host, memory, 16],
        "cuMemCreate" => &[at(&mut out), GRANULE, at(&mut props), 0],
        "cuMemUnmap" => &[mapped, GRANULE],
        "cuStreamDestroy_v2" => &[stream],
        "cuCtxDestroy_v2" => &[made],
        _ => &[0],
    };
    a.say(name, arguments);
    note_order(a, &RETURNED);
    wait_for(&RETURNED);
}
