//! `cuvmm info`: the drivers, their devices, and the capabilities of the devices.

mod probe;
mod text;
mod topology;

use std::process::ExitCode;
use std::sync::Arc;

use cuvmm::driver::auto::OpenError;
use cuvmm::driver::{Driver, GranularityKind, Location, Ordinal, PhysicalProps};
use serde::Serialize;

use cuvmm_command::drivers::{Choice, StandIn};
use cuvmm_command::page::Page;
use cuvmm_command::terminal::{chain, counted, json, print};
use probe::Capability;
use topology::Reaches;

/// Show drivers, devices, and what they can do, found out by trying
///
/// A capability counts as there when the call that needs it succeeds on one granule of memory, not
/// when an attribute promises it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm info
  cuvmm info --driver host --devices 2
  cuvmm info --json | jq .devices[0].capabilities")]
pub(crate) struct Args {
    /// The driver whose devices are shown
    #[arg(long, value_enum, default_value_t)]
    driver: Choice,

    /// How many devices there are, where they are no GPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    devices: Option<u16>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Print reasons in full, in lines of any length
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Debug, Serialize)]
struct Info {
    drivers: Vec<Found>,
    /// The driver whose devices follow.
    driver: &'static str,
    reason: String,
    cuda_version: String,
    devices: Vec<Device>,
    topology: Vec<Reaches>,
}

#[derive(Debug, Serialize)]
struct Found {
    driver: &'static str,
    there: bool,
    reason: String,
}

/// Sizes are in bytes.
#[derive(Debug, Serialize)]
struct Device {
    ordinal: i32,
    name: String,
    uuid: Option<String>,
    total: Option<u64>,
    free: Option<u64>,
    granularities: Vec<Granularity>,
    capabilities: Vec<Capability>,
}

/// The sizes that allocations of one kind of memory must be multiples of.
#[derive(Debug, Serialize)]
struct Granularity {
    memory: String,
    minimum: Option<u64>,
    recommended: Option<u64>,
    /// The driver's error, if there are no sizes.
    refused: Option<String>,
}

impl Args {
    /// # Errors
    /// The requested driver cannot be opened or does not count its devices.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let like = StandIn {
            devices: self.devices,
            ..StandIn::default()
        };
        let opened = self.driver.open_as(&like)?;
        let driver = &*opened.driver;
        let count = driver.device_count()?;
        let full = self.json || self.verbose;
        let info = Info {
            drivers: [Choice::Cuda, Choice::WITHOUT_GPU]
                .map(|choice| found(choice, &like, full))
                .into(),
            driver: driver.kind().name(),
            reason: opened.reason,
            cuda_version: driver.version()?.to_string(),
            devices: (0..count)
                .map(|ordinal| device(&opened.driver, Ordinal(ordinal)))
                .collect(),
            topology: topology::of(&opened.driver, count),
        };
        if self.json {
            print(&json(&info)?)?;
        } else {
            print(&text::of(&info, Page::verbose(self.verbose)))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Opens a driver and returns whether that succeeds, with the reason. With `full` the reason has
/// the dynamic linker's messages.
fn found(choice: Choice, like: &StandIn, full: bool) -> Found {
    let opened = choice
        .open_as(like)
        .and_then(|opened| Ok(opened.driver.device_count()?));
    let (there, reason) = match opened {
        Ok(count) => (count > 0, counted(count.unsigned_abs().into(), "device")),
        Err(error) => (
            false,
            match error.downcast_ref::<OpenError>() {
                Some(error) if full => format!("{error:#}"),
                _ => chain(&error),
            },
        ),
    };
    Found {
        driver: choice.word(),
        there,
        reason,
    }
}

fn device(driver: &Arc<dyn Driver>, ordinal: Ordinal) -> Device {
    let memory = driver.memory_info(ordinal).ok();
    let uuid = driver.device_uuid(ordinal).ok().map(|bytes| uuid(&bytes));
    let mut granularities = vec![granularity(&**driver, Location::device(ordinal))];
    granularities.push(granularity(
        &**driver,
        Location::host_numa(probe::node(&**driver, ordinal)),
    ));
    Device {
        ordinal: ordinal.0,
        name: driver
            .device_name(ordinal)
            .unwrap_or_else(|error| error.to_string()),
        uuid,
        total: driver.total_memory(ordinal).ok(),
        free: memory.map(|memory| memory.free),
        granularities,
        capabilities: probe::all(driver, ordinal),
    }
}

fn granularity(driver: &dyn Driver, location: Location) -> Granularity {
    let props = PhysicalProps::at(location);
    let ask = |kind| driver.allocation_granularity(&props, kind);
    let (minimum, recommended) = (
        ask(GranularityKind::MINIMUM),
        ask(GranularityKind::RECOMMENDED),
    );
    Granularity {
        memory: location.to_string(),
        refused: minimum.as_ref().err().map(ToString::to_string),
        minimum: minimum.ok(),
        recommended: recommended.ok(),
    }
}

/// Formats a UUID as NVIDIA's tools print it.
fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
