//! `cuvmm fake`: programs in C on the stand-in, their exit status, signals and reports.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Output};

use crate::programs::{Programs, said};

/// Runs the command with options, before the program and its arguments.
fn fake(programs: &Programs, options: &[&str], program: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    command
        .args(["fake", "--library"])
        .arg(programs.path("libcuda.so.1"))
        .args(options)
        .arg("--")
        .args(program)
        .current_dir(programs.path(""))
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .expect("the command can be started")
}

fn shown(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn options_are_settings_of_the_library() {
    let programs = Programs::new();
    programs.compile("settings");
    let output = fake(
        &programs,
        &[
            "--gpus",
            "2",
            "--memory",
            "80GiB",
            "--fail",
            "cuMemAlloc:2",
            "--fail",
            "cuMemAlloc:3",
        ],
        &["./settings"],
    );
    assert_eq!(
        shown(&output),
        "init 0 version 13000 devices 2 name fakecuda bytes 85899345920 alloc 0 2 2 0 pool 0"
    );
    assert!(said(&output).is_empty());
    let output = fake(
        &programs,
        &[
            "--gpu", "h200", "--memory", "1GiB", "--cuda", "11.0", "--manner", "strict", "--late",
        ],
        &["./settings"],
    );
    let wanted = "version 11000 devices 1 name NVIDIA H200 bytes 1073741824 ";
    assert!(shown(&output).contains(wanted), "{}", shown(&output));
}

#[test]
fn a_wrong_setting_is_said_before_the_program_starts() {
    let programs = Programs::new();
    std::fs::write(programs.path("wrong.toml"), "device = 2\n").unwrap();
    std::fs::write(programs.path("broken.toml"), "devices = \n").unwrap();
    let report = programs.path("report.%p");
    let report = report.to_str().unwrap();
    let files = || std::fs::read_dir(programs.path("")).unwrap().count();
    let before = files();
    for (options, message) in [
        (
            &["--gpu", "abacus"][..],
            "cuvmm: --gpu abacus: it must be a GPU whose answers are recorded: h100, h200",
        ),
        (
            &["--cuda", "9.0"],
            "cuvmm: --cuda 9.0: it must be a CUDA version like 12.2",
        ),
        (
            &["--latency", "slow"],
            "cuvmm: --latency slow: it must be none, the name of a GPU",
        ),
        (
            &["--fail", "cuMemAllocate:1", "--report", report],
            "cuvmm: --fail cuMemAllocate:1: cuMemAllocate is no function of this library",
        ),
        (
            &["--config", "wrong.toml"],
            "wrong.toml: device=2: there is no such setting",
        ),
        (
            &["--config", "broken.toml"],
            "broken.toml: TOML parse error at line 1",
        ),
    ] {
        let output = fake(&programs, options, &["sh", "-c", "echo started"]);
        let said = said(&output);
        assert!(said.contains(message), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(
            (output.status.code(), &*shown(&output)),
            (Some(2), ""),
            "{said}"
        );
    }
    // The check makes no calls, and reports nothing.
    let right = [
        "--fail",
        "cuInit:1",
        "--report",
        report,
        "--latency",
        "h200",
    ];
    let output = fake(&programs, &right, &["sh", "-c", "echo started"]);
    assert_eq!(shown(&output), "started\n", "{}", said(&output));
    assert_eq!((files(), &*said(&output)), (before, ""));
}

#[test]
fn a_file_of_settings_is_found_wherever_the_program_goes() {
    let programs = Programs::new();
    programs.compile("settings");
    std::fs::write(programs.path("two.toml"), "devices = 2\n").unwrap();
    let settings = programs.path("settings");
    let script = format!("cd / && {}", settings.display());
    let output = fake(&programs, &["--config", "two.toml"], &["sh", "-c", &script]);
    assert!(shown(&output).contains(" devices 2 "), "{}", said(&output));
    let output = fake(&programs, &["--config", "none.toml"], &["./settings"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(shown(&output), "");
    let wanted = "cuvmm: cannot read none.toml: No such file or directory";
    assert!(said(&output).starts_with(wanted), "{}", said(&output));
}

#[test]
fn the_report_goes_to_standard_error_or_to_a_file() {
    let programs = Programs::new();
    programs.compile("faulty");
    let output = fake(&programs, &["--report"], &["./faulty", "physical"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(
        said(&output).contains("leaked: physical 0x"),
        "{}",
        said(&output)
    );
    let path = programs.path("report.txt");
    std::fs::write(&path, "of an earlier run").unwrap();
    let output = fake(
        &programs,
        &[
            "--report",
            "report.txt",
            "--json",
            "--leaks",
            "all",
            "--exit-code",
            "3",
        ],
        &["./faulty", "stream", "keeps-context"],
    );
    assert_eq!(output.status.code(), Some(3));
    assert!(said(&output).is_empty(), "{}", said(&output));
    let report = std::fs::read_to_string(&path).unwrap();
    assert!(
        report.starts_with('{') && report.contains("\"object\":\"stream\""),
        "{report}"
    );
    let output = fake(&programs, &["--report", "/no/folder/x"], &["./faulty"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        said(&output).starts_with("cuvmm: cannot write /no/folder/x"),
        "{}",
        said(&output)
    );
}

#[test]
fn status_and_signals_are_those_of_the_program() {
    use std::os::unix::process::ExitStatusExt as _;

    let programs = Programs::new();
    let status = |words: &[&str]| fake(&programs, &[], words).status;
    assert_eq!(status(&["sh", "-c", "exit 42"]).code(), Some(42));
    assert_eq!(status(&["sh", "-c", "kill -TERM $$"]).signal(), Some(15));
    assert_eq!(status(&["/no/such/program"]).code(), Some(127));
    assert_eq!(status(&["/"]).code(), Some(126));
    // The program takes the place of the command: it has its process number.
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let child = command
        .args(["fake", "--library"])
        .arg(programs.path("libcuda.so.1"))
        .args(["--", "sh", "-c", "echo $$"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id().to_string();
    assert_eq!(shown(&child.wait_with_output().unwrap()).trim(), pid);
}

#[test]
fn the_library_is_found_and_is_no_other() {
    let programs = Programs::new();
    programs.compile("settings");
    // Under the name that cargo gives it, a link has the loader's name.
    let built = programs.path("libfakecuda.so");
    std::fs::copy(programs.path("libcuda.so.1"), &built).unwrap();
    for _ in 0..2 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let output = command
            .args(["fake", "--", "./settings"])
            .env("FAKECUDA_LIBRARY", &built)
            .current_dir(programs.path(""))
            .output()
            .unwrap();
        assert!(shown(&output).starts_with("init 0 "), "{}", said(&output));
        assert!(programs.path("fakecuda/libcuda.so.1").is_symlink());
    }
    for (file, message) in [
        ("settings", "is not fakecuda, but another library"),
        ("absent.so", "cannot read "),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let output = command
            .args(["fake", "--library", file, "--", "true"])
            .current_dir(programs.path(""))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(said(&output).contains(message), "{}", said(&output));
    }
}
