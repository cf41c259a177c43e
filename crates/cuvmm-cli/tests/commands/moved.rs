//! The former names of `cuvmm-bench` commands print the new program.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;

#[test]
fn a_command_that_has_moved_is_named_with_its_new_program() {
    for (arguments, new) in [
        (&["bench"][..], "cuvmm-bench run"),
        (&["bench", "--driver", "cuda", "--json"], "cuvmm-bench run"),
        (&["bench", "--help"], "cuvmm-bench run"),
        (&["conform", "--against", "x.json"], "cuvmm-bench conform"),
        (&["nccl", "--devices", "2"], "cuvmm-bench nccl"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let assert = command.args(arguments).assert().code(2);
        let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{arguments:?}: {text}");
        assert!(text.contains(&format!("`{new}`")), "{arguments:?}: {text}");
        assert!(text.contains("cargo run"), "{arguments:?}: {text}");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let help = command.arg("--help").assert().success();
    let help = String::from_utf8(help.get_output().stdout.clone()).unwrap();
    assert!(!help.contains("conform"), "{help}");
}
