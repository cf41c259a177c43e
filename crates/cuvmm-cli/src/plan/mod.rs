//! `cuvmm plan`: the expected cost of operations on memory, without a GPU, and beside it the
//! measured cost on a GPU.
//!
//! From the bottom up: `step` has the steps, `held` the resources after a step, `committed` a range
//! that steps commit and grow in; `run` executes the steps with the library's types. `file` reads a
//! plan, `figures` combines expected and measured figures, `text` shows them. The run on the model
//! finds a wrong plan.

mod committed;
mod figures;
mod file;
mod held;
mod run;
mod step;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use cuvmm::driver::Driver;
use cuvmm::driver::model::Costs;
use cuvmm::{Device, Region};

use self::figures::{Expected, Figures, Whose};
use self::file::File;
use self::run::{Report, Wrong, run};
use self::step::Step;
use cuvmm_command::costs;
use cuvmm_command::drivers::{Choice, Opened, StandIn};
use cuvmm_command::page::Page;
use cuvmm_command::size::size;
use cuvmm_command::terminal::{json, print};
use cuvmm_command::watch::{A_WHILE, Watch};

/// Go through operations on memory in advance: driver calls, time, waste, and what does not fit
///
/// Reads steps from a TOML file and does them on the model, whose calls cost what they were measured
/// to on a GPU. With another driver the steps are done there for real, and what was expected stands
/// beside what was measured. Exit code 1 when a step fails, 2 when the plan cannot be meant.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm plan crates/cuvmm-cli/plans/elastic-kv.toml
  cuvmm plan plan.toml --memory 40GiB --json
  cuvmm plan plan.toml --driver cuda --costs this-gpu.costs")]
pub(crate) struct Args {
    /// The steps
    file: PathBuf,

    /// Where to do the steps; what they are expected to take always comes from the model
    #[arg(long, value_enum, default_value_t = Choice::Model)]
    driver: Choice,

    /// A table of the cost of calls that `cuvmm-bench run --save-costs` wrote
    #[arg(long, value_name = "FILE", conflicts_with = "gpu")]
    costs: Option<PathBuf>,

    /// A GPU whose table of costs comes with the command [default: nvidia-h200]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,

    /// How many devices there are, where they are no GPUs [default: as many as the plan names]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    devices: Option<u16>,

    /// Memory of each device that is no GPU [default: as the table of costs says]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Print all columns, in lines of any length
    #[arg(short, long)]
    verbose: bool,
}

impl Args {
    /// # Errors
    /// The plan or the options make no sense, the driver is missing, or a step fails.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let file = File::read(&self.file)?;
        let costs = costs::chosen(self.costs.as_deref(), self.gpu.as_deref())?;
        let mut count = match self.devices {
            Some(count) => usize::from(count),
            None => file.devices(),
        };
        let mut stand_in = StandIn {
            capacity: self.memory,
            devices: Some(u16::try_from(count).unwrap_or(u16::MAX)),
            ..StandIn::default()
        };
        let real = match self.driver {
            Choice::Model => None,
            other => Some(Real::open(&other.open_as(&stand_in)?, count)?),
        };
        match &real {
            Some(real) => {
                real.mirror(&mut stand_in)?;
                count = real.devices.len();
            }
            // The model's own memory is an H200's.
            None if self.memory.is_none() => stand_in.capacity = costs::memory(&costs)?,
            None => {}
        }
        let about = costs::about(&costs).to_owned();
        let wrong = |error: Wrong| file.wrong(&error);
        let range = costs.range();
        let (devices, watch) = model(&mut stand_in, costs, count)?;
        let mut expected = Expected::new(run(&file.steps, &devices, &watch).map_err(wrong)?);
        if let Some((low, high)) = range {
            for costs in [low, high] {
                let (devices, watch) = model(&mut stand_in, costs, count)?;
                expected.widen(&run(&file.steps, &devices, &watch).map_err(wrong)?);
            }
        }
        let measured = match &real {
            Some(real) => Some(real.run(&file.steps)?.map_err(wrong)?),
            None => None,
        };
        let whose = whose(real.as_ref().map_or(&devices, |real| &real.devices), about)?;
        let figures = Figures::new(whose, &file, &expected, measured.as_ref());
        let text = match self.json {
            true => json(&figures)?,
            false => text::of(&figures, Page::verbose(self.verbose)),
        };
        print(&text)?;
        if let Some(refusal) = measured.and_then(|report| report.refusal) {
            return Err(anyhow!("not everything could be given back: {refusal}"));
        }
        match &figures.failure {
            Some(failed) => Err(anyhow!(text::said(failed))),
            None => Ok(ExitCode::SUCCESS),
        }
    }
}

/// The devices of a real run.
struct Real {
    devices: Vec<Device>,
    watch: Watch,
}

impl Real {
    fn open(opened: &Opened, count: usize) -> anyhow::Result<Self> {
        Ok(Self {
            devices: open(&opened.driver, count)?,
            watch: Watch::of(&opened.concrete),
        })
    }

    /// Makes a stand-in like these devices.
    fn mirror(&self, stand_in: &mut StandIn) -> anyhow::Result<()> {
        let first = self.devices.first().context("there is no device")?;
        stand_in.capacity = Some(first.memory_info()?.free);
        stand_in.granularity = Some(first.granularity());
        Ok(())
    }

    /// Executes the steps when everything is truly cold, as on a fresh stand-in.
    fn run(&self, steps: &[Step]) -> anyhow::Result<Result<Report, Wrong>> {
        // The first calls of a process make a context and load code.
        let device = self.devices.first().context("there is no device")?;
        let first = || Region::reserve(device, 1)?.commit(0..device.granularity());
        first()?;
        self.watch.wait(A_WHILE);
        for device in &self.devices {
            device.memory_info()?;
        }
        // The wait has emptied the processor's caches, which the table does not know.
        first()?;
        Ok(run(steps, &self.devices, &self.watch))
    }
}

/// Returns devices of a new model, whose calls cost what a table says, and its clock.
fn model(
    stand_in: &mut StandIn,
    costs: Costs,
    count: usize,
) -> anyhow::Result<(Vec<Device>, Watch)> {
    stand_in.costs = Some(costs);
    let model = Arc::new(stand_in.model());
    let devices = open(&(model.clone() as Arc<dyn Driver>), count)?;
    Ok((devices, Watch::Virtual(model)))
}

/// Opens the first `count` devices of a driver, or all if there are fewer.
fn open(driver: &Arc<dyn Driver>, count: usize) -> anyhow::Result<Vec<Device>> {
    let there = u32::try_from(driver.device_count()?)?;
    let wanted = (0..there).take(count);
    let devices = wanted.map(|ordinal| Device::open(Arc::clone(driver), ordinal));
    Ok(devices.collect::<Result<_, _>>()?)
}

fn whose(devices: &[Device], costs: String) -> anyhow::Result<Whose> {
    let first = devices.first().context("there is no device")?;
    Ok(Whose {
        driver: first.driver().kind().name(),
        device: first.name().to_owned(),
        devices: devices.len(),
        device_memory: first.total_memory(),
        costs,
    })
}
