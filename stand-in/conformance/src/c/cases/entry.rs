//! Finding functions: exported names, and `cuGetProcAddress`.

use std::collections::BTreeMap;

use super::super::asker::Asker;
use super::super::library::{at, call_at};
use super::{Case, bare, initialized};

/// The list of the names that the header declares, whose rows begin with a name.
const SYMBOLS: &str = include_str!("../../../../fakecuda/src/symbols.rs");

pub(super) const CASES: &[Case] = &[
    bare("exports.absent", |a| {
        for row in rows() {
            if a.library.address(row.symbol).is_none() {
                a.note(row.symbol);
            }
        }
        a.note("end");
    }),
    initialized("entry.by_version", by_version),
    initialized("entry.v1", |a| {
        for (part, name, version) in [
            ("known", c"cuMemAlloc", 12_000),
            ("unknown", c"cuNoSuchFunction", 12_000),
            ("too_old", c"cuMemCreate", 10_010),
            ("empty", c"", 12_000),
        ] {
            a.part(part);
            let (name, mut found) = (name.as_ptr().addr() as u64, 7u64);
            a.say("cuGetProcAddress", &[name, at(&mut found), version, 0]);
            named_result(a, found);
        }
    }),
    bare("entry.before_init", |a| {
        ask(a, "v2", c"cuInit", 12_000, 0);
    }),
    initialized("entry.known", |a| {
        ask(a, "usual", c"cuMemAlloc", 12_000, 0);
        ask(a, "versioned_name", c"cuMemAlloc_v2", 12_000, 0);
        ask(a, "ptsz_name", c"cuStreamQuery_ptsz", 12_000, 0);
        ask(a, "unknown", c"cuNoSuchFunction", 12_000, 0);
        ask(a, "empty", c"", 12_000, 0);
        ask(a, "runtime_name", c"cudaMalloc", 12_000, 0);
        ask(a, "export_table", c"cuGetExportTable", 12_000, 0);
        ask(a, "itself", c"cuGetProcAddress", 12_000, 0);
        ask(a, "itself_old", c"cuGetProcAddress", 11_030, 0);
    }),
    initialized("entry.profiler", |a| {
        ask(a, "start", c"cuProfilerStart", 12_000, 0);
        ask(a, "stop", c"cuProfilerStop", 12_000, 0);
        ask(a, "start_3020", c"cuProfilerStart", 3_020, 0);
        ask(a, "start_4000", c"cuProfilerStart", 4_000, 0);
        ask(a, "start_per_thread", c"cuProfilerStart", 12_000, 2);
        ask(a, "initialize", c"cuProfilerInitialize", 12_000, 0);
        ask(a, "initialize_4000", c"cuProfilerInitialize", 4_000, 0);
    }),
    initialized("entry.version", |a| {
        ask(a, "0", c"cuMemAlloc", 0, 0);
        ask(a, "negative", c"cuMemAlloc", 0xFFFF_FFFF, 0);
        ask(a, "1000", c"cuMemAlloc", 1_000, 0);
        ask(a, "too_old", c"cuMemCreate", 10_010, 0);
        ask(a, "just_old_enough", c"cuMemCreate", 10_020, 0);
        ask(a, "13000", c"cuMemAlloc", 13_000, 0);
        ask(a, "13050", c"cuMemAlloc", 13_050, 0);
        ask(a, "14000", c"cuMemAlloc", 14_000, 0);
        ask(a, "99990", c"cuMemAlloc", 99_990, 0);
        ask(a, "unknown_99990", c"cuNoSuchFunction", 99_990, 0);
    }),
    initialized("entry.flags", |a| {
        for flags in [0, 1, 2, 3, 4, 8, 1 << 40] {
            let part = format!("{flags}.stream");
            ask(a, &part, c"cuStreamQuery", 12_000, flags);
        }
        ask(a, "2.without_variant", c"cuStreamCreate", 12_000, 2);
        ask(a, "2.copy", c"cuMemcpyHtoD", 12_000, 2);
        ask(a, "2.old", c"cuMemcpyHtoD", 5_000, 2);
        ask(a, "2.too_old", c"cuStreamQuery", 1_000, 2);
    }),
    initialized("entry.null.symbol", |a| {
        let (mut found, mut status) = (7u64, 7u32);
        let arguments = [0, at(&mut found), 12_000, 0, at(&mut status)];
        a.say("cuGetProcAddress_v2", &arguments);
        a.note(found);
        a.note(status);
    }),
    initialized("entry.null.pointer", |a| {
        let name = c"cuMemAlloc".as_ptr().addr() as u64;
        a.tell_last("cuGetProcAddress_v2", &[name, 0, 12_000, 0], 7u32);
    }),
    initialized("entry.null.status", |a| {
        for (part, name) in [("known", c"cuMemAlloc"), ("unknown", c"cuNoSuchFunction")] {
            a.part(part);
            let mut found = 7u64;
            let name = name.as_ptr().addr() as u64;
            let arguments = [name, at(&mut found), 12_000, 0, 0];
            a.say("cuGetProcAddress_v2", &arguments);
            named_result(a, found);
        }
    }),
    bare("entry.found_works", |a| {
        let (mut found, mut status, mut version) = (0u64, 0u32, 0i32);
        let name = c"cuDriverGetVersion".as_ptr().addr() as u64;
        let arguments = [name, at(&mut found), 12_000, 0, at(&mut status)];
        if a.say("cuGetProcAddress_v2", &arguments) && found != 0 {
            let address = std::ptr::with_exposed_provenance_mut(found as usize);
            a.note(call_at(address, &[at(&mut version)]));
            a.note(version > 10_000);
        }
    }),
    initialized("export_table.unknown", |a| {
        let mut id = [0u8; 16];
        a.tell("cuGetExportTable", 7u64, &[at(&mut id)]);
    }),
    bare("export_table.null", |a| {
        let mut id = [0u8; 16];
        a.say("cuGetExportTable", &[0, at(&mut id)]);
    }),
];

