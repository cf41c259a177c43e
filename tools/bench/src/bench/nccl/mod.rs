//! `cuvmm-bench nccl`: NCCL's all-reduce on memory of cuvmm, compared with memory that NCCL
//! allocated.
//!
//! Modules, from the bottom up: `find` locates the library, and `library` calls it; `memory` has
//! buffers of both sides and waits for work on them; `kind` defines the kinds of memory that are
//! compared, and `pattern` the values that are summed; `measure` takes the samples, and `report`
//! shows them. NCCL's multicast is switched off.
//!
//! `unsafe` here: setting one environment variable, which NCCL reads, while no other thread runs.
#![allow(unsafe_code)]

#[cfg(test)]
mod fake;
mod find;
mod kind;
mod library;
mod measure;
mod memory;
mod pattern;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, anyhow, ensure};
use cuvmm::Device;
use cuvmm::driver::Driver;
use cuvmm::driver::cuda::CudaDriver;

use self::library::{Nccl, Ranks};
use self::measure::{Asked, measure};
use self::report::Report;
use cuvmm_cli::command::usage;
use cuvmm_cli::page::Page;
use cuvmm_cli::size::size;
use cuvmm_cli::terminal::print;

/// The bytes that a sample moves: a few milliseconds on fast links, compared with which a launch
/// takes little time.
const PER_SAMPLE: u64 = 2 << 30;

/// The environment variable that switches NCCL's multicast.
const MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// Compare NCCL's all-reduce on memory of cuvmm with memory that NCCL allocated
///
/// One process with a communicator for each GPU. Every sum that is checked must be right. Multicast
/// is off: NCCL_NVLS_ENABLE is set to 0. All kinds of memory are measured alternately in one run:
/// trust the ratios.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm-bench nccl --devices 2
  cuvmm-bench nccl --devices 4 --nccl /path/to/libnccl.so.2 --whole --json")]
pub(crate) struct Args {
    /// The number of GPUs, from the first on
    #[arg(long, value_name = "COUNT", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(2..=8))]
    devices: u32,

    /// The NCCL library [default: PyTorch's, or else the system's]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,

    /// The sizes of the buffer that each GPU contributes to the sum
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = size,
          default_values = ["1MiB", "16MiB", "64MiB", "256MiB", "1GiB"])]
    sizes: Vec<u64>,

    /// The number of samples of each kind, not counting the first
    #[arg(long, value_name = "COUNT", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Also register memory of several extents in one range, which not every NCCL supports
    #[arg(long)]
    whole: bool,

    /// Print all columns, in lines of any length
    #[arg(long)]
    verbose: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Measures and prints.
    ///
    /// # Errors
    /// When an option is wrong, multicast is requested, there are too few GPUs, NCCL is not usable
    /// or fails, or a sum is wrong.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let odd = self.sizes.iter().find(|&size| size % 4 != 0);
        if let Some(odd) = odd {
            return Err(usage(format!("--sizes {odd}: a number has four bytes")));
        }
        without_multicast(std::env::var(MULTICAST).ok().as_deref())?;
        // SAFETY: no other thread runs yet, because neither the driver nor NCCL has been loaded.
        unsafe { std::env::set_var(MULTICAST, "0") };
        let nccl = Nccl::load(&find::candidates(self.nccl.as_deref()))?;
        let driver = Arc::new(CudaDriver::open()?);
        let devices = devices(&driver, self.devices)?;
        let ranks = Ranks::new(nccl, Arc::clone(&driver), &devices)?;
        let asked = Asked {
            sizes: self.sizes,
            rounds: usize::try_from(self.rounds)?,
            per_sample: PER_SAMPLE,
            whole: self.whole,
        };
        let found = measure(&ranks, &devices, &asked)?;
        let report = Report {
            nccl: ranks.nccl().version(),
            library: ranks.nccl().path().display().to_string(),
            driver: driver.version()?.to_string(),
            device: devices
                .first()
                .map_or_else(String::new, |first| first.name().to_owned()),
            devices: devices.len(),
            rows: found.rows,
            refused: found.refused,
        };
        print(&if self.json {
            report.json()?
        } else {
            report.text(Page::verbose(self.verbose))
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns an error if the environment requests multicast.
fn without_multicast(set: Option<&str>) -> anyhow::Result<()> {
    match set {
        None | Some("0") => Ok(()),
        Some(other) => Err(anyhow!(
            "{MULTICAST} is {other}: multicast is not used here, unset it"
        )),
    }
}

/// Opens the first devices, each of which must be able to access the memory of every other.
fn devices(driver: &Arc<CudaDriver>, wanted: u32) -> anyhow::Result<Vec<Device>> {
    let there = driver.device_count()?;
    ensure!(
        u32::try_from(there).is_ok_and(|there| there >= wanted),
        "{wanted} GPUs are wanted, and there are {there}"
    );
    let open = |ordinal| {
        let driver: Arc<dyn Driver> = driver.clone();
        Device::open(driver, ordinal).with_context(|| format!("device {ordinal}"))
    };
    let devices: Vec<Device> = (0..wanted).map(open).collect::<Result<_, _>>()?;
    for (one, other) in devices.iter().flat_map(|one| {
        let others = devices.iter();
        others.map(move |other| (one, other))
    }) {
        ensure!(
            one.can_reach(other)?,
            "device {} does not reach device {}",
            one.ordinal(),
            other.ordinal()
        );
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::without_multicast;

    #[test]
    fn multicast_that_was_asked_for_is_refused() {
        without_multicast(None).unwrap();
        without_multicast(Some("0")).unwrap();
        let error = without_multicast(Some("1")).unwrap_err().to_string();
        assert!(error.contains("NCCL_NVLS_ENABLE is 1"), "{error}");
    }
}
