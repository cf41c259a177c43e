//! `cuvmm demo`: two services and `top` from one command, which leaves nothing behind however it ends.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cuvmm::LedgerView;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

use super::support::pty::Pty;
use super::support::svg;

const MIB: u64 = 1 << 20;

const PICTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/top.svg");

fn demo(runtime: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    command.env("XDG_RUNTIME_DIR", runtime);
    // A ledger of other programs is not looked at.
    command.env("CUVMM_LEDGER", runtime.join("others"));
    command.args(["demo", "--driver=host"]);
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

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// The services of the only demo in `runtime`, when both hold blocks of their caches.
fn services(runtime: &Path) -> [Pid; 2] {
    until("both services work", || {
        let files = entries(&entries(runtime).pop()?);
        let is_ledger = |it: &&PathBuf| it.extension().is_some_and(|it| it == "cuvmm-ledger");
        let stats = LedgerView::open(files.iter().find(is_ledger)?)
            .ok()?
            .stats();
        let working = |name| {
            let mut all = stats.processes.iter();
            let one = all.find(|it| it.name == name && it.charged > 128 * MIB)?;
            Pid::from_raw(one.pid.cast_signed())
        };
        Some([working("chat")?, working("code")?])
    })
}

/// Checks that both services end and that nothing is left of the demo.
fn gone(runtime: &Path, services: [Pid; 2]) {
    until("nothing is left", || {
        let ended = services.iter().all(|pid| test_kill_process(*pid).is_err());
        (ended && entries(runtime).is_empty()).then_some(())
    });
}

/// A demo that goes on for a day.
fn long(runtime: &Path) -> Child {
    let mut command = demo(runtime);
    command.arg("--seconds=86400");
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn without_a_terminal_the_figures_are_printed_once() {
    let runtime = TempDir::new().unwrap();
    let output = demo(runtime.path()).arg("--seconds=1").output().unwrap();
    let (text, said) = (output.stdout, String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.starts_with("two services on the host driver ("),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    let text = String::from_utf8(text).unwrap();
    for part in [
        "of 1 GiB charged; figures in GiB",
        "| chat ",
        "| code ",
        "|   /cache ",
        "|   /weights ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(entries(runtime.path()), [] as [PathBuf; 0]);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_demo_lasts_as_long_as_it_is_told_in_any_unit() {
    let runtime = TempDir::new().unwrap();
    for time in ["--seconds=0.5", "--seconds=1s", "--seconds=200ms"] {
        let output = demo(runtime.path()).arg(time).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{time}: {output:?}");
    }
}

#[test]
fn only_drivers_that_two_processes_can_use_are_offered() {
    let output = Command::new(env!("CARGO_BIN_EXE_cuvmm"))
        .args(["demo", "--driver", "model"])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("[possible values: auto, cuda, host]"),
        "{said}"
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn an_empty_variable_names_no_folder() {
    let here = TempDir::new().unwrap();
    let mut command = demo(Path::new(""));
    let output = command.current_dir(here.path()).arg("--seconds=1").output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let ledger = Path::new(text.lines().next().unwrap());
    assert!(
        ledger.is_absolute() && !ledger.starts_with(here.path()),
        "{text}"
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_terminal_shows_top_until_a_key_or_a_signal_ends_it() {
    let runtime = TempDir::new().unwrap();
    let variable = format!("XDG_RUNTIME_DIR={}", runtime.path().display());
    let command = env!("CARGO_BIN_EXE_cuvmm");
    let start = || {
        let arguments = [&*variable, command, "demo", "--driver=host"];
        let mut demo = Pty::start("env", &arguments, 100, 30);
        demo.until_shown(&["2 processes in 1 ledger", "+ chat", "+ code", "cuvmm-demo-"]);
        (demo, services(runtime.path()))
    };
    // Ctrl-C is a key in a terminal whose modes `top` has set.
    for key in ["q", "\u{3}"] {
        let (mut demo, services) = start();
        demo.press(key);
        let (status, shown) = demo.ended();
        assert_eq!(status.code(), Some(0), "{shown}");
        assert!(shown.contains("two services on the host driver"), "{shown}");
        gone(runtime.path(), services);
    }
    let (demo, services) = start();
    demo.signal(Signal::TERM);
    assert_eq!(demo.ended().0.signal(), Some(Signal::TERM.as_raw()));
    gone(runtime.path(), services);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn services_end_with_the_command_also_when_it_is_killed() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let runtime = TempDir::new().unwrap();
        let child = long(runtime.path());
        let services = services(runtime.path());
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.stdout, b"");
        gone(runtime.path(), services);
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_folder_is_open_to_this_user_alone_and_other_files_stay() {
    let runtime = TempDir::new().unwrap();
    let mut child = long(runtime.path());
    let pids = services(runtime.path());
    let folder = entries(runtime.path()).pop().unwrap();
    assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700);
    let other = folder.join("other");
    std::fs::write(&other, "").unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    until("both services have ended", || {
        let ended = pids.iter().all(|pid| test_kill_process(*pid).is_err());
        ended.then_some(())
    });
    assert!(entries(&folder).contains(&other));
}

#[test]
fn the_command_of_a_service_is_not_for_people() {
    let help = Command::new(env!("CARGO_BIN_EXE_cuvmm"))
        .arg("--help")
        .output();
    let help = String::from_utf8(help.unwrap().stdout).unwrap();
    assert!(
        help.contains("  demo ") && !help.contains("demo-service"),
        "{help}"
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn demos_run_beside_each_other_and_beside_other_ledgers() {
    let runtime = TempDir::new().unwrap();
    let mut first = long(runtime.path());
    let pids = services(runtime.path());
    let output = demo(runtime.path()).arg("--seconds=1").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.matches(".cuvmm-ledger").count(), 1, "{text}");
    assert_eq!(services(runtime.path()), pids);
    first.kill().unwrap();
    first.wait().unwrap();
    gone(runtime.path(), pids);
}

#[test]
fn a_service_that_fails_is_named() {
    let runtime = TempDir::new().unwrap();
    let output = demo(runtime.path()).arg("--device=9").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("cuvmm: chat: "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(entries(runtime.path()), [] as [PathBuf; 0]);

    let child = long(runtime.path());
    let [_, code] = services(runtime.path());
    kill_process(code, Signal::KILL).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(1));
    assert_eq!(entries(runtime.path()), [] as [PathBuf; 0]);
}

/// Draws the picture of the README from a real run: `cargo test -p cuvmm-cli --test commands -- --ignored
/// draws_the_picture_of_the_readme`.
#[test]
#[ignore = "it writes docs/top.svg"]
fn draws_the_picture_of_the_readme() {
    let command = env!("CARGO_BIN_EXE_cuvmm");
    let arguments = ["XDG_RUNTIME_DIR=/tmp", command, "demo", "--driver=host"];
    let mut demo = Pty::start("env", &arguments, 96, 19);
    demo.until_shown(&["+ chat", "+ code"]);
    demo.press("g\r");
    demo.until_shown(&["- c", "/cache", "/weights", "last 5 min"]);
    // The history of the last minute, which the picture shows.
    let end = Instant::now() + Duration::from_secs(60);
    demo.until("a wait in the last picture", |screen| {
        Instant::now() > end && screen.contents().contains(" waits ")
    });
    std::fs::write(PICTURE, svg::picture(demo.screen())).unwrap();
    demo.press("q");
    demo.ended();
}

#[test]
fn the_picture_of_the_readme_is_small_and_shows_both_services() {
    let picture = std::fs::read_to_string(PICTURE).unwrap();
    assert!(picture.len() < 40 << 10, "{} bytes", picture.len());
    for part in [
        "2 processes in 1 ledger",
        "chat",
        "code",
        "waits ",
        "/cache",
    ] {
        assert!(picture.contains(part), "{part}");
    }
}
