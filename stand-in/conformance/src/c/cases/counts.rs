//! Arrays whose count is wrong. Each count has a process of its own: a driver that believes it reads
//! or writes past the end of the array.

use super::super::asker::{Asker, GRANULE};
use super::super::library::at;
use super::{Case, case, initialized};

/// The number of values in the arrays of this file.
const LENGTH: usize = (1 << 16) + 1;

macro_rules! counts {
    ($($begin:ident $ask:ident { $($part:literal $count:expr,)* })*) => {
        pub(super) const CASES: &[Case] = &[
            $($($begin(concat!("count.", stringify!($ask), ".", $part), |a| $ask(a, $count)),)*)*
        ];
    };
}

counts! {
    case set_access {
        "two" 2, "array" LENGTH as u64, "32_bits" 1 << 32, "40_bits" 1 << 40,
        "bytes_wrap" (1 << 62) + 1, "all" u64::MAX,
    }
    case pool_set_access {
        "two" 2, "array" LENGTH as u64, "32_bits" 1 << 32, "40_bits" 1 << 40,
        "bytes_wrap" (1 << 62) + 1, "all" u64::MAX,
    }
    case pointer_attributes { "two" 2, "array" LENGTH as u64, "31_bits" 1 << 31, "all" 0xffff_ffff, }
    case accessed_by {
        "two" 8, "array" 4 * LENGTH as u64, "32_bits" 1 << 32, "40_bits" 1 << 40,
        "all" u64::MAX - 3,
    }
    initialized affinities { "one" 1, "31_bits" 0x7fff_ffff, "negative" 0xffff_ffff, }
    initialized name { "31_bits" 0x7fff_ffff, "negative" 0xffff_ffff, }
}

/// Returns many descriptors that give the first device access.
fn grants() -> Vec<[u32; 3]> {
    vec![[1, 0, 3]; LENGTH]
}

fn set_access(a: &mut Asker, count: u64) {
    let memory = a.mapping(false);
    let mut grants = grants();
    let list = at(&mut *grants);
    a.say("cuMemSetAccess", &[memory, GRANULE, list, count]);
    let mut place = [1u32, 0];
    let flags = a.made("cuMemGetAccess", &[at(&mut place), memory]);
    a.note(flags);
}

fn pool_set_access(a: &mut Asker, count: u64) {
    let mut props = [0u32; 22];
    props[0] = 1;
    props[2] = 1;
    let pool = a.made("cuMemPoolCreate", &[at(&mut props)]);
    let mut grants = grants();
    a.say("cuMemPoolSetAccess", &[pool, at(&mut *grants), count]);
}

fn pointer_attributes(a: &mut Asker, count: u64) {
    let memory = a.alloc(512);
    let mut kind = 7u32;
    let mut attributes = vec![2u32; LENGTH];
    let mut places = vec![at(&mut kind); LENGTH];
    let arguments = [count, at(&mut *attributes), at(&mut *places), memory];
    a.say("cuPointerGetAttributes", &arguments);
    a.note(kind);
}

fn accessed_by(a: &mut Asker, bytes: u64) {
    /// The attribute of the devices that access a range.
    const ACCESSED_BY: u64 = 3;
    let memory = a.managed(GRANULE);
    let mut users = vec![7u32; LENGTH];
    let arguments = [at(&mut *users), bytes, ACCESSED_BY, memory, GRANULE];
    a.say("cuMemRangeGetAttribute", &arguments);
    a.note(users[0].cast_signed());
}

fn affinities(a: &mut Asker, count: u64) {
    // Each affinity is a type and a number of multiprocessors.
    let mut list = vec![[0u32, 8]; LENGTH];
    a.get("cuCtxCreate_v3", 0u64, &[at(&mut *list), count, 0, 0]);
}

fn name(a: &mut Asker, count: u64) {
    let mut text = vec![7u8; 4096];
    a.say("cuDeviceGetName", &[at(&mut *text), count, 0]);
    a.note(text.iter().filter(|&&byte| byte == 7).count() > 3000);
}
