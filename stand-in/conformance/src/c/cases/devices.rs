//! Devices: attributes, identities, properties.

use cuvmm_driver::CUresult;

use super::super::asker::{Asker, written};
use super::super::library::{at, text};
use super::{Case, bare, case, initialized};

pub(super) const CASES: &[Case] = &[
    initialized("attribute", |a| {
        for attribute in 0..=160u64 {
            let mut value = -77i32;
            let arguments = [at(&mut value), attribute, 0];
            a.part(attribute);
            if a.say("cuDeviceGetAttribute", &arguments) {
                a.note(value);
            }
        }
        a.part("negative");
        a.get("cuDeviceGetAttribute", -77i32, &[u64::MAX, 0]);
        a.part("device_99");
        a.get("cuDeviceGetAttribute", -77i32, &[75, 99]);
        a.ask("null", "cuDeviceGetAttribute", &[0, 75, 0]);
    }),
    initialized("device.identity", |a| {
        a.part("name");
        let name = a.get("cuDeviceGetName", [0u8; 64], &[64, 0]);
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(64);
        a.note(String::from_utf8_lossy(&name[..length]));
        a.part("name_short");
        let name = a.get("cuDeviceGetName", *b"xxxxxxxx", &[5, 0]);
        a.note(format_args!("{:?}", String::from_utf8_lossy(&name)));
        a.part("total");
        a.tell("cuDeviceTotalMem_v2", 0u64, &[0]);
        a.part("total_v1");
        a.get("cuDeviceTotalMem", 0u32, &[0]);
        a.part("uuid");
        let old = a.get("cuDeviceGetUuid", [0u8; 16], &[0]);
        let new = a.get("cuDeviceGetUuid_v2", [0u8; 16], &[0]);
        a.note(old == new);
        a.part("capability");
        let mut minor = 0i32;
        let rest = [at(&mut minor), 0];
        let major = a.get("cuDeviceComputeCapability", 0i32, &rest);
        a.note(format_args!("{major}.{minor}"));
        a.part("properties");
        let properties = a.get("cuDeviceGetProperties", [0i32; 16], &[0]);
        a.note(format_args!("{properties:?}"));
        a.part("luid");
        a.get("cuDeviceGetLuid", 0u64, &[at(&mut 0u32), 0]);
        a.part("get_99");
        a.get("cuDeviceGet", 0i32, &[99]);
        a.part("get_negative");
        a.get("cuDeviceGet", 0i32, &[u64::MAX]);
    }),
    initialized("device.name_0", |a| {
        a.get("cuDeviceGetName", *b"xxxxxxxx", &[0, 0]);
    }),
    initialized("device.bus_id", bus_id),
    initialized("device.texture_width", |a| {
        // 32 is the format of one float, of one channel.
        a.tell("cuDeviceGetTexture1DLinearMaxWidth", 0u64, &[0x20, 1, 0]);
    }),
    initialized("device.affinity", |a| {
        for kind in [0, 1, 99] {
            a.part(kind);
            a.tell("cuDeviceGetExecAffinitySupport", 7i32, &[kind, 0]);
        }
    }),
    case("device.pools", |a| {
        for (part, device) in [("0", 0), ("99", 99), ("negative", u64::MAX)] {
            a.part(part);
            a.get("cuDeviceGetDefaultMemPool", 0u64, &[device]);
            a.get("cuDeviceGetMemPool", 0u64, &[device]);
        }
    }),
    bare("version", |a| {
        a.tell("cuDriverGetVersion", 0i32, &[]);
        a.ask("null", "cuDriverGetVersion", &[0]);
        a.ask("init_flags", "cuInit", &[1]);
        a.say("cuInit", &[0]);
        a.say("cuInit", &[1]);
    }),
    bare("error_text", |a| {
        for code in [0u64, 1, 2, 3, 201, 999, 12_345, u64::MAX] {
            a.part(code as i32);
            let name = a.get_last("cuGetErrorName", &[code], 7u64);
            if name != 7 {
                a.note(text(name));
            }
            // The words themselves are in `error_words`.
            let told = a.get_last("cuGetErrorString", &[code], 7u64);
            a.note(match told {
                told if told > 7 && text(told) == text(name) => "name",
                told => written(told, "words"),
            });
        }
    }),
    bare("error_words", |a| {
        for &(_, code) in CUresult::KNOWN {
            let mut told = 0u64;
            a.part(code.0);
            a.need("cuGetErrorString", &[code.0 as u64, at(&mut told)]);
            a.note(text(told));
        }
    }),
    bare("error_text.null", |a| {
        a.say("cuGetErrorName", &[1, 0]);
        a.say("cuGetErrorString", &[1, 0]);
    }),
];

/// Asks for the device's place on the bus, and for the device at that place.
fn bus_id(a: &mut Asker) {
    a.part("format");
    let name = a.get("cuDeviceGetPCIBusId", [0u8; 32], &[32, 0]);
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(32);
    let shape: String = name[..length]
        .iter()
        .map(|&byte| match byte {
            b'0'..=b'9' | b'A'..=b'F' => 'X',
            b'a'..=b'f' => 'x',
            other => other as char,
        })
        .collect();
    a.note(shape);
    let [domain, bus, slot] =
        [50, 33, 34].map(|attribute| a.made("cuDeviceGetAttribute", &[attribute, 0]));
    let expected = format!("{domain:04x}:{bus:02x}:{slot:02x}.0").to_uppercase();
    let said = String::from_utf8_lossy(&name[..length]).to_uppercase();
    a.note(said == expected);
    for (part, mut spelled) in [
        ("same", said.clone()),
        ("lower", said.to_lowercase()),
        ("without_function", said.trim_end_matches(".0").to_owned()),
        (
            "without_domain",
            said.split_once(':').map_or("", |(_, rest)| rest).to_owned(),
        ),
        ("none", "FFFF:7F:1E.0".to_owned()),
        ("nonsense", "nonsense".to_owned()),
        ("empty", String::new()),
    ] {
        a.part(part);
        spelled.push('\0');
        let mut bytes = spelled.into_bytes();
        a.tell("cuDeviceGetByPCIBusId", -7i32, &[at(&mut *bytes)]);
    }
    for room in [0u64, 1, 5, 12, 13] {
        a.part(format_args!("room_{room}"));
        let name = a.get("cuDeviceGetPCIBusId", [b'x'; 32], &[room, 0]);
        let written = name.iter().rposition(|&byte| byte != b'x');
        a.note(written.map_or(0, |last| last + 1));
    }
}
