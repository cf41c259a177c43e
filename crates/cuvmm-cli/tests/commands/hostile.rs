//! Names that would act on a terminal do not, whichever command prints them.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::Value;
use tempfile::TempDir;

const BIN: &str = env!("CARGO_BIN_EXE_cuvmm");

/// A colour, a title, the same by a C1 control, a line of its own, and text that runs the other way.
const EVIL: &str =
    "a\u{1b}[31m\u{1b}]0;t\u{7}\u{9b}2J\u{85}\ncuvmm: all is well\r\u{202e}b\u{2028}\u{7f}";

/// How that begins as it may be shown.
const SHOWN: &str =
    "a\\u{1b}[31m\\u{1b}]0;t\\u{7}\\u{9b}2J\\u{85}\\ncuvmm: all is well\\r\\u{202e}b";

fn acts(character: char) -> bool {
    let mark = matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (character.is_control() && character != '\n') || mark
}

/// Runs a command, checks its output, and returns standard output and standard error.
fn said(folder: &Path, arguments: &[&OsStr]) -> (String, String) {
    let output = Command::new(BIN)
        .env("XDG_RUNTIME_DIR", folder)
        .env("RUST_LOG", "trace")
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).unwrap();
        assert!(!text.contains(acts), "{arguments:?}: {text:?}");
        assert!(
            !text.contains("\ncuvmm: all is well"),
            "{arguments:?}: {text}"
        );
        text
    };
    (text(output.stdout), text(output.stderr))
}

fn run(folder: &Path, arguments: &[&str]) -> (String, String) {
    let arguments: Vec<_> = arguments.iter().map(OsStr::new).collect();
    said(folder, &arguments)
}

