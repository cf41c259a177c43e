//! The environment of every measurement: driver, device, clock, and amount of work.

use std::fmt;
use std::sync::Arc;

use cuvmm::display::Bytes;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::{Driver as _, Ordinal};
use cuvmm::{Device, Limit, Pool, Scrub};

use super::by_hand::Hand;
use super::current::Current;
use super::kernels::Kernels;
use super::row::Row;
use crate::stated::{driver_version, today};
use cuvmm_command::drivers::{Concrete, Opened};
use cuvmm_command::watch::{A_WHILE, Watch};

/// The reason that a row cannot be measured here, which is not a failure.
#[derive(Debug)]
pub(super) struct Skip(pub(super) String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

pub(super) fn skip(why: impl Into<String>) -> anyhow::Error {
    Skip(why.into()).into()
}

/// Memory left free on a GPU for the driver, streams, kernels and other processes.
const LEFT_FREE: u64 = 2 << 30;

/// The most bytes that one row writes to host memory in a quick run.
const QUICKLY: u64 = 128 << 20;

#[derive(Debug)]
pub(super) struct Stage {
    pub(super) driver: Concrete,
    pub(super) device: Device,
    pub(super) watch: Watch,
    pub(super) hand: Hand,
    /// The device, its driver and the day, for people.
    pub(super) about: String,
    /// The kernels, or the reason that there are none.
    pub(super) kernels: Result<Kernels, String>,
    quick: bool,
    /// Bytes that can be mapped together.
    memory: u64,
    /// Bytes that can be written together.
    writable: u64,
    /// Keeps the context current, as a program that uses the device does.
    _current: Option<Current>,
}

impl Stage {
    /// Opens a device of the driver, and loads the kernels if it is a GPU.
    pub(super) fn new(opened: Opened, ordinal: u32, quick: bool) -> anyhow::Result<Self> {
        let device = Device::open(Arc::clone(&opened.driver), ordinal)?;
        let info = device.memory_info()?;
        let (memory, writable) = match &opened.concrete {
            Concrete::Cuda(_) => {
                let bytes = info.free.saturating_sub(LEFT_FREE);
                (bytes, bytes)
            }
            // The host driver's default capacity is the memory that the system can spare; more can
            // be mapped.
            Concrete::Host(_) => {
                let spare = HostDriver::new(HostOptions::new()).total_memory(Ordinal(0))?;
                (info.free, info.free.min(spare))
            }
            Concrete::Model(_) => (info.free, info.free),
        };
        let (current, kernels) = match &opened.concrete {
            Concrete::Cuda(driver) => (
                Some(Current::enter(Arc::clone(driver), device.ordinal())?),
                Kernels::load(Arc::clone(driver), device.ordinal()),
            ),
            _ => (None, Err("device code needs a GPU".to_owned())),
        };
        let about = format!(
            "{}, driver {}, CUDA {}, {}",
            device.name(),
            driver_version(&opened),
            opened.driver.version()?,
            today()
        );
        Ok(Self {
            watch: Watch::of(&opened.concrete),
            hand: Hand::new(Arc::clone(&opened.driver), device.ordinal()),
            driver: opened.concrete,
            device,
            about,
            kernels,
            quick,
            memory,
            writable,
            _current: current,
        })
    }

    pub(super) const fn memory(&self) -> u64 {
        self.memory
    }

    pub(super) const fn writable(&self) -> u64 {
        self.writable
    }

    /// Returns a repeat count: `full`, or `quick` in a quick run.
    pub(super) const fn times(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }

    /// Returns the bytes that a row of `size` bytes writes: fewer in a quick run on the host
    /// driver, where the processor writes them.
    pub(super) fn written(&self, size: u64) -> u64 {
        match &self.driver {
            Concrete::Host(_) if self.quick => size.min(QUICKLY),
            _ => size,
        }
    }

    /// Returns `true` if written bytes can be read back.
    pub(super) const fn keeps_bytes(&self) -> bool {
        !matches!(self.driver, Concrete::Model(_))
    }

    /// Adds the size of `bytes` moved to a row, and the transfer rates if time is real: the model's
    /// cost table has no links.
    pub(super) fn moved(&self, row: Row, bytes: u64) -> Row {
        let row = row.count("mib", (bytes >> 20) as f64);
        match self.watch.note() {
            None => row.moved(bytes),
            said => row.note(said),
        }
    }

    /// Returns the nanoseconds that `act` takes by the stage's clock.
    pub(super) fn time<E: Into<anyhow::Error>>(
        &self,
        act: impl FnOnce() -> Result<(), E>,
    ) -> anyhow::Result<f64> {
        let (took, ()) = self.watch.time(act).map_err(Into::into)?;
        Ok(took)
    }

    /// Waits until a create is truly cold, and then makes one uncounted driver call.
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        self.watch.wait(A_WHILE);
        self.device.memory_info()?;
        Ok(())
    }

    /// Checks that `bytes` can be mapped together.
    ///
    /// # Errors
    /// A `Skip` if there is too little memory.
    pub(super) fn room(&self, bytes: u64) -> anyhow::Result<()> {
        room(bytes, self.memory, "to map")
    }

    /// Checks that `bytes` can be written.
    ///
    /// # Errors
    /// A `Skip` if there is too little memory.
    pub(super) fn room_to_write(&self, bytes: u64) -> anyhow::Result<()> {
        room(bytes, self.writable, "to write")
    }

    /// Checks that `bytes` can be mapped on another device.
    ///
    /// # Errors
    /// A `Skip` if there is too little memory.
    pub(super) fn room_on(&self, other: &Device, bytes: u64) -> anyhow::Result<()> {
        let free = other.memory_info()?.free;
        let left = match &self.driver {
            Concrete::Cuda(_) => LEFT_FREE,
            Concrete::Host(_) | Concrete::Model(_) => 0,
        };
        let there = free.saturating_sub(left);
        room(bytes, there, "to map on the second device")
    }

    /// Creates a pool whose driver calls are counted separately.
    pub(super) fn pool(&self, limit: u64, scrub: Scrub) -> anyhow::Result<Pool> {
        let device = self.device.with_own_counters();
        Ok(Pool::builder(&device)
            .limit(Limit::Bytes(limit))
            .scrub(scrub)
            .build()?)
    }
}

fn room(wanted: u64, there: u64, what: &str) -> anyhow::Result<()> {
    if wanted <= there {
        return Ok(());
    }
    Err(skip(format!(
        "takes {} {what}, and there are {}",
        Bytes(wanted),
        Bytes(there)
    )))
}
