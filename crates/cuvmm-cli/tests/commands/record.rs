//! `cuvmm record` on a ledger of this test's own process, and `cuvmm picture` of what it wrote.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use cuvmm::recording::{Recorder, Recording};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::ledger::{MIB, device, engine};
use crate::support::program::Program;

const BIN: &str = env!("CARGO_BIN_EXE_cuvmm");

/// Runs `cuvmm picture`. Returns the exit code, and what it printed and complained.
fn picture(file: &Path, more: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(BIN);
    let output = command
        .arg("picture")
        .arg(file)
        .args(more)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

fn read(file: &Path) -> Recording {
    Recording::read(&*fs::read(file).unwrap()).unwrap()
}

#[test]
fn a_ledger_is_recorded_until_the_signal_and_drawn() {
    let (device, folder) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, folder.path(), "engine");
    let path = |name: &str| folder.path().join(name);
    let out = path("memory.jsonl");
    let mut command = Command::new(BIN);
    let command = command.args(["record", "--interval", "10ms", "--ledger"]);
    let command = command.arg(engine.ledger.path()).arg("--out").arg(&out);
    let mut recorder = Program(command.stderr(Stdio::piped()).spawn().unwrap());
    let id = i32::try_from(recorder.0.id()).unwrap();
    let is_there = |bytes: u64| {
        // A recording can be read while it is written.
        let text = fs::read(&out).unwrap_or_default();
        let samples = Recording::read(&*text).map_or_else(|_| Vec::new(), |it| it.samples);
        let last = samples.last().and_then(|it| it.parts.first().cloned());
        last.is_some_and(|(_, held)| held >= bytes)
    };
    let wait_for = |bytes| {
        while !is_there(bytes) {
            std::thread::yield_now();
        }
    };
    wait_for(0);
    let block = engine.chat.block(40 * MIB).allocate().unwrap();
    wait_for(40 * MIB);
    kill_process(Pid::from_raw(id).unwrap(), Signal::INT).unwrap();
    let mut said = String::new();
    let mut complaints = BufReader::new(recorder.0.stderr.take().unwrap());
    complaints.read_line(&mut said).unwrap();
    assert!(
        said.contains(" samples in ") && said.contains("memory.jsonl"),
        "{said}"
    );
    assert!(recorder.0.wait().unwrap().success());
    drop(block);
    let found = read(&out);
    let sample = found.samples.last().unwrap();
    assert_eq!(
        (sample.limit, &*sample.source),
        (1 << 30, engine.ledger.path().to_str().unwrap())
    );
    let (name, held) = &sample.parts[0];
    assert_eq!(*name, format!("engine ({})", std::process::id()));
    assert!((40 * MIB..=1 << 30).contains(held), "{held}");

    let (svg, json) = (path("memory.svg"), path("memory.json"));
    let outputs = [
        "--svg",
        svg.to_str().unwrap(),
        "--perfetto",
        json.to_str().unwrap(),
    ];
    let (code, printed, complaint) = picture(&out, &outputs);
    assert_eq!((code, &*complaint), (0, ""));
    assert!(printed.contains(" samples, 1 band, at most "), "{printed}");
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("engine (") && svg.contains("MiB"));
    let trace: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert_eq!(events[0]["args"]["name"].as_str().unwrap(), sample.source);
    let counters: Vec<_> = events.iter().filter(|it| it["ph"] == "C").collect();
    assert_eq!(counters.len(), 3 * found.samples.len());
    let last = |name: &str| counters.iter().rfind(|it| it["name"] == name).unwrap();
    assert_eq!(last("memory")["args"][name].as_u64().unwrap(), *held);
    assert_eq!(last("limit")["args"]["bytes"], 1 << 30);
    assert_eq!(last("held")["ts"].as_u64().unwrap(), sample.t_us);
}

#[test]
fn pools_of_a_program_are_drawn_too() {
    let (device, folder) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, folder.path(), "engine");
    let out = folder.path().join("pool.jsonl");
    let mut recorder = Recorder::new(fs::File::create(&out).unwrap()).unwrap();
    let block = engine.chat.block(6 * MIB).allocate().unwrap();
    recorder.pool("gpu 0", &engine.pool).unwrap();
    drop(block);
    engine.pool.trim(0).unwrap();
    recorder.pool("gpu 0", &engine.pool).unwrap();
    recorder.finish().unwrap();
    let parts: Vec<_> = read(&out).samples.into_iter().map(|it| it.parts).collect();
    assert_eq!(parts[0][0], ("chat".to_owned(), 6 * MIB));
    let svg = folder.path().join("pool.svg");
    let (code, printed, complaint) = picture(&out, &["--svg", svg.to_str().unwrap()]);
    assert_eq!((code, &*complaint), (0, ""));
    assert_eq!(printed, "gpu 0: 2 samples, 1 band, at most 6 MiB held\n");
    assert!(fs::read_to_string(svg).unwrap().contains("chat"));
}

#[test]
fn what_cannot_be_recorded_or_drawn_is_wrong_usage() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    let out = path("out.jsonl");
    let mut command = Command::new(BIN);
    let command = command.args(["record", "--ledger"]).arg(folder.path());
    let output = command.arg("--out").arg(&out).output().unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{complaint}");
    assert!(complaint.contains("there is no ledger in"), "{complaint}");
    assert!(!out.exists(), "nothing is written");

    let file = path("memory.jsonl");
    let svg = path("memory.svg");
    let to_svg = ["--svg", svg.to_str().unwrap()];
    let header = "{\"recording\":1,\"begun_us\":0}\n";
    for (text, more, expected) in [
        (header, &[][..], "name an output"),
        (header, &to_svg, "no samples"),
        ("GIF89a", &to_svg, "no recording"),
        (&*format!("{header}{{}}\n"), &to_svg, "line 2 is no sample"),
    ] {
        fs::write(&file, text).unwrap();
        let (code, printed, complaint) = picture(&file, more);
        assert_eq!((code, &*printed), (2, ""), "{complaint}");
        assert!(
            complaint.contains(expected),
            "{complaint}\nlacks: {expected}"
        );
        assert!(!svg.exists(), "nothing is written");
    }
    let sample = "{\"t_us\":0,\"source\":\"a\",\"limit\":1,\"parts\":[]}\n";
    fs::write(&file, format!("{header}{sample}")).unwrap();
    let (code, _, complaint) = picture(&file, &["--svg", "memory.png"]);
    assert_eq!(code, 2, "{complaint}");
    assert!(complaint.contains("ends with .svg"), "{complaint}");
    assert_eq!(picture(&file, &to_svg).0, 0);

    // An output that is the recording, or the other one.
    let was = fs::read(&file).unwrap();
    let (own, both) = (file.to_str().unwrap(), ["--svg", to_svg[1], "--perfetto"]);
    let (code, _, complaint) = picture(&file, &[&both[..], &[own]].concat());
    assert_eq!(code, 2, "{complaint}");
    assert!(complaint.contains("this is the recording"), "{complaint}");
    let (code, _, complaint) = picture(&file, &[&both[..], &[to_svg[1]]].concat());
    assert_eq!(code, 2, "{complaint}");
    assert!(complaint.contains("a file each"), "{complaint}");
    assert_eq!(fs::read(&file).unwrap(), was);
}
