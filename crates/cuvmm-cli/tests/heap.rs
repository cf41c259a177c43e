//! `cuvmm heap` as a user meets it.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

fn heap(arguments: &[&str], code: i32) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command
        .args(["heap", "--json"])
        .args(arguments)
        .assert()
        .code(code);
    serde_json::from_slice(&assert.get_output().stdout).unwrap()
}

fn trace(dir: &TempDir, text: &str) -> PathBuf {
    let file = dir.path().join("trace");
    std::fs::write(&file, text).unwrap();
    file
}

fn shown(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Four allocations of 64 MiB, of which two that are not side by side are freed for one of 128.
const PIECES: &str = "a 0 67108864 0\na 1 67108864 0\na 2 67108864 0\na 3 67108864 1\n\
                      f 0\nf 2\na 4 134217728 0\nf 1\nf 3\nf 4\n";

#[test]
fn the_keys_are_stable_and_memory_in_pieces_is_stitched() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    for driver in ["model", "host"] {
        let seen = heap(&[shown(&file), "--driver", driver, "--memory", "512MiB"], 0);
        assert_eq!(seen["operations"], 10);
        assert_eq!(seen["peak_live_bytes"], 256 << 20);
        assert_eq!(seen["peak_held_bytes"], 256 << 20);
        assert_eq!(seen["ratio"], 1.0);
        assert_eq!(seen["stitches"], 1);
        assert_eq!(seen["failed"], 0);
        // Two for each allocation of 64 MiB, and four for the stitched one.
        assert_eq!(seen["mappings"], 12);
        assert_eq!(seen["driver_us_per_operation"].is_f64(), driver == "model");
    }
}

#[test]
fn without_aliases_more_is_held() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    let seen = heap(&[shown(&file), "--no-aliases"], 0);
    assert_eq!(seen["peak_held_bytes"], 384 << 20);
}

#[test]
fn what_does_not_fit_is_counted_and_the_smallest_limit_is_found() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    let seen = heap(&[shown(&file), "--limit", "200MiB"], 1);
    assert_eq!(seen["failed"], 1);
    assert_eq!(seen["smallest_limit_bytes"], Value::Null);
    let seen = heap(&[shown(&file), "--smallest-limit"], 0);
    assert_eq!(seen["smallest_limit_bytes"], 256 << 20);
}

#[test]
fn laws_are_repeatable() {
    let law = ["--churn", "small", "--seed", "3"];
    let (first, again) = (heap(&law, 0), heap(&law, 0));
    assert_eq!(first, again);
    assert!(first["ratio"].as_f64().unwrap() <= 1.15, "{first}");
}

#[test]
fn a_file_that_is_no_trace_is_wrong_usage() {
    let dir = TempDir::new().unwrap();
    for text in ["", "a 1 2", "f 1", "\u{1f}\u{8b}"] {
        let file = trace(&dir, text);
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let assert = command.args(["heap", shown(&file)]).assert().code(2);
        let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert!(error.contains("trace"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}
