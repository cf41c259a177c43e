//! End-to-end tests of `cuvmm info`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

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
fn the_topology_says_who_reaches_whom() {
    let two = ["--driver", "host", "--devices", "2"];
    let object: Value = serde_json::from_str(&info(&[&two[..], &["--json"]].concat())).unwrap();
    let topology = object["topology"].as_array().unwrap();
    let devices = object["devices"].as_array().unwrap();
    assert_eq!((devices.len(), topology.len()), (2, 2));
    let second = topology[1]["places"].as_array().unwrap();
    let places: Vec<_> = second
        .iter()
        .map(|place| (place["place"].as_str().unwrap(), &place["near"]))
        .collect();
    let (yes, no) = (Value::Bool(true), Value::Bool(false));
    assert_eq!(
        places,
        [
            ("device 0", &no),
            ("device 1", &yes),
            ("host NUMA node 0", &yes)
        ]
    );
    assert!(second.iter().all(|place| place["reached"] == true));
    let text = info(&two);
    let lines: Vec<Vec<_>> = text
        .lines()
        .skip_while(|line| *line != "Whose memory each device reaches")
        .map(|line| {
            let words = line.split("  ").map(str::trim);
            words.filter(|word| !word.is_empty()).collect()
        })
        .collect();
    assert_eq!(lines[1], ["device 0", "device 1", "host NUMA node 0"]);
    assert_eq!(lines[3], ["device 1", "yes", "yes, near", "yes, near"]);
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
fn the_list_of_drivers_has_the_number_of_devices_that_is_asked_for() {
    let text = info(&["--driver", "host", "--devices", "2"]);
    let host = text.lines().find(|line| line.starts_with(" host "));
    assert!(
        host.is_some_and(|line| line.ends_with(" 2 devices")),
        "{text}"
    );
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

#[test]
fn where_a_library_was_looked_for_is_shown_and_why_it_is_none_in_full() {
    let text = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let assert = command.args(arguments).assert().success();
        String::from_utf8(assert.get_output().stdout.clone()).unwrap()
    };
    let narrow = text(&["info"]);
    let full = text(&["info", "--verbose"]);
    if narrow.contains("could be opened") {
        assert!(narrow.contains("tried libcuda.so.1,"), "{narrow}");
        assert!(full.contains("opened: libcuda.so.1: cannot open"), "{full}");
    }
}
