//! A ledger's file whose words have values that no process writes, before it is opened and while it
//! is used. `tools/fuzz/fuzz_targets/ledger.rs` extends this test.

use crate::ledger_contents_support::{Input, folder, survive};

/// The numbers of words of the header, of the first charges, tickets, slots and exports.
fn word(random: &mut fastrand::Rng) -> u16 {
    const CHARGES: u16 = 64;
    const TICKETS: u16 = CHARGES + 128;
    const SLOTS: u16 = TICKETS + 128;
    const EXPORTS: u16 = SLOTS + 128 * 64;
    match random.u8(..10) {
        0 | 1 => random.u16(..10),
        2 => CHARGES + random.u16(..3),
        3 => TICKETS + random.u16(..3),
        4..8 => SLOTS + 64 * random.u16(..3) + random.u16(..27),
        8 => EXPORTS + random.u16(..32),
        _ => random.u16(..),
    }
}

fn value(random: &mut fastrand::Rng) -> u64 {
    match random.u8(..5) {
        0 => u64::MAX,
        1 => random.u64(..4),
        2 => random.u64(..300),
        3 => 1 << random.u32(..64),
        _ => random.u64(..),
    }
}

#[test]
fn any_contents_are_an_error_or_used() {
    let seed = std::env::var("PROPTEST_RNG_SEED").ok();
    let first = seed.and_then(|seed| seed.parse::<u64>().ok()).unwrap_or(1) << 20;
    let dir = tempfile::tempdir_in(folder()).unwrap();
    let mut opened = 0;
    for seed in first..first + 200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let bytes = match random.u8(..8) {
            0 => {
                let length = [0, 1, 512, 84_480][random.usize(..4)];
                let contents = (0..length).map(|_| random.u8(..));
                std::iter::once(0).chain(contents).collect()
            }
            _ => {
                let count = random.usize(1..12);
                let change =
                    |random: &mut fastrand::Rng| (random.bool(), word(random), value(random));
                let changes: Vec<_> = (0..count).map(|_| change(&mut random)).collect();
                Input::bytes(&changes)
            }
        };
        opened += u32::from(survive(dir.path(), &bytes));
    }
    assert!(opened > 50, "{opened} of 200 were opened");
}
