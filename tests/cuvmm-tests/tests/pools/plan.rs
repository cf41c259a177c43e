//! Plans on the stand-ins: their calls, their costs by a table of round figures, wasted memory,
//! which step fails, and that nothing is leaked.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::common;
use crate::common::{G, GIB, MIB, Rig, model_options};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, Costs, Curve, Machine, ModelDriver, Nothing};
use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{ArgumentError, MemoryError, PlanError, PlanProblem};
use cuvmm::plan::{Clock, Report, StepReport, WallClock};
use cuvmm::{Device, Error, Plan, Step};
use proptest::prelude::*;

/// The virtual clock of a stand-in.
struct Ticks<B: Backing>(Arc<Machine<B>>);

impl<B: Backing> Clock for Ticks<B> {
    fn now(&self) -> Duration {
        self.0.clock()
    }

    fn wait(&self, time: Duration) {
        self.0.advance(time);
    }
}

fn run<B: Backing + 'static>(rig: &Rig<B>, plan: &Plan) -> Report
where
    Machine<B>: Driver,
{
    let clock = Ticks(Arc::clone(&rig.machine));
    plan.run(std::slice::from_ref(&rig.device), &clock).unwrap()
}

fn count(step: &StepReport, call: Call) -> u64 {
    step.calls.get(&call).copied().unwrap_or_default()
}

/// Returns the numbers of reservations, creates, maps, access changes, unmaps, releases and address
/// frees.
fn counts(calls: &BTreeMap<Call, u64>) -> [u64; 7] {
    [
        Call::MemAddressReserve,
        Call::MemCreate,
        Call::MemMap,
        Call::MemSetAccess,
        Call::MemUnmap,
        Call::MemRelease,
        Call::MemAddressFree,
    ]
    .map(|call| calls.get(&call).copied().unwrap_or_default())
}

/// Creates a model of two devices with round costs.
fn priced(capacity: u64) -> (Arc<ModelDriver>, Vec<Device>) {
    let mut costs = Costs::free_of_charge();
    costs.reserve = Curve::flat(1.0);
    costs.create_cold = Curve::flat(100.0);
    costs.create_warm = Curve::flat(10.0);
    costs.map = Curve::flat(2.0);
    costs.set_access = Curve::flat(20.0);
    costs.set_access_cold = Curve::new(&[(2.0, 30.0), (1024.0, 60.0)]);
    costs.set_access_peer = Curve::flat(800.0);
    costs.unmap = Curve::flat(15.0);
    costs.release = Curve::flat(5.0);
    costs.address_free = Curve::flat(3.0);
    let options = model_options().costs(costs).capacity(capacity).devices(2);
    let driver = Arc::new(ModelDriver::new(options));
    let devices = [0, 1].map(|ordinal| Device::open(driver.clone(), ordinal).unwrap());
    (driver, devices.to_vec())
}

fn micros(step: &StepReport) -> u128 {
    step.time.as_micros()
}

