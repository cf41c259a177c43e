//! A forked child, threads, and calls in an odd order.

use super::super::asker::GRANULE;
use super::super::library::{at, in_fork};
use super::{Case, bare, case};

pub(super) const CASES: &[Case] = &[
    case("fork.after_init", |a| {
        let primary = a.primary;
        let memory = a.alloc(GRANULE);
        let mapped = a.mapping(true);
        a.end();
        let status = in_fork(|| {
            let (mut word, mut long) = (7u32, 7u64);
            a.ask_each(&[
                ("cuDriverGetVersion", &[at(&mut word)]),
                ("cuInit", &[0]),
                ("cuDeviceGetCount", &[at(&mut word)]),
                ("cuDeviceGet", &[at(&mut word), 0]),
                ("cuCtxGetCurrent", &[at(&mut long)]),
                ("cuCtxGetDevice", &[at(&mut word)]),
                ("cuMemAlloc_v2", &[at(&mut long), 512]),
                ("cuMemsetD8_v2", &[memory, 1, 16]),
                ("cuMemGetInfo_v2", &[at(&mut long), at(&mut word)]),
                ("cuPointerGetAttribute", &[at(&mut word), 2, memory]),
                ("cuMemAddressReserve", &[at(&mut long), GRANULE, 0, 0, 0]),
                ("cuDevicePrimaryCtxRetain", &[at(&mut long), 0]),
                ("cuCtxSetCurrent", &[primary]),
                ("cuCtxSynchronize", &[]),
                ("cuMemUnmap", &[mapped, GRANULE]),
                ("cuMemFree_v2", &[memory]),
            ]);
            a.end();
        });
        a.part("child");
        a.note(status.map_or("unknown".to_owned(), |status| status.to_string()));
        a.ask("parent", "cuMemsetD8_v2", &[memory, 1, 16]);
        a.say("cuMemFree_v2", &[memory]);
    }),
    bare("fork.before_init", |a| {
        a.made("cuDriverGetVersion", &[]);
        a.end();
        let status = in_fork(|| {
            a.part("child");
            a.enter();
            let memory = a.alloc(512);
            a.say("cuMemFree_v2", &[memory]);
            a.end();
        });
        a.part("status");
        a.note(status.map_or("unknown".to_owned(), |status| status.to_string()));
        a.part("parent");
        a.enter();
        let memory = a.alloc(512);
        a.say("cuMemFree_v2", &[memory]);
    }),
    case("threads.current_is_own", |a| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                a.tell("cuCtxGetCurrent", 7u64, &[]);
                a.get("cuMemAlloc_v2", 0u64, &[512]);
            });
        });
    }),
    bare("before_init", |a| {
        let (mut word, mut long) = (7u32, 7u64);
        a.ask_each(&[
            ("cuCtxGetCurrent", &[at(&mut long)]),
            ("cuDeviceGetCount", &[at(&mut word)]),
            ("cuCtxCreate_v2", &[at(&mut long), 0, 0]),
            ("cuMemAlloc_v2", &[at(&mut long), 512]),
            ("cuStreamQuery", &[0]),
            ("cuEventCreate", &[at(&mut long), 0]),
            ("cuPointerGetAttribute", &[at(&mut word), 2, 4096]),
            ("cuMemFree_v2", &[0]),
            ("cuMemHostAlloc", &[at(&mut long), 512, 0]),
            ("cuMemcpy", &[0, 0, 0]),
            ("cuCtxGetStreamPriorityRange", &[0, 0]),
            ("cuDeviceGetByPCIBusId", &[at(&mut word), at(&mut long)]),
            ("cuGraphCreate", &[at(&mut long), 0]),
            ("cuModuleUnload", &[0]),
        ]);
    }),
    case("unsupported.families", |a| {
        let mut out = [0u64; 32];
        let null_name = c"nothing".as_ptr().addr() as u64;
        let load = [at(&mut out), null_name, 0, 0, 0, 0, 0, 0];
        a.ask_each(&[
            ("cuModuleLoad", &[at(&mut out), null_name]),
            ("cuLibraryLoadFromFile", &load),
            ("cuGraphCreate", &[at(&mut out), 0]),
            ("cuGraphCreate", &[at(&mut out), 1]),
            ("cuUserObjectCreate", &[at(&mut out), 0, 0, 1, 1]),
            ("cuGreenCtxCreate", &[at(&mut out), 0, 0, 0]),
            ("cuProfilerStart", &[]),
            ("cuProfilerStop", &[]),
            ("cuDeviceGetGraphMemAttribute", &[0, 0, at(&mut out)]),
            ("cuDeviceGraphMemTrim", &[0]),
            ("cuMemRangeGetAttributes", &[at(&mut out), 0, 0, 0, 0, 0]),
        ]);
    }),
];
