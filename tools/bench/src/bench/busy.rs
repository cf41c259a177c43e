//! Work that uses a block for a while, on any driver, and detects other writes to the block.
//!
//! On a GPU, one kernel writes every word of the block and runs for the given time, and a second
//! kernel checks every word. On the other drivers, a kernel that reads the block is queued on a
//! held stream, which is released after that time. The model has no bytes to check, but an unmap
//! under a kernel loses the context there too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use cuvmm::driver::model::{Backing, Machine};
use cuvmm::driver::{DeviceAddress, DriverKind, Ordinal};
use cuvmm::{Block, Stream};

use super::kernels::Kernels;
use super::stage::{Stage, skip};
use cuvmm_command::drivers::Concrete;

const PATTERN: u32 = 0x5a5a_5a5a;

pub(super) enum Busy<'a> {
    Kernels(&'a Kernels),
    Held(Held),
}

pub(super) struct Held {
    machine: Arc<dyn Holds>,
    device: Ordinal,
}

/// A block in use, which [`Busy::end`] checks.
pub(super) struct Used {
    stream: Stream,
    at: DeviceAddress,
    bytes: usize,
    begun: Instant,
    time: Duration,
}

impl<'a> Busy<'a> {
    /// Chooses the means for the stage's driver.
    ///
    /// # Errors
    /// A `Skip` on a GPU whose kernels could not be loaded.
    pub(super) fn new(stage: &'a Stage) -> anyhow::Result<Self> {
        let device = stage.device.ordinal();
        let held = |machine| Ok(Self::Held(Held { machine, device }));
        match &stage.driver {
            Concrete::Cuda(_) => stage.kernels.as_ref().map(Self::Kernels).map_err(skip),
            Concrete::Host(machine) => held(Arc::clone(machine) as _),
            Concrete::Model(machine) => held(Arc::clone(machine) as _),
        }
    }

    pub(super) const fn said(&self) -> &'static str {
        match self {
            Self::Kernels(_) => "the work is a kernel",
            Self::Held(_) => "the work is a held stream",
        }
    }

    /// Queues the work without waiting.
    pub(super) fn use_block(
        &self,
        stream: &Stream,
        block: &Block,
        time: Duration,
    ) -> anyhow::Result<Used> {
        let (at, bytes) = (block.address(), block.size());
        match self {
            Self::Kernels(kernels) => kernels.use_block(stream, block, PATTERN, time)?,
            Self::Held(Held { machine, device }) => {
                let byte = PATTERN.to_le_bytes()[0];
                machine.kernel(*device, stream, (vec![], vec![(at, bytes, byte)]))?;
                stream.synchronize()?;
                machine.held(*device, stream, true);
                machine.kernel(*device, stream, (vec![(at, bytes)], vec![]))?;
            }
        }
        Ok(Used {
            stream: stream.clone(),
            at,
            bytes: usize::try_from(bytes)?,
            begun: Instant::now(),
            time,
        })
    }

    /// Waits for the end of the work, and checks that the block was not modified before.
    ///
    /// # Errors
    /// The block was modified.
    pub(super) fn end(&self, used: Used) -> anyhow::Result<()> {
        let changed = match self {
            Self::Kernels(kernels) => {
                used.stream.synchronize()?;
                kernels.changed()?
            }
            Self::Held(Held { machine, device }) => {
                std::thread::sleep(used.time.saturating_sub(used.begun.elapsed()));
                let changed = machine.changed(*device, used.at, used.bytes)?;
                machine.held(*device, &used.stream, false);
                used.stream.synchronize()?;
                changed
            }
        };
        ensure!(changed == 0, "{changed} words changed under running work");
        Ok(())
    }

    /// Calls `act` while the device is busy for `time`.
    ///
    /// # Errors
    /// The error of `act`, or of the driver.
    pub(super) fn meanwhile<T>(
        &self,
        stream: &Stream,
        time: Duration,
        act: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        match self {
            Self::Kernels(kernels) => {
                kernels.wait(stream, time)?;
                act()
            }
            Self::Held(Held { machine, device }) => {
                machine.held(*device, stream, true);
                machine.kernel(*device, stream, (vec![], vec![]))?;
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(time);
                        machine.held(*device, stream, false);
                    });
                    act()
                })
            }
        }
    }
}

/// Ranges that a kernel reads, and ranges that it fills with a byte.
type Ranges = (Vec<(DeviceAddress, u64)>, Vec<(DeviceAddress, u64, u8)>);

trait Holds: Send + Sync {
    fn held(&self, device: Ordinal, stream: &Stream, yes: bool);
    fn kernel(&self, device: Ordinal, stream: &Stream, ranges: Ranges) -> anyhow::Result<()>;
    /// Counts the words that do not hold the pattern.
    fn changed(&self, device: Ordinal, at: DeviceAddress, bytes: usize) -> anyhow::Result<u64>;
}

impl<B: Backing> Holds for Machine<B> {
    fn held(&self, device: Ordinal, stream: &Stream, yes: bool) {
        if yes {
            self.hold(device, stream.as_raw());
        } else {
            self.release_stream(device, stream.as_raw());
        }
    }

    fn kernel(&self, device: Ordinal, stream: &Stream, ranges: Ranges) -> anyhow::Result<()> {
        self.queue_kernel(device, stream.as_raw(), ranges.0, ranges.1)
            .map_err(|code| anyhow!("queueing a kernel: {code}"))
    }

    fn changed(&self, device: Ordinal, at: DeviceAddress, bytes: usize) -> anyhow::Result<u64> {
        if B::KIND == DriverKind::Model {
            return Ok(0);
        }
        let mut seen = vec![0; bytes];
        self.peek(device, at, &mut seen)
            .map_err(|code| anyhow!("the block is not there: {code}"))?;
        let words = seen.chunks_exact(4);
        let wrong = words.filter(|word| **word != PATTERN.to_le_bytes());
        Ok(wrong.count() as u64)
    }
}
