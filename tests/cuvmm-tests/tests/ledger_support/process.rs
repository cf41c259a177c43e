//! Processes that use one ledger and one device: this test program, run again. The test sends each
//! of them commands and reads their answers, a line each.
//!
//! A process ends when the test's end of its standard input is closed, and is killed when the
//! thread that started it ends.
//!
//! `unsafe` in this file: releasing another process's locks.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use cuvmm::LedgerView;
use cuvmm::ledger::FILE_ENDING;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitOptions, kill_process, pidfd_getfd, pidfd_open,
    waitpid,
};

use super::device::Device;
use super::own_process;
use crate::common::G;

/// The environment variable with the test's process id, the ledger's limit in granules, the driver,
/// the name of the process, and the directory of the ledger and the device.
pub const PART: &str = "CUVMM_LEDGER_PROCESS";

/// The driver of processes on a GPU; others use the host driver.
pub const ON_GPU: &str = "cuda";

/// The beginning of each answer, which tells it from what the test runner prints.
pub const ANSWER: &str = "> ";

/// Far longer than anything here takes, also on a busy machine.
pub const LONG: Duration = Duration::from_secs(120);

/// A device and a directory for a ledger.
#[derive(Debug)]
pub struct Place {
    pub device: Device,
    dir: tempfile::TempDir,
    /// Granules of the ledger.
    pub limit: u64,
    /// The test that plays a process, and the driver that it uses.
    part: &'static str,
    driver: &'static str,
}

impl Place {
    /// Starts a device with `capacity` granules, for processes on the host driver whose ledger has
    /// `limit` granules and which the test `process` plays.
    pub fn new(limit: u64, capacity: u64) -> Self {
        Self::of("process", "host", (limit, capacity))
    }

    /// Starts a device for processes that another test plays with another driver.
    pub fn of(part: &'static str, driver: &'static str, (limit, capacity): (u64, u64)) -> Self {
        let memory = Path::new("/dev/shm");
        let dir = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        Self {
            device: Device::start(&dir.path().join("device"), capacity * G),
            dir,
            limit,
            part,
            driver,
        }
    }

    /// Starts a process.
    pub fn start(&self, name: &str) -> Process {
        let (test, limit, dir) = (std::process::id(), self.limit, self.dir.path().display());
        let driver = self.driver;
        let child = own_process::only(self.part)
            .arg("--test-threads=1")
            .env(PART, format!("{test}:{limit}:{driver}:{name}:{dir}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.unwrap();
        let (send, answers) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        // It ends when the process and its forked children have ended.
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once(ANSWER) {
                    let _ = send.send(answer.to_owned());
                }
            }
        });
        Process {
            input: child.stdin.take(),
            child,
            name: name.to_owned(),
            answers,
            joined: false,
        }
    }

    /// Starts a process and waits until it has opened the ledger.
    pub fn join(&self, name: &str) -> Process {
        let mut process = self.start(name);
        process.await_joined();
        process
    }

    /// Opens the ledger to look at it. There must be one.
    pub fn view(&self) -> LedgerView {
        LedgerView::open(self.ledger_file()).unwrap()
    }

    fn ledger_file(&self) -> PathBuf {
        let is_ledger = |path: &PathBuf| path.to_string_lossy().ends_with(FILE_ENDING);
        self.files().into_iter().find(is_ledger).unwrap()
    }

    /// Takes the file of the ledger away for a time, or shortens it by a byte of its last page.
    /// Processes that would open the ledger meanwhile are refused.
    pub fn without_ledger(&self, away: bool, time: Duration) {
        let path = self.ledger_file();
        if away {
            // A folder is in its place, so that no process makes another one.
            let other = self.dir.path().join("away");
            std::fs::create_dir(&other).unwrap();
            let exchange = || renameat_with(CWD, &path, CWD, &other, RenameFlags::EXCHANGE);
            exchange().unwrap();
            std::thread::sleep(time);
            exchange().unwrap();
            std::fs::remove_dir(&other).unwrap();
        } else {
            let file = File::options().write(true).open(path).unwrap();
            let size = file.metadata().unwrap().len();
            file.set_len(size - 1).unwrap();
            std::thread::sleep(time);
            file.set_len(size).unwrap();
        }
    }

    /// Returns the files of the ledger and of its processes.
    pub fn files(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.dir.path().join("ledger")).unwrap();
        files.map(|file| file.unwrap().path()).collect()
    }

    /// Checks that the processes never had more than the ledger's limit.
    pub fn within_limit(&self) {
        let counts = self.device.counts();
        assert!(counts.peak <= self.limit * G, "over the limit: {counts:?}");
        assert!(counts.faults.is_empty(), "forked children: {counts:?}");
    }
}

