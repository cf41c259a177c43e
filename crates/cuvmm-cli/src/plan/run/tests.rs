use std::sync::Arc;

use cuvmm::driver::fault::{Fault, FaultDriver};
use cuvmm::driver::model::{Costs, ModelDriver, ModelOptions};
use cuvmm::driver::{CUresult, Driver};

use super::*;

const G: u64 = 2 << 20;

/// Parses steps, one in each line, without the header.
fn steps(text: &str) -> Vec<Step> {
    #[derive(serde::Deserialize)]
    struct Read {
        step: Vec<Step>,
    }
    let text: String = text
        .trim()
        .lines()
        .map(|line| format!("[[step]]\n{}\n", line.trim()))
        .collect();
    toml::from_str::<Read>(&text).unwrap().step
}

/// A model of two devices.
fn model() -> (Arc<ModelDriver>, Vec<Device>) {
    let options = ModelOptions::new().devices(2).capacity(1 << 30);
    let model = Arc::new(ModelDriver::new(options.costs(Costs::free_of_charge())));
    let devices = open(&(model.clone() as Arc<dyn Driver>));
    (model, devices)
}

fn open(driver: &Arc<dyn Driver>) -> Vec<Device> {
    let open = |ordinal| Device::open(Arc::clone(driver), ordinal).unwrap();
    [0, 1].map(open).to_vec()
}

fn done(text: &str) -> Report {
    let (model, devices) = model();
    let watch = Watch::Virtual(Arc::clone(&model));
    let report = run(&steps(text), &devices, &watch).unwrap();
    assert!(report.failure.is_none(), "{:?}", report.failure);
    assert!(model.live().is_nothing(), "{:?}", model.live());
    report
}

/// Returns the bytes in granules and the mappings that were held after each step.
fn held(report: &Report) -> Vec<[u64; 5]> {
    let held = report.steps.iter().map(|(_, held)| {
        let Held {
            asked,
            padding,
            precommitted,
            kept,
            mappings,
            ..
        } = *held;
        assert_eq!(held.memory, asked + padding + precommitted + kept);
        [asked, padding, precommitted, kept]
            .map(|bytes| bytes / G)
            .into_iter()
            .chain([mappings])
    });
    held.map(|held| <[u64; 5]>::try_from(held.collect::<Vec<_>>()).unwrap())
        .collect()
}

#[test]
fn growth_takes_few_extents_and_a_part_ahead() {
    let report = done(
        r#"reserve = { name = "v", size = "512 MiB" }
        grow = { in = "v", to = "128 MiB", by = "1 MiB" }
        commit = { in = "v", size = "2 MiB" }
        decommit = { in = "v", at = "32 MiB", size = "98 MiB" }"#,
    );
    // One extent for each doubling up to 16 granules, then extents of 2, 4 and 8 granules.
    let [_, grown, more, cut] = held(&report)[..] else {
        unreachable!("four steps")
    };
    assert_eq!((grown[0], grown[3]), (64, 0));
    assert!(grown[2] <= 8 && grown[4] <= 12, "{grown:?}");
    assert_eq!(report.steps[1].0.calls["cuMemCreate"], grown[4]);
    assert_eq!(more[0], 65);
    assert_eq!(cut[..4], [16, 0, 0, 0]);
}

#[test]
fn extents_that_are_partly_in_use_are_kept() {
    let report = done(
        r#"reserve = { name = "a", size = "32 MiB" }
        commit = { in = "a", size = "16 MiB" }
        decommit = { in = "a", at = "4 MiB", size = "8 MiB" }
        decommit = { in = "a", at = 0, size = "4 MiB" }
        decommit = { in = "a", at = "12 MiB", size = "4 MiB" }"#,
    );
    let kept = [[8, 0, 0, 0, 1], [4, 0, 0, 4, 1], [2, 0, 0, 6, 1], [0; 5]];
    assert_eq!(held(&report)[1..], kept);
}

#[test]
fn a_name_is_free_again_and_addresses_may_then_be_used_otherwise() {
    let report = done(
        r#"reserve = { name = "a", size = "8 MiB" }
        create = { name = "p", size = 1 }
        map = { physical = "p", in = "a", at = 0 }
        unmap = { in = "a", at = 0 }
        map = { physical = "p", in = "a", at = 0, access = [0, 1] }
        release = "a"
        release = "p"
        reserve = { name = "a", size = "8 MiB" }
        commit = { in = "a", size = "2 MiB" }
        stripe = { name = "s", size = "10 MiB", unit = "4 MiB", devices = [0, 1], access = [0, 1] }"#,
    );
    assert_eq!(held(&report).last(), Some(&[6, 0, 0, 0, 4]));
    assert_eq!(report.ending.calls["cuMemUnmap"], 4);
}

/// Checks the error of the last of some steps.
#[track_caller]
fn wrong(text: &str, said: &str) {
    let (model, devices) = model();
    let steps = steps(text);
    let wrong = run(&steps, &devices, &Watch::Virtual(Arc::clone(&model))).unwrap_err();
    assert_eq!(wrong.to_string(), format!("step {}: {said}", steps.len()));
    assert!(model.live().is_nothing(), "{:?}", model.live());
}