fn write(folder: &TempDir, name: &str, bytes: impl AsRef<[u8]>) -> String {
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Killed when this is dropped.
struct Publisher(Child);

impl Publisher {
    fn of(folder: &Path, file: &str) -> Self {
        let mut child = Command::new(BIN)
            .env("XDG_RUNTIME_DIR", folder)
            .args([
                "share",
                "publish",
                "--driver",
                "host",
                "--name",
                "toy\u{202e}",
                file,
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let publisher = Self(child);
        for line in lines {
            let line = line.unwrap();
            assert!(!line.contains(acts), "{line:?}");
            if line.contains("until Ctrl-C") {
                return publisher;
            }
        }
        panic!("it has ended");
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn names_of_tensors_and_notes_act_on_no_terminal() {
    let folder = TempDir::new().unwrap();
    let view = TensorView::new(Dtype::U8, vec![4], b"1234").unwrap();
    let tensors: BTreeMap<&str, TensorView<'_>> = [(EVIL, view)].into();
    let notes = [(EVIL.to_owned(), EVIL.to_owned())];
    let file = write(
        &folder,
        "toy.safetensors",
        serialize(tensors, Some(notes.into_iter().collect())).unwrap(),
    );
    let _publisher = Publisher::of(folder.path(), &file);

    let (list, _) = run(folder.path(), &["share", "list"]);
    assert!(list.contains("| toy\\u{202e} |"), "{list}");
    assert_eq!(list.lines().count(), 3, "{list}");
    let attach = [
        "share",
        "attach",
        "toy\u{202e}",
        "--driver",
        "host",
        "--dump",
        EVIL,
    ];
    let (text, _) = run(folder.path(), &attach);
    assert!(text.contains(&format!("\n{SHOWN}")), "a note: {text}");
    assert!(text.contains(&format!("| {SHOWN}")), "a tensor: {text}");
    let (object, _) = run(folder.path(), &[&attach[..], &["--json"]].concat());
    let object: Value = serde_json::from_str(&object).unwrap();
    assert_eq!(object["manifest"]["tensors"][0]["name"], EVIL);
    assert_eq!(object["manifest"]["metadata"][EVIL], EVIL);
    assert_eq!(object["name"], "toy\u{202e}");
    let wrong = [
        "share",
        "attach",
        "toy\u{202e}",
        "--driver",
        "host",
        "--dump",
        "\u{9b}2J",
    ];
    let (_, line) = run(folder.path(), &wrong);
    assert!(line.contains("\\u{9b}2J"), "{line}");
    let (_, line) = run(folder.path(), &["share", "attach", EVIL]);
    assert!(line.contains("\"toy\\u{202e}\""), "{line}");
}

#[test]
fn names_of_models_and_steps_act_on_no_terminal() {
    let folder = TempDir::new().unwrap();
    let trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n";
    let trace = write(&folder, "trace.csv", trace);
    let chart = folder.path().join("chart.svg");
    let model = format!("--model={EVIL}={trace}");
    let at = format!("--chart={}", chart.display());
    let replay = ["replay", "--verbose", "--driver", "model", &model, &at];
    let (text, _) = run(folder.path(), &replay);
    assert!(text.contains(&format!("1 request to {SHOWN}")), "{text}");
    let drawn = fs::read_to_string(&chart).unwrap();
    assert!(!drawn.contains(acts) && drawn.contains(SHOWN), "{drawn}");
    let (object, _) = run(folder.path(), &[&replay[..], &["--json"]].concat());
    let object: Value = serde_json::from_str(&object).unwrap();
    assert!(
        object["policies"]["static"]["models"][EVIL].is_object(),
        "{object}"
    );

    let name = serde_json::to_string(EVIL).unwrap();
    let step = format!("[[step]]\nreserve = {{ name = {name}, size = 1 }}\n");
    let plan = write(&folder, "plan.toml", step.replace('\u{7f}', "\\u007f"));
    let (text, line) = run(folder.path(), &["plan", "--verbose", &plan]);
    assert!(
        text.contains(&format!("reserve 1 B as {SHOWN}")),
        "{text}{line}"
    );
    run(folder.path(), &["plan", "--json", &plan]);
    let twice = format!("{step}{step}").replace('\u{7f}', "\\u007f");
    let (_, line) = run(
        folder.path(),
        &["plan", &write(&folder, "twice.toml", twice)],
    );
    assert!(line.contains("the name is in use already"), "{line}");
    assert_eq!(line.lines().count(), 1, "{line}");
}

#[test]
fn what_is_on_the_command_line_and_in_files_acts_on_no_terminal() {
    let folder = TempDir::new().unwrap();
    let evil = format!("/nowhere/{EVIL}");
    for arguments in [
        &["plan", &evil][..],
        &["share", "publish", &evil],
        &[
            "share", "publish", "--driver", "host", "--name", EVIL, "/nowhere",
        ],
        &["share", "list", "--socket", &evil],
        &[
            "share", "attach", "x", "--driver", "host", "--verify", &evil,
        ],
        &[
            "share", "attach", "x", "--driver", "host", "--socket", &evil,
        ],
        &["replay", &format!("--model={EVIL}={evil}")],
        &["replay", "--chart", &evil],
        &["heap", &evil],
        &["heap", "--churn", "small", "--chart", &evil],
        &["replay", "--driver", "model", "--gpu", EVIL],
        &["replay", "--driver", "model", "--costs", &evil],
        &["bench", EVIL],
        &[EVIL],
        &["plan", "--memory", EVIL],
        &["plan", &format!("--{EVIL}")],
    ] {
        let (out, line) = run(folder.path(), arguments);
        assert_eq!(out, "", "{arguments:?}");
        assert_eq!(line.lines().count(), 1, "{arguments:?}: {line}");
    }
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt as _;
        let odd = OsStr::from_bytes(b"/nowhere/\xff\x9b\x1b[2J");
        said(folder.path(), &[OsStr::new("plan"), odd]);
    }

    // A snapshot whose entries are text.
    let snapshot = format!(
        "{{\"device_traces\": {}}}",
        serde_json::to_string(EVIL).unwrap()
    );
    let snapshot = write(&folder, "snapshot.json", snapshot);
    let (_, line) = run(folder.path(), &["heap", &snapshot]);
    assert!(line.contains("this is no snapshot"), "{line}");

    let costs = format!("about {}\nreserve 0:1\n", EVIL.replace('\n', " "));
    let costs = write(&folder, "costs", costs);
    let plan = write(&folder, "plan.toml", "[[step]]\nwait = \"1 s\"\n");
    run(
        folder.path(),
        &["plan", &plan, "--costs", &costs, "--memory", "1GiB"],
    );
}
