//! `cuvmm picture`: draws a recording of memory over time, as SVG or for Perfetto.

mod chart;
mod perfetto;
mod series;

use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use cuvmm::recording::Recording;

use self::series::Series;
use cuvmm_command::command::usage;
use cuvmm_command::files;
use cuvmm_command::terminal::{print, safe, shown};

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
    /// Wrong usage: no output is named, the file is no recording or has no samples, or an output is the
    /// recording, the other output, or cannot be written.
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
        self.check_outputs()?;
        if let Some(file) = &self.svg {
            crate::chart::write(file, &chart::svg(&all)?)?;
        }
        if let Some(file) = &self.perfetto {
            let mut to = BufWriter::new(files::replace(file)?);
            let written = perfetto::write(&mut to, &all).and_then(|()| to.flush());
            written.with_context(|| shown(file))?;
        }
        let lines = all.iter().map(Series::described);
        print(&safe_lines(lines))?;
        Ok(ExitCode::SUCCESS)
    }

    /// Checks both outputs before one of them is written.
    fn check_outputs(&self) -> anyhow::Result<()> {
        let (svg, perfetto) = (self.svg.as_deref(), self.perfetto.as_deref());
        let mut outputs = [svg, perfetto].into_iter().flatten();
        if let Some(file) = outputs.find(|file| is_same(file, &self.file)) {
            let what = "this is the recording, and the output needs a file of its own";
            return Err(files::wrong(file, what));
        }
        if let (Some(svg), Some(perfetto)) = (svg, perfetto)
            && (svg == perfetto || is_same(svg, perfetto))
        {
            let what = "--svg and --perfetto need a file each";
            return Err(files::wrong(svg, what));
        }
        svg.map_or(Ok(()), crate::chart::writable)?;
        perfetto.map_or(Ok(()), files::writable)
    }
}

/// Returns `true` if two paths are of one regular file.
fn is_same(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| path.canonicalize().ok();
    one.is_file() && place(one) == place(other)
}

/// Joins lines, in which nothing acts on a terminal.
fn safe_lines(lines: impl Iterator<Item = String>) -> String {
    lines.map(|line| format!("{}\n", safe(&line))).collect()
}
