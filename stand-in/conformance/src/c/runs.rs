//! Running cases, each in a process of its own, several at a time.

use std::collections::VecDeque;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::cases::{self, Case, Kind};
use super::table::Table;
use crate::isolate::{death, wait};

/// The time that a case has.
const PATIENCE: Duration = Duration::from_secs(60);

/// The cases to run on one library.
#[derive(Debug)]
pub(crate) struct Runs<'a> {
    library: &'a str,
    cases: Vec<&'static Case>,
}

impl<'a> Runs<'a> {
    pub(crate) fn new(library: &'a str, filter: &str) -> Self {
        let wanted = |case: &&Case| case.kind != Kind::Helper && case.name.contains(filter);
        Self {
            library,
            cases: cases::all().filter(wanted).collect(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.cases.len()
    }

    /// Runs the cases, those that measure free memory after the others and one at a time.
    pub(crate) fn run(&self, jobs: usize) -> Result<Table, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let (usual, alone): (Vec<_>, Vec<_>) = self
            .cases
            .iter()
            .copied()
            .partition(|case| case.kind == Kind::Usual);
        let answers = Mutex::new(Table::default());
        let waiting = Mutex::new(VecDeque::from(usual));
        let next = || {
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.pop_front()
        };
        let ask = |case: &Case| {
            let (text, lacking) = self.ask(&program, case);
            let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
            answers.add(&text);
            if let Some(end) = lacking {
                answers.put(&format!("{}.end", case.name), end);
            }
        };
        thread::scope(|scope| {
            for _ in 0..jobs.max(1) {
                scope.spawn(|| {
                    while let Some(case) = next() {
                        ask(case);
                    }
                });
            }
        });
        for case in alone {
            ask(case);
        }
        Ok(answers.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs one case, and returns what it printed and how it ended if it did not end as it should.
    fn ask(&self, program: &PathBuf, case: &Case) -> (String, Option<String>) {
        let child = Command::new(program)
            .args(["--library", self.library, "--case", case.name])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => return (String::new(), Some(error.to_string())),
        };
        let mut out = child.stdout.take();
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut text = Vec::new();
                if let Some(out) = &mut out {
                    // What was read before an error is the answer so far.
                    let _ = out.read_to_end(&mut text);
                }
                String::from_utf8_lossy(&text).into_owned()
            });
            let end = end(&mut child);
            (reader.join().unwrap_or_default(), end)
        })
    }
}

/// Waits for a child, and returns how it ended if not with success.
fn end(child: &mut Child) -> Option<String> {
    match wait(child, PATIENCE) {
        Ok(Some(status)) if status.success() => None,
        Ok(Some(status)) => death(status).or_else(|| Some(format!("ended: {status}"))),
        Ok(None) => Some("did not end".to_owned()),
        Err(error) => Some(error.to_string()),
    }
}
