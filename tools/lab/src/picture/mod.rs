//! `cuvmm picture`: draws a recording of memory over time, as SVG or for Perfetto.

mod chart;
mod perfetto;
mod series;

use std::path::PathBuf;
use std::process::ExitCode;

use cuvmm::recording::Recording;

use self::series::Series;
use cuvmm_command::command::usage;
use cuvmm_command::files;
use cuvmm_command::terminal::{print, safe};

/// The most bytes of a recording.
const MOST: u64 = 256 << 20;

/// Draw a recording of memory over time
///
/// `cuvmm record` writes recordings of ledgers, and `cuvmm::recording::Recorder` those of a program's
/// pools. Each ledger or pool is a plot, and each process or tenant a band in it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm picture memory.jsonl --svg memory.svg
  cuvmm picture memory.jsonl --perfetto memory.json   # for https://ui.perfetto.dev")]
pub struct Args {
    /// The recording
    file: PathBuf,

    /// Write a picture
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Write counter tracks for Perfetto and chrome://tracing, as Chrome's trace events
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
}

impl Args {
    /// Draws the recording.
    ///
    /// # Errors
    /// Wrong usage: no output is named, the file is no recording or has no samples, or an output cannot
    /// be written.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if self.svg.is_none() && self.perfetto.is_none() {
            return Err(usage(
                "name an output: --svg FILE, --perfetto FILE, or both",
            ));
        }
        let bytes = files::bytes(&self.file, MOST)?;
        let recording = Recording::read(&*bytes);
        let recording = recording.map_err(|error| files::wrong(&self.file, error))?;
        let all = Series::of(&recording).map_err(|error| files::wrong(&self.file, error))?;
        if let Some(file) = &self.svg {
            crate::chart::writable(file)?;
            crate::chart::write(file, &chart::svg(&all)?)?;
        }
        if let Some(file) = &self.perfetto {
            files::writable(file)?;
            files::write(file, &perfetto::json(&all)?)?;
        }
        let lines = all.iter().map(Series::described);
        print(&safe_lines(lines))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Joins lines, in which nothing acts on a terminal.
fn safe_lines(lines: impl Iterator<Item = String>) -> String {
    lines.map(|line| format!("{}\n", safe(&line))).collect()
}
