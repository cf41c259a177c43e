//! Helpers that run `cuvmm-bench run` and read its rows.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do, and not every test uses them all"
)]

use std::collections::BTreeSet;

use assert_cmd::Command;
use serde_json::Value;

/// Returns the `run` command with these arguments.
pub fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm-bench"));
    command.arg("run").args(arguments);
    command
}

/// Runs the command and returns its standard output.
pub fn output(arguments: &[&str]) -> String {
    let assert = bench(arguments).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

/// Runs the command with few samples and returns its JSON output.
pub fn object(arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--quick", "--json"]].concat();
    serde_json::from_str(&output(&arguments)).unwrap()
}

/// Runs a command that fails, and returns the one line that it writes to standard error.
pub fn complaint(arguments: &[&str], code: i32) -> String {
    let assert = bench(arguments).assert().code(code);
    let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

/// Returns a figure of a row.
pub fn number(row: &Value, key: &str) -> f64 {
    row[key]
        .as_f64()
        .unwrap_or_else(|| panic!("{key} of {row}"))
}

/// Returns a row by its name.
pub fn row<'a>(object: &'a Value, name: &str) -> &'a Value {
    let rows = object["rows"].as_array().unwrap();
    let found = rows.iter().find(|row| row["name"] == name);
    found.unwrap_or_else(|| panic!("no {name}: {}", object["skipped"]))
}

/// Checks the properties of every result: `names` are measured or skipped, and each once.
pub fn check(object: &Value, driver: &str, names: &[&str]) {
    assert_eq!(object["driver"], driver);
    assert!(!object["device"].as_str().unwrap().is_empty());
    let mut seen = BTreeSet::new();
    for row in object["rows"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        assert!(seen.insert(name), "{name} is there twice");
        assert!(row["n"].as_u64().unwrap() > 0, "{row}");
        assert!(!row["baseline"].as_str().unwrap().is_empty(), "{row}");
        let (p50, p99, max) = (
            number(row, "p50_ns"),
            number(row, "p99_ns"),
            number(row, "max_ns"),
        );
        assert!(p50 <= p99 && p99 <= max, "{row}");
        let baseline = number(row, "baseline_p50_ns");
        if baseline == 0.0 {
            assert!(row["ratio"].is_null(), "{row}");
            continue;
        }
        // The ratio of these rows is inverted: threads show their gain, and kept contents the
        // fraction of a copy's speed.
        let turned_over = ["threads_8", "sleep_keep", "wake_kept", "exchange"];
        let expected = if turned_over.iter().any(|start| name.starts_with(start)) {
            baseline / p50
        } else {
            p50 / baseline
        };
        let ratio = number(row, "ratio");
        assert!((ratio - expected).abs() <= expected * 1e-9, "{row}");
    }
    for (name, reason) in object["skipped"].as_object().unwrap() {
        assert!(seen.insert(name), "{name} is there and left out");
        let reason = reason.as_str().unwrap();
        assert!(
            !reason.is_empty() && !reason.starts_with("failed"),
            "{name}: {reason}"
        );
    }
    assert_eq!(seen, names.iter().copied().collect());
}
