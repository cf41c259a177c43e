//! Comparison of every backend that runs without a GPU with the recorded answers of GPUs, case by
//! case.
//!
//! `unsafe` is allowed here to load the stand-in for libcuda that the test builds.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Backend, recordings};
use conformance::{DELIBERATE, Deliberate, Isolate, Report, Suite};
use cuvmm_driver::fault::{Fault, FaultDriver};
use cuvmm_driver::{CUresult, Call};
use cuvmm_model::host::{HostDriver, HostOptions};
use cuvmm_model::model::{ModelDriver, ModelOptions};

/// Compares a backend's answers with every recording, and reports all differences together.
fn hold(backend: &str, report: &Report) {
    let mut wrong = Vec::new();
    let may = |case: &str| {
        DELIBERATE
            .iter()
            .any(|deliberate| deliberate.case == case && deliberate.backends.contains(&backend))
    };
    let recordings = recordings();
    for (path, recording) in &recordings {
        let file = path.file_name().unwrap().to_string_lossy();
        let comparison = recording.compare(report);
        for difference in &comparison.different {
            if !may(&difference.case) {
                wrong.push(format!("{file}: {difference}"));
            }
        }
        assert!(
            comparison.same > 100,
            "{file}: only {} cases compared",
            comparison.same
        );
    }
    let listed = |one: &&Deliberate| one.backends.contains(&backend) && !one.by_machine;
    for deliberate in DELIBERATE.iter().filter(listed) {
        let answer = report.answers.get(deliberate.case);
        let differs = |recorded: Option<&String>| recorded.is_some_and(|text| Some(text) != answer);
        let stale = answer.is_some()
            && !recordings.iter().any(|(_, recording)| {
                let recorded = recording.answers.get(deliberate.case);
                recorded.is_none() || differs(recorded)
            });
        if stale {
            wrong.push(format!(
                "{}: listed as different and is not",
                deliberate.case
            ));
        }
    }
    wrong.extend(report.leaks.iter().map(|leak| format!("leak: {leak}")));
    assert!(wrong.is_empty(), "{backend}:\n{}", wrong.join("\n"));
}

/// Checks that cases are skipped only for what the backend lacks.
fn skipped_for(report: &Report, reasons: &[&str]) {
    for (case, reason) in &report.skipped {
        assert!(
            reasons.iter().any(|allowed| reason.contains(allowed)),
            "{case} was skipped: {reason}"
        );
    }
}

#[test]
fn the_model_answers_as_gpus_did() {
    let report = Backend::open("model").report("");
    hold("model", &report);
    let gpu = "on a GPU only";
    skipped_for(&report, &["no memory", gpu, "no two devices", "slow cases"]);
}

