//! End-to-end tests of `cuvmm share`: real processes on the host driver.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command as Process, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command;
use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_setfl, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::Value;
use tempfile::TempDir;

const BIN: &str = env!("CARGO_BIN_EXE_cuvmm");

/// The folders of a user: one for sockets, one for files.
struct Home {
    runtime: TempDir,
    files: TempDir,
}

impl Home {
    fn new() -> Self {
        Self {
            runtime: TempDir::new().unwrap(),
            files: TempDir::new().unwrap(),
        }
    }

    fn folder(&self) -> PathBuf {
        self.runtime.path().join("cuvmm")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// Writes a file under a temporary name and renames it, which is how a file should be replaced.
    fn weights(&self, name: &str, seed: u8) -> PathBuf {
        let (path, beside) = (self.file(name), self.file("beside"));
        fs::write(&beside, weights(seed)).unwrap();
        fs::rename(beside, &path).unwrap();
        path
    }

    /// Creates a pipe without a writer. Opening it blocks forever, unless it is opened
    /// non-blocking.
    fn pipe(&self, name: &str) -> PathBuf {
        let path = self.file(name);
        let made = mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0);
        made.unwrap();
        path
    }

    fn share(&self, command: &str, arguments: &[&str]) -> Command {
        let mut process = Command::new(BIN);
        process
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .args(["share", command])
            .args(arguments)
            .timeout(Duration::from_secs(60));
        process
    }

    fn json(&self, command: &str, arguments: &[&str]) -> Value {
        let mut process = self.share(command, arguments);
        let assert = process.arg("--json").assert().success();
        serde_json::from_slice(&assert.get_output().stdout).unwrap()
    }

    /// Runs a command that fails with `code`, and returns its single line on standard error.
    fn complaint(&self, command: &str, arguments: &[&str], code: i32) -> String {
        let assert = self.share(command, arguments).assert().code(code);
        let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    }

