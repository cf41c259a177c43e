//! `cuvmm heap` as a user meets it.

#![allow(clippy::unwrap_used, clippy::panic)]

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
fn the_keys_are_stable_and_memory_in_pieces_is_merged() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    for driver in ["model", "host"] {
        let seen = heap(&[shown(&file), "--driver", driver, "--memory", "1GiB"], 0);
        assert_eq!(seen["operations"], 10);
        assert_eq!(seen["peak_live_bytes"], 256 << 20);
        assert_eq!(seen["peak_held_bytes"], 256 << 20);
        assert_eq!(seen["ratio"], 1.0);
        assert_eq!(seen["stitches"], 0);
        assert_eq!(seen["failed"], 0);
        // Eight of 8 MiB for the first allocation. The others are one extent each, because their mean
        // size is known then. Of the eight of the first and another one, the last makes one.
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
fn a_limit_that_no_heap_can_have_is_refused() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    let least = "bytes of a pool's limit: 1 MiB is less than the minimum of 2 MiB";
    for (option, size, said) in [
        ("--limit", "1MiB", least),
        ("--limit", "1TiB", "1 TiB is more than the maximum of"),
        ("--memory", "1MiB", least),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let assert = command.args(["heap", shown(&file), option, size]);
        let assert = assert.assert().code(2).stdout("");
        let complaint = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        let begun = format!("cuvmm: {option}: ");
        assert!(
            complaint.starts_with(&begun) && complaint.contains(said),
            "{complaint}"
        );
    }
}

