//! Help, completions and man pages.

#![allow(clippy::unwrap_used)]

use assert_cmd::Command;

fn output(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.args(arguments).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

#[test]
fn every_command_has_examples() {
    for command in [
        &["info"][..],
        &["replay"],
        &["plan"],
        &["heap"],
        &["share", "publish"],
        &["share", "list"],
        &["share", "attach"],
        &["fake"],
        &["top"],
        &["ctl"],
        &["metrics"],
        &["record"],
        &["picture"],
        &["completions"],
    ] {
        let help = output(&[command, &["--help"]].concat());
        let (_, examples) = help.split_once("\nExamples:\n").unwrap();
        let line = format!("  cuvmm {}", command.join(" "));
        assert!(examples.contains(&line), "{help}");
        let short = output(&[command, &["-h"]].concat());
        assert!(short.contains("Examples:"), "{short}");
    }
}

#[test]
fn completions_name_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let text = output(&["completions", shell]);
        assert!(text.contains("replay"), "{shell}: {text}");
        assert!(text.contains("guarantee"), "{shell}: {text}");
        for hidden in ["replay-one", "demo-service", "conform"] {
            assert!(!text.contains(hidden), "{shell}: {hidden}: {text}");
        }
    }
}

#[test]
fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    output(&["man", folder.path().to_str().unwrap()]);
    for name in ["cuvmm.1", "cuvmm-replay.1", "cuvmm-share-attach.1"] {
        let page = std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(page.contains(".SH NAME"), "{name}");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    command.args(["man", "/nowhere"]).assert().code(1);
}
