//! The command line itself: words that are misspelled, and missing verbs.

#![allow(clippy::unwrap_used)]

use assert_cmd::Command;

#[test]
fn a_word_that_is_misspelled_is_answered_with_the_right_one() {
    let said = stderr(&["relpay"]);
    assert!(
        said.starts_with("cuvmm: unrecognized subcommand 'relpay' (tip: "),
        "{said}"
    );
    assert!(
        said.contains("'replay'") && said.lines().count() == 1,
        "{said}"
    );
    assert!(!said.contains("replay-one"), "a hidden command: {said}");
    assert!(!stderr(&["demo-servic"]).contains("demo-service"));
}

#[test]
fn a_command_without_its_verb_shows_its_own_help() {
    let ctl = stderr(&["ctl"]);
    assert!(ctl.contains("Usage: cuvmm ctl "), "{ctl}");
    for verb in ["limit", "guarantee", "priority", "trim", "sleep", "wake"] {
        assert!(ctl.contains(&format!("  {verb} ")), "{ctl}");
    }
    assert!(stderr(&["share"]).contains("Usage: cuvmm share "));
    assert!(stderr(&[]).contains("Usage: cuvmm "));
}

#[test]
fn wrong_usage_names_the_help_that_has_the_usage() {
    for (arguments, said) in [
        (
            &["abacus"][..],
            "unrecognized subcommand 'abacus': see `cuvmm --help`\n",
        ),
        (
            &["ctl", "limit", "chat"],
            "the following required arguments were not provided: <SIZE>: see `cuvmm ctl limit --help`\n",
        ),
        (&["top", "--twice"], ": see `cuvmm top --help`\n"),
    ] {
        let complaint = stderr(arguments);
        assert!(complaint.ends_with(said), "{complaint}");
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
    }
}

#[test]
fn a_full_disk_is_said_to_be_that_of_the_output() {
    for arguments in [&["--help"][..], &["completions", "bash"]] {
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let ended = command.args(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        let wanted = "cuvmm: cannot write to standard output: No space left on device";
        assert!(said.starts_with(wanted), "{arguments:?}: {said}");
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}");
    }
}

/// Runs the command with arguments that are wrong usage, and returns its complaint.
fn stderr(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.args(arguments).assert().code(2).stdout("");
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}
