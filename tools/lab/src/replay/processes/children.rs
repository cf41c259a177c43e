//! The processes of a replay: started, sent lines, heard, ended and awaited.
//!
//! Each has a writing and a reading thread here, so a process that neither reads nor writes delays
//! no other. A process ends when its input ends, and is killed if it does not.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::message::Said;
use cuvmm_command::stop::Stop;
use cuvmm_command::subprocess;
use cuvmm_command::terminal::safe;

/// The interval of looks for signals and silent processes.
const LOOK: Duration = Duration::from_millis(50);

/// The most bytes of a line: the course of tens of millions of requests.
const LONGEST: u64 = 4 << 30;

/// Processes that a drop ends and awaits.
pub(super) struct Children {
    each: Vec<One>,
    sender: Sender<(usize, Option<Vec<u8>>)>,
    lines: Receiver<(usize, Option<Vec<u8>>)>,
    /// The longest silence of a process.
    patience: Duration,
}

struct One {
    name: String,
    process: Child,
    /// Lines to the process. `None` once its input should end.
    tell: Option<Sender<String>>,
    heard: Instant,
    ended: bool,
}

impl Children {
    pub(super) fn new(patience: Duration) -> Self {
        let (sender, lines) = channel();
        Self {
            each: Vec::new(),
            sender,
            lines,
            patience,
        }
    }

    /// Starts a process. Signals of the terminal do not reach it.
    ///
    /// # Errors
    /// The process or a thread cannot be started.
    pub(super) fn start(&mut self, name: &str, command: &mut Command) -> anyhow::Result<()> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let name = safe(name).into_owned();
        let process = command.process_group(0).spawn();
        let mut process = process.with_context(|| format!("{name}: no process"))?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (tell, told) = channel();
        let index = self.each.len();
        self.each.push(One {
            name,
            process,
            tell: Some(tell),
            heard: Instant::now(),
            ended: false,
        });
        let sender = self.sender.clone();
        let spawn = || thread::Builder::new().name("cuvmm-replay".into());
        if let (Some(input), Some(output)) = (input, output) {
            spawn().spawn(move || write(input, &told))?;
            spawn().spawn(move || read(output, index, &sender))?;
        }
        Ok(())
    }

    /// Sends a line to a process.
    ///
    /// # Errors
    /// The value cannot be written as JSON.
    pub(super) fn tell(&self, index: usize, what: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(what)? + "\n";
        if let Some(tell) = self.each.get(index).and_then(|one| one.tell.as_ref()) {
            // The output of a process shows that it is gone.
            let _ = tell.send(line);
        }
        Ok(())
    }

    /// Waits for a line of a process, and returns the index of the process.
    ///
    /// # Errors
    /// A signal comes, or a process has ended or failed, is silent, or sends an invalid line. The
    /// error names its models.
    pub(super) fn hear(&mut self, stop: &Stop) -> anyhow::Result<(usize, Said)> {
        loop {
            stop.check()?;
            for one in self.each.iter().filter(|one| !one.ended) {
                if one.heard.elapsed() > self.patience {
                    bail!("{} has said nothing for {:?}", one.said(), self.patience);
                }
            }
            let (index, line) = match self.lines.recv_timeout(LOOK) {
                Ok(heard) => heard,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => bail!("no process is left to be heard"),
            };
            let one = self.each.get_mut(index).context("a process has a number")?;
            one.heard = Instant::now();
            let Some(line) = line else {
                if one.ended {
                    continue;
                }
                bail!("{} ended before it was done: {}", one.said(), one.status());
            };
            match serde_json::from_slice(&line) {
                Ok(Said::Failed(what)) => bail!("{}: {what}", one.said()),
                Ok(said) => {
                    one.ended = matches!(said, Said::Ended(_));
                    return Ok((index, said));
                }
                Err(_) => {
                    let line = String::from_utf8_lossy(&line);
                    let line: String = line.trim_end().chars().take(60).collect();
                    bail!("{} said {:?}, which is no answer", one.said(), safe(&line));
                }
            }
        }
    }

    /// Ends all processes, and waits for them.
    ///
    /// # Errors
    /// A process failed at its end.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        self.end();
        for one in &mut self.each {
            let status = one.process.wait()?;
            if !status.success() {
                bail!("{} was done, but ended with {status}", one.said());
            }
        }
        Ok(())
    }

    /// Ends the input of all processes, and kills those that do not end then.
    fn end(&mut self) {
        for one in &mut self.each {
            one.tell = None;
        }
        let until = subprocess::grace();
        for one in &mut self.each {
            // A process that cannot be awaited has ended.
            let _ = subprocess::end(&mut one.process, until);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.end();
    }
}

impl One {
    fn said(&self) -> String {
        format!("{} (process {})", self.name, self.process.id())
    }

    /// Describes the end of a process whose output has ended.
    fn status(&mut self) -> String {
        let status = subprocess::ended(&mut self.process, subprocess::grace());
        status.map_or("its output is closed".to_owned(), |it| it.to_string())
    }
}

fn write(mut input: ChildStdin, told: &Receiver<String>) {
    for line in told {
        if input.write_all(line.as_bytes()).is_err() {
            return;
        }
    }
}

/// Reads the lines of a process, and its end.
fn read(output: ChildStdout, index: usize, sender: &Sender<(usize, Option<Vec<u8>>)>) {
    let mut output = BufReader::new(output);
    loop {
        let mut line = Vec::new();
        let read = output.by_ref().take(LONGEST).read_until(b'\n', &mut line);
        let line = Some(line).filter(|line| read.is_ok() && !line.is_empty());
        let end = line.is_none();
        if sender.send((index, line)).is_err() || end {
            return;
        }
    }
}
