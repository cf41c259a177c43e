//! End-to-end tests of `cuvmm replay --processes`: the figures of several processes in one report,
//! and the end of all processes when one fails.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuvmm::LedgerView;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::{Device, Ledger};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Writes a trace of requests that arrive every tenth of a second.
fn trace(dir: &Path, name: &str, requests: u32) -> String {
    let mut text = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
    for at in 0..requests {
        let (minute, second, tenth) = (at / 600, at / 10 % 60, at % 10);
        let (context, generated) = (100 + at % 7 * 16, 20 + at % 50);
        writeln!(
            text,
            "2023-11-16 18:{minute:02}:{second:02}.{tenth}805900,{context},{generated}"
        )
        .unwrap();
    }
    let path = dir.join(format!("{name}.csv"));
    std::fs::write(&path, text).unwrap();
    format!("--model={name}={}", path.display())
}

/// A replay of two models, whose private directories are in `runtime`.
fn replay(runtime: &Path, requests: [u32; 2]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    command
        .env("XDG_RUNTIME_DIR", runtime)
        .args(["replay", "--policy=elastic", "--driver=host"])
        .arg(trace(runtime, "conv", requests[0]))
        .arg(trace(runtime, "code", requests[1]));
    command
}

fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The private directories of replays.
fn private(runtime: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(runtime).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.is_dir()).collect()
}

/// A replay that would take many minutes, whose models play in processes of their own already.
struct Long {
    runtime: TempDir,
    process: Child,
    /// The processes of both models.
    pids: [Pid; 2],
}

impl Long {
    fn start(more: &[&str]) -> Self {
        let runtime = TempDir::new().unwrap();
        let mut command = replay(runtime.path(), [20_000, 20_000]);
        let process = command
            .args(["--processes", "--speed=1"])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pids = until("both processes play", || {
            let found = private(runtime.path()).pop()?;
            let mut files = std::fs::read_dir(found).ok()?.flatten();
            let file =
                files.find(|it| it.path().extension().is_some_and(|it| it == "cuvmm-ledger"));
            let stats = LedgerView::open(file?.path()).ok()?.stats();
            let playing = |name| {
                let mut all = stats.processes.iter();
                let one = all.find(|it| it.name == name && it.obtained > 0)?;
                Pid::from_raw(one.pid.cast_signed())
            };
            Some([playing("conv")?, playing("code")?])
        });
        Self {
            runtime,
            process,
            pids,
        }
    }