#[test]
fn every_step_is_timed_by_the_table() {
    let (machine, devices) = priced(64 * GIB);
    let plan = Plan::new()
        .reserve("range", 64 * GIB)
        .commit("range", GIB)
        .commit("range", 3 * MIB)
        .reserve("separate", 4 * G)
        .create("memory", G)
        .map("memory", "separate", G)
        .step(Step::Map {
            physical: "memory".to_owned(),
            within: "separate".to_owned(),
            offset: 0,
            access: vec![0, 1],
        })
        .release("separate")
        .release("memory")
        .step(Step::Decommit {
            within: "range".to_owned(),
            offset: GIB,
            size: 3 * MIB,
        })
        .wait(Duration::from_secs(1))
        .stripe("striped", 5 * G - 1, 2 * G, &[0, 1]);
    let clock = Ticks(Arc::clone(&machine));
    let report = plan.run(&devices, &clock).unwrap();
    assert!(report.is_done(), "{:?}", report.failure);
    let times: Vec<_> = report.steps.iter().map(micros).collect();
    // 3 MiB are a granule of 2 MiB and one more, in one extent of 4 MiB.
    let small = 30;
    let stripes = 2 * (100 + 2 + small) + 100 + 2 + 30 + 800 + 1;
    let expected = [
        1,
        100 + 2 + 60,
        100 + 2 + small,
        1,
        100,
        2 + 30,
        2 + 20 + 800,
        15 + 15 + 3,
        5,
        15 + 5,
        0,
        stripes,
    ];
    assert_eq!(times, expected);
    assert_eq!(report.time().as_micros(), expected.iter().sum::<u128>());
    assert_eq!(counts(&report.calls()), [3, 6, 7, 7, 3, 2, 1]);
    assert_eq!(counts(&report.ending.calls), [0, 0, 0, 0, 4, 4, 2]);
    assert_eq!(report.ending.time.as_micros(), 4 * (15 + 5) + 2 * 3);
    assert!(report.ending.refusal.is_none());
    assert!(machine.live().is_nothing(), "{:?}", machine.live());

    // Memory held after each step.
    let held: Vec<_> = report.steps.iter().map(|step| step.in_use).collect();
    assert_eq!((held[0].memory(), held[0].addresses), (0, 64 * GIB));
    assert_eq!((held[2].asked, held[2].padding), (GIB + 3 * MIB, MIB));
    assert_eq!((held[2].mappings, held[2].precommitted), (2, 0));
    assert_eq!((held[6].memory(), held[6].mappings), (GIB + 3 * G, 4));
    assert_eq!(held[6].addresses, 64 * GIB + 4 * G);
    assert_eq!((held[9].memory(), held[9].mappings), (GIB, 1));
    assert_eq!((held[11].memory(), held[11].padding), (GIB + 5 * G, 1));
    assert_eq!(report.peak.memory, GIB + 5 * G);
    assert_eq!(report.peak.waste, MIB);
    assert_eq!(report.peak.mappings, 4);
    assert_eq!(report.peak.addresses, 64 * GIB + 5 * G);
}

#[test]
fn what_was_released_a_moment_ago_is_cheap_until_time_has_passed() {
    let (machine, devices) = priced(64 * GIB);
    let again = |plan: Plan| plan.reserve("a", GIB).commit("a", GIB).release("a");
    let plan = again(again(Plan::new()).wait(Duration::from_millis(299)));
    let plan = again(plan.wait(Duration::from_millis(300)));
    let report = plan.run(&devices, &Ticks(machine)).unwrap();
    let times: Vec<_> = [1, 5, 9].map(|step| micros(&report.steps[step])).to_vec();
    assert_eq!(times, [100 + 2 + 60, 10 + 2 + 20, 100 + 2 + 60]);
}

