//! Attributes of addresses.

use super::super::asker::{Asker, GRANULE, props};
use super::super::library::at;
use super::{Case, case};

/// The attributes whose values are numbers without a meaning of their own.
const IDS: [u64; 2] = [7, 20];

/// The attribute that takes a structure and is not asked for.
const TOKENS: u64 = 5;

pub(super) const CASES: &[Case] = &[
    case("pointer.alloc", |a| every(a, |a| a.alloc(GRANULE), 0)),
    case("pointer.alloc_interior", |a| {
        every(a, |a| a.alloc(GRANULE), 4096);
    }),
    case("pointer.alloc_small", |a| every(a, |a| a.alloc(100), 0)),
    case("pointer.alloc_large", |a| {
        every(a, |a| a.alloc(3 * GRANULE + 512), 0);
    }),
    case("pointer.pool", |a| every(a, |a| a.alloc_async(GRANULE), 0)),
    case("pointer.pool_interior", |a| {
        every(a, |a| a.alloc_async(4096), 512);
    }),
    case("pointer.pinned", |a| every(a, |a| a.pinned(8192, 0), 64)),
    case("pointer.pinned_mapped", |a| {
        every(a, |a| a.pinned(8192, 2), 0);
    }),
    case("pointer.registered", |a| {
        let memory = super::host::pages(4);
        a.need("cuMemHostRegister_v2", &[memory, 4 * 4096, 0]);
        attributes(a, memory, 64);
    }),
    case("pointer.managed", |a| {
        every(a, |a| a.managed(GRANULE), 4096)
    }),
    case("pointer.mapping", |a| {
        let address = a.reserve(2 * GRANULE);
        a.map(address, true);
        attributes(a, address, 4096);
    }),
    case("pointer.mapping_second", |a| {
        let address = a.reserve(2 * GRANULE);
        a.map(address, true);
        a.map(address + GRANULE, true);
        attributes(a, address, GRANULE);
    }),
    case("pointer.mapping_closed", |a| {
        every(a, |a| a.mapping(false), 0);
    }),
    case("pointer.mapping_read_only", |a| {
        let address = a.mapping(false);
        a.grant(address, 1);
        attributes(a, address, 0);
    }),
    case("pointer.mapping_rdma", |a| {
        let (address, mut props) = (a.reserve(GRANULE), props());
        props[6] = 1 << 8;
        let handle = a.made("cuMemCreate", &[GRANULE, at(&mut props), 0]);
        a.need("cuMemMap", &[address, GRANULE, 0, handle, 0]);
        a.grant(address, 3);
        attributes(a, address, 0);
    }),
    case("pointer.pool_small", |a| {
        let first = a.alloc_async(64);
        let address = a.alloc_async(64);
        attributes(a, first, 0);
        a.part("second_range");
        tell_range(a, address + 8, address);
        a.ask("past_the_end", "cuMemsetD8_v2", &[first, 1, 64]);
        a.say("cuMemsetD8_v2", &[first, 1, 65]);
        a.say("cuMemsetD8_v2", &[first, 1, 512]);
        a.say("cuMemsetD8_v2", &[first, 1, 513]);
    }),
    case("pointer.reserved", |a| every(a, |a| a.reserve(GRANULE), 0)),
    case("pointer.host", |a| every(a, |_| super::host::pages(1), 0)),
    case("pointer.null", |a| every(a, |_| 0, 0)),
    case("pointer.freed", |a| {
        let address = a.alloc(GRANULE);
        a.need("cuMemFree_v2", &[address]);
        attributes(a, address, 0);
    }),
    case("pointer.odd_attributes", |a| {
        let address = a.alloc(GRANULE);
        for attribute in [0u64, 5, 22, 23, 99] {
            a.part(attribute);
            a.get("cuPointerGetAttribute", [0u64; 4], &[attribute, address]);
        }
        a.ask("null", "cuPointerGetAttribute", &[0, 2, address]);
    }),
    case("pointer.without_context", |a| {
        let address = a.alloc(GRANULE);
        a.need("cuCtxSetCurrent", &[0]);
        a.tell("cuPointerGetAttribute", 0u64, &[2, address]);
    }),
    case("pointer.several", several),
    case("pointer.several_null", |a| {
        let address = a.alloc(GRANULE);
        let (mut attribute, mut data) = (2u32, 0u64);
        a.part("count_0");
        let arguments = [0, at(&mut attribute), at(&mut data), address];
        a.say("cuPointerGetAttributes", &arguments);
        a.part("no_attributes");
        a.say("cuPointerGetAttributes", &[1, 0, at(&mut data), address]);
        a.part("no_data");
        let arguments = [1, at(&mut attribute), 0, address];
        a.say("cuPointerGetAttributes", &arguments);
    }),
    case("pointer.set", |a| {
        let address = a.alloc(GRANULE);
        let mut on = 1u32;
        a.part("sync_memops");
        a.say("cuPointerSetAttribute", &[at(&mut on), 6, address]);
        let got = a.made("cuPointerGetAttribute", &[6, address]);
        a.note(got);
        a.part("sync_memops_2");
        on = 2;
        a.say("cuPointerSetAttribute", &[at(&mut on), 6, address]);
        a.ask("other", "cuPointerSetAttribute", &[at(&mut on), 2, address]);
        a.ask("null", "cuPointerSetAttribute", &[0, 6, address]);
        a.part("unknown_address");
        a.say("cuPointerSetAttribute", &[at(&mut on), 6, 4096]);
        a.part("mapping");
        let mapped = a.mapping(true);
        on = 1;
        a.say("cuPointerSetAttribute", &[at(&mut on), 6, mapped]);
    }),
    case("pointer.buffer_ids", buffer_ids),
    case("pointer.range", |a| {
        for (part, bytes) in [("1", 1u64), ("100", 100), ("513", 513), ("3MiB", 3 << 20)] {
            let address = a.alloc(bytes);
            a.part(part);
            tell_range(a, address, address);
        }
        a.part("pool_100");
        let address = a.alloc_async(100);
        tell_range(a, address, address);
        a.ask("null_outs", "cuMemGetAddressRange_v2", &[0, 0, address]);
        a.part("pinned");
        let address = a.pinned(100, 0);
        tell_range(a, address, address);
    }),
];

