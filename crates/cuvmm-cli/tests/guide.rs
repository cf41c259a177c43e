//! The commands of the guide `processes.md` and of the front page, taken from their texts and run as
//! these show them: programs under one limit, and a terminal beside them.

#![allow(clippy::panic, clippy::unwrap_used)]

mod support;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::program::{Program, run, script};
use support::pty::Pty;
use tempfile::TempDir;

const GUIDE: &str = include_str!("../../../docs/guides/processes.md");
const FRONT: &str = include_str!("../../../README.md");

/// The directory that the texts name.
const DIRECTORY: &str = "/tmp/gpu";

/// How long a command is tried again, and a figure waited for.
const PATIENCE: Duration = Duration::from_secs(90);

const MIB: u64 = 1 << 20;

#[test]
#[ignore = "a program of its own, started by another test"]
fn example_processes() {
    run();
}

/// A section of a text.
#[derive(Clone, Copy)]
struct Section(&'static str);

impl Section {
    fn of(text: &'static str, heading: &str) -> Self {
        let (_, rest) = text.split_once(heading).unwrap();
        Self(rest.split("\n## ").next().unwrap())
    }

    /// Returns the commands, in their order.
    fn commands(self) -> Vec<String> {
        let blocks = self.0.split("\n```sh\n").skip(1);
        let lines = blocks.flat_map(|it| it.split("\n```").next().unwrap().lines());
        let bare = lines.map(|line| line.split(" #").next().unwrap().trim().to_owned());
        bare.filter(|line| !line.is_empty()).collect()
    }

    /// Returns the words of the line that begins like this.
    fn line(self, begins: &str) -> Vec<&'static str> {
        let mut lines = self.0.lines();
        let line = lines.find(|line| line.starts_with(begins)).unwrap();
        line.split_whitespace().collect()
    }
}

fn has_line(text: &str, words: &[&str]) -> bool {
    text.lines()
        .any(|line| line.split_whitespace().eq(words.iter().copied()))
}

/// Makes a folder with the programs that the guide's commands name.
fn programs(folder: &Path) {
    symlink(env!("CARGO_BIN_EXE_cuvmm"), folder.join("cuvmm")).unwrap();
    // The example is built already, as a part of this test.
    let cargo = format!(
        "#!/bin/sh\nif [ \"$1 $2 $3 $4 $5\" != 'run --release --example processes --' ]; then\n\
         echo \"the test knows no cargo $*\" >&2\nexit 9\nfi\nshift 5\n{}\n",
        script()
    );
    let file = folder.join("cargo");
    std::fs::write(&file, cargo).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
}

/// A place for the commands: the folder of programs, and a directory instead of that of the texts.
struct Place {
    bin: TempDir,
    directory: TempDir,
}

impl Place {
    fn command(&self, command: &str) -> String {
        assert!(command.contains(DIRECTORY), "{command}");
        let directory = self.directory.path().to_str().unwrap();
        format!("exec {}", command.replace(DIRECTORY, directory))
    }

    fn path(&self) -> String {
        format!(
            "{}:{}",
            self.bin.path().display(),
            std::env::var("PATH").unwrap()
        )
    }

    fn shell(&self, command: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", &self.command(command)]);
        shell.env("PATH", self.path());
        shell
    }

    /// Starts a program that goes on.
    fn start(&self, command: &str) -> Program {
        let mut shell = self.shell(command);
        Program(shell.stdout(Stdio::null()).spawn().unwrap())
    }

    /// Runs a command to its end. A process may refuse while its memory is in use by others, so it
    /// is tried again.
    fn done(&self, command: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let output = self.shell(command).output().unwrap();
            let complaint = String::from_utf8(output.stderr).unwrap();
            match output.status.code() {
                Some(0) => return String::from_utf8(output.stdout).unwrap(),
                Some(1) if complaint.contains("refused") && Instant::now() < until => {
                    thread::sleep(Duration::from_millis(20));
                }
                code => panic!("{command}: {code:?}: {complaint}"),
            }
        }
    }

    fn live(&self, command: &str) -> Pty {
        let (path, command) = (format!("PATH={}", self.path()), self.command(command));
        Pty::start("env", &[&path, "sh", "-c", &command], 100, 30)
    }

    /// Waits until the figures satisfy a condition.
    fn until(&self, what: &str, is: impl Fn(&Value) -> bool) {
        let until = Instant::now() + PATIENCE;
        loop {
            let text = self.done(&format!("cuvmm top --json --ledger {DIRECTORY}"));
            let figures: Value = serde_json::from_str(&text).unwrap();
            if is(&figures["ledgers"][0]) {
                return;
            }
            assert!(Instant::now() < until, "{what} did not come: {text}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns a process by its name.
fn process<'a>(ledger: &'a Value, name: &str) -> &'a Value {
    let found = ledger["processes"].as_array().into_iter().flatten();
    let mut found = found.filter(|it| it["name"] == name);
    found.next().unwrap_or(&Value::Null)
}

/// Returns a tenant by its name.
fn tenant<'a>(ledger: &'a Value, of: &str, name: &str) -> &'a Value {
    let tenants = process(ledger, of)["report"]["pools"][0]["tenants"].as_array();
    let mut found = tenants
        .into_iter()
        .flatten()
        .filter(|it| it["name"] == name);
    found.next().unwrap_or(&Value::Null)
}