#[test]
fn models_of_pytorch_stand_beside_the_heap() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    let seen = heap(&[shown(&file), "--smallest-limit"], 0);
    // Segments of 64 MiB on one stream and one on the other, and one of 128 MiB.
    let native = &seen["native"];
    assert_eq!(native["peak_held_bytes"], 384 << 20);
    assert_eq!(native["driver_calls"], 5);
    // With less, the two that are free are given back for the last one. The limit is to a granule.
    let limit = native["smallest_limit_bytes"].as_u64().unwrap();
    assert!((256 << 20..258 << 20).contains(&limit), "{limit}");
    let expandable = &seen["expandable"];
    // Pages of 20 MiB: 200 MiB for three allocations, 60 MiB more because the last of them is a part
    // of the 128 MiB, and 80 MiB on the other stream.
    assert_eq!(expandable["peak_held_bytes"], 340 << 20);
    assert_eq!(expandable["failed"], 0);
    let seen = heap(&[shown(&file), "--limit", "200MiB"], 1);
    assert_eq!(seen["native"]["failed"], 1);

    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.args(["heap", shown(&file)]).assert().success();
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    for said in [
        "| PyTorch, native |",
        "| held over live ",
        "models",
        "stitches 0,",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn without_a_file_a_trace_is_made() {
    let made = |arguments: &[&str]| {
        let seen = heap(arguments, 0);
        [seen["operations"].clone(), seen["peak_live_bytes"].clone()]
    };
    let uniform = made(&[]);
    assert_eq!(made(&["--churn"]), uniform);
    assert_eq!(made(&["--churn", "uniform"]), uniform);
    wrong(&["--device", "1"], "name its file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let arguments = [
        "heap",
        "--churn=uniform",
        "--limit=8GiB",
        "--smallest-limit",
    ];
    let assert = command.args(arguments).assert().code(1);
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    let origin = "7872 operations made by `uniform` from seed 0, ";
    assert!(text.starts_with(origin), "{text}");
    let said = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(said.starts_with("no smallest limit: "), "{said}");
}

#[test]
fn with_work_in_flight_streams_wait_for_each_other() {
    let dir = TempDir::new().unwrap();
    let text = "a 0 134217728 0\nf 0\na 1 134217728 1\n";
    let file = trace(&dir, text);
    let none = heap(&[shown(&file)], 0);
    assert_eq!(
        (&none["stream_waits"], &none["stitches"]),
        (&0.into(), &0.into())
    );
    let ahead = heap(&[shown(&file), "--ahead", "100"], 0);
    assert_eq!(ahead["stream_waits"], 1);
    assert_eq!(ahead["peak_held_bytes"], 128 << 20);
    let arguments = [shown(&file), "--ahead", "1", "--driver", "host"];
    wrong(&arguments, "--ahead is for the model");
}

/// A snapshot as PyTorch 2.11 writes it. Memory from before: 2 MiB that are live at the end and 1 MiB
/// that is freed.
const SNAPSHOT: &str = r#"
import json, pickle, sys
A, M = 0x7f0000000000, 1 << 20
frames = [{"filename": "a.py", "line": 3, "name": "f"}]
def entry(action, addr, size, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream,
            "time_us": 1764000000000000, "frames": frames, "compile_context": "N/A"}
def block(address, size, requested, state):
    return {"address": address, "size": size, "requested_size": requested, "state": state,
            "frames": frames}
trace = [entry("segment_alloc", A, 20 * M), entry("alloc", A, 3 * M),
         entry("alloc", A + 3 * M, 5 * M, 94000000000000),
         {"action": "oom", "device_free": 5, "size": 1 << 40, "stream": 0, "frames": frames},
         entry("free_requested", A, 3 * M), entry("free_completed", A, 3 * M),
         entry("free_completed", A + 10 * M, M), entry("snapshot", 0, 0)]
segment = {"device": 0, "address": A, "total_size": 20 * M, "allocated_size": 7 * M, "stream": 0,
           "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
           "frames": frames, "blocks": [
               block(A, 3 * M, 0, "inactive"),
               block(A + 3 * M, 5 * M, 5 * M, "active_allocated"),
               block(A + 12 * M, 2 * M, 2 * M - 5, "active_pending_free")]}
snapshot = {"segments": [segment], "device_traces": [trace, []], "external_annotations": [],
            "allocator_settings": {"max_split_size": -1, "garbage_collection_threshold": 0.5,
                                   "expandable_segments": False, "last": None, "big": 1 << 200}}
folder = sys.argv[1]
for protocol in (2, 3, 4, 5):
    with open(f"{folder}/{protocol}.pickle", "wb") as file:
        pickle.dump(snapshot, file, protocol=protocol)
with open(f"{folder}/snapshot.json", "w") as file:
    json.dump(snapshot, file)
class Evil:
    def __reduce__(self):
        return print, ("called",)
with open(f"{folder}/evil.pickle", "wb") as file:
    pickle.dump({"device_traces": [[Evil()]]}, file)
snapshot["device_traces"][1] = trace
with open(f"{folder}/two.pickle", "wb") as file:
    pickle.dump(snapshot, file)
"#;

#[test]
fn snapshots_of_pytorch_are_traces() {
    let dir = TempDir::new().unwrap();
    let mut python = std::process::Command::new("python3");
    let python = python.args(["-c", SNAPSHOT, shown(dir.path())]).status();
    if python.is_err() {
        println!("DID NOT RUN: there is no python3");
        return;
    }
    assert!(python.unwrap().success());
    let path = |name: &str| dir.path().join(name);
    for name in [
        "2.pickle",
        "3.pickle",
        "4.pickle",
        "5.pickle",
        "snapshot.json",
    ] {
        let seen = heap(&[shown(&path(name))], 0);
        assert_eq!(seen["operations"], 6, "{name}");
        assert_eq!(seen["peak_live_bytes"], (11 << 20) - 5, "{name}");
    }
    wrong(&[shown(&path("evil.pickle"))], "only plain data is read");
    wrong(
        &[shown(&path("two.pickle"))],
        "devices [0, 1]: --device chooses one",
    );
    let seen = heap(&[shown(&path("two.pickle")), "--device", "1"], 0);
    assert_eq!(seen["operations"], 5);
    let lines = trace(&dir, PIECES);
    wrong(
        &[shown(&lines), "--device", "1"],
        "--device is for snapshots",
    );
}

/// Runs the command, which refuses its arguments with one line.
fn wrong(arguments: &[&str], what: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.arg("heap").args(arguments).assert().code(2);
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(error.contains(what), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn costs_within_a_heap_change_its_time_alone() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    let of = |gpu| heap(&[shown(&file), "--gpu", gpu], 0);
    let (alone, within) = (of("nvidia-h200"), of("nvidia-h200-heap"));
    for same in ["mappings", "ratio"] {
        assert_eq!(alone[same], within[same], "{same}");
    }
    let time = |seen: &Value| seen["driver_us_per_operation"].as_f64().unwrap();
    assert!(time(&within) > 1.5 * time(&alone), "{alone} {within}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn laws_are_repeatable() {
    let law = ["--churn", "small", "--seed", "3"];
    let (first, again) = (heap(&law, 0), heap(&law, 0));
    assert_eq!(first, again);
    assert!(first["ratio"].as_f64().unwrap() <= 1.15, "{first}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_report_names_the_terms_of_the_run() {
    let terms =
        |seen: &Value| ["law", "seed", "preset", "limit_bytes"].map(|key| seen[key].clone());
    let law = ["--churn", "small", "--seed", "3", "--preset", "fast"];
    let limited = [&law[..], &["--limit", "100GiB"]].concat();
    let made = ["small".into(), 3.into(), "fast".into()];
    for (arguments, limit) in [(&law[..], Value::Null), (&limited, (100_u64 << 30).into())] {
        let seen = terms(&heap(arguments, 0));
        assert_eq!((&seen[..3], &seen[3]), (&made[..], &limit), "{arguments:?}");
    }
    let dir = TempDir::new().unwrap();
    let seen = terms(&heap(&[shown(&trace(&dir, PIECES))], 0));
    assert_eq!(
        seen,
        [Value::Null, Value::Null, "tight".into(), Value::Null]
    );
}

#[test]
fn a_trace_of_a_file_has_no_seed() {
    let dir = TempDir::new().unwrap();
    let file = trace(&dir, PIECES);
    wrong(&[shown(&file), "--seed", "4"], "--seed");
}

#[test]
fn a_file_that_is_no_trace_is_wrong_usage() {
    let dir = TempDir::new().unwrap();
    for text in [
        "",
        "a 1 2",
        "f 1",
        "\u{1f}\u{8b}",
        "{}",
        "{\"device_traces\": 5}",
    ] {
        let file = trace(&dir, text);
        wrong(&[shown(&file)], "trace");
    }
    let file = dir.path().join("trace");
    std::fs::write(&file, b"\x80\x04}").unwrap();
    wrong(
        &[shown(&file)],
        "trace: this is no snapshot: byte 3 of the pickle: the file ends",
    );
}
