//! The choice of a driver, opened with its concrete type where that is needed.

use std::sync::Arc;

use cuvmm::driver::auto::{self, OpenError, OpenOptions, Wanted};
use cuvmm::driver::cuda::CudaDriver;
#[cfg(target_os = "linux")]
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::model::{Costs, ModelDriver, ModelOptions};
use cuvmm::driver::{Driver, DriverKind};

use crate::terminal::shown;

/// The word on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// A GPU when there is one, else the host
    #[default]
    Auto,
    /// The real driver
    Cuda,
    /// Host memory by the driver's rules
    #[cfg(target_os = "linux")]
    Host,
    /// The driver's rules without memory
    Model,
}

/// The properties of a driver without a GPU. `None` stands for the default.
#[derive(Clone, Debug, Default)]
pub struct StandIn {
    /// Memory of each device in bytes, which may exceed the system's: only written memory is taken.
    pub capacity: Option<u64>,
    /// The cost of calls on the model, by default an H200's.
    pub costs: Option<Costs>,
    /// The number of devices.
    pub devices: Option<u16>,
    /// The granule in bytes, on the model.
    pub granularity: Option<u64>,
}

/// A driver, and the reason for its choice.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The driver by its own type.
    pub concrete: Concrete,
    /// The reason for the choice, for people.
    pub reason: String,
}

/// A driver by its own type.
#[derive(Clone, Debug)]
pub enum Concrete {
    /// The real driver.
    Cuda(Arc<CudaDriver>),
    /// The host driver.
    #[cfg(target_os = "linux")]
    Host(Arc<HostDriver>),
    /// The model.
    Model(Arc<ModelDriver>),
}

impl Choice {
    /// The driver where there is no GPU: the host driver on Linux, the model on other systems.
    #[cfg(target_os = "linux")]
    pub const WITHOUT_GPU: Self = Self::Host;
    /// The driver where there is no GPU: the host driver on Linux, the model on other systems.
    #[cfg(not(target_os = "linux"))]
    pub const WITHOUT_GPU: Self = Self::Model;

    /// Returns the word of the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cuda => "cuda",
            #[cfg(target_os = "linux")]
            Self::Host => "host",
            Self::Model => "model",
        }
    }

    /// Returns the choice that opens a driver of this kind again.
    pub const fn of(kind: DriverKind) -> Self {
        match kind {
            DriverKind::Cuda => Self::Cuda,
            DriverKind::Model => Self::Model,
            _ => Self::WITHOUT_GPU,
        }
    }

    /// Opens the driver with the default properties.
    ///
    /// # Errors
    /// The real driver was requested and cannot be opened. The others always can.
    pub fn open(self) -> anyhow::Result<Opened> {
        self.open_as(&StandIn::default())
    }

    /// Opens the driver. A driver without a GPU gets the properties `like`.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_as(self, like: &StandIn) -> anyhow::Result<Opened> {
        let (driver, concrete, reason): (Arc<dyn Driver>, _, _) = match self {
            Self::Auto => {
                let found = auto::open(OpenOptions::new().wanted(Wanted::Best));
                let (choice, reason) = match found {
                    Ok(found) => (Self::of(found.kind), found.reason),
                    Err(OpenError::NoHostDriver { reason }) => (Self::Model, reason),
                    Err(error) => return Err(error.into()),
                };
                let opened = choice.open_as(like)?;
                return Ok(Opened { reason, ..opened });
            }
            Self::Cuda => {
                let driver = Arc::new(CudaDriver::open()?);
                let reason = format!("{} was requested", shown(driver.api().library()));
                (driver.clone(), Concrete::Cuda(driver), reason)
            }
            #[cfg(target_os = "linux")]
            Self::Host => {
                let mut options = HostOptions::new();
                if let Some(bytes) = like.capacity {
                    options = options.capacity(bytes);
                }
                if let Some(count) = like.devices {
                    options = options.devices(count);
                }
                let driver = Arc::new(HostDriver::new(options));
                let reason = "the host driver was requested".to_owned();
                (driver.clone(), Concrete::Host(driver), reason)
            }
            Self::Model => {
                let driver = Arc::new(like.model());
                let reason = "the model was requested".to_owned();
                (driver.clone(), Concrete::Model(driver), reason)
            }
        };
        Ok(Opened {
            driver,
            concrete,
            reason,
        })
    }
}

impl StandIn {
    /// Makes a model with these properties.
    pub fn model(&self) -> ModelDriver {
        let costs = self.costs.clone().unwrap_or_default();
        let mut options = ModelOptions::new().costs(costs);
        if let Some(bytes) = self.capacity {
            options = options.capacity(bytes);
        }
        if let Some(count) = self.devices {
            options = options.devices(count);
        }
        if let Some(bytes) = self.granularity {
            options = options.granularity(bytes);
        }
        ModelDriver::new(options)
    }
}

impl Opened {
    /// Returns the model, if this is one.
    pub fn model(&self) -> Option<Arc<ModelDriver>> {
        match &self.concrete {
            Concrete::Model(model) => Some(Arc::clone(model)),
            _ => None,
        }
    }

    /// Describes the driver and the reason for its choice, for people.
    pub fn said(&self) -> String {
        format!("the {} driver ({})", self.driver.kind().name(), self.reason)
    }
}
