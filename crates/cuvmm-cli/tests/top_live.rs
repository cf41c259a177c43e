//! `cuvmm top` in a terminal, beside two programs that share a ledger.

#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use support::program::{Program, run};
use support::pty::Pty;
use tempfile::TempDir;

#[test]
#[ignore = "a program of its own, started by other tests"]
fn example_processes() {
    run();
}

fn top(directory: &Path) -> Pty {
    let directory = directory.to_str().unwrap();
    let arguments = ["top", "--ledger", directory];
    Pty::start(env!("CARGO_BIN_EXE_cuvmm"), &arguments, 100, 30)
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_terminal_shows_processes_and_takes_keys() {
    let directory = TempDir::new().unwrap();
    let _chat = Program::start(directory.path(), "chat");
    let code = Program::start(directory.path(), "code");
    let mut top = top(directory.path());
    top.until_shown(&[
        "2 processes in 1 ledger",
        "stalled: some ",
        "+ chat",
        "+ code",
        "vcharged",
        "stalled some% full%",
    ]);
    top.until("the alternate screen", vt100::Screen::alternate_screen);
    top.press("?");
    top.until_shown(&["any key leaves the help", "growth    change of charged"]);
    top.press(" ");
    top.until_shown(&["q quit  ? help", "+ chat"]);
    top.press("s");
    top.until_shown(&["sorted by in use"]);
    top.press("SSSSr");
    top.until_shown(&["sorted by process, reversed"]);
    top.press("r");
    top.until("chat above code", |screen| {
        let shown = screen.contents();
        let at = |name| shown.find(name);
        at("+ chat").is_some_and(|chat| at("+ code").is_some_and(|code| chat < code))
    });
    // Up to the first, and down with an arrow's sequence of bytes, and up again.
    top.press("g\u{1b}[Bk\r");
    top.until_shown(&[
        "- chat",
        "stalled ",
        " in full; some ",
        "/cache",
        "/model",
        "pending free",
    ]);
    // Both fill more than half of the ledger, so each waits for the other again and again.
    top.until_shown(&["    waits ", "    asked 1: code, "]);
    top.press("t");
    top.until_shown(&["chat gave back"]);
    top.press("z");
    top.until_shown(&["put chat to sleep? y or n"]);
    top.press("n");
    top.until_shown(&["nothing was changed"]);
    top.press("zy");
    top.until_shown(&["chat sleeps"]);

    top.resize(60, 10);
    top.until("the narrow table", |screen| {
        let shown = screen.contents();
        shown.contains("vprocess") || shown.contains("processv") && !shown.contains("guar.")
    });
    top.resize(100, 30);
    kill_process(Pid::from_child(&code.0), Signal::STOP).unwrap();
    top.until_shown(&["silent"]);
    top.press("?");
    top.until_shown(&["any key leaves the help"]);
    top.press("qq");
    let (status, shown) = top.ended();
    assert_eq!(status.code(), Some(0), "{shown}");
    assert_eq!(shown.trim(), "");
}

#[test]
fn keys_and_signals_end_it_and_the_terminal_is_restored() {
    let directory = TempDir::new().unwrap();
    for key in ["q", "\u{1b}", "\u{3}"] {
        let mut top = top(directory.path());
        top.until_shown(&["there is no ledger in"]);
        top.press(key);
        let (status, shown) = top.ended();
        assert_eq!(status.code(), Some(0), "{key:?}: {shown}");
    }
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut top = top(directory.path());
        top.until_shown(&["there is no ledger in"]);
        top.signal(signal);
        let (status, shown) = top.ended();
        assert_eq!(status.signal(), Some(signal.as_raw()), "{status}: {shown}");
    }
}

#[test]
fn what_is_wrong_at_first_is_told_on_the_usual_screen() {
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join("x.cuvmm-ledger"), "not a ledger").unwrap();
    let (status, shown) = top(directory.path()).ended();
    assert_eq!(status.code(), Some(2), "{shown}");
    assert!(shown.contains("is not a usable ledger"), "{shown}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn what_goes_wrong_later_is_told_in_the_status_line() {
    let directory = TempDir::new().unwrap();
    let mut top = top(directory.path());
    top.until_shown(&["there is no ledger in"]);
    let file = directory.path().join("x.cuvmm-ledger");
    std::fs::write(&file, "not a ledger").unwrap();
    top.until_shown(&["is not a usable ledger"]);
    std::fs::remove_file(&file).unwrap();
    top.until("the end of the trouble", |screen| {
        !screen.contents().contains("is not a usable ledger")
    });
    top.press("q");
    assert_eq!(top.ended().0.code(), Some(0));
}
