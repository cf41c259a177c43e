//! `cuvmm plan` as a user meets it.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

fn cuvmm() -> Command {
    Command::new(env!("CARGO_BIN_EXE_cuvmm"))
}

fn sample(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("plans")
        .join(name)
}

fn json(file: &Path, arguments: &[&str], code: i32) -> Value {
    let assert = cuvmm()
        .args(["plan", "--json"])
        .args(arguments)
        .arg(file)
        .assert()
        .code(code);
    serde_json::from_slice(&assert.get_output().stdout).unwrap()
}

/// The one line on standard error.
fn complaint(file: &Path, arguments: &[&str], code: i32) -> String {
    let assert = cuvmm().arg("plan").args(arguments).arg(file).assert();
    let output = assert.code(code);
    let text = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

fn plan(dir: &TempDir, text: &str) -> PathBuf {
    let file = dir.path().join("plan.toml");
    std::fs::write(&file, text).unwrap();
    file
}

/// A GPU of round figures.
fn costs(dir: &TempDir) -> String {
    let file = dir.path().join("costs");
    let text = "about a GPU of round figures\nmemory_mib 8192\nreserve 0:1\ncreate_cold 0:100\n\
                create_warm 0:10\nmap 0:2\nset_access 0:20\nset_access_cold 0:30\n\
                set_access_peer 0:800\nunmap 0:15\nrelease 0:5\naddress_free 0:3\nsynchronize 0\nother 0\n";
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

#[test]
fn every_figure_follows_from_the_table() {
    let dir = TempDir::new().unwrap();
    let costs = costs(&dir);
    let file = plan(
        &dir,
        "[[step]]\nreserve = { name = \"a\", size = \"64 GiB\" }\n\
         [[step]]\ncommit = { in = \"a\", size = \"3 GiB\" }\n\
         [[step]]\ncommit = { in = \"a\", size = 1 }\n\
         [[step]]\nwait = \"1 s\"\n\
         [[step]]\nstripe = { name = \"s\", size = \"6 MiB\", unit = \"4 MiB\", devices = [0, 1] }\n",
    );
    let said = json(&file, &["--costs", &costs], 0);
    assert_eq!(said["driver"], "model");
    assert_eq!(said["costs"], "a GPU of round figures");
    assert_eq!(said["devices"], 2);
    assert_eq!(said["device_memory"], 8_u64 << 30);
    let steps = said["steps"].as_array().unwrap();
    let expected: Vec<_> = steps
        .iter()
        .map(|step| step["expected_us"].as_f64().unwrap())
        .collect();
    assert_eq!(expected, [1.0, 396.0, 132.0, 0.0, 1.0 + 132.0 + 932.0]);
    assert_eq!(said["total"]["expected_us"], 1594.0);
    assert_eq!(said["total"]["calls"]["cuMemCreate"], 6);
    // Two reservations, six extents of three calls, and whether one device reaches the other.
    assert_eq!(said["total"]["driver_calls"], 2 + 18 + 1);
    assert!(said["total"]["measured_us"].is_null() && said["total"]["ratio"].is_null());
    let one = &steps[2];
    assert_eq!(one["does"], "commit 1 B in a");
    assert_eq!(one["calls"]["cuMemMap"], 1);
    let gib = 1_u64 << 30;
    assert_eq!(one["asked"], 3 * gib + 1);
    assert_eq!(one["padding"], (2 << 20) - 1);
    assert_eq!(one["memory"], 3 * gib + (2 << 20));
    assert_eq!(
        (&one["mappings"], &one["addresses"]),
        (&4.into(), &(64 * gib).into())
    );
    assert_eq!(said["peak"]["memory"], 3 * gib + (8 << 20));
    assert_eq!(said["peak"]["mappings"], 6);
    assert!(said["failure"].is_null() && said["expected_failure"].is_null());
    assert_eq!(said["ending"]["expected_us"], 6.0 * 20.0 + 6.0);
    assert_eq!(said["ending"]["calls"]["cuMemUnmap"], 6);
}

#[test]
fn a_table_with_ranges_says_how_sure_the_expectation_is() {
    let dir = TempDir::new().unwrap();
    let costs = costs(&dir);
    let file = plan(
        &dir,
        "[[step]]\nreserve = { name = \"a\", size = \"2 MiB\" }\n\
         [[step]]\ncommit = { in = \"a\", size = \"2 MiB\" }\n",
    );
    let text = |said: &str| {
        let assert = cuvmm()
            .args(["plan", "--costs", &costs])
            .arg(&file)
            .assert();
        let text = String::from_utf8(assert.success().get_output().stdout.clone()).unwrap();
        assert!(text.contains(said), "{text}");
        text
    };
    let said = json(&file, &["--costs", &costs], 0);
    assert_eq!(said["total"]["expected_us"], 133.0);
    assert!(said["total"]["expected_low_us"].is_null(), "{said}");
    assert!(!text("no ranges").contains("range:"));
    let table = std::fs::read_to_string(&costs).unwrap();
    let table = table
        .replace("create_cold 0:100", "create_cold 0:90/100/400")
        .replace("unmap 0:15", "unmap 0:10/15/16");
    std::fs::write(&costs, table).unwrap();
    let said = json(&file, &["--costs", &costs], 0);
    let range = |took: &Value| {
        ["expected_low_us", "expected_us", "expected_high_us"]
            .map(|key| took[key].as_f64().unwrap())
    };
    assert_eq!(range(&said["steps"][0]), [1.0, 1.0, 1.0]);
    assert_eq!(range(&said["steps"][1]), [122.0, 132.0, 432.0]);
    assert_eq!(range(&said["total"]), [123.0, 133.0, 433.0]);
    assert_eq!(range(&said["ending"]), [18.0, 23.0, 24.0]);
    assert!(text("range:").contains("122 to 432"));
    text("expected 23.00 us, range 18.00 us to 24.00 us");
    let real = json(&file, &["--costs", &costs, "--driver", "host"], 0);
    assert_eq!(range(&real["total"]), [123.0, 133.0, 433.0]);
}

#[test]
fn the_samples_are_plans() {
    for (name, devices) in [("elastic-kv.toml", 1), ("two-gpus.toml", 2)] {
        let said = json(&sample(name), &[], 0);
        assert_eq!(said["devices"], devices, "{name}");
        assert!(said["costs"].as_str().unwrap().contains("NVIDIA H200"));
        assert_eq!(json(&sample(name), &["--gpu", "NVIDIA H200"], 0), said);
        let assert = cuvmm().arg("plan").arg(sample(name)).assert().success();
        let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
        assert!(
            text.contains("| total") && text.contains("At most "),
            "{text}"
        );
        assert!(text.lines().all(|line| line.trim_end() == line), "{text:?}");
    }
}

#[test]
fn the_first_step_that_does_not_fit_is_named_and_exits_with_1() {
    let file = sample("elastic-kv.toml");
    let said = json(&file, &["--memory", "40GiB"], 1);
    let failure = &said["failure"];
    assert_eq!(failure["step"], 4);
    let error = failure["error"].as_str().unwrap();
    assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    let steps = said["steps"].as_array().unwrap();
    assert_eq!(
        steps.len(),
        4,
        "what it reached is shown, and nothing behind it"
    );
    assert_eq!(said["peak"]["memory"], 40_u64 << 30);
    let line = complaint(&file, &["--memory", "40GiB"], 1);
    assert!(line.contains("step 4 fails (grow kv to 40 GiB"), "{line}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn on_a_driver_it_is_done_for_real_beside_what_was_expected() {
    let file = sample("elastic-kv.toml");
    let said = json(&file, &["--driver", "host", "--memory", "80GiB"], 0);
    assert_eq!(
        (&said["driver"], &said["device"]),
        (&"host".into(), &"host memory".into())
    );
    let foreseen = json(&file, &["--memory", "80GiB"], 0);
    let (steps, expected) = (said["steps"].as_array(), foreseen["steps"].as_array());
    for (step, expected) in steps.unwrap().iter().zip(expected.unwrap()) {
        for key in [
            "step",
            "does",
            "calls",
            "expected_us",
            "memory",
            "mappings",
            "addresses",
        ] {
            assert_eq!(step[key], expected[key], "{key}");
        }
        let calls = step["driver_calls"].as_u64().unwrap();
        assert_eq!(
            step["measured_us"].as_f64() > Some(0.0),
            calls > 0,
            "{step}"
        );
        assert_eq!(step["ratio"].is_f64(), calls > 0, "{step}");
    }
    assert_eq!(said["peak"], foreseen["peak"]);
    let refused = json(&file, &["--driver", "host", "--memory", "40GiB"], 1);
    assert_eq!(
        refused["failure"]["step"],
        refused["expected_failure"]["step"]
    );
}

#[test]
fn what_cannot_be_meant_is_told_in_a_line_and_exits_with_2() {
    let dir = TempDir::new().unwrap();
    let step = |text: &str| plan(&dir, &format!("# a plan\n\n[[step]]\n{text}\n"));
    let unknown = complaint(&step("commit = { in = \"a\", size = 1 }"), &[], 2);
    assert!(unknown.contains("line 3") && unknown.contains("step 1") && unknown.contains("\"a\""));
    let verb = complaint(&step("malloc = 7"), &[], 2);
    assert!(verb.contains("line 4") && verb.contains("malloc"), "{verb}");
    let size = complaint(&step("create = { name = \"a\", size = \"much\" }"), &[], 2);
    assert!(size.contains("line 4") && size.contains("much"), "{size}");
    let device = step("create = { name = \"a\", size = 1, device = 3 }");
    let few = complaint(&device, &["--devices", "2"], 2);
    assert!(few.contains("devices 3..4: there are 2"), "{few}");
    json(&device, &["--devices", "4"], 0);
    let host = complaint(&device, &["--devices", "1", "--driver", "host"], 2);
    assert!(host.contains("devices 3..4: there are 1"), "{host}");
    let gone = complaint(Path::new("/nowhere/plan.toml"), &[], 2);
    assert!(gone.contains("/nowhere/plan.toml"), "{gone}");
    let gpu = complaint(&device, &["--gpu", "abacus"], 2);
    assert!(
        gpu.contains("abacus") && gpu.contains("nvidia-h200"),
        "{gpu}"
    );
    complaint(&device, &["--gpu", "h200", "--costs", "FILE"], 2);
    complaint(&device, &["--devices", "0"], 2);
    let costs = complaint(&device, &["--costs", "/nowhere/costs"], 2);
    assert!(costs.contains("/nowhere/costs"), "{costs}");
}

#[test]
fn a_size_that_does_not_fit_64_bits_is_refused_with_its_line() {
    let dir = TempDir::new().unwrap();
    for size in ["16EiB", "99999999999EiB", "18446744073709551616"] {
        let file = plan(
            &dir,
            &format!("[[step]]\nreserve = {{ name = \"a\", size = \"{size}\" }}\n"),
        );
        let said = complaint(&file, &[], 2);
        assert!(said.contains("line 2") && said.contains(size), "{said}");
    }
    let costs = costs(&dir);
    let table = std::fs::read_to_string(&costs).unwrap();
    std::fs::write(&costs, table.replace("memory_mib 8192", "memory_mib 1e30")).unwrap();
    let file = plan(&dir, "[[step]]\nwait = \"1 s\"\n");
    let said = complaint(&file, &["--costs", &costs], 2);
    assert!(said.contains("--memory"), "{said}");
}

#[test]
fn one_thing_is_not_told_as_several() {
    let dir = TempDir::new().unwrap();
    let file = plan(&dir, "[[step]]\nreserve = { name = \"a\", size = 1 }\n");
    let assert = cuvmm().arg("plan").arg(&file).assert().success();
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    assert!(
        text.contains("Giving everything back: 1 driver call, expected"),
        "{text}"
    );
    assert!(text.contains(", 0 mappings, 2 MiB of addresses"), "{text}");
}

/// Steps by the hundred thousand: all kinds in turn, on names that come, go and stay.
fn many_steps(count: usize) -> String {
    let mut text = String::from(
        "[[step]]\nreserve = { name = \"all\", size = \"8 TiB\" }\n\
         [[step]]\nreserve = { name = \"by hand\", size = \"8 TiB\" }\n\
         [[step]]\ncreate = { name = \"p\", size = \"2 MiB\" }\n",
    );
    for index in 0..count / 5 {
        let at = 4 * index;
        write!(
            text,
            "[[step]]\nreserve = {{ name = \"kept {index}\", size = 1 }}\n\
             [[step]]\ncommit = {{ in = \"all\", at = \"{at} MiB\", size = 1 }}\n\
             [[step]]\nmap = {{ physical = \"p\", in = \"by hand\", at = \"{at} MiB\" }}\n\
             [[step]]\ncreate = {{ name = \"{index}\", size = 7 }}\n\
             [[step]]\nrelease = \"{index}\"\n"
        )
        .unwrap();
    }
    text
}

/// It takes seconds. The limit is for one that hangs.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_plan_of_a_hundred_thousand_steps_is_read_done_and_shown() {
    let dir = TempDir::new().unwrap();
    let count = 100_000;
    let file = plan(&dir, &many_steps(count));
    let mut command = cuvmm();
    command
        .args(["plan", "--json", "--memory", "1TiB"])
        .arg(&file);
    let assert = command
        .timeout(Duration::from_secs(3600))
        .assert()
        .success();
    let said: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    let steps = said["steps"].as_array().unwrap();
    assert_eq!(steps.len(), count + 3);
    let last = steps.last().unwrap();
    let each = count as u64 / 5;
    assert_eq!(last["mappings"], 2 * each);
    assert_eq!(last["asked"], each + (2 << 20));
    assert_eq!(last["memory"], (each + 1) * (2 << 20));
    assert_eq!(said["peak"]["memory"], (each + 2) * (2 << 20));
    assert_eq!(said["total"]["calls"]["cuMemMap"], 2 * each);
    let step = "[[step]]\nunmap = { in = \"all\", at = 1 }\n";
    let wrong = plan(&dir, &(many_steps(count) + step));
    let line = many_steps(count).lines().count() + 1;
    let said = complaint(&wrong, &[], 2);
    assert!(
        said.contains(&format!("line {line}: step {}", count + 4)),
        "{said}"
    );
}

#[test]
fn a_wait_is_as_long_as_an_option_may_say() {
    let dir = TempDir::new().unwrap();
    let file = plan(&dir, "[[step]]\nwait = \"10000 h\"\n");
    cuvmm().arg("plan").arg(&file).assert().success();
    for time in ["10001 h", "18446744073709551615 s"] {
        let file = plan(&dir, &format!("[[step]]\nwait = \"{time}\"\n"));
        for driver in ["model", "host"] {
            let said = complaint(&file, &["--driver", driver], 2);
            assert!(said.contains("line 2: "), "{said}");
            assert!(
                said.contains(&format!("{time:?}: a time is at most 10000h")),
                "{said}"
            );
        }
    }
}