/// A process of the test. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    input: Option<ChildStdin>,
    name: String,
    answers: Receiver<String>,
    joined: bool,
}

impl Process {
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns `true` if the process has opened the ledger.
    pub fn has_joined(&mut self) -> bool {
        if !self.joined
            && let Ok(answer) = self.answers.try_recv()
        {
            assert_eq!(answer, "ready", "{}", self.name);
            self.joined = true;
        }
        self.joined
    }

    /// Waits until the process has opened the ledger.
    pub fn await_joined(&mut self) {
        if !self.joined {
            assert_eq!(self.answer(), "ready", "{}", self.name);
            self.joined = true;
        }
    }

    /// Sends a command.
    pub fn tell(&mut self, command: &str) {
        let sent = writeln!(self.input.as_ref().unwrap(), "{command}");
        sent.unwrap_or_else(|error| panic!("{}: {command}: {error}", self.name));
    }

    /// Returns the next answer.
    pub fn answer(&self) -> String {
        let answer = self.answers.recv_timeout(LONG);
        answer.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Returns the test's end of the standard input, which keeps forked children of the process.
    pub const fn keep_input(&mut self) -> Option<ChildStdin> {
        self.input.take()
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Stops the process, and waits until all of its threads are stopped.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let status = waitpid(Some(self.pid()), WaitOptions::UNTRACED).unwrap();
        let (_, status) = status.unwrap();
        assert!(status.stopped(), "{}: {status:?}", self.name);
    }

    /// Makes a stopped process one that was killed and whose memory the driver has not freed yet:
    /// its locks are free, and it has not ended. Returns `false` if the system does not let this
    /// process do that.
    pub fn lose_locks(&self) -> bool {
        let process = pidfd_open(self.pid(), PidfdFlags::empty()).unwrap();
        let files = format!("/proc/{}/fd", self.pid().as_raw_nonzero());
        for entry in std::fs::read_dir(files).unwrap().flatten() {
            let file = std::fs::read_link(entry.path()).unwrap_or_default();
            if !file.to_string_lossy().ends_with(cuvmm::ledger::FILE_ENDING) {
                continue;
            }
            let number = entry.file_name().to_string_lossy().parse().unwrap();
            let Ok(file) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) else {
                return false;
            };
            let mut all = libc::flock {
                l_type: libc::F_UNLCK as libc::c_short,
                l_whence: libc::SEEK_SET as libc::c_short,
                l_start: 0,
                l_len: 0,
                l_pid: 0,
            };
            // SAFETY: the descriptor is open, and `all` is a valid `flock`.
            let released =
                unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut all) };
            assert_eq!(released, 0);
        }
        true
    }

    /// Kills the process. One that has found a fault has ended by itself.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{}: {status}", self.name);
    }

    /// Makes the process end by itself, with everything given back.
    pub fn end(mut self) {
        self.input = None;
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < LONG, "{} does not end", self.name);
            std::thread::sleep(Duration::from_millis(2));
        }
        let status = self.child.wait().unwrap();
        assert!(ExitStatus::success(&status), "{}: {status}", self.name);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for something that happens soon.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
