//! Legacy interprocess handles of memory and events.

use super::super::asker::{Asker, GRANULE};
use super::super::library::{IpcHandle, at};
use super::{Case, case, helper};

pub(super) const CASES: &[Case] = &[
    case("ipc.handle_of", |a| {
        let plain = a.alloc(GRANULE);
        let small = a.alloc(100);
        let pool = a.alloc_async(GRANULE);
        let pinned = a.pinned(4096, 0);
        let mapped = a.mapping(true);
        let managed = a.managed(GRANULE);
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
            a.part(part);
            note_handle(a, "cuIpcGetMemHandle", address);
        }
        a.ask("null_out", "cuIpcGetMemHandle", &[0, plain]);
        a.part("same_twice");
        let (one, mut two) = (memory_handle(a, plain), memory_handle(a, plain));
        a.note(one == two);
        a.part("interior_is_the_same");
        if a.say("cuIpcGetMemHandle", &[at(&mut two), plain + 4096]) {
            a.note(one == two);
        }
    }),
    case("ipc.open_own", |a| {
        let plain = a.alloc(GRANULE);
        let handle = memory_handle(a, plain);
        open(a, handle, Some(1));
    }),
    case("ipc.open_nonsense", |a| {
        a.part("zeros");
        open(a, [0; 64], Some(1));
        a.part("ones");
        open(a, [0xFF; 64], Some(1));
    }),
    case("ipc.open_flags", |a| {
        for flags in [0u32, 2] {
            a.part(flags);
            open(a, [0; 64], Some(flags));
        }
    }),
    case("ipc.memory", |a| {
        let plain = a.alloc(GRANULE);
        a.need("cuMemsetD8_v2", &[plain, 41, 64]);
        a.part("opens");
        let handle = a.get("cuIpcGetMemHandle", [0u8; 64], &[plain]);
        a.other_process("ipc.child_memory", &hex(&handle));
        a.part("written");
        let byte = a.first_byte(plain);
        a.note(byte);
    }),
    case("ipc.memory_small", |a| {
        let first = a.alloc(100);
        let second = a.alloc(100);
        a.need("cuMemsetD8_v2", &[first, 40, 100]);
        a.need("cuMemsetD8_v2", &[second, 41, 100]);
        let handle = a.get("cuIpcGetMemHandle", [0u8; 64], &[second]);
        a.other_process("ipc.child_memory", &hex(&handle));
    }),
    case("ipc.memory_freed", |a| {
        let plain = a.alloc(GRANULE);
        let handle = memory_handle(a, plain);
        a.need("cuMemFree_v2", &[plain]);
        a.other_process("ipc.child_memory", &hex(&handle));
    }),
    helper("ipc.child_memory", |a| {
        let given = bytes(&a.given);
        let Some(address) = open(a, given, Some(1)) else {
            return;
        };
        a.tell("cuMemcpyDtoH_v2", 0u64, &[address, 1]);
        a.say("cuMemsetD8_v2", &[address, 43, 1]);
        let (base, size) = a.range(address);
        a.note(format_args!("{} {size}", address.wrapping_sub(base)));
        let again = open(a, given, Some(1));
        a.note(again == Some(address));
        a.say("cuMemFree_v2", &[address]);
        a.get("cuIpcGetMemHandle", [0u8; 64], &[address]);
        for _ in 0..3 {
            a.say("cuIpcCloseMemHandle", &[address]);
        }
    }),
    case("ipc.close_refused", |a| {
        let plain = a.alloc(GRANULE);
        a.ask("own", "cuIpcCloseMemHandle", &[plain]);
        a.ask("null", "cuIpcCloseMemHandle", &[0]);
        a.ask("unknown", "cuIpcCloseMemHandle", &[4096]);
    }),
    case("ipc.event_handle_of", |a| {
        for flags in [0u64, 2, 6] {
            let event = a.event(flags);
            a.part(flags);
            note_handle(a, "cuIpcGetEventHandle", event);
        }
    }),
    case("ipc.event_open_own", |a| {
        let event = a.event(6);
        let handle = event_handle(a, event);
        open(a, handle, None);
    }),
    case("ipc.event_open_nonsense", |a| {
        open(a, [0; 64], None);
    }),
    case("ipc.event", |a| {
        let event = a.event(6);
        let handle = event_handle(a, event);
        a.need("cuEventRecord", &[event, 0]);
        a.other_process("ipc.child_event", &hex(&handle));
        a.say("cuEventQuery", &[event]);
    }),
    helper("ipc.child_event", |a| {
        let given = bytes(&a.given);
        let Some(event) = open(a, given, None) else {
            return;
        };
        a.say("cuEventQuery", &[event]);
        a.say("cuEventSynchronize", &[event]);
        a.say("cuStreamWaitEvent", &[0, event, 0]);
        a.get("cuIpcGetEventHandle", [0u8; 64], &[event]);
        a.say("cuEventRecord", &[event, 0]);
        a.say("cuEventDestroy_v2", &[event]);
    }),
];

fn memory_handle(a: &mut Asker, memory: u64) -> [u8; 64] {
    let mut handle = [0u8; 64];
    a.need("cuIpcGetMemHandle", &[at(&mut handle), memory]);
    handle
}

fn event_handle(a: &mut Asker, event: u64) -> [u8; 64] {
    let mut handle = [0u8; 64];
    a.need("cuIpcGetEventHandle", &[at(&mut handle), event]);
    handle
}

/// Asks for a handle, and notes whether there is one.
fn note_handle(a: &mut Asker, name: &str, object: u64) {
    let unwritten = a.get(name, [0xAAu8; 64], &[object]) == [0xAA; 64];
    a.note(if unwritten { "unwritten" } else { "handle" });
}

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