    /// Waits for the end, and checks that nothing is left. Returns the complaint.
    fn ended(self) -> String {
        let output = self.process.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(output.stdout.is_empty());
        for pid in self.pids {
            assert!(!Path::new("/proc").join(pid.to_string()).exists(), "{pid}");
        }
        assert_eq!(private(self.runtime.path()), [] as [PathBuf; 0]);
        let said = said(&output);
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn one_process_and_two_are_in_one_report() {
    let runtime = TempDir::new().unwrap();
    let play = |more: &[&str]| {
        let mut command = replay(runtime.path(), [60, 20]);
        let output = command.args(["--memory=128MiB", "--json"]).args(more);
        let output = output.output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        assert!(output.stderr.is_empty(), "{}", said(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let virtual_time = play(&[]);
    let report = play(&["--processes", "--speed=5"]);
    assert_eq!(report["speed"], 5.0);
    for key in ["speed", "ttft_p99_ledger_ratio"] {
        assert_eq!(virtual_time.get(key), None, "{key}");
    }
    let virtual_time = &virtual_time["policies"]["elastic"];
    assert_eq!(virtual_time.get("processes"), None);
    let (one, two) = (
        &report["policies"]["elastic"],
        &report["policies"]["ledger"],
    );
    let p99 = |of: &Value| of["ttft_p99_ms"].as_f64().unwrap();
    // The ratio is of times that are not rounded.
    let ratio = report["ttft_p99_ledger_ratio"].as_f64().unwrap();
    assert!((ratio - p99(two) / p99(one)).abs() < 1e-3, "{ratio}");
    for (one, two, requests) in [
        (one, two, 80),
        (&one["models"]["conv"], &two["models"]["conv"], 60),
        (&one["models"]["code"], &two["models"]["code"], 20),
    ] {
        for figures in [one, two] {
            assert!(
                one.as_object()
                    .unwrap()
                    .keys()
                    .eq(figures.as_object().unwrap().keys())
            );
            assert_eq!(figures["requests"], requests);
            assert_eq!(figures["completed"], requests);
            assert_eq!(figures["wrong_stamps"], 0);
            assert!(
                figures["verified_stamps"].as_u64() > Some(2 * requests),
                "{figures}"
            );
            assert!(
                figures["peak_bytes"].as_u64() <= Some(128 * MIB),
                "{figures}"
            );
            assert!(figures["ttft_p50_ms"].as_f64() > Some(0.0), "{figures}");
        }
    }
    let keys = virtual_time["models"]["conv"].as_object().unwrap().keys();
    assert!(keys.eq(two["models"]["conv"].as_object().unwrap().keys()));
    let models = &two["models"];
    for key in ["preempted", "driver_calls", "verified_stamps"] {
        let sum = models["conv"][key].as_u64().unwrap() + models["code"][key].as_u64().unwrap();
        assert_eq!(two[key], sum, "{key}");
    }
    let all = [&one["processes"], &two["processes"]];
    let all: Vec<_> = all.iter().flat_map(|it| it.as_array().unwrap()).collect();
    let models: Vec<_> = all.iter().map(|it| it["models"].clone()).collect();
    assert_eq!(
        models,
        [json!(["conv", "code"]), json!(["conv"]), json!(["code"])]
    );
    assert_ne!(all[1]["pid"], all[2]["pid"]);
    assert_eq!(all[0]["ledger_stalled_ms"], Value::Null);
    assert!(all[1]["ledger_stalled_ms"].is_number());
    for key in [
        "waits",
        "growth_refused",
        "growth_refused_behind",
        "late_max_ms",
        "waited_ms",
        "waited_max_ms",
        "growth_waits",
        "growth_served",
        "growth_waited_ms",
        "gave",
        "gave_bytes",
        "gave_ms",
    ] {
        assert!(all.iter().all(|it| it[key].is_number()), "{key}");
    }
    for process in &all {
        assert!(process["calls"]["cuMemCreate"]["count"].as_u64() > Some(0));
        let why = process["growth_refused_why"].as_object().unwrap();
        let why: u64 = why.values().map(|it| it.as_u64().unwrap()).sum();
        assert_eq!(process["growth_refused"], why);
    }
    assert_eq!(private(runtime.path()), [] as [PathBuf; 0]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn paged_caches_of_two_processes_are_in_one_report() {
    let runtime = TempDir::new().unwrap();
    for options in [
        &["--memory=128MiB", "--layout=paged"][..],
        &["--memory=512MiB", "--layout=paged-layer-major"],
        &["--memory=128MiB", "--layout=paged", "--keep-prefixes"],
    ] {
        let keeps = options.contains(&"--keep-prefixes");
        let mut command = replay(runtime.path(), [60, 20]);
        let command = command.args(["--processes", "--speed=5", "--json"]);
        let output = command.args(options).output().unwrap();
        assert!(output.status.success(), "{options:?}: {}", said(&output));
        let report = serde_json::from_slice::<Value>(&output.stdout).unwrap();
        let all = &report["policies"]["ledger"];
        let each = [
            (all, 80),
            (&all["models"]["conv"], 60),
            (&all["models"]["code"], 20),
        ];
        for (figures, requests) in each {
            assert_eq!(figures["completed"], requests, "{options:?}");
            assert_eq!(figures["wrong_stamps"], 0, "{options:?}");
            assert!(figures["verified_stamps"].as_u64() > Some(2 * requests));
            // What is held is noted after an event, and blocks in use within it.
            assert!(figures["held_by_live"].as_f64() > Some(0.9), "{figures}");
            assert_eq!(figures["kept_mean_bytes"].as_f64() > Some(0.0), keeps);
        }
        let sum = |key: &str| {
            let models = ["conv", "code"].map(|model| all["models"][model][key].as_u64());
            models.into_iter().flatten().sum::<u64>()
        };
        assert_eq!(all["evicted_blocks"], sum("evicted_blocks"));
        let processes = all["processes"].as_array().unwrap();
        assert_ne!(processes[0]["pid"], processes[1]["pid"]);
        for process in processes {
            assert!(process["calls"]["cuMemCreate"]["count"].as_u64() > Some(0));
        }
    }
    assert_eq!(private(runtime.path()), [] as [PathBuf; 0]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn tables_and_the_chart_have_both_processes() {
    let runtime = TempDir::new().unwrap();
    let chart = runtime.path().join("chart.svg");
    let output = replay(runtime.path(), [20, 10])
        .args(["--memory=64MiB", "--processes", "--speed=5"])
        .arg(format!("--chart={}", chart.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "in real time, the trace 5 times as fast; under ledger a process for each model",
        "Processes (real time in ms)",
        "| elastic | all   |",
        "| ledger  | all   |",
        "| elastic | conv, code |",
        "| ledger  | conv       |",
        "| code   | cuMemUnmap ",
        "p99 time to first token over all requests: ledger takes ",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
    let svg = std::fs::read_to_string(chart).unwrap();
    assert!(svg.contains("limit of the pool") && svg.contains("limit of the ledger"));
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_killed_process_is_named_and_leaves_nothing() {
    let long = Long::start(&[]);
    let pid = long.pids[1];
    kill_process(pid, Signal::KILL).unwrap();
    let said = long.ended();
    let expected = format!("code (process {pid}) ended before it was done: signal: 9");
    assert!(said.contains(&expected), "{said}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_stopped_process_is_given_up() {
    let long = Long::start(&["--patience=2"]);
    let pid = long.pids[0];
    kill_process(pid, Signal::STOP).unwrap();
    let said = long.ended();
    let expected = format!("conv (process {pid}) has said nothing for 2s");
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn a_process_that_says_nonsense_is_named() {
    let long = Long::start(&[]);
    let pid = long.pids[1];
    let output = format!("/proc/{pid}/fd/1");
    let mut output = std::fs::OpenOptions::new()
        .write(true)
        .open(output)
        .unwrap();
    output.write_all(b"non\x1bsense\n").unwrap();
    drop(output);
    let said = long.ended();
    let expected = format!("code (process {pid}) said \"non\\\\u{{1b}}sense\", which is no answer");
    assert!(said.contains(&expected), "{said}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_signal_ends_all_processes() {
    for signal in [Signal::INT, Signal::TERM] {
        let long = Long::start(&[]);
        kill_process(Pid::from_child(&long.process), signal).unwrap();
        let said = long.ended();
        assert!(
            said.contains("interrupted before the work was done"),
            "{said}"
        );
    }
}

#[test]
fn processes_end_when_the_replay_is_killed() {
    let mut long = Long::start(&[]);
    long.process.kill().unwrap();
    long.process.wait().unwrap();
    until("both processes have ended and removed the ledger", || {
        private(long.runtime.path()).is_empty().then_some(())
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_ledger_of_other_programs_is_joined() {
    let runtime = TempDir::new().unwrap();
    let ledgers = TempDir::new().unwrap();
    let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0).unwrap();
    let ledger = Ledger::builder(&device, ledgers.path());
    let ledger = ledger.limit(64 * MIB).name("other").open().unwrap();
    let play = |memory: &str| {
        let mut command = replay(runtime.path(), [10, 10]);
        let command = command.args([memory, "--processes", "--speed=10", "--ledger"]);
        command.arg(ledgers.path()).output().unwrap()
    };
    let done = play("--memory=64MiB");
    assert!(done.status.success(), "{}", said(&done));
    let refused = play("--memory=128MiB");
    assert_eq!(refused.status.code(), Some(1));
    let complaint = said(&refused);
    assert!(complaint.contains("policy ledger: co"), "{complaint}");
    assert!(complaint.contains("64 MiB"), "{complaint}");
    assert_eq!(ledger.stats().processes.len(), 1);
    assert_eq!(private(runtime.path()), [] as [PathBuf; 0]);
}

#[test]
fn options_that_do_not_fit_are_wrong_usage() {
    for (arguments, named) in [
        (&["--processes", "--policy=static"][..], "--policy static"),
        (&["--processes", "--driver=host", "--expect"], "--expect"),
        (&["--processes", "--speed=0"], "--speed"),
        (&["--processes", "--speed=fast"], "--speed"),
        (&["--speed=2"], "--processes"),
        (&["--ledger=/tmp"], "--processes"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let output = command.arg("replay").args(arguments).output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        assert!(said.contains(named), "{arguments:?}: {said}");
    }
}

#[test]
fn the_part_of_one_process_is_no_command_for_people() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let output = command
        .arg("replay-one")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(
        line.contains("standard input is not that of a replay"),
        "{line}"
    );
    let help = Command::new(env!("CARGO_BIN_EXE_cuvmm"))
        .arg("--help")
        .output();
    assert!(
        !String::from_utf8(help.unwrap().stdout)
            .unwrap()
            .contains("replay-one")
    );
}
