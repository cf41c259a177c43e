//! `cuvmm-bench nccl` where there is no GPU or no NCCL. What it measures is tested beside it, with something
//! that plays NCCL.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;

/// The one line on standard error.
fn complaint(arguments: &[&str], multicast: Option<&str>, code: i32) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm-bench"));
    command.arg("nccl").args(arguments);
    command.env_remove("NCCL_NVLS_ENABLE");
    if let Some(value) = multicast {
        command.env("NCCL_NVLS_ENABLE", value);
    }
    let assert = command.assert().code(code);
    let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn a_library_that_is_not_there_is_named() {
    let text = complaint(&["--nccl", "/nowhere/libnccl.so.2"], None, 1);
    assert!(text.contains("no NCCL to load"), "{text}");
    assert!(text.contains("/nowhere/libnccl.so.2"), "{text}");
}

#[test]
fn a_library_that_is_not_nccl_is_refused() {
    let text = complaint(&["--nccl", "libc.so.6"], None, 1);
    assert!(
        text.contains("libc.so.6: ncclGetVersion is missing"),
        "{text}"
    );
    assert!(text.contains("since 2.19.0"), "{text}");
}

#[test]
fn multicast_is_not_used() {
    let text = complaint(&["--nccl", "/nowhere/x"], Some("1"), 1);
    assert!(text.contains("NCCL_NVLS_ENABLE is 1"), "{text}");
    let text = complaint(&["--nccl", "/nowhere/x"], Some("0"), 1);
    assert!(text.contains("no NCCL to load"), "{text}");
}

#[test]
fn options_that_cannot_be_meant_are_usage() {
    for wrong in [
        ["--devices", "1"],
        ["--devices", "9"],
        ["--sizes", "0"],
        ["--rounds", "0"],
    ] {
        complaint(&wrong, None, 2);
    }
    let text = complaint(&["--sizes", "1MiB,1022"], None, 2);
    assert!(text.contains("1022"), "{text}");
}
