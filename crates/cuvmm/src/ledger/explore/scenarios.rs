//! The scenarios that are explored.

use super::actor::Op::{self, *};
use super::world::Uses;
use super::{End, Faults, Scenario, Script, Sight};

const ENDS: &[End] = &[End::AtOnce, End::Late];

/// The operations of a member before and during interruptions.
type Part<'a> = (&'a [Op], &'a [Op]);

/// Returns a scenario of two members that have joined. One is killed at any point, or its request
/// is dropped.
fn two(one: Part<'_>, other: Part<'_>) -> Scenario {
    let script = |(before, ops): Part<'_>| Script {
        before: [&[Join], before].concat(),
        ops: ops.to_vec(),
    };
    Scenario {
        limit: 10,
        scripts: vec![script(one), script(other)],
        faults: Faults {
            most: 1,
            ends: ENDS,
            sight: Sight::Pidfds,
            stops: false,
            interruptions: None,
        },
    }
}

fn explore(scenario: &Scenario) {
    let begun = std::time::Instant::now();
    match scenario.explore() {
        Ok((states, runs)) => println!("{states} states, {runs} runs, {:?}", begun.elapsed()),
        Err(fault) => panic!("{scenario:?}: {fault}"),
    }
}

/// Explores some orders from fixed seeds; `CUVMM_PROGRAMS` times as many from the seed that
/// `PROPTEST_RNG_SEED` sets.
fn sample(orders: u64, mut scenario: impl FnMut(u64) -> Scenario) {
    let told = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = told("PROPTEST_RNG_SEED").unwrap_or(1) << 20;
    let dir = crate::ledger::tests::directory();
    let path = dir.path().join("ledger");
    for seed in first..first + orders * told("CUVMM_PROGRAMS").unwrap_or(1) {
        let scenario = scenario(seed);
        if let Err(fault) = scenario.run_at_random(&path, seed, &Uses::new(true)) {
            panic!("{scenario:?}: {fault}");
        }
    }
}

// I-70
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn charges_race() {
    explore(&two((&[], &[Take(6), Give(6)]), (&[], &[Take(6), Give(3)])));
}