on_both! {
    fn growth_takes_few_extents_and_a_part_ahead(rig) {
        let plan = Plan::new()
            .reserve("vec", 256 * G)
            .grow("vec", 64 * G, MIB)
            .commit("vec", 5)
            .grow("vec", 200 * G + 1, 3 * MIB)
            .step(Step::Decommit { within: "vec".to_owned(), offset: 16 * G, size: 185 * G });
        let report = run(rig, &plan);
        assert!(report.is_done(), "{:?}", report.failure);
        let grown = &report.steps[1];
        assert_eq!(grown.in_use.asked, 64 * G);
        assert!(grown.in_use.precommitted <= 8 * G, "{grown:?}");
        let creates = count(grown, Call::MemCreate);
        assert_eq!(creates, grown.in_use.mappings);
        // One extent for each doubling up to 16 granules, then extents of 8 granules up to 64.
        assert_eq!(creates, 5 + 6);
        let precommitted = grown.in_use.precommitted;
        // The next commit uses precommitted memory, if there is any.
        let five = &report.steps[2];
        assert_eq!((five.in_use.asked, five.in_use.padding), (64 * G + 5, G - 5));
        assert_eq!(count(five, Call::MemCreate), u64::from(precommitted == 0));
        let whole = &report.steps[3];
        assert_eq!((whole.in_use.asked, whole.in_use.padding), (200 * G + 1, G - 1));
        assert!(whole.in_use.precommitted <= 25 * G);
        let cut = &report.steps[4];
        assert_eq!((cut.in_use.asked, cut.in_use.precommitted, cut.in_use.padding), (16 * G, 0, 0));
        assert_eq!(count(cut, Call::MemUnmap), whole.in_use.mappings - cut.in_use.mappings);
        assert_eq!(count(cut, Call::MemRelease), count(cut, Call::MemUnmap));
        assert_eq!(report.peak.memory, whole.in_use.memory());
    }

    fn extents_that_are_partly_in_use_are_kept(rig) {
        let decommit = |offset, size| Step::Decommit { within: "a".to_owned(), offset, size };
        let plan = Plan::new()
            .reserve("a", 16 * G)
            .commit("a", 8 * G)
            .step(decommit(2 * G, 4 * G))
            .step(decommit(0, 2 * G))
            .step(decommit(6 * G, 2 * G));
        let report = run(rig, &plan);
        let held: Vec<_> = report.steps[1..].iter().map(|step| {
            let held = step.in_use;
            (held.asked / G, held.kept / G, held.mappings)
        }).collect();
        assert_eq!(held, [(8, 0, 1), (4, 4, 1), (2, 6, 1), (0, 0, 0)]);
    }

    fn the_first_step_that_does_not_fit_ends_the_plan(rig) {
        let all = rig.device.total_memory();
        let plan = Plan::new()
            .reserve("a", 2 * all)
            .commit("a", G)
            .create("b", G)
            .commit("a", all)
            .release("b");
        let report = run(rig, &plan);
        assert_eq!(report.steps.len(), 3);
        let failure = report.failure.expect("too much");
        assert_eq!(failure.reached.step, 4);
        assert!(count(&failure.reached, Call::MemCreate) >= 1);
        assert_eq!(failure.reached.in_use, report.steps[2].in_use, "the plan changed nothing");
        let created = matches!(failure.error, Error::Memory(MemoryError::Create { .. }));
        assert!(created, "{}", failure.error);
        assert!(failure.error.to_string().contains("OUT_OF_MEMORY"), "{}", failure.error);
        assert_eq!(report.peak.memory, 2 * G);
    }

    fn growth_shows_how_far_it_came(rig) {
        let all = rig.device.total_memory();
        let plan = Plan::new().reserve("a", 2 * all).grow("a", 2 * all, 16 * MIB);
        let report = run(rig, &plan);
        let failure = report.failure.expect("too much");
        assert_eq!(failure.reached.step, 2);
        let reached = failure.reached.in_use;
        assert!(reached.memory() <= all && reached.memory() >= all - 16 * MIB, "{reached:?}");
    }

    fn the_wall_clock_does_too(rig) {
        let plan = Plan::new().reserve("a", G).wait(Duration::from_millis(20)).commit("a", 1);
        let clock = WallClock::default();
        let report = plan.run(std::slice::from_ref(&rig.device), &clock).unwrap();
        assert!(clock.now() >= Duration::from_millis(20));
        assert!(report.time() < clock.now() - Duration::from_millis(20));
        assert_eq!(report.steps[1].time, Duration::ZERO);
        assert_eq!(counts(&report.calls()), [1, 1, 1, 1, 0, 0, 0]);
    }
}

/// The wrong step, the wrong name if any, and the problem.
type Wrong = (Option<usize>, Option<String>, PlanProblem);

fn parts(error: PlanError) -> Wrong {
    (error.step, error.name, error.problem)
}

/// Returns the expected problem of a step.
fn at(step: usize, name: Option<&str>, problem: impl Into<PlanProblem>) -> Wrong {
    (Some(step), name.map(str::to_owned), problem.into())
}

