//! `cuvmm-bench conform` as a user meets it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn conform(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm-bench"));
    command.arg("conform").args(arguments);
    command
}

fn output(arguments: &[&str], code: i32) -> String {
    let assert = conform(arguments).assert().code(code);
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

/// The one line on standard error.
fn complaint(arguments: &[&str], code: i32) -> String {
    let assert = conform(arguments).assert().code(code);
    let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn answers_are_printed_and_counted() {
    let text = output(&["--driver", "model", "--filter", "reserve.size"], 0);
    assert!(text.contains("reserve.size_0"), "{text}");
    assert!(text.contains("CUDA_ERROR_INVALID_VALUE"), "{text}");
    assert!(text.contains("7 cases answered, 0 left out"), "{text}");
    assert!(text.contains("Nothing was left behind"), "{text}");
}

#[test]
fn json_holds_answers_and_what_was_left_out() {
    let text = output(&["--driver", "model", "--filter", "alias", "--json"], 0);
    let object: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(object["driver"], "model");
    assert_eq!(object["answers"]["map.alias_second_va"], "CUDA_SUCCESS");
    let reason = object["skipped"]["alias.value"].as_str().unwrap();
    assert!(reason.contains("no memory"), "{reason}");
    assert_eq!(object["leaks"], Value::Array(Vec::new()));
}

#[test]
fn a_case_that_wants_its_own_process_gets_one() {
    let text = output(
        &[
            "--driver",
            "host",
            "--filter",
            "map.released_handle",
            "--json",
        ],
        0,
    );
    let object: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        object["answers"]["map.released_handle"],
        "CUDA_ERROR_INVALID_VALUE"
    );
    assert_eq!(
        object["answers"]["map.released_handle_still_mapped"],
        "CUDA_SUCCESS"
    );
}

#[test]
fn what_is_recorded_does_not_differ_from_itself() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.json");
    let file = path.to_str().unwrap();
    output(&["--driver", "model", "--record", file], 0);
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(
        recorded["driver_version"]
            .as_str()
            .unwrap()
            .contains("model")
    );
    assert_eq!(recorded["date"].as_str().unwrap().len(), "2026-01-02".len());
    let text = output(&["--driver", "model", "--against", file], 0);
    assert!(text.contains(" 0 different"), "{text}");
}

#[test]
fn what_differs_is_named_and_fails() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("wrong.json");
    let recorded = serde_json::json!({
        "gpu": "a GPU", "driver_version": "1", "date": "2026-01-02", "cuda_version": "13.0",
        "answers": { "map.ok": "CUDA_ERROR_UNKNOWN", "map.adjacent": "CUDA_SUCCESS" }
    });
    std::fs::write(&path, recorded.to_string()).unwrap();
    let file = path.to_str().unwrap();
    let text = output(
        &["--driver", "model", "--filter", "map.", "--against", file],
        1,
    );
    let line = "map.ok: recorded \"CUDA_ERROR_UNKNOWN\", here \"CUDA_SUCCESS\"";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("1 the same, 1 different"), "{text}");
    let arguments = [
        "--driver",
        "model",
        "--filter",
        "map.",
        "--against",
        file,
        "--json",
    ];
    let object: Value = serde_json::from_str(&output(&arguments, 1)).unwrap();
    assert_eq!(object["comparison"]["different"][0]["case"], "map.ok");
}

#[test]
fn the_list_says_what_each_case_asks() {
    let text = output(&["--list", "--filter", "unmap.past_end"], 0);
    assert!(text.contains("unmap-holes"), "{text}");
    let object: Value = serde_json::from_str(&output(&["--list", "--json"], 0)).unwrap();
    assert!(object.as_array().unwrap().len() > 300);
}

#[test]
fn misuse_is_one_line_and_a_code() {
    complaint(&["--driver", "abacus"], 2);
    complaint(&["--record", "x.json", "--filter", "map"], 2);
    assert!(complaint(&["--against", "/nowhere/x.json"], 2).contains("/nowhere/x.json"));
    assert!(complaint(&["--driver", "model", "--filter", "nonsense"], 1).contains("nonsense"));
    assert!(complaint(&["--driver", "model", "--one", "nonsense"], 1).contains("nonsense"));
    let unwritable = ["--driver", "model", "--record", "/nowhere/x.json"];
    assert!(complaint(&unwritable, 2).contains("/nowhere/x.json"));
    let no_json = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    assert!(complaint(&["--against", no_json.to_str().unwrap()], 2).contains("no recording"));
}

#[test]
fn default_output_fits_in_100_columns() {
    for arguments in [&["--driver", "model"][..], &["--list"]] {
        let text = output(arguments, 0);
        let widest = text.lines().max_by_key(|line| line.chars().count());
        let width = widest.map(|line| line.chars().count());
        assert!(width <= Some(100), "{widest:?}");
    }
}
