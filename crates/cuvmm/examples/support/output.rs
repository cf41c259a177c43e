//! Another process of an example, whose input and output the first process has.

use std::error::Error;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A process and its output.
pub(crate) struct Output {
    pub(crate) process: Child,
    lines: BufReader<ChildStdout>,
}

impl Output {
    /// Starts a process.
    ///
    /// # Errors
    /// Fails if the system starts none.
    pub(crate) fn of(mut command: Command) -> Result<Self, Box<dyn Error>> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let output = process.stdout.take();
        let output = output.ok_or("the standard output is not piped")?;
        let lines = BufReader::new(output);
        Ok(Self { process, lines })
    }

    /// Prints the next line of output that begins with a word.
    ///
    /// # Errors
    /// Fails if the process ends before.
    pub(crate) fn repeat(&mut self, word: &str) -> Result<(), Box<dyn Error>> {
        for line in (&mut self.lines).lines() {
            let line = line?;
            if line.starts_with(word) {
                println!("{line}");
                return Ok(());
            }
        }
        Err(format!("a {word} ended too early").into())
    }
}
