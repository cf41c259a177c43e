//! Contexts: made, current, destroyed, primary.

use super::super::asker::{Asker, GRANULE, granules};
use super::super::library::at;
use super::{Case, alone, case, initialized};

pub(super) const CASES: &[Case] = &[
    initialized("ctx.create", |a| {
        for (part, name) in [("v1", "cuCtxCreate"), ("v2", "cuCtxCreate_v2")] {
            a.part(part);
            let context = a.get(name, 0u64, &[0, 0]);
            about(a, context);
        }
        a.part("v3");
        let context = a.get("cuCtxCreate_v3", 0u64, &[0, 0, 0, 0]);
        about(a, context);
        let mut parameters = [0u64; 3];
        for (part, parameters) in [("v4", 0), ("v4_empty", at(&mut parameters))] {
            a.part(part);
            let context = a.get("cuCtxCreate_v4", context, &[parameters, 0, 0]);
            about(a, context);
        }
    }),
    initialized("ctx.create_refused", |a| {
        let mut context = 7u64;
        for (part, flags, device) in [
            ("device_99", 0, 99),
            ("flags_3", 3, 0),
            ("flags_0x100", 0x100, 0),
            ("flags_0x8000", 0x8000, 0),
        ] {
            a.ask(part, "cuCtxCreate_v2", &[at(&mut context), flags, device]);
        }
        a.part("v3_count_without_array");
        a.say("cuCtxCreate_v3", &[at(&mut context), 0, 1, 0, 0]);
        a.part("unwritten");
        a.note(context == 7);
    }),
    initialized("ctx.create_null", |a| {
        a.say("cuCtxCreate_v2", &[0, 0, 0]);
        a.say("cuCtxCreate_v4", &[0, 0, 0, 0]);
    }),
    initialized("ctx.create_flags", |a| {
        for flags in [1u64, 2, 4, 8, 0x10, 0x80] {
            a.part(flags);
            let context = a.get("cuCtxCreate_v2", 0u64, &[flags, 0]);
            a.tell("cuCtxGetFlags", 77u32, &[]);
            a.say("cuCtxDestroy_v2", &[context]);
        }
    }),
    case("ctx.stack", stack),
    case("ctx.destroy", destroy),
    case("ctx.destroy_null", |a| {
        a.say("cuCtxDestroy_v2", &[0]);
    }),
    initialized("ctx.destroy_twice", |a| {
        let context = a.context();
        a.say("cuCtxDestroy_v2", &[context]);
        a.say("cuCtxDestroy_v2", &[context]);
    }),
    case("ctx.destroy_primary", |a| {
        a.say("cuCtxDestroy_v2", &[a.primary]);
        a.part("state");
        state(a);
    }),
    initialized("ctx.destroy_v1", |a| {
        let context = a.context();
        a.say("cuCtxDestroy", &[context]);
    }),
    initialized("ctx.push_destroyed", |a| {
        let context = a.context();
        a.need("cuCtxDestroy_v2", &[context]);
        a.say("cuCtxPushCurrent_v2", &[context]);
    }),
    initialized("ctx.set_destroyed", |a| {
        let context = a.context();
        a.need("cuCtxDestroy_v2", &[context]);
        a.say("cuCtxSetCurrent", &[context]);
    }),
    case("ctx.push_nonsense", |a| {
        a.say("cuCtxPushCurrent_v2", &[0x1234_0000]);
    }),
    case("ctx.push_null", |a| {
        a.say("cuCtxPushCurrent_v2", &[0]);
    }),
    case("ctx.attach", |a| {
        a.part("primary");
        let attached = a.get("cuCtxAttach", 0u64, &[0]);
        a.note(attached == a.primary);
        a.say("cuCtxDetach", &[a.primary]);
        a.part("made");
        let context = a.context();
        let again = a.get("cuCtxAttach", 0u64, &[0]);
        a.note(again == context);
        a.say("cuCtxDetach", &[again]);
        a.say("cuCtxDetach", &[context]);
    }),
    case("ctx.attach_flags", |a| {
        a.get("cuCtxAttach", 0u64, &[1]);
    }),
    case("ctx.queries", queries),
    initialized("ctx.queries_without", |a| {
        let (mut word, mut long) = (7u32, 7u64);
        let priorities = [at(&mut word), at(&mut long)];
        a.ask_each(&[
            ("cuCtxGetFlags", &[at(&mut word)]),
            ("cuCtxGetDevice", &[at(&mut word)]),
            ("cuCtxGetId", &[0, at(&mut long)]),
            ("cuCtxGetApiVersion", &[0, at(&mut word)]),
            ("cuCtxGetLimit", &[at(&mut long), 0]),
            ("cuCtxSynchronize", &[]),
            ("cuCtxPopCurrent_v2", &[at(&mut long)]),
            ("cuCtxGetStreamPriorityRange", &priorities),
            ("cuMemAlloc_v2", &[at(&mut long), 512]),
            ("cuMemGetInfo_v2", &[at(&mut long), at(&mut word)]),
            ("cuStreamCreate", &[at(&mut long), 0]),
            ("cuEventCreate", &[at(&mut long), 0]),
            ("cuMemHostAlloc", &[at(&mut long), 512, 0]),
            ("cuMemAllocAsync", &[at(&mut long), 512, 0]),
            ("cuMemFree_v2", &[0]),
            ("cuStreamQuery", &[0]),
            ("cuStreamSynchronize", &[0]),
        ]);
    }),
    case("ctx.limits", |a| {
        for limit in 0..=8u64 {
            a.part(limit);
            let value = a.get("cuCtxGetLimit", 7u64, &[limit]);
            a.note(value);
            a.say("cuCtxSetLimit", &[limit, value]);
        }
        a.part("99");
        a.get("cuCtxGetLimit", 7u64, &[99]);
        a.say("cuCtxSetLimit", &[99, 1]);
    }),
    initialized("primary.flags", |a| {
        a.part("before");
        state(a);
        a.ask("set", "cuDevicePrimaryCtxSetFlags_v2", &[0, 4]);
        state(a);
        a.enter();
        a.ask("set_active", "cuDevicePrimaryCtxSetFlags_v2", &[0, 1]);
        state(a);
        a.ask("set_bad", "cuDevicePrimaryCtxSetFlags_v2", &[0, 0x100]);
        a.ask("set_v1", "cuDevicePrimaryCtxSetFlags", &[0, 0]);
    }),
    initialized("primary.release_unretained", |a| {
        a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
    }),
    initialized("primary.retain_refused", |a| {
        a.part("device_99");
        a.get("cuDevicePrimaryCtxRetain", 7u64, &[99]);
        a.ask("null", "cuDevicePrimaryCtxRetain", &[0, 0]);
        a.part("state");
        state(a);
    }),
    case("primary.twice", |a| {
        let second = a.get("cuDevicePrimaryCtxRetain", 0u64, &[0]);
        a.note(second == a.primary);
        for _ in 0..2 {
            a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
            state(a);
        }
        a.say("cuDevicePrimaryCtxRelease_v2", &[0]);
    }),
    case("primary.after_release", after_release),
    case("primary.again", |a| {
        let first = a.primary;
        let memory = a.alloc(GRANULE);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        a.part("same_handle");
        a.note(first == a.primary);
        a.part("old_memory");
        a.say_kind(memory);
        a.say("cuMemsetD8_v2", &[memory, 1, 16]);
        a.say("cuMemFree_v2", &[memory]);
    }),
    case("primary.again_stream", |a| {
        let stream = a.stream();
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        a.say("cuStreamQuery", &[stream]);
    }),
    case("primary.again_event", |a| {
        let event = a.event(2);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        a.say("cuEventQuery", &[event]);
    }),
    case("primary.again_mapping", |a| {
        let address = a.mapping(true);
        a.need("cuMemsetD8_v2", &[address, 9, 16]);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        a.tell("cuMemcpyDtoH_v2", 0u64, &[address, 1]);
    }),
    case("primary.again_pinned", |a| {
        let memory = a.pinned(4096, 0);
        a.need("cuDevicePrimaryCtxRelease_v2", &[0]);
        a.enter();
        a.say_kind(memory);
        a.say("cuMemFreeHost", &[memory]);
    }),
    case("primary.reset", |a| {
        let memory = a.alloc(GRANULE);
        a.say("cuDevicePrimaryCtxReset_v2", &[0]);
        state(a);
        a.part("after");
        a.say_kind(memory);
        a.get("cuMemAlloc_v2", 0u64, &[512]);
    }),
    case("primary.reset_then_retain", |a| {
        a.need("cuDevicePrimaryCtxReset_v2", &[0]);
        a.enter();
        let memory = a.alloc(512);
        a.say("cuMemFree_v2", &[memory]);
    }),
    alone("primary.release_returns", |a| {
        let mut other = a.context();
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
    let current = a.get("cuCtxGetCurrent", 0u64, &[]);
    let own = current == context;
    a.note(if own { "current" } else { "other" });
    a.tell_last("cuCtxGetApiVersion", &[context], 0u32);
    a.tell("cuCtxGetFlags", 77u32, &[]);
    let id = a.get_last("cuCtxGetId", &[context], 0u64);
    a.note(id > 0);
    a.say("cuCtxDestroy_v2", &[context]);
    let current = a.get("cuCtxGetCurrent", current, &[]);
    a.note(if current == 0 { "none" } else { "left" });
}

/// Pushes, pops and sets contexts, and notes which one is current.
fn stack(a: &mut Asker) {
    let primary = a.primary;
    let made = a.context();
    let tell = |a: &mut Asker| {
        let current = a.made("cuCtxGetCurrent", &[]);
        a.note(match current {
            0 => "none",
            current if current == primary => "primary",
            current if current == made => "made",
            _ => "other",
        });
    };
    a.part("after_create");
    tell(a);
    a.ask("set_replaces_the_top", "cuCtxSetCurrent", &[primary]);
    tell(a);
    a.say("cuCtxPopCurrent_v2", &[0]);
    tell(a);
    a.ask("set_null_pops", "cuCtxPushCurrent_v2", &[made]);
    a.say("cuCtxSetCurrent", &[0]);
    tell(a);
    a.part("pop_to_empty");
    for _ in 0..3 {
        a.get("cuCtxPopCurrent_v2", 7u64, &[]);
        tell(a);
    }
    a.ask("set_null_of_empty", "cuCtxSetCurrent", &[0]);
    tell(a);
    a.ask("v1", "cuCtxPushCurrent", &[made]);
    let popped = a.get("cuCtxPopCurrent", 7u64, &[]);
    a.note(popped == made);
}

/// Destroys a context with objects in it, and asks about each afterwards.
fn destroy(a: &mut Asker) {
    let made = a.context();
    let (memory, mapped, pinned) = (a.alloc(GRANULE), a.mapping(true), a.pinned(4096, 0));
    a.ask("", "cuCtxDestroy_v2", &[made]);
    let current = a.get("cuCtxGetCurrent", 7u64, &[]);
    a.note(current == a.primary);
    for (part, address) in [("memory", memory), ("mapping", mapped), ("pinned", pinned)] {
        a.part(part);
        a.say_kind(address);
    }
    a.ask("free", "cuMemFree_v2", &[memory]);
    a.part("version");
    a.get_last("cuCtxGetApiVersion", &[made], 0u32);
}

/// Asks the simple queries of the primary context.
fn queries(a: &mut Asker) {
    let primary = a.primary;
    a.part("flags");
    a.tell("cuCtxGetFlags", 77u32, &[]);
    a.ask("set_flags", "cuCtxSetFlags", &[4]);
    a.tell("cuCtxGetFlags", 77u32, &[]);
    a.say("cuCtxSetFlags", &[0x1000]);
    a.part("version");
    a.tell_last("cuCtxGetApiVersion", &[primary], 77u32);
    a.tell_last("cuCtxGetApiVersion", &[0], 77u32);
    a.part("id");
    let id = a.get_last("cuCtxGetId", &[primary], 77u64);
    let current = a.get_last("cuCtxGetId", &[0], 77u64);
    a.note(current == id);
    a.note(id);
    a.part("id_of_another");
    let made = a.context();
    let other = a.get_last("cuCtxGetId", &[made], 77u64);
    a.note(other.wrapping_sub(id));
    a.need("cuCtxDestroy_v2", &[made]);
    a.part("device");
    a.tell("cuCtxGetDevice", 77i32, &[]);
    a.get("cuCtxGetDevice_v2", 77i32, &[primary]);
    a.get("cuCtxGetDevice_v2", 77i32, &[0]);
    a.part("priorities");
    let (mut least, mut greatest) = (77i32, 77i32);
    let arguments = [at(&mut least), at(&mut greatest)];
    a.say("cuCtxGetStreamPriorityRange", &arguments);
    a.note(format_args!("{least} {greatest}"));
    a.say("cuCtxGetStreamPriorityRange", &[0, 0]);
    a.part("cache");
    a.tell("cuCtxGetCacheConfig", 77u32, &[]);
    a.say("cuCtxSetCacheConfig", &[1]);
    a.say("cuCtxSetCacheConfig", &[99]);
    a.part("shared");
    a.tell("cuCtxGetSharedMemConfig", 77u32, &[]);
    a.say("cuCtxSetSharedMemConfig", &[1]);
    a.part("affinity");
    a.get("cuCtxGetExecAffinity", [0u32; 4], &[0]);
    a.ask("synchronize", "cuCtxSynchronize", &[]);
    a.say("cuCtxSynchronize_v2", &[primary]);
    a.say("cuCtxSynchronize_v2", &[0]);
    a.ask("rdma_flush", "cuFlushGPUDirectRDMAWrites", &[100, 0]);
}

/// Asks with a context current that was released for the last time.
fn after_release(a: &mut Asker) {
    let primary = a.primary;
    let memory = a.alloc(GRANULE);
    a.ask("state", "cuDevicePrimaryCtxRelease_v2", &[0]);
    state(a);
    a.part("current");
    let current = a.get("cuCtxGetCurrent", 7u64, &[]);
    a.note(match current {
        0 => "none",
        current if current == primary => "released",
        _ => "other",
    });
    let (mut word, mut long) = (7u32, 7u64);
    a.ask_each(&[
        ("cuCtxGetDevice", &[at(&mut word)]),
        ("cuMemAlloc_v2", &[at(&mut long), 512]),
        ("cuMemFree_v2", &[memory]),
        ("cuPointerGetAttribute", &[at(&mut word), 2, memory]),
        ("cuCtxSynchronize", &[]),
        ("cuStreamCreate", &[at(&mut long), 0]),
        ("cuMemsetD8_v2", &[memory, 1, 16]),
        ("cuCtxGetApiVersion", &[primary, at(&mut word)]),
        ("cuCtxSetCurrent", &[primary]),
        ("cuCtxPushCurrent_v2", &[primary]),
    ]);
}
