//! The options of `cuvmm-bench run`.

use std::path::PathBuf;

use cuvmm_command::drivers::{Choice, Opened, StandIn};
use cuvmm_command::size::size;
use cuvmm_command::{costs, files};

/// Memory that a driver without a GPU can map by default: enough for every row. Only written memory
/// is taken from the system.
const MAPPABLE: u64 = 40 << 30;

/// The number of devices of a driver without a GPU: some rows take two.
pub(super) const PLAYED: u16 = 2;

/// Measure the library beside the driver's own calls
///
/// Every row is measured in turn with what it is measured against, in one run: trust the ratios.
/// Rows that a driver cannot measure are left out and named. Some rows take seconds, all of them
/// minutes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm-bench run --driver cuda
  cuvmm-bench run --driver host --quick
  cuvmm-bench run --driver cuda --only warm_alloc_free_2MiB,threads_8 --json")]
pub(crate) struct Args {
    /// The driver to measure on; the model counts virtual time
    #[arg(long, value_enum, default_value_t)]
    pub(super) driver: Choice,

    /// Which device of the driver; rows of two take the next one that it reaches besides
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

    /// A table of costs that --save-costs wrote, for the model [default: an H200]
    #[arg(long, value_name = "FILE")]
    pub(super) costs: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,

    /// Print each row to standard error as it comes, and all columns, counts and notes in the end, in
    /// lines of any length
    #[arg(short, long)]
    pub(super) verbose: bool,
}

impl Args {
    /// Opens the driver, and reads the table of costs if given.
    ///
    /// # Errors
    /// A file cannot be read or written, or the driver is missing.
    pub(super) fn open(&self) -> anyhow::Result<Opened> {
        let costs = self.costs.as_deref().map(costs::read).transpose()?;
        if let Some(file) = &self.save_costs {
            files::writable(file)?;
        }
        let memory = match self.memory {
            None if self.driver != Choice::Model => Some(MAPPABLE),
            memory => memory,
        };
        self.driver.open_as(&StandIn {
            capacity: memory,
            costs,
            devices: Some(PLAYED),
            ..StandIn::default()
        })
    }
}