/// Checks the error of a wrong plan on two devices.
#[track_caller]
fn wrong(plan: &Plan, expected: Wrong) {
    let (machine, devices) = priced(64 * GIB);
    let before = machine.snapshot();
    let refused = plan.check(&devices).unwrap_err();
    let clock = Ticks(Arc::clone(&machine));
    assert_eq!(plan.run(&devices, &clock).err(), Some(refused.clone()));
    assert_eq!(machine.snapshot(), before, "no driver call");
    let (step, name, problem) = &expected;
    let name = name.as_ref().map(|name| format!("{name:?}: "));
    let said = [
        step.map(|step| format!("step {step}: "))
            .unwrap_or_default(),
        name.unwrap_or_default(),
        problem.to_string(),
    ];
    assert_eq!(refused.to_string(), said.concat());
    assert_eq!(parts(refused), expected);
}

/// Returns the error for a device number that does not exist.
fn no_device(device: u64, count: u64) -> ArgumentError {
    ArgumentError::OutOfRange {
        what: "devices",
        start: device,
        end: device + 1,
        len: count,
    }
}

#[test]
fn what_cannot_be_meant_is_named_with_its_step() {
    let name = || "a".to_owned();
    let reserved = || Plan::new().reserve("a", 4 * G);
    let map = |offset, access| Step::Map {
        physical: "p".to_owned(),
        within: name(),
        offset,
        access,
    };
    let unknown = |step, name| at(step, Some(name), PlanProblem::UnknownName);
    wrong(&Plan::new().commit("a", 1), unknown(1, "a"));
    wrong(&reserved().release("a").commit("a", 1), unknown(3, "a"));
    wrong(&reserved().map("p", "a", 0), unknown(2, "p"));
    wrong(
        &reserved().create("a", 1),
        at(2, Some("a"), PlanProblem::NameTaken),
    );
    let kind = |step, name, is, needed| at(step, Some(name), PlanProblem::WrongKind { is, needed });
    let (range, ground) = ("a range to map in", "a range to commit in");
    wrong(
        &Plan::new().create("p", G).commit("p", 1),
        kind(2, "p", "physical memory", ground),
    );
    wrong(
        &reserved().create("p", G).commit("a", 1).map("p", "a", G),
        kind(4, "a", "a range that is committed in", range),
    );
    wrong(
        &reserved().create("p", G).map("p", "a", 0).commit("a", 1),
        kind(4, "a", "a range that physicals are mapped in", ground),
    );
    wrong(
        &reserved().map("a", "a", 0),
        kind(2, "a", "a range of addresses", "physical memory"),
    );
    wrong(
        &Plan::new().stripe("s", G, G, &[0]).grow("s", G, G),
        kind(2, "s", "a striped range", ground),
    );
    let zero = |step, what| at(step, None, ArgumentError::Zero(what));
    wrong(&Plan::new().reserve("a", 0), zero(1, "the size"));
    wrong(&reserved().commit("a", 0), zero(2, "the size"));
    wrong(
        &reserved().grow("a", G, 0),
        zero(2, "bytes of each request"),
    );
    wrong(&Plan::new().stripe("s", G, 0, &[0]), zero(1, "a stripe"));
    wrong(
        &Plan::new().stripe("s", G, G, &[]),
        zero(1, "the number of devices"),
    );
    wrong(
        &Plan::new().create("p", u64::MAX),
        at(
            1,
            None,
            ArgumentError::Overflow {
                what: "bytes",
                value: u64::MAX,
            },
        ),
    );
    let misaligned = |what, value| {
        let multiple = G;
        ArgumentError::Misaligned {
            what,
            value,
            multiple,
        }
    };
    wrong(
        &reserved().create("p", G).map("p", "a", 1),
        at(3, Some("a"), misaligned("an offset in bytes", 1)),
    );
    wrong(
        &Plan::new().stripe("s", G, MIB, &[0]),
        at(1, None, misaligned("bytes of a stripe", MIB)),
    );
    let outside = |step, start, size| {
        let outside = ArgumentError::OutOfRange {
            what: "bytes",
            start,
            end: start + size,
            len: 4 * G,
        };
        at(step, Some("a"), outside)
    };
    wrong(&reserved().commit("a", 4 * G + 1), outside(2, 0, 5 * G));
    wrong(
        &reserved().commit("a", 1).commit("a", 4 * G),
        outside(3, G, 4 * G),
    );
    wrong(&reserved().grow("a", 5 * G, 1), outside(2, 0, 5 * G));
    wrong(
        &reserved().create("p", 2 * G).map("p", "a", 3 * G),
        outside(3, 3 * G, 2 * G),
    );
    wrong(
        &reserved()
            .create("p", 2 * G)
            .map("p", "a", G)
            .map("p", "a", 2 * G),
        at(
            4,
            Some("a"),
            MemoryError::Overlap {
                offset: 2 * G,
                size: 2 * G,
                taken: G,
            },
        ),
    );
    let unmap = |offset| Step::Unmap {
        within: name(),
        offset,
    };
    wrong(
        &reserved().create("p", G).map("p", "a", 0).step(unmap(G)),
        at(4, Some("a"), MemoryError::NotCommitted(G..G + 1)),
    );
    let decommit = Step::Decommit {
        within: name(),
        offset: 0,
        size: 2 * G,
    };
    wrong(
        &reserved().commit("a", 1).step(decommit),
        at(3, Some("a"), MemoryError::NotCommitted(0..2 * G)),
    );
    wrong(
        &reserved().commit("a", 2 * G).grow("a", G, 1),
        at(
            3,
            Some("a"),
            ArgumentError::TooSmall {
                what: "bytes to grow to",
                value: G,
                least: 2 * G + 1,
            },
        ),
    );
    let still = at(4, Some("p"), PlanProblem::StillMapped);
    wrong(
        &reserved().create("p", G).map("p", "a", 0).release("p"),
        still,
    );
    let device = |step, device| at(step, None, no_device(device, 2));
    wrong(
        &Plan::new().step(Step::Reserve {
            name: name(),
            size: G,
            device: 2,
        }),
        device(1, 2),
    );
    wrong(
        &reserved().create("p", G).step(map(0, vec![0, 7])),
        device(3, 7),
    );
    wrong(&Plan::new().stripe("s", G, G, &[0, 3]), device(1, 3));
}

