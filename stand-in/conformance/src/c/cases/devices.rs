//! Devices: attributes, identities, properties.

use cuvmm_driver::CUresult;

use super::super::asker::Asker;
use super::super::library::{at, text};
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("attribute", |a| {
        a.need("cuInit", &[0]);
        for attribute in 0..=160u64 {
            let mut value = -77i32;
            let arguments = [at(&mut value), attribute, 0];
            a.part(attribute);
            if a.say("cuDeviceGetAttribute", &arguments) {
                a.note(value);
            }
        }
        a.part("negative");
        let mut value = -77i32;
        a.say("cuDeviceGetAttribute", &[at(&mut value), u64::MAX, 0]);
        a.part("device_99");
        a.say("cuDeviceGetAttribute", &[at(&mut value), 75, 99]);
        a.part("null");
        a.say("cuDeviceGetAttribute", &[0, 75, 0]);
    }),
    case("device.identity", |a| {
        a.need("cuInit", &[0]);
        a.part("name");
        let mut name = [0u8; 64];
        a.say("cuDeviceGetName", &[at(&mut name), 64, 0]);
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(64);
        a.note(String::from_utf8_lossy(&name[..length]));
        a.part("name_short");
        let mut name = *b"xxxxxxxx";
        a.say("cuDeviceGetName", &[at(&mut name), 5, 0]);
        a.note(format_args!("{:?}", String::from_utf8_lossy(&name)));
        a.part("total");
        let mut bytes = 0u64;
        a.say("cuDeviceTotalMem_v2", &[at(&mut bytes), 0]);
        a.note(bytes);
        a.part("total_v1");
        let mut narrow = 0u32;
        a.say("cuDeviceTotalMem", &[at(&mut narrow), 0]);
        a.part("uuid");
        let (mut old, mut new) = ([0u8; 16], [0u8; 16]);
        a.say("cuDeviceGetUuid", &[at(&mut old), 0]);
        a.say("cuDeviceGetUuid_v2", &[at(&mut new), 0]);
        a.note(old == new);
        a.part("capability");
        let (mut major, mut minor) = (0i32, 0i32);
        a.say(
            "cuDeviceComputeCapability",
            &[at(&mut major), at(&mut minor), 0],
        );
        a.note(format_args!("{major}.{minor}"));
        a.part("properties");
        let mut properties = [0i32; 16];
        a.say("cuDeviceGetProperties", &[at(&mut properties), 0]);
        a.note(format_args!("{properties:?}"));
        a.part("luid");
        let (mut luid, mut mask) = (0u64, 0u32);
        a.say("cuDeviceGetLuid", &[at(&mut luid), at(&mut mask), 0]);
        a.part("get_99");
        let mut device = 0i32;
        a.say("cuDeviceGet", &[at(&mut device), 99]);
        a.part("get_negative");
        a.say("cuDeviceGet", &[at(&mut device), u64::MAX]);
    }),
    case("device.name_0", |a| {
        a.need("cuInit", &[0]);
        let mut name = *b"xxxxxxxx";
        a.say("cuDeviceGetName", &[at(&mut name), 0, 0]);
    }),
    case("device.bus_id", bus_id),
    case("device.texture_width", |a| {
        a.need("cuInit", &[0]);
        let mut width = 0u64;
        // 32 is the format of one float, of one channel.
        let arguments = [at(&mut width), 0x20, 1, 0];
        a.say("cuDeviceGetTexture1DLinearMaxWidth", &arguments);
        a.note(width);
    }),
    case("device.affinity", |a| {
        a.need("cuInit", &[0]);
        for kind in [0, 1, 99] {
            let mut supported = 7i32;
            a.part(kind);
            a.say(
                "cuDeviceGetExecAffinitySupport",
                &[at(&mut supported), kind, 0],
            );
            a.note(supported);
        }
    }),
    case("device.pools", |a| {
        a.enter();
        for (part, device) in [("0", 0), ("99", 99), ("negative", u64::MAX)] {
            a.part(part);
            let mut pool = 0u64;
            a.say("cuDeviceGetDefaultMemPool", &[at(&mut pool), device]);
            a.say("cuDeviceGetMemPool", &[at(&mut pool), device]);
        }
    }),
    case("version", |a| {
        let mut version = 0i32;
        a.say("cuDriverGetVersion", &[at(&mut version)]);
        a.note(version);
        a.part("null");
        a.say("cuDriverGetVersion", &[0]);
        a.part("init_flags");
        a.say("cuInit", &[1]);
        a.say("cuInit", &[0]);
        a.say("cuInit", &[1]);
    }),
    case("error_text", |a| {
        for code in [0u64, 1, 2, 3, 201, 999, 12_345, u64::MAX] {
            a.part(code as i32);
            let (mut name, mut told) = (7u64, 7u64);
            a.say("cuGetErrorName", &[code, at(&mut name)]);
            if name != 7 {
                a.note(text(name));
            }
            a.say("cuGetErrorString", &[code, at(&mut told)]);
            // The words themselves are in `error_words`.
            a.note(match told {
                7 => "unwritten",
                0 => "null",
                _ if text(told) == text(name) => "name",
                _ => "words",
            });
        }
    }),
    case("error_words", |a| {
        for &(_, code) in CUresult::KNOWN {
            let mut told = 0u64;
            a.part(code.0);
            a.need("cuGetErrorString", &[code.0 as u64, at(&mut told)]);
            a.note(text(told));
        }
    }),
    case("error_text.null", |a| {
        a.say("cuGetErrorName", &[1, 0]);
        a.say("cuGetErrorString", &[1, 0]);
    }),
];

/// Asks for the device's place on the bus, and for the device at that place.
fn bus_id(a: &mut Asker) {
    a.need("cuInit", &[0]);
    let mut name = [0u8; 32];
    a.part("format");
    a.say("cuDeviceGetPCIBusId", &[at(&mut name), 32, 0]);
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
    let mut numbers = [0i32; 3];
    for (number, attribute) in numbers.iter_mut().zip([50u64, 33, 34]) {
        a.need("cuDeviceGetAttribute", &[at(number), attribute, 0]);
    }
    let [domain, bus, slot] = numbers;
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
        let mut device = -7i32;
        let mut bytes = spelled.into_bytes();
        a.say("cuDeviceGetByPCIBusId", &[at(&mut device), at(&mut *bytes)]);
        a.note(device);
    }
    for room in [0u64, 1, 5, 12, 13] {
        a.part(format_args!("room_{room}"));
        let mut name = [b'x'; 32];
        a.say("cuDeviceGetPCIBusId", &[at(&mut name), room, 0]);
        let written = name.iter().rposition(|&byte| byte != b'x');
        a.note(written.map_or(0, |last| last + 1));
    }
}