/// Notes whether the range at an address begins at `base`, and its size.
fn tell_range(a: &mut Asker, address: u64, base: u64) {
    let (start, size) = a.range(address);
    a.note(format_args!("{} {size}", start == base));
}

/// Makes memory, and asks for every attribute of the address at an offset in it.
fn every(a: &mut Asker, make: fn(&mut Asker) -> u64, offset: u64) {
    let base = make(a);
    attributes(a, base, offset);
}

/// Asks for every attribute of the address at an offset in memory. Values are related to what is
/// known, because addresses are not part of an answer.
fn attributes(a: &mut Asker, base: u64, offset: u64) {
    let (address, context) = (base + offset, a.primary);
    for attribute in (1..=21).filter(|&attribute| attribute != TOKENS) {
        a.part(attribute);
        let rest = [attribute, address];
        let value = a.get("cuPointerGetAttribute", [0xAAu8; 32], &rest);
        let bytes = value.iter().rposition(|&byte| byte != 0xAA);
        let Some(bytes) = bytes.map(|last| last + 1) else {
            continue;
        };
        let mut word = [0u8; 8];
        for (to, from) in word.iter_mut().zip(&value[..bytes.min(8)]) {
            *to = *from;
        }
        let word = u64::from_le_bytes(word);
        let named = match word {
            0 => "0".to_owned(),
            _ if IDS.contains(&attribute) => "id".to_owned(),
            word if word == address => "address".to_owned(),
            word if word == base => "base".to_owned(),
            word if word == context => "context".to_owned(),
            word if word < 1 << 32 => word.to_string(),
            _ => "large".to_owned(),
        };
        a.note(format_args!("{named} in {bytes}"));
    }
}

/// Asks for several attributes at once, of several addresses.
fn several(a: &mut Asker) {
    let known = a.alloc(GRANULE);
    let host = super::host::pages(1);
    for (part, address) in [("known", known), ("host", host), ("null", 0)] {
        let mut attributes = [1u32, 2, 3, 4, 8, 9, 11, 12];
        let mut values = [0xAAAA_AAAA_AAAA_AAAAu64; 8];
        let mut places = [0u64; 8];
        for (place, value) in places.iter_mut().zip(&mut values) {
            *place = at(value);
        }
        a.part(part);
        let arguments = [8, at(&mut attributes), at(&mut places), address];
        a.say("cuPointerGetAttributes", &arguments);
        for (attribute, value) in attributes.iter().zip(values) {
            let named = match value {
                0xAAAA_AAAA_AAAA_AAAA => "unwritten".to_owned(),
                0 => "0".to_owned(),
                value if value == address => "address".to_owned(),
                value if value >> 32 == 0xAAAA_AAAA => format!("{}w4", value as i32),
                value if value & !0xFF == 0xAAAA_AAAA_AAAA_AA00 => format!("{}w1", value & 0xFF),
                value if value < 1 << 32 => value.to_string(),
                _ => "large".to_owned(),
            };
            a.note(format_args!("{attribute}:{named}"));
        }
    }
    a.part("bad_attribute");
    let (mut attributes, mut value) = ([2u32, 99], 7u64);
    let mut places = [at(&mut value), at(&mut value)];
    let arguments = [2, at(&mut attributes), at(&mut places), known];
    a.say("cuPointerGetAttributes", &arguments);
}

/// Compares the numbers of buffers.
fn buffer_ids(a: &mut Asker) {
    let id = |a: &mut Asker, address: u64| a.made("cuPointerGetAttribute", &[7, address]);
    let (one, two) = (a.alloc(GRANULE), a.alloc(GRANULE));
    let (first, second) = (id(a, one), id(a, two));
    a.part("two_differ");
    a.note(first != second);
    a.part("rises_by");
    a.note(second.wrapping_sub(first));
    a.part("interior");
    let inside = id(a, one + 4096);
    a.note(inside == first);
    a.part("again");
    a.need("cuMemFree_v2", &[one]);
    let again = a.alloc(GRANULE);
    let third = id(a, again);
    a.note(third != first && third != second);
    a.part("pool_again");
    let pooled = a.alloc_async(4096);
    let before = id(a, pooled);
    a.need("cuMemFreeAsync", &[pooled, 0]);
    let reused = a.alloc_async(4096);
    let after = id(a, reused);
    a.note(format_args!(
        "address-same {} id-same {}",
        reused == pooled,
        before == after
    ));
    a.part("mappings_of_one_physical");
    let handle = a.physical();
    let range = a.reserve(2 * GRANULE);
    for address in [range, range + GRANULE] {
        a.need("cuMemMap", &[address, GRANULE, 0, handle, 0]);
        a.grant(address, 3);
    }
    let (low, high) = (id(a, range), id(a, range + GRANULE));
    a.note(low == high);
    a.part("mapped_again");
    a.need("cuMemUnmap", &[range, GRANULE]);
    a.need("cuMemMap", &[range, GRANULE, 0, handle, 0]);
    let remapped = id(a, range);
    a.note(remapped == low);
    a.part("small_ones_differ");
    let (one, two) = (a.alloc(100), a.alloc(100));
    let (one, two) = (id(a, one), id(a, two));
    a.note(one != two);
}