#[test]
fn a_name_is_free_again_and_addresses_may_then_be_used_otherwise() {
    let (machine, devices) = priced(64 * GIB);
    let plan = Plan::new()
        .reserve("a", 4 * G)
        .create("p", G)
        .map("p", "a", 0)
        .step(Step::Unmap {
            within: "a".to_owned(),
            offset: 0,
        })
        .map("p", "a", 0)
        .release("a")
        .release("p")
        .reserve("a", 4 * G)
        .commit("a", G);
    let report = plan.run(&devices, &Ticks(Arc::clone(&machine))).unwrap();
    assert!(report.is_done(), "{:?}", report.failure);
    assert_eq!(counts(&report.calls()), [2, 2, 3, 3, 2, 1, 1]);
    assert!(machine.live().is_nothing());
}

#[test]
fn devices_of_another_driver_are_refused() {
    let ((_, one), (_, other)) = (priced(GIB), priced(GIB));
    let devices = [one[0].clone(), other[0].clone()];
    let refused = Plan::new().check(&devices);
    let stranger = ArgumentError::WrongDriver("the device");
    assert_eq!(refused.map_err(parts), Err((None, None, stranger.into())));
    let none = Plan::new().reserve("a", G).check(&[]);
    assert_eq!(none.map_err(parts), Err(at(1, None, no_device(0, 0))));
}

