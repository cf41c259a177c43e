//! Work that is in flight while a trace is played on the model.

use std::time::Duration;

use cuvmm::driver::Ordinal;
use cuvmm::driver::model::ModelDriver;
use cuvmm::{Device, Stream};

/// Queues work for each allocation. The work completes only at the next multiple of `every`
/// operations, as if the host were that far ahead of the GPU.
#[derive(Debug)]
pub(super) struct Ahead<'a> {
    model: &'a ModelDriver,
    device: Ordinal,
    every: u64,
    operations: u64,
    /// The time of queueing, which is no cost of a heap.
    pub(super) spent: Duration,
}

impl<'a> Ahead<'a> {
    /// Begins with all streams held.
    pub(super) fn new(model: &'a ModelDriver, device: &Device, every: u64) -> Self {
        let device = device.ordinal();
        model.hold_all(device);
        Self {
            model,
            device,
            every,
            operations: 0,
            spent: Duration::ZERO,
        }
    }

    /// Queues work that uses an allocation.
    ///
    /// # Errors
    /// The context was lost.
    pub(super) fn queue(&mut self, stream: &Stream) -> anyhow::Result<()> {
        let begun = self.model.clock();
        let queued = self
            .model
            .queue_kernel(self.device, stream.as_raw(), vec![], vec![]);
        self.spent += self.model.clock() - begun;
        queued.map_err(|code| anyhow::anyhow!("no work can be queued on the model: {code:?}"))
    }

    pub(super) fn step(&mut self) {
        self.operations += 1;
        if self.operations.is_multiple_of(self.every) {
            self.model.release_all_streams(self.device);
            self.model.hold_all(self.device);
        }
    }
}

impl Drop for Ahead<'_> {
    /// Lets all work run, because the end of a pool waits for it.
    fn drop(&mut self) {
        self.model.release_all_streams(self.device);
    }
}
