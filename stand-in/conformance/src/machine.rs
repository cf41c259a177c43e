//! Kernels on the model and the host driver, where tests can queue stand-ins for kernels.

use std::sync::Arc;

use cuvmm_driver::{Call, DeviceAddress, DriverError, Ordinal, StreamHandle};
use cuvmm_model::model::{Backing, Machine};

use crate::KernelToucher;

/// Kernels on a model or a host driver.
#[derive(Debug)]
pub struct MachineToucher<B: Backing>(Arc<Machine<B>>);

impl<B: Backing> MachineToucher<B> {
    /// Creates the kernels of a driver.
    #[must_use]
    pub fn new(machine: Arc<Machine<B>>) -> Self {
        Self(machine)
    }

    fn launch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        reads: Vec<(DeviceAddress, u64)>,
        writes: Vec<(DeviceAddress, u64, u8)>,
    ) -> Result<(), DriverError> {
        self.0
            .queue_kernel(device, stream, reads, writes)
            .map_err(|code| DriverError::new(Call::GraphLaunch, code))
    }
}

impl<B: Backing> KernelToucher for MachineToucher<B> {
    fn touch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        address: DeviceAddress,
        write: bool,
    ) -> Result<(), DriverError> {
        let (reads, writes) = if write {
            (Vec::new(), vec![(address, 4, 1)])
        } else {
            (vec![(address, 4)], Vec::new())
        };
        self.launch(device, stream, reads, writes)
    }

    /// Holds the stream back until a thread waits for work, because work takes no time on these
    /// drivers.
    fn spin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        milliseconds: u32,
    ) -> Result<(), DriverError> {
        if milliseconds > 0 {
            self.0.hold_until_awaited(device, stream);
        }
        self.launch(device, stream, Vec::new(), Vec::new())
    }
}
