//! End-to-end tests of `cuvmm replay`: its stable output, its chart, its errors.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// Writes a trace of requests that arrive every tenth of a second and have at least `context`
/// tokens of context.
fn trace(dir: &TempDir, name: &str, end: &str, requests: u32, context: u32) -> PathBuf {
    let mut text = format!("{HEADER}{end}");
    for at in 0..requests {
        let (second, tenth) = (at / 10 % 60, at % 10);
        let context = context + at % 7 * 16;
        write!(
            text,
            "2023-11-16 18:15:{second:02}.{tenth}805900,{context},{}{end}",
            20 + at % 50
        )
        .unwrap();
    }
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

pub(super) fn cuvmm() -> Command {
    Command::cargo_bin("cuvmm").unwrap()
}

pub(super) fn model(name: &str, path: &Path) -> String {
    format!("--model={name}={}", path.display())
}

/// Creates traces for two models, the first with a much higher load.
pub(super) fn two_models(dir: &TempDir) -> [String; 2] {
    [
        model("conv", &trace(dir, "conv.csv", "\n", 300, 200)),
        model("code", &trace(dir, "code.csv", "\r\n", 20, 100)),
    ]
}

pub(super) fn json(args: &[&str], models: &[String]) -> Value {
    let output = cuvmm()
        .arg("replay")
        .args(models)
        .args(args)
        .arg("--json")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.stderr.is_empty());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks the stable keys of the figures of a policy or of a model.
fn assert_figures(figures: &Value, memory: u64) {
    let count = |key: &str| {
        figures[key]
            .as_u64()
            .unwrap_or_else(|| panic!("{key} in {figures}"))
    };
    assert_eq!(count("completed") + count("rejected"), count("requests"));
    assert!(count("preempted") < 100_000);
    assert!(count("peak_bytes") > 0 && count("peak_bytes") <= memory);
    assert!(count("driver_calls") > 0);
    assert_eq!(count("wrong_stamps"), 0);
    count("verified_stamps");
    for key in ["ttft_p50_ms", "ttft_p99_ms", "driver_time_ms"] {
        assert!(
            figures[key].as_f64().is_some_and(|time| time > 0.0),
            "{key} in {figures}"
        );
    }
    assert!(figures["ttft_p50_ms"].as_f64() <= figures["ttft_p99_ms"].as_f64());
}

#[test]
fn json_is_a_stable_interface() {
    let dir = TempDir::new().unwrap();
    let models = two_models(&dir);
    let said = json(
        &["--memory", "512MiB", "--policy", "both", "--driver", "host"],
        &models,
    );
    assert_eq!(said["memory_bytes"], 512 << 20);
    for policy in ["static", "elastic"] {
        let figures = &said["policies"][policy];
        assert_figures(figures, 512 << 20);
        assert_eq!(figures["requests"], 320);
        assert!(figures["verified_stamps"].as_u64() > Some(10_000));
        let models = figures["models"].as_object().unwrap();
        assert_eq!(models.len(), 2);
        assert_figures(&models["conv"], 512 << 20);
        assert_figures(&models["code"], 512 << 20);
        for key in [
            "requests",
            "completed",
            "rejected",
            "preempted",
            "verified_stamps",
        ] {
            let sum: u64 = models
                .values()
                .map(|model| model[key].as_u64().unwrap())
                .sum();
            assert_eq!(figures[key], sum, "{key}");
        }
    }
    assert!(
        said["ttft_p99_gain"].as_f64() > Some(1.5),
        "{}",
        said["ttft_p99_gain"]
    );
}

/// Removes the figures that are measured in real time.
fn without_times(mut said: Value) -> Value {
    for policy in said["policies"].as_object_mut().unwrap().values_mut() {
        policy.as_object_mut().unwrap().remove("driver_time_ms");
        for model in policy["models"].as_object_mut().unwrap().values_mut() {
            model.as_object_mut().unwrap().remove("driver_time_ms");
        }
    }
    said
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn what_the_driver_s_calls_take_is_expected_by_a_table() {
    let dir = TempDir::new().unwrap();
    let models = two_models(&dir);
    let table = dir.path().join("costs");
    std::fs::write(
        &table,
        "about a slow GPU\nset_access 2:1000\nset_access_cold 2:1000\n",
    )
    .unwrap();
    let costs = format!("--costs={}", table.display());
    let common = ["--memory", "512MiB", "--policy", "both"];
    let said = json(
        &[&common[..], &["--driver=host", "--expect", &costs]].concat(),
        &models,
    );
    let alone = json(
        &[&common[..], &["--driver=model", &costs]].concat(),
        &models,
    );
    for policy in ["static", "elastic"] {
        let (figures, alone) = (&said["policies"][policy], &alone["policies"][policy]);
        let expected = &figures["expected"];
        assert_eq!(expected["costs"], "a slow GPU");
        // Both counts are of runs on the model driver without stamps.
        let calls = |figures: &Value| figures["driver_calls"].as_f64().unwrap();
        assert!(calls(expected) <= calls(alone));
        let access = &expected["by_call"]["cuMemSetAccess"];
        assert_eq!(access["measured"], access["expected"]);
        let count = access["expected"].as_f64().unwrap();
        assert_eq!(access["expected_ms"].as_f64(), Some(count));
        let (took, time) = (&figures["driver_time_ms"], &expected["driver_time_ms"]);
        let ratio = took.as_f64().unwrap() / time.as_f64().unwrap();
        let said = expected["ratio"].as_f64().unwrap();
        assert!((said - ratio).abs() <= ratio * 1e-3, "{said} {ratio}");
        assert!(alone["expected"].is_null());
    }
    let output = cuvmm()
        .arg("replay")
        .args(&models)
        .args(["--memory=512MiB", "--driver=host", "--expect", "--gpu=h200"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("elastic: ") && text.contains("measured by expected"),
        "{text}"
    );
    assert!(text.contains("NVIDIA H200"), "{text}");
    for (args, word) in [
        (["--driver=model", "--expect"], "--expect"),
        (["--driver=host", "--gpu=h200"], "--expect"),
        (["--driver=model", "--gpu=abacus"], "nvidia-h200"),
    ] {
        let output = cuvmm().arg("replay").args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(word), "{text}");
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_same_trace_gives_the_same_figures_whatever_ends_its_lines() {
    let dir = TempDir::new().unwrap();
    let said = ["\n", "\r\n"].map(|end| {
        let model = model("conv", &trace(&dir, "conv.csv", end, 100, 300));
        without_times(json(&["--memory=128MiB", "--driver=host"], &[model]))
    });
    assert_eq!(said[0], said[1]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_model_driver_decides_as_the_host_does_and_stamps_nothing() {
    let dir = TempDir::new().unwrap();
    let models = two_models(&dir);
    let [host, model] =
        ["host", "model"].map(|driver| json(&["--memory=512MiB", "--driver", driver], &models));
    assert_eq!(model["stamps"], false);
    assert_eq!(model["policies"]["elastic"]["verified_stamps"], 0);
    for policy in ["static", "elastic"] {
        for key in [
            "completed",
            "preempted",
            "ttft_p50_ms",
            "ttft_p99_ms",
            "peak_bytes",
        ] {
            assert_eq!(
                host["policies"][policy][key], model["policies"][policy][key],
                "{policy} {key}"
            );
        }
    }
}

#[test]
fn one_policy_is_played_alone() {
    let dir = TempDir::new().unwrap();
    let said = json(
        &["--memory=512MiB", "--driver=model", "--policy=static"],
        &two_models(&dir),
    );
    let policies = said["policies"].as_object().unwrap();
    assert_eq!(policies.keys().collect::<Vec<_>>(), ["static"]);
    assert!(said.get("losers").is_none());
}

#[test]
fn a_request_larger_than_all_memory_is_rejected_and_counted() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("large.csv");
    let at = "2023-11-16 18:15:46.6805900";
    std::fs::write(
        &path,
        format!("{HEADER}\n{at},100000,5\n{at},16,16\n{at},4294967295,4294967295\n"),
    )
    .unwrap();
    let said = json(&["--memory=64MiB", "--driver=host"], &[model("a", &path)]);
    for policy in ["static", "elastic"] {
        let figures = &said["policies"][policy];
        assert_eq!(
            (&figures["rejected"], &figures["completed"]),
            (&2.into(), &1.into())
        );
    }
}

#[test]
fn where_nothing_completes_there_is_no_time() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("large.csv");
    std::fs::write(&path, format!("{HEADER}\n2023-11-16 18:15:46,100000,5\n")).unwrap();
    let said = json(&["--memory=64MiB", "--driver=host"], &[model("a", &path)]);
    assert_eq!(said["policies"]["elastic"]["ttft_p99_ms"], Value::Null);
    cuvmm()
        .args([
            "replay",
            "--memory=64MiB",
            "--driver=host",
            &model("a", &path),
        ])
        .assert()
        .success();
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_generated_workload_is_the_same_for_the_same_seed() {
    let play = |seed| {
        without_times(json(
            &["--driver=model", "--policy=elastic", "--seed", seed],
            &[],
        ))
    };
    let one = play("1");
    assert_eq!(one["seed"], 1);
    assert_eq!(one, play("1"));
    assert_ne!(one["policies"], play("2")["policies"]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn tables_are_for_people_and_losers_are_named() {
    let dir = TempDir::new().unwrap();
    let greedy = model("conv", &trace(&dir, "conv.csv", "\n", 300, 700));
    let modest = model("code", &trace(&dir, "code.csv", "\n", 20, 100));
    let assert = cuvmm()
        .args([
            "replay",
            "--memory=512MiB",
            "--guarantee=8MiB",
            "--driver=host",
            &greedy,
            &modest,
        ])
        .assert()
        .success();
    let said = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    for part in [
        "320 requests to conv, code",
        "| static  | conv  |",
        "| elastic | all   |",
        "driver calls",
        "elastic is",
        "times better than static",
    ] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    assert!(
        said.contains("code loses under elastic: ") && !said.contains("conv loses"),
        "{said}"
    );
}

#[test]
fn demand_beyond_the_memory_is_warned_of() {
    let dir = TempDir::new().unwrap();
    let said = |requests, context| {
        let one = model("conv", &trace(&dir, "conv.csv", "\n", requests, context));
        let assert = cuvmm()
            .args(["replay", "--memory=512MiB", "--driver=model", &one])
            .assert()
            .success();
        String::from_utf8(assert.get_output().stdout.clone()).unwrap()
    };
    assert!(said(200, 1000).contains("warning: demand exceeds memory"));
    assert!(!said(3, 16).contains("warning:"));
}

#[test]
fn the_chart_shows_both_policies_and_all_models() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("chart.svg");
    let chart = format!("--chart={}", file.display());
    cuvmm()
        .args(["replay", "--memory=512MiB", "--driver=model", &chart])
        .args(two_models(&dir))
        .assert()
        .success();
    let svg = std::fs::read_to_string(file).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    for (text, times) in [
        ("static: memory by model", 1),
        ("elastic: memory by model", 1),
        ("conv", 2),
        ("code", 2),
        ("limit of each model", 1),
        ("limit of the pool", 1),
        ("requests waiting", 2),
        ("p99 time to first token over all requests: elastic is ", 1),
    ] {
        assert_eq!(svg.matches(text).count(), times, "{text}");
    }
    assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
}

/// Runs a command that fails, and returns its exit code and its single line of standard error.
pub(super) fn failure(args: &[&str]) -> (i32, String) {
    let output = cuvmm().args(args).output().unwrap();
    assert!(output.stdout.is_empty(), "{args:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
    (output.status.code().unwrap(), said)
}

#[test]
fn errors_are_one_line_that_names_the_option() {
    let dir = TempDir::new().unwrap();
    let good = model("a", &trace(&dir, "good.csv", "\n", 3, 16));
    for (args, named) in [
        (vec!["replay", "--foo"], "--foo"),
        (vec!["replay", "--memory", "8Gx"], "--memory"),
        (vec!["replay", "--memory", "0"], "--memory"),
        (
            vec!["replay", "--memory", "99999999999EiB"],
            "at most 18446744073709551615",
        ),
        (vec!["replay", "--memory", "1KiB"], "--memory"),
        (vec!["replay", "--model", "conv"], "--model"),
        (vec!["replay", "--model", "=x"], "--model"),
        (vec!["replay", &good, &good], "--model"),
        (vec!["replay", "--guarantee", "5GiB"], "--guarantee"),
        (vec!["replay", "--policy", "both-ways"], "--policy"),
        (vec!["replay", "--driver", "rocm"], "--driver"),
        (vec!["replay", "--prefill", "0"], "--prefill"),
        (vec!["replay", "--decode", "NaN"], "--decode"),
        (vec!["replay", "--seed", "1", &good], "--seed"),
        (vec!["replya"], "replya"),
    ] {
        let (code, said) = failure(&args);
        assert_eq!(code, 2, "{args:?}: {said}");
        assert!(
            said.starts_with("cuvmm: ") && said.contains(named),
            "{args:?}: {said}"
        );
    }
}

#[test]
fn errors_are_one_line_that_names_the_file() {
    let dir = TempDir::new().unwrap();
    let good = model("a", &trace(&dir, "good.csv", "\n", 3, 16));
    let broken = dir.path().join("broken.csv");
    std::fs::write(
        &broken,
        format!("{HEADER}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15,3\r\n"),
    )
    .unwrap();
    let chart = format!("--chart={}", dir.path().join("none/chart.svg").display());
    for (args, named) in [
        (
            vec!["replay".to_owned(), model("a", Path::new("/nowhere.csv"))],
            "/nowhere.csv: ",
        ),
        (
            vec!["replay".to_owned(), model("a", dir.path())],
            "this is a folder",
        ),
        (
            vec!["replay".to_owned(), model("a", &broken)],
            "broken.csv: line 3: has 2 fields where the header has 3",
        ),
        (
            vec!["replay".to_owned(), good.clone(), chart],
            "none/chart.svg: ",
        ),
        (
            vec![
                "replay".to_owned(),
                good,
                "--driver=host".to_owned(),
                "--device=7".to_owned(),
            ],
            "device 7",
        ),
    ] {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let (code, said) = failure(&args);
        // A device that the driver lacks is a failure; an unusable file is wrong usage.
        let expected = if named == "device 7" { 1 } else { 2 };
        assert_eq!(code, expected, "{args:?}: {said}");
        assert!(
            said.starts_with("cuvmm: ") && said.contains(named),
            "{args:?}: {said}"
        );
    }
}

#[test]
fn help_is_no_error() {
    for args in [&["--help"][..], &["replay", "--help"], &["--version"]] {
        cuvmm().args(args).assert().success();
    }
}

#[test]
fn a_chart_of_another_kind_than_svg_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let picture = dir.path().join("replay.png");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.args(["replay", "--chart"]).arg(&picture).assert();
    let said = String::from_utf8(assert.code(2).get_output().stderr.clone()).unwrap();
    assert!(
        said.contains("charts are SVG: give the file a name"),
        "{said}"
    );
    assert!(!picture.exists());
}