/// A row of the table of names.
struct Row {
    symbol: &'static str,
    base: &'static str,
    version: u64,
    per_thread: bool,
}

fn rows() -> impl Iterator<Item = Row> {
    SYMBOLS.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        Some(Row {
            symbol: fields.next().filter(|name| name.starts_with("cu"))?,
            base: fields.next()?,
            version: fields.next()?.parse().ok()?,
            per_thread: fields.next()? == "own",
        })
    })
}

/// Asks for a function and notes the code, the status and the exported name of what is found.
fn ask(a: &mut Asker, part: &str, name: &std::ffi::CStr, version: u64, flags: u64) {
    a.part(part);
    let (mut found, mut status) = (7u64, 7u32);
    let name = name.as_ptr().addr() as u64;
    let arguments = [name, at(&mut found), version, flags, at(&mut status)];
    a.say("cuGetProcAddress_v2", &arguments);
    a.note(format_args!("status {status}"));
    named_result(a, found);
}

/// Notes the exported name of an address.
fn named_result(a: &mut Asker, found: u64) {
    match found {
        0 => a.note("null"),
        7 => a.note("unwritten"),
        _ => {
            let name = rows().find(|row| {
                let address = a.library.address(row.symbol);
                address.is_some_and(|address| address.addr() as u64 == found)
            });
            a.note(name.map_or("unexported", |row| row.symbol));
        }
    }
}

/// Asks for every function of the header, in each of its versions and just below the first, and
/// notes those for which the answer is not the exported name of the table.
fn by_version(a: &mut Asker) {
    let mut driver = 0i32;
    a.need("cuDriverGetVersion", &[at(&mut driver)]);
    let mut first = BTreeMap::new();
    for row in rows() {
        let begun = first.entry(row.base).or_insert(row.version);
        *begun = row.version.min(*begun);
    }
    for row in rows().filter(|row| row.version <= driver as u64) {
        let flags = if row.per_thread { 2 } else { 1 };
        let (status, found) = look(a, row.base, row.version, flags);
        let exported = a.library.address(row.symbol);
        let same = exported.is_some_and(|address| address.addr() as u64 == found);
        if status != "SUCCESS 0" || !same {
            a.part(row.symbol);
            a.note(format_args!("at {}: {status}", row.version));
            named_result(a, found);
        }
        if !row.per_thread && first.get(row.base) == Some(&row.version) {
            let (status, found) = look(a, row.base, row.version - 10, flags);
            if status != "SUCCESS 2" || found != 0 {
                a.part(format_args!("{}.before", row.base));
                a.note(format_args!("at {}: {status}", row.version - 10));
                named_result(a, found);
            }
        }
    }
    a.part("end");
    a.note("end");
}

/// Returns the code and status of a search, and the address found.
fn look(a: &Asker, base: &str, version: u64, flags: u64) -> (String, u64) {
    let (mut found, mut status) = (0u64, 7u32);
    let mut name = base.as_bytes().to_vec();
    name.push(0);
    let arguments = [
        at(&mut *name),
        at(&mut found),
        version,
        flags,
        at(&mut status),
    ];
    let code = a.call("cuGetProcAddress_v2", &arguments);
    let code = code
        .and_then(|code| code.name())
        .unwrap_or("CUDA_ABSENT")
        .trim_start_matches("CUDA_");
    (format!("{code} {status}"), found)
}
