//! A device for unit tests: the model driver, whose streams can be held, behind a driver that fails
//! on request.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm_driver::fault::{Fault, FaultDriver};
use cuvmm_driver::{CUresult, Call, Driver, Ordinal};
use cuvmm_model::model::{Machine, ModelDriver, ModelOptions, Nothing};

use super::{Space, Unmapped};
use crate::device::Device;
use crate::own::{Access, Physical, Stream};

pub(crate) const G: u64 = 2 << 20;

pub(crate) struct Rig {
    pub(crate) machine: Arc<Machine<Nothing>>,
    faults: Arc<FaultDriver>,
    pub(crate) device: Device,
}

pub(crate) fn rig() -> Rig {
    let machine = Arc::new(ModelDriver::new(ModelOptions::new()));
    let inner: Arc<dyn Driver> = machine.clone();
    let faults = Arc::new(FaultDriver::new(inner));
    let driver: Arc<dyn Driver> = faults.clone();
    let device = Device::open(driver, 0).unwrap();
    Rig {
        machine,
        faults,
        device,
    }
}

impl Rig {
    pub(crate) fn memory(&self, granules: u64) -> Unmapped {
        Unmapped::fresh(Physical::new(&self.device, granules * G).unwrap())
    }

    /// Reserves a space with an extent of one granule in each of its granules.
    pub(crate) fn space(&self, granules: u64) -> Space {
        let mut space = Space::reserve(&self.device, granules * G).unwrap();
        let memory = (0..granules).map(|_| self.memory(1)).collect();
        space.place_for(0, memory, Access::ReadWrite).unwrap();
        space
    }

    /// Creates a stream with work that is incomplete before [`finish`](Self::finish).
    pub(crate) fn busy_stream(&self) -> Stream {
        let stream = Stream::new(&self.device).unwrap();
        self.queue(&stream);
        stream
    }

    /// Queues work on a stream and holds it.
    pub(crate) fn queue(&self, stream: &Stream) {
        self.machine.hold(Ordinal(0), stream.as_raw());
        let queued = self
            .machine
            .queue_kernel(Ordinal(0), stream.as_raw(), vec![], vec![]);
        queued.unwrap();
    }

    /// Completes all work of a stream.
    pub(crate) fn finish(&self, stream: &Stream) {
        self.machine.release_stream(Ordinal(0), stream.as_raw());
    }

    /// Makes the nth call of a kind from now on fail.
    pub(crate) fn fail(&self, call: Call, nth: u64) {
        let fault = Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN);
        self.faults.arm(fault.of(call));
    }

    /// Makes the nth call of a kind from now on, and all later calls, fail.
    pub(crate) fn fail_from(&self, call: Call, nth: u64) {
        let fault = Fault::from(nth, CUresult::CUDA_ERROR_UNKNOWN);
        self.faults.arm(fault.of(call));
    }

    pub(crate) fn heal(&self) {
        self.faults.disarm();
    }

    /// Makes the nth call of a kind from now on panic.
    pub(crate) fn panic_at(&self, call: Call, nth: u64) {
        let left = AtomicU64::new(nth);
        self.faults.watch(Some(Arc::new(move |made| {
            let is_last = made == call && left.fetch_sub(1, Ordering::Relaxed) == 1;
            assert!(!is_last, "the driver panics at {call}");
        })));
    }

    pub(crate) fn calls(&self) -> u64 {
        self.faults.total()
    }

    pub(crate) fn count(&self, call: Call) -> u64 {
        self.faults.count(call)
    }
}
