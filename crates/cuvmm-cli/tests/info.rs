//! `cuvmm info` as a user meets it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use assert_cmd::Command;
use serde_json::Value;

fn info(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.arg("info").args(arguments).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn capability<'a>(object: &'a Value, name: &str) -> &'a Value {
    let all = object["devices"][0]["capabilities"].as_array().unwrap();
    all.iter()
        .find(|capability| capability["name"] == name)
        .unwrap()
}

#[test]
fn the_host_can_do_what_the_library_needs() {
    let object: Value = serde_json::from_str(&info(&["--driver", "host", "--json"])).unwrap();
    assert_eq!(object["driver"], "host");
    let device = &object["devices"][0];
    assert_eq!(device["granularities"][0]["minimum"], 2 << 20);
    assert!(device["free"].as_u64().unwrap() <= device["total"].as_u64().unwrap());
    for name in [
        "virtual memory",
        "export as descriptor",
        "managed memory",
        "memory pools",
    ] {
        assert_eq!(capability(&object, name)["there"], true, "{name}");
    }
}

#[test]
fn a_promise_that_is_not_kept_is_shown_with_the_answer() {
    let object: Value = serde_json::from_str(&info(&["--driver", "model", "--json"])).unwrap();
    let fabric = capability(&object, "export as fabric handle");
    assert_eq!(fabric["there"], false);
    let reason = fabric["reason"].as_str().unwrap();
    assert!(reason.contains("CUDA_ERROR_NOT_PERMITTED"), "{reason}");
    assert!(reason.contains("though the attribute says yes"), "{reason}");
}

#[test]
fn what_is_not_tried_says_so() {
    let object: Value = serde_json::from_str(&info(&["--driver", "model", "--json"])).unwrap();
    for (name, there) in [
        ("managed memory beside the host", true),
        ("managed memory in the host's reach", false),
        ("multicast", false),
    ] {
        let found = capability(&object, name);
        assert_eq!(found["there"], there, "{name}");
        let reason = found["reason"].as_str().unwrap();
        assert!(reason.contains("the attribute says"), "{reason}");
    }
}

#[test]
fn every_driver_is_named_with_a_reason() {
    let object: Value = serde_json::from_str(&info(&["--json"])).unwrap();
    let drivers = object["drivers"].as_array().unwrap();
    let names: Vec<_> = drivers
        .iter()
        .map(|driver| driver["driver"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["cuda", "host"]);
    for driver in drivers {
        assert!(!driver["reason"].as_str().unwrap().is_empty());
    }
    assert!(!object["reason"].as_str().unwrap().is_empty());
}

#[test]
fn people_get_a_page_without_trailing_blanks() {
    let text = info(&["--driver", "host"]);
    assert!(text.starts_with("Drivers\n"), "{text}");
    assert!(text.contains("granularity"), "{text}");
    assert!(text.lines().all(|line| line.trim_end() == line), "{text:?}");
}

#[test]
fn a_driver_that_is_not_there_is_a_failure() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    command
        .args(["info", "--driver", "abacus"])
        .assert()
        .code(2);
}