const A: &str = "reserve = { name = \"a\", size = \"8 MiB\" }\n";
const P: &str = "create = { name = \"p\", size = \"4 MiB\" }\n";

#[test]
fn what_cannot_be_meant_is_named_with_its_step() {
    let after = |steps: &[&str], last: &str, said: &str| {
        wrong(&(steps.concat() + last), said);
    };
    let commit = "commit = { in = \"a\", size = 1 }\n";
    let map = "map = { physical = \"p\", in = \"a\", at = 0 }\n";
    let unknown = |name| format!("{name:?}: the name is not defined here");
    after(&[], commit, &unknown("a"));
    after(&[A, "release = \"a\"\n"], commit, &unknown("a"));
    after(&[A], map, &unknown("p"));
    after(&[A], A, "\"a\": the name is in use already");
    let needs = |name, is, needed| format!("{name:?}: it is {is}, but the step needs {needed}");
    after(
        &[P],
        "commit = { in = \"p\", size = 1 }",
        &needs("p", A_PHYSICAL, TO_COMMIT_IN),
    );
    after(&[A, P, commit], map, &needs("a", TO_COMMIT_IN, TO_MAP_IN));
    after(&[A, P, map], commit, &needs("a", TO_MAP_IN, TO_COMMIT_IN));
    after(
        &[A, P, map],
        "release = \"p\"",
        "\"p\": it is still mapped: unmap it first",
    );
    for (last, said) in [
        ("commit = { in = \"a\", size = 0 }", "0..0"),
        (
            "commit = { in = \"a\", size = \"9 MiB\" }",
            "there are 8388608",
        ),
        (
            "commit = { in = \"a\", at = 1, size = 1 }",
            "bytes 1..2097152 are not whole granules of 2 MiB",
        ),
        (
            "decommit = { in = \"a\", at = 0, size = 1 }",
            "commit them first",
        ),
        (
            "grow = { in = \"a\", to = \"2 MiB\", by = 0 }",
            "bytes of each request",
        ),
        (
            "grow = { in = \"a\", to = \"9 MiB\", by = 1 }",
            "there are 8388608",
        ),
        ("unmap = { in = \"a\", at = 0 }", "commit them first"),
        (
            "create = { name = \"q\", size = 1, device = 2 }",
            "devices 2..3: there are 2",
        ),
        (
            "reserve = { name = \"q\", size = 0 }",
            "at least one is required",
        ),
        (
            "stripe = { name = \"s\", size = \"4 MiB\", unit = \"1 MiB\", devices = [0] }",
            "is not a multiple of",
        ),
        (
            "stripe = { name = \"s\", size = \"4 MiB\", unit = \"2 MiB\", devices = [] }",
            "the number of devices",
        ),
    ] {
        let (model, devices) = model();
        let watch = Watch::Virtual(model);
        let wrong = run(&steps(&format!("{A}{last}")), &devices, &watch).unwrap_err();
        let text = wrong.to_string();
        assert!(
            text.starts_with("step 2: ") && text.contains(said),
            "{text}"
        );
    }
    let (model, devices) = model();
    let again = run(
        &steps(&[A, P, map, map].concat()),
        &devices,
        &Watch::Virtual(model),
    );
    let text = again.unwrap_err().to_string();
    assert!(
        text.starts_with("step 4: \"a\": ") && text.contains("overlaps"),
        "{text}"
    );
}

#[test]
fn every_call_of_a_plan_may_fail_once_and_nothing_is_left() {
    let steps = steps(
        r#"reserve = { name = "a", size = "128 MiB" }
        commit = { in = "a", size = "6 MiB" }
        grow = { in = "a", to = "40 MiB", by = "2 MiB" }
        create = { name = "p", size = "2 MiB" }
        reserve = { name = "m", size = "4 MiB" }
        map = { physical = "p", in = "m", at = "2 MiB" }
        decommit = { in = "a", at = "16 MiB", size = "24 MiB" }
        unmap = { in = "m", at = "2 MiB" }
        stripe = { name = "s", size = "6 MiB", unit = "2 MiB", devices = [0] }
        release = "m""#,
    );
    for nth in 1.. {
        let (model, _) = model();
        let faults = Arc::new(FaultDriver::new(model.clone() as Arc<dyn Driver>));
        let devices = open(&(faults.clone() as Arc<dyn Driver>));
        faults.arm(Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN));
        let report = run(&steps, &devices, &Watch::Virtual(Arc::clone(&model))).unwrap();
        let hit = faults.injected() > 0;
        faults.disarm();
        let left = devices.iter().map(Device::drop_failures).sum::<u64>();
        assert!(
            model.live().is_nothing() || left > 0,
            "{nth}: {:?}",
            model.live()
        );
        if !hit {
            assert!(nth > 50 && report.failure.is_none() && report.refusal.is_none());
            break;
        }
    }
}
