//! The driver that a replay runs on, with room for the replay's memory.

use std::sync::Arc;

use cuvmm::driver::Driver;
use cuvmm::driver::auto::{self, OpenOptions, Wanted};
use cuvmm::driver::host::HostOptions;
use cuvmm::driver::model::{ModelDriver, ModelOptions};

use crate::drivers::Choice;

/// A driver, and what it is.
pub(super) struct Opened {
    pub(super) driver: Arc<dyn Driver>,
    /// For people: which driver, and why this one.
    pub(super) said: String,
}

/// What a driver without a GPU has beyond the replay's memory: no pool leaves anything free.
const SLACK: u64 = 256 << 20;

/// Opens the driver. One without a GPU is given the memory that the replay wants, whatever the
/// system has: only what is written is taken.
///
/// # Errors
/// Why the real driver cannot be had, if it was asked for.
pub(super) fn open(choice: Choice, memory: u64) -> anyhow::Result<Opened> {
    let capacity = memory.saturating_add(SLACK);
    let wanted = match choice {
        Choice::Auto => Wanted::Best,
        Choice::Cuda => Wanted::Cuda,
        Choice::Host => Wanted::Host,
        Choice::Model => {
            let driver = ModelDriver::new(ModelOptions::new().capacity(capacity));
            return Ok(Opened {
                driver: Arc::new(driver),
                said: "the model driver".to_owned(),
            });
        }
    };
    let host = HostOptions::new().capacity(capacity);
    let opened = auto::open(OpenOptions::new().wanted(wanted).host(host))?;
    let said = format!("the {} driver ({})", opened.kind.name(), opened.reason);
    Ok(Opened {
        driver: opened.driver,
        said,
    })
}
