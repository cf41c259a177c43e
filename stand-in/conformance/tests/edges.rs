//! Comparison of the stand-in for libcuda with the answers to questions in C.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;

#[path = "../../fakecuda/testing/built.rs"]
mod built;

/// Asks the stand-in, with settings of it, the cases that a filter selects, and compares the answers
/// with those of a GPU.
fn compare(recorded: &str, filter: &str, settings: &[(&str, &str)]) {
    let directory = tempfile::tempdir().unwrap();
    let library = built::fakecuda_in(directory.path());
    let answers = Path::new(env!("CARGO_MANIFEST_DIR")).join("answers");
    let output = Command::new(env!("CARGO_BIN_EXE_conformance-c"))
        .arg("--library")
        .arg(&library)
        .args(["--filter", filter])
        .arg("--against")
        .arg(answers.join(recorded))
        .arg("--known")
        .arg(answers.join("edges-known.txt"))
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complained}");
}

#[test]
fn the_stand_in_answers_in_c_as_recorded() {
    compare("edges-h200-580.159.tsv", "", &[]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_stand_in_answers_in_c_as_an_h100() {
    compare("edges-h100-580.159.tsv", "", &[("FAKECUDA_GPU", "h100")]);
}

#[test]
fn two_devices_answer_about_peers_as_two_h100s() {
    let two = [("FAKECUDA_DEVICES", "2"), ("FAKECUDA_GPU", "h100")];
    compare("two-h100-580.159.tsv", "peer.", &two);
}

#[test]
fn streams_of_another_device_answer_as_on_two_h100s() {
    let two = [("FAKECUDA_DEVICES", "2"), ("FAKECUDA_GPU", "h100")];
    compare("two-h100-580.159.tsv", "apart.", &two);
}

#[test]
fn streams_of_another_device_answer_as_on_two_h200s() {
    let two = [("FAKECUDA_DEVICES", "2"), ("FAKECUDA_GPU", "h200")];
    compare("two-h200-580.159.tsv", "apart.", &two);
}
