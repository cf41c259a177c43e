//! The scenarios that are explored.

use super::actor::Op::{self, *};
use super::world::Uses;
use super::{End, Scenario, Script, stay_on_one_processor};

const ENDS: &[End] = &[End::AtOnce, End::Late];

/// What a member does before it is interrupted, and then.
type Part<'a> = (&'a [Op], &'a [Op]);

/// Returns a scenario of two members that have joined.
fn two(limit: u64, one: Part<'_>, other: Part<'_>) -> Scenario {
    let script = |(before, ops): Part<'_>| Script {
        before: [&[Join], before].concat(),
        ops: ops.to_vec(),
    };
    Scenario {
        limit,
        scripts: vec![script(one), script(other)],
        faults: 1,
        ends: ENDS,
        stops: false,
    }
}

fn explore(scenario: &Scenario) {
    let begun = std::time::Instant::now();
    match scenario.explore() {
        Ok((states, runs)) => println!("{states} states, {runs} runs, {:?}", begun.elapsed()),
        Err(fault) => panic!("{scenario:?}: {fault}"),
    }
}

#[test]
fn charges_race() {
    explore(&two(
        10,
        (&[], &[Take(6), Give(6)]),
        (&[], &[Take(6), Give(3)]),
    ));
}

#[test]
fn charges_that_fit_are_made() {
    let mut scenario = two(
        10,
        (&[], &[MustTake(4), Give(6)]),
        (&[], &[MustTake(5), Give(3)]),
    );
    scenario.faults = 0;
    explore(&scenario);
}

#[test]
fn charges_of_stopped_processes() {
    let mut scenario = two(10, (&[], &[Take(6)]), (&[], &[Take(6), Give(3)]));
    scenario.stops = true;
    scenario.ends = &[];
    explore(&scenario);
}

#[test]
fn guarantees_race() {
    explore(&two(
        10,
        (&[], &[Guarantee(6), Guarantee(2)]),
        (&[Take(3)], &[Take(4), Give(5)]),
    ));
}

#[test]
fn dead_processes_are_collected() {
    explore(&two(
        10,
        (&[Take(6)], &[Take(2), Give(3)]),
        (&[], &[Pass, MustAwait(9)]),
    ));
}

#[test]
fn requests_wait_for_what_another_gives() {
    explore(&two(
        10,
        (&[Take(8)], &[Give(3), Give(5)]),
        (&[Take(1)], &[MustAwait(8), Give(2)]),
    ));
}

#[test]
fn requests_wait_for_what_another_has_cached() {
    explore(&two(
        10,
        (&[Take(8), Cache(8)], &[Pass, Pass]),
        (&[Take(1)], &[MustAwait(8)]),
    ));
}

#[test]
fn two_requests_wait() {
    explore(&two(
        10,
        (&[Take(4), Cache(4)], &[Await(9, 60)]),
        (&[Take(4), Cache(4)], &[Await(9, 60)]),
    ));
}

#[test]
fn members_join_and_leave() {
    explore(&two(
        10,
        (&[Leave], &[Join, Take(3)]),
        (&[Take(4)], &[Leave, Join]),
    ));
}

#[test]
fn two_members_make_the_file() {
    let mut scenario = two(10, (&[], &[Join]), (&[], &[Join]));
    scenario.scripts.iter_mut().for_each(|it| it.before.clear());
    explore(&scenario);
}

#[test]
fn a_block_is_lent_while_it_is_imported() {
    explore(&two(
        10,
        (&[Take(6), Export(4)], &[Lend, Pass]),
        (&[], &[Import, Release]),
    ));
}

#[test]
fn an_importer_ends_or_releases_while_the_owner_leaves() {
    explore(&two(
        10,
        (&[Take(6), Export(4)], &[Leave, Join]),
        (&[], &[Import, Release]),
    ));
}

#[test]
fn an_owner_ends_while_a_block_is_imported() {
    explore(&two(
        10,
        (&[Take(6)], &[Export(4), Take(2)]),
        (&[], &[Import, Pass, Release, Pass]),
    ));
}

/// The explorer finds what a wrong protocol does.
#[test]
fn a_charge_without_tentative_granules_is_found_out() {
    let mut scenario = two(10, (&[], &[TakeUnchecked(6)]), (&[], &[TakeUnchecked(6)]));
    scenario.faults = 0;
    let fault = scenario.explore().unwrap_err();
    assert!(fault.contains("12 granules are charged of 10"), "{fault}");
}

/// Returns random operations.
fn script(random: &mut fastrand::Rng) -> Script {
    let op = |random: &mut fastrand::Rng| match random.u8(..14) {
        0 => Join,
        1 => Take(random.u64(1..8)),
        2 => Take(random.u64(1..4)),
        3 => Give(random.u64(1..6)),
        4 | 5 => Cache(random.u64(1..6)),
        6 | 7 => Await(random.u64(1..10), random.u64(..200)),
        8 => Guarantee(random.u64(..6)),
        9 => Export(random.u64(1..4)),
        10 => Lend,
        11 => Import,
        12 => Release,
        _ if random.u8(..3) == 0 => Leave,
        _ => Pass,
    };
    let count = random.usize(3..9);
    Script {
        before: if random.bool() { vec![Join] } else { vec![] },
        ops: std::iter::once(Join)
            .chain((0..count).map(|_| op(random)))
            .collect(),
    }
}

/// Three members from fixed seeds; `CUVMM_PROGRAMS` times as many from the seed that
/// `PROPTEST_RNG_SEED` sets.
#[test]
fn three_members_at_random() {
    stay_on_one_processor();
    let told = |name| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let first = told("PROPTEST_RNG_SEED").unwrap_or(1) << 20;
    let dir = crate::ledger::tests::directory();
    let path = dir.path().join("ledger");
    for seed in first..first + 400 * told("CUVMM_PROGRAMS").unwrap_or(1) {
        let mut random = fastrand::Rng::with_seed(seed);
        let scenario = Scenario {
            limit: 12,
            scripts: (0..3).map(|_| script(&mut random)).collect(),
            faults: random.usize(..4),
            ends: &[End::AtOnce, End::Late, End::Forked],
            stops: true,
        };
        if let Err(fault) = scenario.run_at_random(&path, seed, &Uses::new(true)) {
            panic!("{scenario:?}: {fault}");
        }
    }
}