    fn running(&self, command: &str, arguments: &[&str]) -> Running {
        let mut child = Process::new(BIN)
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .args(["share", command, "--driver", "host"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Running { child, lines }
    }

    /// Starts a keeper, and waits until it listens. Returns what it has printed before.
    fn keeping(&self) -> (Running, Vec<String>) {
        let mut child = Process::new(BIN)
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .args(["share", "keep"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut running = Running { child, lines };
        let mut said = vec![running.line()];
        while !said[said.len() - 1].contains("until Ctrl-C") {
            said.push(running.line());
        }
        (running, said)
    }

    fn publishing(&self, arguments: &[&str]) -> Running {
        let mut running = self.running("publish", arguments);
        running.line_with("until Ctrl-C");
        running
    }

    /// Returns the number of files in the folder of the sockets; 0 if there is no folder.
    fn left(&self) -> usize {
        fs::read_dir(self.folder()).map_or(0, Iterator::count)
    }
}

/// A background process that is killed on drop.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn line(&mut self) -> String {
        let mut line = String::new();
        if self.lines.read_line(&mut line).unwrap() == 0 {
            let mut stderr = self.child.stderr.take().unwrap();
            let said = std::io::read_to_string(&mut stderr).unwrap();
            panic!("it has ended: {said}");
        }
        line
    }

    /// Reads lines up to the first that contains `what`, and returns it.
    fn line_with(&mut self, what: &str) -> String {
        loop {
            let line = self.line();
            if line.contains(what) {
                return line;
            }
        }
    }

    fn json(&mut self) -> Value {
        serde_json::from_str(&self.line()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
    }

    fn code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a file of three tensors, together larger than a granule. The bytes depend on the seed.
fn weights(seed: u8) -> Vec<u8> {
    let large: Vec<u8> = (0..3 << 20)
        .map(|n: u32| (n >> 8) as u8 ^ n as u8 ^ seed)
        .collect();
    let small: Vec<u8> = (0..6u8)
        .flat_map(|n| f32::from(n + seed).to_le_bytes())
        .collect();
    let half = half_ones(5);
    let tensors: BTreeMap<&str, TensorView<'_>> = [
        (
            "embedding",
            TensorView::new(Dtype::U8, vec![3, 1 << 20], &large),
        ),
        ("norm", TensorView::new(Dtype::F32, vec![2, 3], &small)),
        ("scale", TensorView::new(Dtype::BF16, vec![5], &half)),
    ]
    .map(|(name, view)| (name, view.unwrap()))
    .into();
    let note = [("format".to_owned(), "pt".to_owned())];
    serialize(tensors, Some(note.into_iter().collect())).unwrap()
}

/// Returns `count` ones as BF16.
fn half_ones(count: usize) -> Vec<u8> {
    [0x80, 0x3f].repeat(count)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn what_one_process_publishes_others_list_and_read() {
    let home = Home::new();
    let file = home.weights("toy.safetensors", 3);
    assert_eq!(home.json("list", &[])["publishers"], Value::Array(vec![]));
    assert!(!home.folder().exists(), "looking makes no folder");

    let mut publisher = home.running("publish", &[text(&file)]);
    let told = publisher.line();
    assert!(
        told.starts_with("published \"toy\" version 1: 3.00 MiB of 3 tensors in 1 extent, "),
        "{told}"
    );
    assert!(told.ends_with(" GB/s\n"), "{told}");
    let pid = publisher.child.id();
    let socket = home.folder().join(format!("{pid}.sock"));
    assert_eq!(
        publisher.line(),
        format!("process {pid} at {}, until Ctrl-C\n", socket.display())
    );
    let mode = fs::metadata(home.folder()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);

    let listed = &home.json("list", &[])["publishers"][0];
    assert_eq!(listed["pid"], pid);
    assert_eq!(listed["socket"], text(&socket));
    let one = &listed["publications"][0];
    assert_eq!(
        (
            &one["name"],
            &one["version"],
            &one["bytes"],
            &one["tensors"]
        ),
        (&"toy".into(), &1.into(), &(4 << 20).into(), &3.into())
    );
    let table = home.share("list", &[]).assert().success();
    let table = String::from_utf8(table.get_output().stdout.clone()).unwrap();
    assert!(
        table.starts_with("| name | version | size MiB |"),
        "{table}"
    );
    assert!(table.contains(&format!("| {} |", text(&socket))), "{table}");

    let verify = ["toy", "--driver", "host", "--verify", text(&file)];
    let dump = ["--dump", "norm", "--count", "4"];
    let read = home.json("attach", &[&verify[..], &dump].concat());
    assert_eq!(read["verified"], true);
    assert_eq!(read["pid"], pid);
    assert_eq!(read["bytes"], 4 << 20);
    assert_eq!(read["device_free_before"], read["device_free_after"]);
    let (attach, first) = (&read["attach_us"], &read["first_byte_us"]);
    assert!(0.0 < attach.as_f64().unwrap() && attach.as_f64() <= first.as_f64());
    assert_eq!(
        read["dump"]["elements"],
        serde_json::json!(["3", "4", "5", "6"])
    );
    let manifest = &read["manifest"];
    assert_eq!(manifest["metadata"]["format"], "pt");
    let embedding = manifest["tensors"].as_array().unwrap().iter();
    let mut embedding = embedding.filter(|tensor| tensor["name"] == "embedding");
    assert_eq!(
        embedding.next().unwrap()["shape"],
        serde_json::json!([3, 1 << 20])
    );

    let arguments = [&verify[..], &["--dump", "scale"]].concat();
    let shown = home.share("attach", &arguments).assert().success();
    let shown = String::from_utf8(shown.get_output().stdout.clone()).unwrap();
    assert!(shown.contains("\nscale: 1, 1, 1, 1, 1\n"), "{shown}");
    assert!(shown.contains("\nformat: pt\n"), "{shown}");
    assert!(shown.contains("| norm      | F32  | [2, 3] "), "{shown}");
    let verified = format!("verified: all bytes are those of {}\n", text(&file));
    assert!(shown.ends_with(&verified), "{shown}");

    // A file of the same shape with different bytes; "norm" differs first.
    let other = home.weights("other.safetensors", 4);
    let verify = ["toy", "--driver", "host", "--verify", text(&other)];
    let said = home.complaint("attach", &verify, 1);
    assert!(
        said.contains("byte 2 differs, in tensor \"norm\""),
        "{said}"
    );

    publisher.signal(Signal::TERM);
    assert_eq!(publisher.code(), Some(0));
    assert_eq!(home.left(), 0, "socket and lock are gone");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_reader_gets_newer_versions_and_keeps_the_last_when_the_publisher_is_killed() {
    let home = Home::new();
    let file = home.weights("toy.safetensors", 1);
    let mut publisher = home.publishing(&["--follow", text(&file)]);
    let verify = ["toy", "--watch", "--json", "--verify", text(&file)];
    let mut reader = home.running("attach", &verify);
    assert_eq!(reader.json()["version"], 1);

    // An incomplete file is reported, and the version before stays published.
    let cut = weights(2);
    let beside = home.file("beside");
    fs::write(&beside, &cut[..cut.len() - 1]).unwrap();
    fs::rename(&beside, &file).unwrap();
    let mut said = String::new();
    let mut stderr = BufReader::new(publisher.child.stderr.take().unwrap());
    stderr.read_line(&mut said).unwrap();
    assert!(said.contains("the header describes"), "{said}");
    let listed = home.json("list", &[]);
    assert_eq!(listed["publishers"][0]["publications"][0]["version"], 1);

    home.weights("toy.safetensors", 2);
    let told = publisher.line();
    assert!(told.starts_with("published \"toy\" version 2: "), "{told}");
    let newer = reader.json();
    assert_eq!(
        (&newer["version"], &newer["verified"]),
        (&2.into(), &true.into())
    );

    publisher.child.kill().unwrap();
    publisher.code();
    let end = reader.json();
    assert_eq!(end["publisher"], "gone");
    assert_eq!(
        (&end["version"], &end["verified"], &end["bytes"]),
        (&2.into(), &true.into(), &(4 << 20).into())
    );
    assert_eq!(reader.code(), Some(0));

    assert_eq!(home.left(), 2, "socket and lock");
    let listed = home.json("list", &[]);
    assert_eq!(listed["publishers"], Value::Array(vec![]));
    let socket = home.folder().join(format!("{}.sock", publisher.child.id()));
    assert_eq!(listed["swept"], serde_json::json!([text(&socket)]));
    assert_eq!(home.left(), 0);
    let said = home.complaint("attach", &["toy", "--driver", "host"], 1);
    assert_eq!(said, "cuvmm: \"toy\" is not published: nothing is\n");
}

/// `list` takes paths from the user, and must not remove the user's files beside them.
#[test]
fn a_listing_removes_only_what_a_publisher_has_left() {
    let home = Home::new();
    let lock = home.file("Cargo.lock");
    fs::write(&lock, "").unwrap();
    let said = home.complaint("list", &["--socket", text(&home.file("Cargo"))], 1);
    assert!(said.contains("no process listens"), "{said}");
    assert!(lock.exists());

    // The socket of another program, at which no process listens any more.
    let other = home.file("other.sock");
    drop(std::os::unix::net::UnixListener::bind(&other).unwrap());
    home.complaint("list", &["--socket", text(&other)], 1);
    assert!(other.exists());
    assert_eq!(fs::read_dir(home.files.path()).unwrap().count(), 2);

    // A killed publisher, and a publisher of which only the lock is left.
    let file = home.weights("toy.safetensors", 1);
    let mut killed = home.publishing(&[text(&file)]);
    killed.child.kill().unwrap();
    killed.code();
    let orphan = home.folder().join("1.sock.cuvmm-lock");
    fs::write(&orphan, "").unwrap();
    fs::set_permissions(&orphan, fs::Permissions::from_mode(0o600)).unwrap();
    for foreign in ["2.sock.lock", "3.sock.cuvmm-lock", "notes"] {
        fs::write(home.folder().join(foreign), "mine").unwrap();
    }
    let listed = home.json("list", &[]);
    assert_eq!(listed["swept"].as_array().unwrap().len(), 2, "{listed}");
    assert_eq!(listed["sockets_not_asked"], 0);
    assert_eq!(home.left(), 3, "what is no publisher's stays");
}

#[test]
fn a_name_that_two_publish_is_chosen_by_its_socket() {
    let home = Home::new();
    let (one, other) = (
        home.weights("toy.safetensors", 1),
        home.weights("small.safetensors", 2),
    );
    let first = home.publishing(&[text(&one), text(&other)]);
    let socket = home.file("here");
    let second = home.publishing(&[text(&other), "--name", "toy", "--socket", text(&socket)]);
    // A publisher with a socket elsewhere is found by the socket, not by the name.
    let read = home.json("attach", &["toy", "--driver", "host"]);
    assert_eq!(read["pid"], first.child.id());
    let at = ["toy", "--driver", "host", "--socket", text(&socket)];
    let read = home.json("attach", &at);
    assert_eq!(read["pid"], second.child.id());
    let listed = home.json("list", &["--socket", text(&socket)]);
    assert_eq!(listed["publishers"].as_array().unwrap().len(), 1);

    let third = home.publishing(&[text(&one)]);
    let said = home.complaint("attach", &["toy", "--driver", "host"], 1);
    for expected in [
        format!("process {} at ", first.child.id()),
        format!("process {} at ", third.child.id()),
        "--socket".to_owned(),
    ] {
        assert!(said.contains(&expected), "{said}");
    }
    let said = home.complaint("attach", &["large", "--driver", "host"], 1);
    assert!(
        said.contains("\"large\" is not published: published are ") && said.contains("\"small\""),
        "{said}"
    );

    // The signal ends only this publisher.
    let mut second = second;
    second.signal(Signal::INT);
    assert_eq!(second.code(), Some(0));
    assert!(!socket.exists());
    let said = home.complaint("list", &["--socket", text(&socket)], 1);
    assert!(said.contains("no process listens"), "{said}");
}

#[test]
fn what_cannot_be_meant_is_told_in_one_line() {
    let home = Home::new();
    let file = home.weights("toy.safetensors", 1);
    let (file, nothing) = (text(&file), home.file("empty.safetensors"));
    let bytes: BTreeMap<String, TensorView<'_>> = BTreeMap::new();
    fs::write(&nothing, serialize(bytes, None).unwrap()).unwrap();
    let noise = home.file("noise.safetensors");
    fs::write(&noise, [0xff; 100]).unwrap();
    let folder = home.files.path();
    let pipe = home.pipe("pipe.safetensors");
    for (command, arguments, code, expected) in [
        (
            "publish",
            &[file, "--driver", "model"][..],
            2,
            "no memory to share",
        ),
        ("publish", &[file, file], 2, "both named \"toy\""),
        ("publish", &[file, text(&noise), "--name", "x"], 2, "--name"),
        ("publish", &[], 2, "<FILE>"),
        (
            "publish",
            &["--driver", "host", file, text(&noise)],
            2,
            "no safetensors file",
        ),
        (
            "publish",
            &["--driver", "host", file, text(&nothing)],
            2,
            "no bytes",
        ),
        ("publish", &[file, text(folder)], 2, "this is a folder"),
        ("publish", &["/nowhere/x"], 2, "/nowhere/x: No such file"),
        ("publish", &["/dev/zero"], 2, "/dev/zero: this is a device"),
        ("publish", &[file, text(&pipe)], 2, "this is a pipe"),
        (
            "publish",
            &["--driver", "host", file, "--name", "a\nb"],
            2,
            "without control characters",
        ),
        // The name is checked before the file.
        ("publish", &["/nowhere/x", "--name", ""], 2, "--name \"\""),
        (
            "publish",
            &["--driver", "host", file, "--socket", "/nowhere/x"],
            1,
            "/nowhere/x: ",
        ),
        (
            "attach",
            &["toy", "--driver", "host", "--verify", "/nowhere/x"],
            2,
            "/nowhere/x: No such file",
        ),
        ("list", &["--socket", "/nowhere/x"], 1, "at /nowhere/x"),
        (
            "publish",
            &["--driver", "host", file, "--socket", file],
            1,
            "is not a socket",
        ),
        ("attach", &["toy", "--count", "3"], 2, "--dump"),
        (
            "attach",
            &["toy", "--driver", "model"],
            2,
            "no memory to share",
        ),
        ("list", &["--socket", file], 1, "is not a socket"),
    ] {
        let said = home.complaint(command, arguments, code);
        assert!(said.starts_with("cuvmm: "), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    assert_eq!(home.left(), 0, "what failed to publish leaves no socket");
    assert!(fs::read(file).is_ok(), "what is no socket stays");
}

#[test]
fn a_folder_that_others_may_write_to_is_not_trusted() {
    let home = Home::new();
    let file = home.weights("toy.safetensors", 1);
    fs::DirBuilder::new()
        .mode(0o700)
        .create(home.folder())
        .unwrap();
    fs::set_permissions(home.folder(), fs::Permissions::from_mode(0o770)).unwrap();
    for (command, arguments) in [
        ("list", &[][..]),
        ("attach", &["toy", "--driver", "host"]),
        ("publish", &["--driver", "host", text(&file)]),
    ] {
        let said = home.complaint(command, arguments, 1);
        assert!(said.contains("has mode 0770"), "{said}");
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_publisher_that_does_not_answer_is_told() {
    let home = Home::new();
    let file = home.weights("toy.safetensors", 1);
    let stuck = home.publishing(&[text(&file)]);
    let other = home.publishing(&[text(&file), "--name", "other"]);
    stuck.signal(Signal::STOP);
    let begun = Instant::now();
    let mut list = home.share("list", &["--json"]);
    let assert = list.assert().code(1);
    assert!(begun.elapsed() < Duration::from_secs(30));
    let found: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(found["publishers"][0]["pid"], other.child.id());
    assert!(
        found["silent"][0]["error"].as_str().unwrap().contains("2s"),
        "{found}"
    );
    // Other publishers can still be attached.
    let read = home.json("attach", &["other", "--driver", "host"]);
    assert_eq!(read["version"], 1);
    stuck.signal(Signal::CONT);
}

#[test]
fn a_file_that_a_pipe_takes_the_place_of_stops_no_signal() {
    let home = Home::new();
    let file = home.weights("toy.safetensors", 1);
    let mut publisher = home.publishing(&["--follow", text(&file)]);
    fs::rename(home.pipe("beside"), &file).unwrap();
    let mut said = String::new();
    let mut stderr = BufReader::new(publisher.child.stderr.take().unwrap());
    stderr.read_line(&mut said).unwrap();
    assert!(said.contains("toy.safetensors: this is a pipe"), "{said}");
    publisher.signal(Signal::TERM);
    assert_eq!(publisher.code(), Some(0));
    assert_eq!(home.left(), 0);
}

/// The publisher is stuck, because it prints to a full pipe that has no reader.
#[test]
fn a_second_signal_ends_a_publisher_that_is_stuck() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let home = Home::new();
        let file = home.weights("toy.safetensors", 1);
        let (_unread, full) = std::io::pipe().unwrap();
        fcntl_setfl(&full, OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&full, &[0; 4096]).is_ok() {}
        fcntl_setfl(&full, OFlags::empty()).unwrap();
        let mut child = Process::new(BIN)
            .env("XDG_RUNTIME_DIR", home.runtime.path())
            .args(["share", "publish", "--driver", "host", text(&file)])
            .stdout(full)
            .spawn()
            .unwrap();
        let patience = Instant::now() + Duration::from_secs(60);
        let wait = || {
            assert!(Instant::now() < patience, "it did not end by {signal:?}");
            std::thread::sleep(Duration::from_millis(5));
        };
        // After publishing, the publisher prints without checking for signals in between.
        while home.json("list", &[])["publishers"][0]["publications"][0].is_null() {
            wait();
        }
        // Two signals may be delivered as one, so signals are sent until the process ends.
        let status = loop {
            kill_process(Pid::from_child(&child), signal).unwrap();
            wait();
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
        };
        assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn what_a_killed_publisher_had_given_to_a_keeper_is_found_by_its_name() {
    let home = Home::new();
    let file = home.weights("gpt2.safetensors", 1);
    let early = home.complaint("publish", &["--keep", text(&file), "--driver", "host"], 1);
    assert!(early.contains("keeper.sock: `cuvmm share keep`"), "{early}");
    assert_eq!(home.left(), 0);
    let (keeper, _) = home.keeping();
    let publisher = home.publishing(&["--keep", text(&file)]);
    let attach = ["gpt2", "--driver", "host", "--verify", text(&file)];
    let pid = |attached: &Value| attached["pid"].as_u64().unwrap();
    // While it runs the publisher serves.
    let attached = home.json("attach", &attach);
    assert_eq!(pid(&attached), u64::from(publisher.child.id()));
    let listed = home.json("list", &[]);
    let keeping = |listed: &Value| -> Vec<String> {
        let publishers = listed["publishers"].as_array().unwrap().iter();
        let all = publishers.flat_map(|it| it["publications"].as_array().unwrap());
        let mut all: Vec<_> = all.map(|it| it["keeping"].to_string()).collect();
        all.sort();
        all
    };
    assert_eq!(keeping(&listed), ["\"kept\"", "\"wanted\""]);
    drop(keeper);
    // A keeper that is started again takes it from the publisher.
    let (keeper, said) = home.keeping();
    assert!(said[0].contains("took \"gpt2\" version 1"), "{said:?}");
    drop(publisher);
    assert_eq!(
        pid(&home.json("attach", &attach)),
        u64::from(keeper.child.id())
    );
    assert_eq!(keeping(&home.json("list", &[])), ["\"kept\""]);
    let shown = home.share("list", &[]).assert().success();
    let shown = String::from_utf8(shown.get_output().stdout.clone()).unwrap();
    assert!(
        shown.contains(&format!("{} keeps it", keeper.child.id())),
        "{shown}"
    );
    // The next publisher replaces it.
    let next = home.weights("gpt2.safetensors", 2);
    drop(home.publishing(&["--keep", text(&next)]));
    assert_eq!(
        pid(&home.json("attach", &attach)),
        u64::from(keeper.child.id())
    );
    home.share("drop", &["gpt2"])
        .assert()
        .success()
        .stdout("dropped \"gpt2\"\n");
    let refused = home.complaint("drop", &["gpt2"], 1);
    assert!(refused.contains("is not kept"), "{refused}");
    let refused = home.complaint("attach", &["gpt2", "--driver", "host"], 1);
    assert!(refused.contains("not published"), "{refused}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_version_that_a_keeper_missed_is_given_to_the_next_one() {
    let home = Home::new();
    let file = home.weights("toy.safetensors", 1);
    let (keeper, _) = home.keeping();
    let mut publisher = home.publishing(&["--keep", "--follow", text(&file)]);
    drop(keeper);
    home.weights("toy.safetensors", 2);
    let mut said = String::new();
    let mut stderr = BufReader::new(publisher.child.stderr.take().unwrap());
    stderr.read_line(&mut said).unwrap();
    assert!(said.contains("published, and not kept"), "{said}");
    // It is not the version that the keeper before had, so this one does not ask for it.
    let (keeper, _) = home.keeping();
    publisher.line_with("kept \"toy\"");
    drop(publisher);
    let attach = ["toy", "--driver", "host", "--verify", text(&file)];
    let attached = home.json("attach", &attach);
    assert_eq!(attached["pid"], u64::from(keeper.child.id()));
    assert_eq!(attached["version"], 2);
}
