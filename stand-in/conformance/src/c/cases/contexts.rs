//! Contexts: made, current, destroyed, primary.

use super::super::asker::{Asker, GRANULE, granules};
use super::super::library::at;
use super::{Case, alone, case};

pub(super) const CASES: &[Case] = &[
    case("ctx.create", |a| {
        a.need("cuInit", &[0]);
        for (part, name) in [("v1", "cuCtxCreate"), ("v2", "cuCtxCreate_v2")] {
            a.part(part);
            let mut context = 0u64;
            a.say(name, &[at(&mut context), 0, 0]);
            about(a, context);
        }
        a.part("v3");
        let mut context = 0u64;
        a.say("cuCtxCreate_v3", &[at(&mut context), 0, 0, 0, 0]);
        about(a, context);
        a.part("v4");
        a.say("cuCtxCreate_v4", &[at(&mut context), 0, 0, 0]);
        about(a, context);
        a.part("v4_empty");
        let mut parameters = [0u64; 3];
        let arguments = [at(&mut context), at(&mut parameters), 0, 0];
        a.say("cuCtxCreate_v4", &arguments);
        about(a, context);
    }),
    case("ctx.create_refused", |a| {
        a.need("cuInit", &[0]);
        let mut context = 7u64;
        a.part("device_99");
        a.say("cuCtxCreate_v2", &[at(&mut context), 0, 99]);
        a.part("flags_3");
        a.say("cuCtxCreate_v2", &[at(&mut context), 3, 0]);
        a.part("flags_0x100");
        a.say("cuCtxCreate_v2", &[at(&mut context), 0x100, 0]);
        a.part("flags_0x8000");
        a.say("cuCtxCreate_v2", &[at(&mut context), 0x8000, 0]);
        a.part("v3_count_without_array");
        a.say("cuCtxCreate_v3", &[at(&mut context), 0, 1, 0, 0]);
        a.part("unwritten");
        a.note(context == 7);
    }),
    case("ctx.create_null", |a| {
        a.need("cuInit", &[0]);
        a.say("cuCtxCreate_v2", &[0, 0, 0]);
        a.say("cuCtxCreate_v4", &[0, 0, 0, 0]);
    }),
    case("ctx.create_flags", |a| {
        a.need("cuInit", &[0]);
        for flags in [1u64, 2, 4, 8, 0x10, 0x80] {
            a.part(flags);
            let (mut context, mut got) = (0u64, 77u32);
            a.say("cuCtxCreate_v2", &[at(&mut context), flags, 0]);
            a.say("cuCtxGetFlags", &[at(&mut got)]);
            a.note(got);
            a.say("cuCtxDestroy_v2", &[context]);
        }
    }),
    case("ctx.stack", stack),
    case("ctx.destroy", destroy),
    case("ctx.destroy_null", |a| {
        a.enter();
        a.say("cuCtxDestroy_v2", &[0]);
    }),
    case("ctx.destroy_twice", |a| {
        a.need("cuInit", &[0]);
        let mut context = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut context), 0, 0]);
        a.say("cuCtxDestroy_v2", &[context]);
        a.say("cuCtxDestroy_v2", &[context]);
    }),
    case("ctx.destroy_primary", |a| {
        let primary = a.enter();
        a.say("cuCtxDestroy_v2", &[primary]);
        a.part("state");
        state(a);
    }),
    case("ctx.destroy_v1", |a| {
        a.need("cuInit", &[0]);
        let mut context = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut context), 0, 0]);
        a.say("cuCtxDestroy", &[context]);
    }),
    case("ctx.push_destroyed", |a| {
        a.need("cuInit", &[0]);
        let mut context = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut context), 0, 0]);
        a.need("cuCtxDestroy_v2", &[context]);
        a.say("cuCtxPushCurrent_v2", &[context]);
    }),
    case("ctx.set_destroyed", |a| {
        a.need("cuInit", &[0]);
        let mut context = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut context), 0, 0]);
        a.need("cuCtxDestroy_v2", &[context]);
        a.say("cuCtxSetCurrent", &[context]);
    }),
    case("ctx.push_nonsense", |a| {
        a.enter();
        a.say("cuCtxPushCurrent_v2", &[0x1234_0000]);
    }),
    case("ctx.push_null", |a| {
        a.enter();
        a.say("cuCtxPushCurrent_v2", &[0]);
    }),
    case("ctx.attach", |a| {
        let primary = a.enter();
        let mut context = 0u64;
        a.part("primary");
        a.say("cuCtxAttach", &[at(&mut context), 0]);
        a.note(context == primary);
        a.say("cuCtxDetach", &[primary]);
        a.part("made");
        a.need("cuCtxCreate_v2", &[at(&mut context), 0, 0]);
        let mut again = 0u64;
        a.say("cuCtxAttach", &[at(&mut again), 0]);
        a.note(again == context);
        a.say("cuCtxDetach", &[again]);
        a.say("cuCtxDetach", &[context]);
    }),
    case("ctx.attach_flags", |a| {
        a.enter();
        let mut context = 0u64;
        a.say("cuCtxAttach", &[at(&mut context), 1]);
    }),
    case("ctx.queries", queries),
    case("ctx.queries_without", |a| {
        a.need("cuInit", &[0]);
        let (mut word, mut long) = (7u32, 7u64);
        for (name, arguments) in [
            ("cuCtxGetFlags", &[at(&mut word)] as &[u64]),
            ("cuCtxGetDevice", &[at(&mut word)]),
            ("cuCtxGetId", &[0, at(&mut long)]),
            ("cuCtxGetApiVersion", &[0, at(&mut word)]),
            ("cuCtxGetLimit", &[at(&mut long), 0]),
            ("cuCtxSynchronize", &[]),
            ("cuCtxPopCurrent_v2", &[at(&mut long)]),
            (
                "cuCtxGetStreamPriorityRange",
                &[at(&mut word), at(&mut long)],
            ),
            ("cuMemAlloc_v2", &[at(&mut long), 512]),
            ("cuMemGetInfo_v2", &[at(&mut long), at(&mut word)]),
            ("cuStreamCreate", &[at(&mut long), 0]),
            ("cuEventCreate", &[at(&mut long), 0]),
            ("cuMemHostAlloc", &[at(&mut long), 512, 0]),
            ("cuMemAllocAsync", &[at(&mut long), 512, 0]),
            ("cuMemFree_v2", &[0]),
            ("cuStreamQuery", &[0]),
            ("cuStreamSynchronize", &[0]),
        ] {
            a.part(name);
            a.say(name, arguments);
        }
    }),
    case("ctx.limits", |a| {
        a.enter();
        for limit in 0..=8u64 {
            let mut value = 7u64;
            a.part(limit);
            a.say("cuCtxGetLimit", &[at(&mut value), limit]);
            a.note(value);
            a.say("cuCtxSetLimit", &[limit, value]);
        }
        a.part("99");
        let mut value = 7u64;
        a.say("cuCtxGetLimit", &[at(&mut value), 99]);
        a.say("cuCtxSetLimit", &[99, 1]);
    }),
    case("primary.flags", |a| {
        a.need("cuInit", &[0]);
        a.part("before");
        state(a);
        a.part("set");
        a.say("cuDevicePrimaryCtxSetFlags_v2", &[0, 4]);
        state(a);
        a.enter();
        a.part("set_active");
        a.say("cuDevicePrimaryCtxSetFlags_v2", &[0, 1]);
        state(a);
        a.part("set_bad");
        a.say("cuDevicePrimaryCtxSetFlags_v2", &[0, 0x100]);
        a.part("set_v1");
        a.say("cuDevicePrimaryCtxSetFlags", &[0, 0]);
    }),
    case("primary.release_unretained", |a| {
        a.need("cuInit", &[0]);
        a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
    }),
    case("primary.retain_refused", |a| {
        a.need("cuInit", &[0]);
        let mut context = 7u64;
        a.part("device_99");
        a.say("cuDevicePrimaryCtxRetain", &[at(&mut context), 99]);
        a.part("null");
        a.say("cuDevicePrimaryCtxRetain", &[0, 0]);
        a.part("state");
        state(a);
    }),
    case("primary.twice", |a| {
        let first = a.enter();
        let mut second = 0u64;
        a.say("cuDevicePrimaryCtxRetain", &[at(&mut second), 0]);
        a.note(first == second);
        a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
        state(a);
        a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
        state(a);
        a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
    }),
    case("primary.after_release", after_release),
    case("primary.again", |a| {
        let first = a.enter();
        let memory = a.alloc(GRANULE);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        let second = a.enter();
        a.part("same_handle");
        a.note(first == second);
        a.part("old_memory");
        let mut kind = 0u32;
        a.say("cuPointerGetAttribute", &[at(&mut kind), 2, memory]);
        a.say("cuMemsetD8_v2", &[memory, 1, 16]);
        a.say("cuMemFree_v2", &[memory]);
    }),
    case("primary.again_stream", |a| {
        a.enter();
        let stream = a.stream();
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        a.say("cuStreamQuery", &[stream]);
    }),
    case("primary.again_event", |a| {
        a.enter();
        let event = a.event(2);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        a.say("cuEventQuery", &[event]);
    }),
    case("primary.again_mapping", |a| {
        a.enter();
        let address = a.reserve(GRANULE);
        a.map(address, true);
        a.need("cuMemsetD8_v2", &[address, 9, 16]);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        let mut byte = 0u64;
        a.say("cuMemcpyDtoH_v2", &[at(&mut byte), address, 1]);
        a.note(byte);
    }),
    case("primary.again_pinned", |a| {
        a.enter();
        let memory = a.pinned(4096, 0);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        let mut kind = 0u32;
        a.say("cuPointerGetAttribute", &[at(&mut kind), 2, memory]);
        a.say("cuMemFreeHost", &[memory]);
    }),
    case("primary.reset", |a| {
        a.enter();
        let memory = a.alloc(GRANULE);
        a.say("cuDevicePrimaryCtxReset_v2", &[0]);
        state(a);
        a.part("after");
        let mut kind = 0u32;
        a.say("cuPointerGetAttribute", &[at(&mut kind), 2, memory]);
        let mut again = 0u64;
        a.say("cuMemAlloc_v2", &[at(&mut again), 512]);
    }),
    case("primary.reset_then_retain", |a| {
        a.enter();
        a.need("cuDevicePrimaryCtxReset_v2", &[0]);
        a.enter();
        let memory = a.alloc(512);
        a.say("cuMemFree_v2", &[memory]);
    }),
    alone("primary.release_returns", |a| {
        a.enter();
        let mut other = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut other), 0, 0]);
        let before = a.free();
        a.need("cuCtxPopCurrent_v2", &[at(&mut other)]);
        a.alloc(64 * GRANULE);
        a.need("cuCtxSetCurrent", &[other]);
        a.note(granules(before.saturating_sub(a.free_now())));
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.note(a.free_now() >= before);
    }),
];