/// The commands of a section that were run, and where.
struct Done {
    place: Place,
    running: Vec<Program>,
    /// How many showed the figures live, and how many once.
    shown: (u32, u32),
    changes: Vec<String>,
}

/// Runs the commands of a section.
fn done(section: Section) -> Done {
    let place = Place {
        bin: TempDir::new().unwrap(),
        directory: TempDir::new().unwrap(),
    };
    programs(place.bin.path());
    let (mut running, mut live, mut once, mut changes) = (Vec::new(), 0, 0, Vec::new());
    for command in section.commands() {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["cargo", ..] => {
                let name = words[words.len() - 1].to_owned();
                running.push(place.start(&command));
                place.until(&command, |it| {
                    tenant(it, &name, "model")["in_use"] == 64 * MIB
                });
            }
            ["cuvmm", "top", "--once", ..] => {
                let text = place.done(&command);
                assert!(has_line(&text, &section.line("| process")), "{text}");
                for row in ["| chat ", "| code ", "|   /cache ", "|   /model "] {
                    assert!(text.contains(row), "{row}: {text}");
                }
                assert!(text.contains("of 1 GiB charged; figures in GiB"), "{text}");
                once += 1;
            }
            ["cuvmm", "top", ..] => {
                let (mut screen, columns) = (place.live(&command), section.line("process "));
                screen.until("the columns that the guide shows", |screen| {
                    has_line(&screen.contents(), &columns)
                });
                screen.until_shown(&["2 processes in 1 ledger, sorted by charged"]);
                screen.until_shown(&["+ chat", "+ code"]);
                screen.press("q");
                assert_eq!(screen.ended().0.code(), Some(0), "{command}");
                live += 1;
            }
            ["cuvmm", "ctl", verb, of, ..] => {
                let said = place.done(&command);
                let expected = match verb {
                    "trim" => said.starts_with("gave back "),
                    "limit" => said.is_empty() || said.contains("more than that is still held"),
                    _ => said.is_empty(),
                };
                assert!(expected, "{command}: {said}");
                changes.push(format!("{verb} {of}"));
            }
            _ => panic!("the test knows no command {command}"),
        }
    }
    Done {
        place,
        running,
        shown: (live, once),
        changes,
    }
}

#[test]
fn the_command_of_the_front_page_does_what_it_says() {
    let front = Section::of(FRONT, "\n### Two programs under one limit\n");
    let [command] = &front.commands()[..] else {
        panic!("the front page has one command");
    };
    let arguments = command.strip_prefix("cargo run --release -p cuvmm-cli -- ");
    let mut program = vec![env!("CARGO_BIN_EXE_cuvmm")];
    program.extend(arguments.unwrap().split_whitespace());
    let mut demo = Pty::start("env", &program, 100, 30);
    demo.until_shown(&["2 processes in 1 ledger", "+ chat", "+ code", "cuvmm-demo-"]);
    // The folder that the second command is given.
    let shown = demo.screen().contents();
    let folder = shown.lines().find(|line| line.contains("cuvmm-demo-"));
    let words: Vec<&str> = front
        .0
        .split('`')
        .filter(|it| it.starts_with("cuvmm ctl"))
        .collect();
    let [ctl] = words[..] else {
        panic!("the front page has one change: {words:?}");
    };
    let ctl = ctl.replace("FOLDER", folder.unwrap().trim());
    let mut ctl = Command::new(program[0])
        .args(ctl.split_whitespace().skip(1))
        .output();
    assert!(ctl.as_mut().unwrap().status.success(), "{ctl:?}");
    demo.until_shown(&["0.39"]);
    demo.press("q");
    assert_eq!(demo.ended().0.code(), Some(0));
}

#[test]
fn the_commands_of_the_guide_do_what_it_says() {
    let done = done(Section::of(GUIDE, "\n## Look and change"));
    assert_eq!((done.running.len(), done.shown), (2, (1, 1)));
    let (place, changes) = (&done.place, &done.changes);
    let expected = [
        "limit chat",
        "guarantee code/cache",
        "trim chat",
        "sleep code",
    ];
    assert_eq!(changes[..], expected);
    place.until("what was changed", |ledger| {
        process(ledger, "chat")["limit"] == 400 * MIB
            && tenant(ledger, "code", "cache")["guarantee"] == 128 * MIB
            && tenant(ledger, "code", "model")["asleep"] == 64 * MIB
    });
}
