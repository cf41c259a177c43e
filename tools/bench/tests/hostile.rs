//! Names from the command line and from files that would act on a terminal are shown as escapes.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;

/// A color, a title, a C1 control, a line break, and text that runs the other way.
const EVIL: &str =
    "a\u{1b}[31m\u{1b}]0;t\u{7}\u{9b}2J\u{85}\ncuvmm: all is well\r\u{202e}b\u{2028}\u{7f}";

fn acts(character: char) -> bool {
    let mark = matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (character.is_control() && character != '\n') || mark
}

/// Runs the command, checks what it prints, and returns standard output and standard error.
fn run(arguments: &[&str]) -> (String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_cuvmm-bench"))
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

#[test]
fn arguments_act_on_no_terminal() {
    let evil = format!("/nowhere/{EVIL}");
    for arguments in [
        &["conform", "--against", &evil][..],
        &["conform", "--driver", "model", "--filter", EVIL],
        &["run", "--only", EVIL],
        &["run", "--costs", &evil],
        &[EVIL],
    ] {
        let (out, line) = run(arguments);
        assert_eq!(out, "", "{arguments:?}");
        assert_eq!(line.lines().count(), 1, "{arguments:?}: {line}");
    }
}

#[test]
fn recorded_answers_act_on_no_terminal() {
    let folder = TempDir::new().unwrap();
    let recorded = json!({
        "gpu": EVIL, "driver_version": EVIL, "date": EVIL, "cuda_version": EVIL,
        "answers": { "granularity/minimum": EVIL, EVIL: EVIL },
    });
    let path = folder.path().join("recorded.json");
    fs::write(&path, recorded.to_string()).unwrap();
    let against = [
        "conform",
        "--driver",
        "model",
        "--filter",
        "granularity",
        "--against",
        path.to_str().unwrap(),
    ];
    run(&against);
    run(&[&against[..], &["--json", "--verbose"]].concat());
}