#[test]
fn the_host_driver_answers_as_gpus_did() {
    let report = Backend::open("host").report("");
    hold("host", &report);
    skipped_for(&report, &["on a GPU only", "no two devices", "slow cases"]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_real_backend_over_a_stand_in_answers_as_gpus_did() {
    let report = Backend::open("fakecuda").report("");
    hold("fakecuda", &report);
    skipped_for(&report, &["no kernels", "no two devices", "slow cases"]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_same_case_twice_has_the_same_answer() {
    let backend = Backend::open("model");
    let (first, second) = (backend.report(""), backend.report(""));
    assert_eq!(first.answers, second.answers);
}

#[test]
fn a_death_is_an_answer() {
    let backend = Backend::open("model");
    let dying = Isolate::new("sh", ["-c", "kill -SEGV $$"]);
    let report = Suite::new(Arc::clone(&backend.driver))
        .isolate(dying)
        .filter("map.released_handle_still_mapped")
        .run(|_, _| ())
        .unwrap();
    let answers: Vec<_> = report.answers.values().collect();
    assert_eq!(answers, ["died: SIGSEGV"]);
}

#[test]
fn a_child_that_does_not_end_is_ended() {
    let backend = Backend::open("model");
    let slow = Isolate::new("sh", ["-c", "exec sleep 600"]);
    let report = Suite::new(Arc::clone(&backend.driver))
        .isolate(slow.patience(Duration::from_millis(20)))
        .filter("map.released_handle_still_mapped")
        .run(|_, _| ())
        .unwrap();
    let reasons: Vec<_> = report.skipped.values().collect();
    assert!(reasons[0].contains("did not end"), "{reasons:?}");
}

#[test]
fn what_a_case_leaves_behind_is_told() {
    let backend = Backend::open("model");
    let driver = FaultDriver::new(Arc::clone(&backend.driver));
    driver.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemRelease));
    let report = Suite::new(Arc::new(driver))
        .filter("create.ok")
        .run(|_, _| ())
        .unwrap();
    assert_eq!(report.answers["create.ok"], "CUDA_SUCCESS");
    let leaks: Vec<_> = report.leaks.iter().map(ToString::to_string).collect();
    assert_eq!(
        leaks,
        [
            "create.ok: cuMemRelease returned CUDA_ERROR_UNKNOWN",
            "create.ok: 2097152 bytes of device memory did not come back",
        ]
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_step_before_the_question_that_fails_is_told_apart() {
    let backend = Backend::open("model");
    let driver = FaultDriver::new(Arc::clone(&backend.driver));
    driver.arm(Fault::all(CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemCreate));
    let report = Suite::new(Arc::new(driver))
        .filter("map.ok")
        .run(|_, _| ())
        .unwrap();
    let answer = &report.answers["map.ok"];
    assert_eq!(
        answer,
        "set-up failed: cuMemCreate returned CUDA_ERROR_OUT_OF_MEMORY"
    );
    assert!(report.leaks.is_empty());
}

#[test]
fn a_child_that_says_nothing_is_no_answer() {
    let backend = Backend::open("model");
    let mute = Isolate::new("sh", ["-c", "echo lost my way >&2; exit 3"]);
    let report = Suite::new(Arc::clone(&backend.driver))
        .isolate(mute)
        .filter("map.released_handle_still_mapped")
        .run(|_, _| ())
        .unwrap();
    assert!(report.answers.is_empty());
    let reasons: Vec<_> = report.skipped.values().collect();
    assert!(reasons[0].contains("lost my way"), "{reasons:?}");
}

/// Checks the cases for two devices. A recording from one GPU does not contain them, so the
/// stand-ins are also compared with each other and with the measurements on two H200s.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn two_devices_answer_as_measured() {
    let others = [
        "managed.accessed_by_two",
        "managed.other_device",
        "mem_pool_access.peer",
    ];
    for filter in ["peer.", "stripe."].into_iter().chain(others) {
        let model = ModelDriver::new(ModelOptions::new().devices(2));
        let model = Backend::machine("model", model).report(filter);
        let host = HostDriver::new(HostOptions::new().devices(2));
        let host = Backend::machine("host", host).report(filter);
        assert!(!model.answers.is_empty());
        assert_eq!(model.answers, host.answers);
        for (path, recording) in recordings() {
            let different = recording.compare(&model).different;
            assert!(different.is_empty(), "{}: {different:?}", path.display());
        }
        assert!(model.leaks.is_empty() && host.leaks.is_empty());
        for (case, measured) in [
            ("peer.can_access", "1, back 1, itself 0"),
            (
                "peer.no_grant.memset",
                "CUDA_ERROR_INVALID_VALUE, sync CUDA_SUCCESS",
            ),
            ("peer.no_grant.get_access", "CUDA_SUCCESS, value 0"),
            ("stripe.set_access_one_call", "CUDA_SUCCESS"),
            ("stripe.memset_whole", "CUDA_SUCCESS, sync CUDA_SUCCESS"),
            ("stripe.ordinal_second", "1"),
        ] {
            if let Some(answer) = model.answers.get(case) {
                assert_eq!(answer, measured, "{case}");
            }
        }
    }
}
