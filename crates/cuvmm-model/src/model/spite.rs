//! Calls that fail at random.

use super::chance::Chance;
use cuvmm_driver::Call;

/// The frequency of random failures of calls.
///
/// Such a call returns a random code of those documented for it, and changes nothing. With equal
/// seeds, equal calls in equal order fail equally.
///
/// Calls that report the devices and their abilities never fail at random. Codes that would report
/// a state that does not exist (a lost context, a capture, unfinished work, a driver that has shut
/// down) are not used. `OUT_OF_MEMORY` is used where it is documented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomFailures {
    seed: u64,
    acquiring: u64,
    giving_back: u64,
}

impl RandomFailures {
    /// Fails one in `one_in` of the calls that acquire, change, queue, query or wait. 0 means
    /// never.
    #[must_use]
    pub const fn new(seed: u64, one_in: u64) -> Self {
        Self {
            seed,
            acquiring: one_in,
            giving_back: 0,
        }
    }

    /// Fails one in `one_in` of the calls that release, unmap, free or destroy. 0 means never and
    /// is the default.
    #[must_use]
    pub const fn giving_back(mut self, one_in: u64) -> Self {
        self.giving_back = one_in;
        self
    }

    pub(crate) fn one_in(&self, call: Call) -> u64 {
        match call {
            Call::Init
            | Call::DriverGetVersion
            | Call::DeviceGetCount
            | Call::DeviceGetName
            | Call::DeviceGetUuid
            | Call::DeviceGetAttribute
            | Call::DeviceTotalMem
            | Call::DeviceCanAccessPeer
            | Call::MemGetAllocationGranularity
            | Call::PrimaryCtxRetain
            | Call::PrimaryCtxRelease
            | Call::CtxPushCurrent
            | Call::CtxPopCurrent
            | Call::CtxGetCurrent => 0,
            Call::MemAddressFree
            | Call::MemRelease
            | Call::MemUnmap
            | Call::StreamDestroy
            | Call::EventDestroy
            | Call::GraphDestroy
            | Call::GraphExecDestroy
            | Call::MemFree
            | Call::MemFreeAsync
            | Call::MemPoolDestroy
            | Call::MemFreeHost
            | Call::MemHostUnregister => self.giving_back,
            _ => self.acquiring,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Spiting {
    pub(crate) spite: RandomFailures,
    pub(crate) chance: Chance,
}

impl From<RandomFailures> for Spiting {
    fn from(spite: RandomFailures) -> Self {
        Self {
            spite,
            chance: Chance::new(spite.seed),
        }
    }
}
