//! `cuvmm record`: writes the figures of ledgers over time into a file.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cuvmm::recording::Recorder;

use super::find::Where;
use cuvmm_command::command::usage;
use cuvmm_command::duration::duration;
use cuvmm_command::files;
use cuvmm_command::stop::Stop;
use cuvmm_command::terminal::{counted, shown, tell};

/// Record the memory of all processes over time, for `cuvmm picture`
///
/// Reads the ledgers' files at each interval, and makes no CUDA call. Ends after `--seconds`, or when it
/// is interrupted; the file is whole after each sample.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm record --out memory.jsonl
  cuvmm record --out memory.jsonl --seconds 60 --interval 100ms")]
pub(crate) struct Args {
    #[command(flatten)]
    at: Where,

    /// The file, which is made or replaced
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// End after this time, in seconds or as 5min [default: when it is interrupted]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    seconds: Option<Duration>,

    /// The time between two samples, at least 10ms
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
}

const SHORTEST: Duration = Duration::from_millis(10);

fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        time if time < SHORTEST => Err("an interval is at least 10ms".to_owned()),
        time => Ok(time),
    }
}

impl Args {
    /// # Errors
    /// There is no ledger, or the file cannot be written.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let mut views = self.at.open()?;
        if views.is_empty() {
            return Err(usage(format!("there is no ledger in {}", self.at.shown())));
        }
        let file = files::replace(&self.out)?;
        let stop = Stop::on_signals()?;
        let (begun, mut samples) = (Instant::now(), 0);
        let mut recorder = Recorder::new(file).with_context(|| shown(&self.out))?;
        loop {
            for view in &views {
                let source = shown(view.path());
                let written = recorder.ledger(&source, &view.stats());
                written.with_context(|| shown(&self.out))?;
                samples += 1;
            }
            let left = self
                .seconds
                .map(|time| time.saturating_sub(begun.elapsed()));
            let wait = left.map_or(self.interval, |left| left.min(self.interval));
            if wait.is_zero() || stop.within(wait) {
                break;
            }
            // Ledgers come and go. One that cannot be read is tried again.
            views = self.at.open_again(views)?.ledgers;
        }
        recorder.finish().with_context(|| shown(&self.out))?;
        tell(&format!(
            "{} in {}",
            counted(samples, "sample"),
            shown(&self.out)
        ));
        Ok(ExitCode::SUCCESS)
    }
}
