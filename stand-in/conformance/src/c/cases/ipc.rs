//! Legacy interprocess handles of memory and events.

use super::super::asker::{Asker, GRANULE};
use super::super::library::{IpcHandle, at};
use super::{Case, case, helper};

pub(super) const CASES: &[Case] = &[
    case("ipc.handle_of", |a| {
        a.enter();
        let plain = a.alloc(GRANULE);
        let small = a.alloc(100);
        let pool = a.alloc_async(GRANULE);
        let pinned = a.pinned(4096, 0);
        let mapped = a.reserve(GRANULE);
        a.map(mapped, true);
        let mut managed = 0u64;
        a.need("cuMemAllocManaged", &[at(&mut managed), GRANULE, 1]);
        for (part, address) in [
            ("plain", plain),
            ("plain_interior", plain + 4096),
            ("small", small),
            ("pool", pool),
            ("pinned", pinned),
            ("mapping", mapped),
            ("managed", managed),
            ("unknown", 4096),
            ("null", 0),
            ("pageable", super::host::pages(1)),
        ] {
            let mut handle = [0xAAu8; 64];
            a.part(part);
            a.say("cuIpcGetMemHandle", &[at(&mut handle), address]);
            a.note(if handle == [0xAA; 64] {
                "unwritten"
            } else {
                "handle"
            });
        }
        a.part("null_out");
        a.say("cuIpcGetMemHandle", &[0, plain]);
        a.part("same_twice");
        let (mut one, mut two) = ([0u8; 64], [0u8; 64]);
        a.need("cuIpcGetMemHandle", &[at(&mut one), plain]);
        a.need("cuIpcGetMemHandle", &[at(&mut two), plain]);
        a.note(one == two);
        a.part("interior_is_the_same");
        if a.say("cuIpcGetMemHandle", &[at(&mut two), plain + 4096]) {
            a.note(one == two);
        }
    }),
    case("ipc.open_own", |a| {
        a.enter();
        let plain = a.alloc(GRANULE);
        let mut handle = [0u8; 64];
        a.need("cuIpcGetMemHandle", &[at(&mut handle), plain]);
        open(a, handle, Some(1));
    }),
    case("ipc.open_nonsense", |a| {
        a.enter();
        a.part("zeros");
        open(a, [0; 64], Some(1));
        a.part("ones");
        open(a, [0xFF; 64], Some(1));
    }),
    case("ipc.open_flags", |a| {
        a.enter();
        for flags in [0u32, 2] {
            a.part(flags);
            open(a, [0; 64], Some(flags));
        }
    }),
    case("ipc.memory", |a| {
        a.enter();
        let plain = a.alloc(GRANULE);
        a.need("cuMemsetD8_v2", &[plain, 41, 64]);
        let mut handle = [0u8; 64];
        a.part("opens");
        a.say("cuIpcGetMemHandle", &[at(&mut handle), plain]);
        a.other_process("ipc.child_memory", &hex(&handle));
        a.part("written");
        let mut byte = 0u64;
        a.need("cuMemcpyDtoH_v2", &[at(&mut byte), plain, 1]);
        a.note(byte);
    }),
    case("ipc.memory_small", |a| {
        a.enter();
        let first = a.alloc(100);
        let second = a.alloc(100);
        a.need("cuMemsetD8_v2", &[first, 40, 100]);
        a.need("cuMemsetD8_v2", &[second, 41, 100]);
        let mut handle = [0u8; 64];
        a.say("cuIpcGetMemHandle", &[at(&mut handle), second]);
        a.other_process("ipc.child_memory", &hex(&handle));
    }),
    case("ipc.memory_freed", |a| {
        a.enter();
        let plain = a.alloc(GRANULE);
        let mut handle = [0u8; 64];
        a.need("cuIpcGetMemHandle", &[at(&mut handle), plain]);
        a.need("cuMemFree_v2", &[plain]);
        a.other_process("ipc.child_memory", &hex(&handle));
    }),
    helper("ipc.child_memory", |a| {
        let given = bytes(&a.given);
        a.enter();
        let Some(address) = open(a, given, Some(1)) else {
            return;
        };
        let mut byte = 0u64;
        a.say("cuMemcpyDtoH_v2", &[at(&mut byte), address, 1]);
        a.note(byte);
        a.say("cuMemsetD8_v2", &[address, 43, 1]);
        let (mut base, mut size) = (0u64, 0u64);
        let arguments = [at(&mut base), at(&mut size), address];
        a.say("cuMemGetAddressRange_v2", &arguments);
        a.note(format_args!("{} {size}", address.wrapping_sub(base)));
        let again = open(a, given, Some(1));
        a.note(again == Some(address));
        a.say("cuMemFree_v2", &[address]);
        let mut handle = [0u8; 64];
        a.say("cuIpcGetMemHandle", &[at(&mut handle), address]);
        a.say("cuIpcCloseMemHandle", &[address]);
        a.say("cuIpcCloseMemHandle", &[address]);
        a.say("cuIpcCloseMemHandle", &[address]);
    }),
    case("ipc.close_refused", |a| {
        a.enter();
        let plain = a.alloc(GRANULE);
        a.part("own");
        a.say("cuIpcCloseMemHandle", &[plain]);
        a.part("null");
        a.say("cuIpcCloseMemHandle", &[0]);
        a.part("unknown");
        a.say("cuIpcCloseMemHandle", &[4096]);
    }),
    case("ipc.event_handle_of", |a| {
        a.enter();
        for flags in [0u64, 2, 6] {
            let event = a.event(flags);
            let mut handle = [0xAAu8; 64];
            a.part(flags);
            a.say("cuIpcGetEventHandle", &[at(&mut handle), event]);
            a.note(if handle == [0xAA; 64] {
                "unwritten"
            } else {
                "handle"
            });
        }
    }),
    case("ipc.event_open_own", |a| {
        a.enter();
        let event = a.event(6);
        let mut handle = [0u8; 64];
        a.need("cuIpcGetEventHandle", &[at(&mut handle), event]);
        open(a, handle, None);
    }),
    case("ipc.event_open_nonsense", |a| {
        a.enter();
        open(a, [0; 64], None);
    }),
    case("ipc.event", |a| {
        a.enter();
        let event = a.event(6);
        let mut handle = [0u8; 64];
        a.need("cuIpcGetEventHandle", &[at(&mut handle), event]);
        a.need("cuEventRecord", &[event, 0]);
        a.other_process("ipc.child_event", &hex(&handle));
        a.say("cuEventQuery", &[event]);
    }),
    helper("ipc.child_event", |a| {
        let given = bytes(&a.given);
        a.enter();
        let Some(event) = open(a, given, None) else {
            return;
        };
        a.say("cuEventQuery", &[event]);
        a.say("cuEventSynchronize", &[event]);
        a.say("cuStreamWaitEvent", &[0, event, 0]);
        let mut handle = [0u8; 64];
        a.say("cuIpcGetEventHandle", &[at(&mut handle), event]);
        a.say("cuEventRecord", &[event, 0]);
        a.say("cuEventDestroy_v2", &[event]);
    }),
];

/// Opens a handle of memory, or of an event if there are no flags.
fn open(a: &mut Asker, handle: [u8; 64], flags: Option<u32>) -> Option<u64> {
    let name = match flags {
        Some(_) => "cuIpcOpenMemHandle_v2",
        None => "cuIpcOpenEventHandle",
    };
    let mut opened = 0u64;
    let out = at(&mut opened);
    let code = a.library.open_ipc(name, out, IpcHandle(handle), flags);
    a.code(code);
    (code.is_some_and(|code| code.0 == 0)).then_some(opened)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> [u8; 64] {
    let mut bytes = [0; 64];
    for (byte, digits) in bytes.iter_mut().zip(hex.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).unwrap_or_default();
        *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
    }
    bytes
}