impl Asker {
    /// Returns the free memory without adding anything to the answer.
    pub(super) fn free_now(&self) -> u64 {
        let (mut free, mut total) = (0u64, 0u64);
        self.call("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
        free
    }
}

/// Notes the state of the first device's primary context.
fn state(a: &mut Asker) {
    let (mut flags, mut active) = (7u32, 7i32);
    let arguments = [0, at(&mut flags), at(&mut active)];
    a.say("cuDevicePrimaryCtxGetState", &arguments);
    a.note(format_args!("flags {flags} active {active}"));
}

/// Notes what is known about a context that was just made, and destroys it.
fn about(a: &mut Asker, context: u64) {
    let (mut current, mut version, mut flags, mut id) = (0u64, 0u32, 77u32, 0u64);
    a.say("cuCtxGetCurrent", &[at(&mut current)]);
    a.note(if current == context {
        "current"
    } else {
        "other"
    });
    a.say("cuCtxGetApiVersion", &[context, at(&mut version)]);
    a.note(version);
    a.say("cuCtxGetFlags", &[at(&mut flags)]);
    a.note(flags);
    a.say("cuCtxGetId", &[context, at(&mut id)]);
    a.note(id > 0);
    a.say("cuCtxDestroy_v2", &[context]);
    a.say("cuCtxGetCurrent", &[at(&mut current)]);
    a.note(if current == 0 { "none" } else { "left" });
}

/// Pushes, pops and sets contexts, and notes which one is current.
fn stack(a: &mut Asker) {
    let primary = a.enter();
    let mut made = 0u64;
    a.need("cuCtxCreate_v2", &[at(&mut made), 0, 0]);
    let tell = |a: &mut Asker| {
        let mut current = 7u64;
        a.need("cuCtxGetCurrent", &[at(&mut current)]);
        a.note(match current {
            0 => "none",
            current if current == primary => "primary",
            current if current == made => "made",
            _ => "other",
        });
    };
    a.part("after_create");
    tell(a);
    a.part("set_replaces_the_top");
    a.say("cuCtxSetCurrent", &[primary]);
    tell(a);
    a.say("cuCtxPopCurrent_v2", &[0]);
    tell(a);
    a.part("set_null_pops");
    a.say("cuCtxPushCurrent_v2", &[made]);
    a.say("cuCtxSetCurrent", &[0]);
    tell(a);
    a.part("pop_to_empty");
    for _ in 0..3 {
        let mut popped = 7u64;
        a.say("cuCtxPopCurrent_v2", &[at(&mut popped)]);
        tell(a);
    }
    a.part("set_null_of_empty");
    a.say("cuCtxSetCurrent", &[0]);
    tell(a);
    a.part("v1");
    a.say("cuCtxPushCurrent", &[made]);
    let mut popped = 7u64;
    a.say("cuCtxPopCurrent", &[at(&mut popped)]);
    a.note(popped == made);
}

/// Destroys a context with objects in it, and asks about each afterwards.
fn destroy(a: &mut Asker) {
    let primary = a.enter();
    let mut made = 0u64;
    a.need("cuCtxCreate_v2", &[at(&mut made), 0, 0]);
    let memory = a.alloc(GRANULE);
    let mapped = a.reserve(GRANULE);
    a.map(mapped, true);
    let pinned = a.pinned(4096, 0);
    a.part("");
    a.say("cuCtxDestroy_v2", &[made]);
    let mut current = 7u64;
    a.say("cuCtxGetCurrent", &[at(&mut current)]);
    a.note(current == primary);
    let mut kind = 7u32;
    for (part, address) in [("memory", memory), ("mapping", mapped), ("pinned", pinned)] {
        a.part(part);
        a.say("cuPointerGetAttribute", &[at(&mut kind), 2, address]);
    }
    a.part("free");
    a.say("cuMemFree_v2", &[memory]);
    a.part("version");
    let mut version = 0u32;
    a.say("cuCtxGetApiVersion", &[made, at(&mut version)]);
}

/// Asks the simple queries of the primary context.
fn queries(a: &mut Asker) {
    let primary = a.enter();
    let (mut word, mut long, mut other) = (77u32, 77u64, 77i32);
    a.part("flags");
    a.say("cuCtxGetFlags", &[at(&mut word)]);
    a.note(word);
    a.part("set_flags");
    a.say("cuCtxSetFlags", &[4]);
    a.say("cuCtxGetFlags", &[at(&mut word)]);
    a.note(word);
    a.say("cuCtxSetFlags", &[0x1000]);
    a.part("version");
    a.say("cuCtxGetApiVersion", &[primary, at(&mut word)]);
    a.note(word);
    a.say("cuCtxGetApiVersion", &[0, at(&mut word)]);
    a.note(word);
    a.part("id");
    a.say("cuCtxGetId", &[primary, at(&mut long)]);
    let id = long;
    a.say("cuCtxGetId", &[0, at(&mut long)]);
    a.note(long == id);
    a.note(id);
    a.part("id_of_another");
    let mut made = 0u64;
    a.need("cuCtxCreate_v2", &[at(&mut made), 0, 0]);
    a.say("cuCtxGetId", &[made, at(&mut long)]);
    a.note(long.wrapping_sub(id));
    a.need("cuCtxDestroy_v2", &[made]);
    a.part("device");
    a.say("cuCtxGetDevice", &[at(&mut other)]);
    a.note(other);
    a.say("cuCtxGetDevice_v2", &[at(&mut other), primary]);
    a.say("cuCtxGetDevice_v2", &[at(&mut other), 0]);
    a.part("priorities");
    let (mut least, mut greatest) = (77i32, 77i32);
    let arguments = [at(&mut least), at(&mut greatest)];
    a.say("cuCtxGetStreamPriorityRange", &arguments);
    a.note(format_args!("{least} {greatest}"));
    a.say("cuCtxGetStreamPriorityRange", &[0, 0]);
    a.part("cache");
    a.say("cuCtxGetCacheConfig", &[at(&mut word)]);
    a.note(word);
    a.say("cuCtxSetCacheConfig", &[1]);
    a.say("cuCtxSetCacheConfig", &[99]);
    a.part("shared");
    a.say("cuCtxGetSharedMemConfig", &[at(&mut word)]);
    a.note(word);
    a.say("cuCtxSetSharedMemConfig", &[1]);
    a.part("affinity");
    let mut affinity = [0u32; 4];
    a.say("cuCtxGetExecAffinity", &[at(&mut affinity), 0]);
    a.part("synchronize");
    a.say("cuCtxSynchronize", &[]);
    a.say("cuCtxSynchronize_v2", &[primary]);
    a.say("cuCtxSynchronize_v2", &[0]);
    a.part("rdma_flush");
    a.say("cuFlushGPUDirectRDMAWrites", &[100, 0]);
}

/// Asks with a context current that was released for the last time.
fn after_release(a: &mut Asker) {
    let primary = a.enter();
    let memory = a.alloc(GRANULE);
    a.part("state");
    a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
    state(a);
    a.part("current");
    let mut current = 7u64;
    a.say("cuCtxGetCurrent", &[at(&mut current)]);
    a.note(match current {
        0 => "none",
        current if current == primary => "released",
        _ => "other",
    });
    let mut word = 7u32;
    let mut long = 7u64;
    for (name, arguments) in [
        ("cuCtxGetDevice", &[at(&mut word)] as &[u64]),
        ("cuMemAlloc_v2", &[at(&mut long), 512]),
        ("cuMemFree_v2", &[memory]),
        ("cuPointerGetAttribute", &[at(&mut word), 2, memory]),
        ("cuCtxSynchronize", &[]),
        ("cuStreamCreate", &[at(&mut long), 0]),
        ("cuMemsetD8_v2", &[memory, 1, 16]),
        ("cuCtxGetApiVersion", &[primary, at(&mut word)]),
        ("cuCtxSetCurrent", &[primary]),
        ("cuCtxPushCurrent_v2", &[primary]),
    ] {
        a.part(name);
        a.say(name, arguments);
    }
}
