//! Comparison of the stand-in for libcuda with the answers to questions in C.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::path::Path;
use std::process::Command;

#[path = "../../fakecuda/testing/built.rs"]
mod built;

#[test]
fn the_stand_in_answers_in_c_as_recorded() {
    let directory = tempfile::tempdir().unwrap();
    let library = built::fakecuda_in(directory.path());
    let answers = Path::new(env!("CARGO_MANIFEST_DIR")).join("answers");
    let output = Command::new(env!("CARGO_BIN_EXE_conformance-c"))
        .arg("--library")
        .arg(&library)
        .arg("--against")
        .arg(answers.join("edges-h200-580.159.tsv"))
        .arg("--known")
        .arg(answers.join("edges-known.txt"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complained}");
}
