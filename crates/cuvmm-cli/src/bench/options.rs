//! The options of `cuvmm bench`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use cuvmm::driver::model::Costs;

use crate::drivers::{Choice, Opened};
use crate::size::size;
use crate::usage;

/// What a driver without a GPU can map by default: enough for every row. Only what is written is
/// taken from the system.
const MAPPABLE: u64 = 40 << 30;

/// Measure the library beside the driver's own calls
///
/// Every row is measured in turn with what it is measured against, in one run: trust the ratios.
/// Rows that a driver cannot measure are left out and named. Some rows take seconds, all of them
/// minutes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The driver to measure on; the model counts virtual time
    #[arg(long, value_enum, default_value_t)]
    pub(super) driver: Choice,

    /// Which device of the driver
    #[arg(long, value_name = "ORDINAL", default_value_t = 0)]
    pub(super) device: u32,

    /// Only these rows, each with its comparisons
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(super) only: Vec<String>,

    /// Few samples: to see that it works
    #[arg(long)]
    pub(super) quick: bool,

    /// Memory of a device that is no GPU
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) memory: Option<u64>,

    /// Measure also what each driver call costs, and write the table to a file
    #[arg(long, value_name = "FILE")]
    pub(super) save_costs: Option<PathBuf>,

    /// What calls cost on the model, as --save-costs wrote it [default: an H200]
    #[arg(long, value_name = "FILE")]
    pub(super) costs: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,

    /// Print each row to standard error as it comes
    #[arg(short, long)]
    pub(super) verbose: bool,
}

impl Args {
    /// Opens the driver.
    ///
    /// # Errors
    /// Options that do not fit together, a table that cannot be read, a driver that cannot be had.
    pub(super) fn open(&self) -> anyhow::Result<Opened> {
        let model = self.driver == Choice::Model;
        if self.costs.is_some() && !model {
            return Err(usage("--costs: only --driver model has costs".to_owned()));
        }
        let costs = self.costs.as_deref().map(read).transpose()?;
        if let Some(file) = &self.save_costs {
            writable(file)?;
        }
        let memory = match self.memory {
            None if !model => Some(MAPPABLE),
            memory => memory,
        };
        self.driver.open_with(memory, costs)
    }
}

fn read(file: &Path) -> anyhow::Result<Costs> {
    let named = || file.display().to_string();
    let text = fs::read_to_string(file).with_context(named)?;
    text.parse().with_context(named)
}

/// Finds out whether the file can be written, before a run that takes minutes.
fn writable(file: &Path) -> anyhow::Result<()> {
    let opened = fs::OpenOptions::new().append(true).create(true).open(file);
    opened
        .map(drop)
        .map_err(|error| anyhow!("{}: {error}", file.display()))
}