#[test]
fn charges_that_fit_are_made() {
    let mut scenario = two(
        (&[], &[MustTake(4), Give(6)]),
        (&[], &[MustTake(5), Give(3)]),
    );
    scenario.faults.most = 0;
    explore(&scenario);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn charges_of_stopped_processes() {
    let mut scenario = two((&[], &[Take(6)]), (&[], &[Take(6), Give(3)]));
    (scenario.faults.stops, scenario.faults.ends) = (true, &[]);
    explore(&scenario);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn guarantees_race() {
    let guarantees: Part<'_> = (&[], &[Guarantee(6), Guarantee(2)]);
    explore(&two(guarantees, (&[Take(3)], &[Take(4), Give(5)])));
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn dead_processes_are_collected() {
    let waits: Part<'_> = (&[], &[Pass, MustAwait(9)]);
    for sight in [Sight::Pidfds, Sight::Numbers] {
        let mut scenario = two((&[Take(6)], &[Take(2), Give(3)]), waits);
        scenario.faults.sight = sight;
        explore(&scenario);
    }
}

/// The memory of a process of which nothing is known is free after two seconds.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn dead_processes_of_which_nothing_is_known_are_collected() {
    let waits: Part<'_> = (&[], &[Await(9, 1), Pass]);
    let mut scenario = two((&[Take(6)], &[Take(2), Give(3)]), waits);
    scenario.faults.sight = Sight::Nothing;
    explore(&scenario);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn requests_wait_for_what_another_gives() {
    let waits: Part<'_> = (&[Take(1)], &[MustAwait(8), Give(2)]);
    explore(&two((&[Take(8)], &[Give(3), Give(5)]), waits));
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn requests_wait_for_what_another_has_cached() {
    let waits: Part<'_> = (&[Take(1)], &[MustAwait(8)]);
    explore(&two((&[Take(8), Cache(8)], &[Pass, Pass]), waits));
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn two_requests_wait() {
    let part: Part<'_> = (&[Take(4), Cache(4)], &[Await(9, 60), Give(2)]);
    let mut scenario = two(part, part);
    scenario.faults.interruptions = Some(1);
    explore(&scenario);
}

/// Returns a scenario of a request that is served when earlier memory is released, however many of
/// these granules two later requests are charged past it.
fn passing(later: [&[u64]; 2]) -> Scenario {
    let waits: Part<'_> = (&[], &[MustAwait(8)]);
    let mut scenario = two((&[Take(7)], &[Give(7)]), waits);
    for granules in later {
        scenario.scripts.push(Script {
            before: vec![Join],
            ops: granules.iter().map(|&it| TakeBehind(it)).collect(),
        });
    }
    (scenario.faults.most, scenario.faults.ends) = (0, &[]);
    scenario
}

/// Two granules are left to the passing requests, which want three. In all orders in which a
/// runnable member is interrupted once, the waiting request is served: 239,000 states. With two
/// interruptions there are too many for a test that always runs. One and one granules, and two and
/// two, have about as many states and were explored too.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn later_requests_pass_one_that_waits() {
    let mut scenario = passing([&[1], &[2]]);
    scenario.faults.interruptions = Some(1);
    explore(&scenario);
}

/// Two charges each and unlimited interruptions have too many orders to take all.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn later_requests_pass_one_that_waits_at_random() {
    sample(500, |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut later = || [random.u64(1..3), 1];
        let (one, other) = (later(), later());
        passing([&one, &other])
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn members_join_and_leave() {
    let mut scenario = two((&[Leave], &[Join, Take(3)]), (&[Take(4)], &[Leave, Join]));
    scenario.faults.interruptions = Some(2);
    scenario.faults.ends = &[End::AtOnce];
    explore(&scenario);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn two_members_make_the_file() {
    let mut scenario = two((&[], &[Join]), (&[], &[Join]));
    scenario.scripts.iter_mut().for_each(|it| it.before.clear());
    scenario.faults.interruptions = Some(2);
    scenario.faults.ends = &[End::AtOnce];
    explore(&scenario);
}

/// No limit changes under a member, and one of two members that require different limits joins.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn two_members_require_different_limits() {
    let part = |limit| (&[] as &[Op], [JoinUnder(limit), Take(limit)]);
    let (one, other) = (part(9), part(8));
    let mut scenario = two((one.0, &one.1), (other.0, &other.1));
    scenario.scripts.iter_mut().for_each(|it| it.before.clear());
    (scenario.faults.most, scenario.faults.interruptions) = (0, Some(3));
    explore(&scenario);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_block_is_lent_while_it_is_imported() {
    let exporter: Part<'_> = (&[Take(6), Export(4)], &[Lend, Pass]);
    explore(&two(exporter, (&[], &[Import, Release])));
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn an_importer_ends_or_releases_while_the_owner_leaves() {
    let exporter: Part<'_> = (&[Take(6), Export(4)], &[Leave, Join]);
    let mut scenario = two(exporter, (&[], &[Import, Release]));
    scenario.faults.ends = &[End::AtOnce];
    explore(&scenario);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn an_owner_ends_while_a_block_is_imported() {
    let importer: Part<'_> = (&[], &[Import, Pass, Release, Pass]);
    explore(&two((&[Take(6)], &[Export(4), Take(2)]), importer));
}

/// Explores two collectors of a dead process's slot, one of which then takes the slot.
fn two_collectors(first: Part<'_>, dead: &[Op], joins: &[Op]) {
    let mut scenario = two(first, (&[dead, &[Die]].concat(), &[]));
    scenario.scripts.push(Script {
        before: Vec::new(),
        ops: [&[Join], joins].concat(),
    });
    (scenario.faults.most, scenario.faults.interruptions) = (0, Some(2));
    explore(&scenario);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_late_collector_keeps_the_charge_of_the_next_owner() {
    two_collectors((&[], &[Pass, Take(2)]), &[Guarantee(4)], &[Guarantee(3)]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_late_collector_keeps_the_exports_of_the_next_owner() {
    let first: Part<'_> = (&[], &[Pass, Import]);
    two_collectors(first, &[Guarantee(4)], &[Take(3), Export(3)]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_late_collector_keeps_the_names_of_the_next_owner() {
    let first: Part<'_> = (&[Take(4), Export(4)], &[Pass, Lend]);
    two_collectors(first, &[Import], &[Import]);
}

/// The explorer finds the fault of a wrong protocol.
#[test]
fn a_charge_without_tentative_granules_is_found_out() {
    let mut scenario = two((&[], &[TakeUnchecked(6)]), (&[], &[TakeUnchecked(6)]));
    scenario.faults.most = 0;
    let fault = scenario.explore().unwrap_err();
    assert!(fault.contains("12 granules are charged of 10"), "{fault}");
}

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
    let ops = (0..count).map(|_| op(random));
    Script {
        ops: std::iter::once(Join).chain(ops).collect(),
        before: if random.bool() { vec![Join] } else { vec![] },
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn three_members_at_random() {
    sample(1_000, |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        // A lock kept by a forked child tells nothing, so the members need another sight.
        let (sight, ends): (_, &[End]) = match random.u8(..3) {
            0 => (Sight::Nothing, ENDS),
            1 => (Sight::Numbers, &[End::AtOnce, End::Late, End::Forked]),
            _ => (Sight::Pidfds, &[End::AtOnce, End::Late, End::Forked]),
        };
        Scenario {
            limit: 12,
            scripts: (0..3).map(|_| script(&mut random)).collect(),
            faults: Faults {
                most: random.usize(..4),
                ends,
                sight,
                stops: true,
                interruptions: None,
            },
        }
    });
}
