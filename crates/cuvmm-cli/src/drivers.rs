//! Which driver a command looks at, opened with its concrete type at hand where that is needed.

use std::sync::Arc;

use cuvmm::driver::auto::{self, OpenOptions, Wanted};
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::model::{Costs, ModelDriver, ModelOptions};
use cuvmm::driver::{Driver, DriverKind};

/// The word on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Choice {
    /// A GPU when there is one, else the host
    #[default]
    Auto,
    /// The real driver
    Cuda,
    /// Host memory by the driver's rules
    Host,
    /// The driver's rules without memory
    Model,
}

/// A driver, and why it is this one.
#[derive(Clone, Debug)]
pub(crate) struct Opened {
    /// The driver.
    pub(crate) driver: Arc<dyn Driver>,
    /// The same, by its own type.
    pub(crate) concrete: Concrete,
    /// For people: why it is this one.
    pub(crate) reason: String,
}

/// A driver by its own type.
#[derive(Clone, Debug)]
pub(crate) enum Concrete {
    /// The real driver.
    Cuda(Arc<CudaDriver>),
    /// The host driver.
    Host(Arc<HostDriver>),
    /// The model.
    Model(Arc<ModelDriver>),
}

impl Choice {
    /// The word that chooses it.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cuda => "cuda",
            Self::Host => "host",
            Self::Model => "model",
        }
    }

    /// The choice that opens a driver of this kind again.
    pub(crate) const fn of(kind: DriverKind) -> Self {
        match kind {
            DriverKind::Cuda => Self::Cuda,
            DriverKind::Model => Self::Model,
            _ => Self::Host,
        }
    }

    /// Opens the driver. One without a GPU has `capacity` bytes of memory if that is given,
    /// whatever the system has: only what is written is taken.
    ///
    /// # Errors
    /// Why the real driver cannot be had, if it was asked for. The others can always be.
    pub(crate) fn open(self, capacity: Option<u64>) -> anyhow::Result<Opened> {
        self.open_with(capacity, None)
    }

    /// Opens the driver as [`open`](Self::open) does. What calls cost matters to the model alone;
    /// by default it is what they cost on an H200.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_with(
        self,
        capacity: Option<u64>,
        costs: Option<Costs>,
    ) -> anyhow::Result<Opened> {
        match self {
            Self::Auto => {
                let found = auto::open(OpenOptions::new().wanted(Wanted::Best))?;
                let opened = Self::of(found.kind).open_with(capacity, costs)?;
                Ok(Opened {
                    reason: found.reason,
                    ..opened
                })
            }
            Self::Cuda => {
                let driver = Arc::new(CudaDriver::open()?);
                let reason = format!("{} was asked for", driver.api().library().display());
                Ok(Opened {
                    driver: driver.clone(),
                    concrete: Concrete::Cuda(driver),
                    reason,
                })
            }
            Self::Host => {
                let options = HostOptions::new();
                let driver = Arc::new(HostDriver::new(match capacity {
                    Some(bytes) => options.capacity(bytes),
                    None => options,
                }));
                let reason = "the host driver was asked for".to_owned();
                Ok(Opened {
                    driver: driver.clone(),
                    concrete: Concrete::Host(driver),
                    reason,
                })
            }
            Self::Model => {
                let options = ModelOptions::new().costs(costs.unwrap_or_default());
                let driver = Arc::new(ModelDriver::new(match capacity {
                    Some(bytes) => options.capacity(bytes),
                    None => options,
                }));
                let reason = "the model was asked for".to_owned();
                Ok(Opened {
                    driver: driver.clone(),
                    concrete: Concrete::Model(driver),
                    reason,
                })
            }
        }
    }
}

impl Opened {
    /// For people: which driver, and why this one.
    pub(crate) fn said(&self) -> String {
        format!("the {} driver ({})", self.driver.kind().name(), self.reason)
    }
}

/// Prints to standard output. Whoever stops reading, as `head` does, is no failure.
///
/// # Errors
/// When the text cannot be written for another reason.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}