#[test]
fn every_call_of_a_plan_may_fail_once_and_nothing_is_left() {
    let plan = Plan::new()
        .reserve("a", 64 * G)
        .commit("a", 3 * G)
        .grow("a", 20 * G, G)
        .create("p", G)
        .reserve("m", 2 * G)
        .map("p", "m", G)
        .step(Step::Decommit {
            within: "a".to_owned(),
            offset: 8 * G,
            size: 12 * G,
        })
        .step(Step::Unmap {
            within: "m".to_owned(),
            offset: G,
        })
        .stripe("s", 3 * G, G, &[0])
        .release("m");
    let mut failed = 0;
    for code in [
        CUresult::CUDA_ERROR_UNKNOWN,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    ] {
        for k in 1.. {
            let rig: Rig<Nothing> = common::model();
            rig.faults.arm(Fault::nth(k, code));
            let report = run(&rig, &plan);
            let hit = rig.faults.injected() > 0;
            rig.faults.disarm();
            if let Some(failure) = &report.failure {
                failed += 1;
                assert_eq!(failure.reached.step, report.steps.len() + 1);
            }
            let left = common::only_counted_left(&rig);
            let live = rig.machine.live();
            assert!(left <= 1, "call {k}, {code}: {live:?}");
            if !hit {
                assert!(report.is_done() && report.ending.refusal.is_none());
                assert!(k > 50, "{k}");
                break;
            }
        }
    }
    assert!(failed >= 50, "{failed}");
}

/// The reference for a plan: one region that is committed and truncated at its end, and physicals.
#[derive(Debug, Default)]
struct Known {
    committed: Vec<u64>,
    physicals: Vec<u64>,
    calls: [u64; 7],
}

#[derive(Clone, Debug)]
enum Do {
    Commit(u64),
    Cut,
    Create(u64),
    Release(usize),
}

fn act() -> impl Strategy<Value = Do> {
    prop_oneof![
        (1..40 * G).prop_map(Do::Commit),
        Just(Do::Cut),
        (1..9 * G).prop_map(Do::Create),
        (0..8usize).prop_map(Do::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(200), ..ProptestConfig::default() })]

    #[test]
    fn a_random_plan_makes_the_calls_of_its_books(acts in prop::collection::vec(act(), 1..30)) {
        let rig = common::model();
        let mut plan = Plan::new().reserve("region", 4096 * G);
        let mut known = Known::default();
        known.calls[0] = 1;
        let mut names = 0..;
        let mut live: Vec<(String, u64)> = vec![];
        // Requested sizes, in order of their offsets.
        let mut expected = vec![(0, 0, 0)];
        for act in acts {
            match act {
                Do::Commit(size) => {
                    plan = plan.commit("region", size);
                    // One extent for each bit of the size in granules.
                    let extents = u64::from(size.div_ceil(G).count_ones());
                    known.committed.push(size);
                    for call in 1..=3 {
                        known.calls[call] += extents;
                    }
                }
                Do::Cut => {
                    let Some(size) = known.committed.pop() else { continue };
                    let offset = known.committed.iter().map(|size| size.div_ceil(G) * G).sum();
                    let within = "region".to_owned();
                    plan = plan.step(Step::Decommit { within, offset, size });
                    let extents = u64::from(size.div_ceil(G).count_ones());
                    known.calls[4] += extents;
                    known.calls[5] += extents;
                }
                Do::Create(size) => {
                    let name = format!("physical {}", names.next().unwrap_or(0));
                    plan = plan.create(&name, size);
                    live.push((name, size));
                    known.calls[1] += 1;
                }
                Do::Release(index) => {
                    if live.is_empty() { continue }
                    let (name, _) = live.swap_remove(index % live.len());
                    plan = plan.release(name);
                    known.calls[5] += 1;
                }
            }
            known.physicals = live.iter().map(|(_, size)| *size).collect();
            let sizes = || known.committed.iter().chain(&known.physicals);
            let mappings = known.committed.iter().map(|size| size.div_ceil(G).count_ones());
            expected.push((
                sizes().sum::<u64>(),
                sizes().map(|size| size.div_ceil(G) * G).sum::<u64>(),
                u64::from(mappings.sum::<u32>()),
            ));
        }
        let report = run(&rig, &plan);
        prop_assert!(report.is_done(), "{:?}", report.failure);
        let found: Vec<_> = report.steps.iter().map(|step| {
            (step.in_use.asked, step.in_use.memory(), step.in_use.mappings)
        }).collect();
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(counts(&report.calls()), known.calls);
        let most = expected.iter().map(|held| held.1).max();
        prop_assert_eq!(Some(report.peak.memory), most);
        common::nothing_left(rig);
    }
}
