//! `cuvmm-bench compare` on files that `run --json` printed, and on others.

#![allow(clippy::unwrap_used, clippy::panic)]

mod rows;

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

use rows::output;

fn compare(folder: &Path, arguments: &[&str], code: i32) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm-bench"));
    command.current_dir(folder).arg("compare").args(arguments);
    let assert = command.assert().code(code);
    let text = |bytes: &Vec<u8>| String::from_utf8(bytes.clone()).unwrap();
    let said = assert.get_output();
    (text(&said.stdout), text(&said.stderr))
}

#[test]
fn runs_of_the_model_are_alike_and_a_slower_one_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let row = "sparse_commit_1GiB";
    let run = output(&["--driver", "model", "--quick", "--json", "--only", row]);
    std::fs::write(folder.path().join("old"), &run).unwrap();
    let (text, _) = compare(folder.path(), &["--old", "old", "--new", "old"], 0);
    assert!(text.contains("with few samples"), "{text}");
    assert!(
        text.contains("1 row of both builds, median quotient 1.000; 0 above 1.05"),
        "{text}"
    );

    let mut slower: Value = serde_json::from_str(&run).unwrap();
    let p50 = slower["rows"][0]["p50_ns"].as_f64().unwrap();
    slower["rows"][0]["p50_ns"] = (p50 * 2.0).into();
    std::fs::write(folder.path().join("new"), slower.to_string()).unwrap();
    let arguments = ["--old", "old", "old", "--new", "new", "--json"];
    let (json, _) = compare(folder.path(), &arguments, 1);
    let found: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(found["above"], serde_json::json!([row]));
    assert_eq!(found["rows"][0]["old"].as_array().unwrap().len(), 2);
    compare(
        folder.path(),
        &["--old", "old", "--new", "new", "--bound", "2.1"],
        0,
    );
}

#[test]
fn other_files_and_bounds_are_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text"), "no run").unwrap();
    let complaint = |arguments: &[&str]| compare(folder.path(), arguments, 2).1;
    let said = complaint(&["--old", "text", "--new", "text"]);
    assert!(
        said.contains("text: this is not the output of `cuvmm-bench run --json`"),
        "{said}"
    );
    let said = complaint(&["--old", "none", "--new", "text"]);
    assert!(said.contains("none: "), "{said}");
    for bound in ["0", "-1", "NaN", "inf", "much"] {
        let bound = format!("--bound={bound}");
        let said = complaint(&["--old", "text", "--new", "text", &bound]);
        assert!(said.contains("--bound"), "{said}");
    }
    assert!(complaint(&["--old", "text"]).contains("--new"));
}
