//! Calls that fail out of the blue.

use super::chance::Chance;
use crate::Call;

/// How often calls fail for no reason, with any code that is documented for them, having changed
/// nothing. The same calls in the same order fail alike for the same seed.
///
/// Calls that say what devices there are and what they can do never fail so. Nor does a code come
/// that would tell of a state that is not there: a lost context, a capture, work under way, a
/// driver that has gone. `OUT_OF_MEMORY` does come, where it is documented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spite {
    seed: u64,
    acquiring: u64,
    giving_back: u64,
}

impl Spite {
    /// One call in `one_in` fails, of those that acquire, change, queue, ask or wait. 0 is never.
    #[must_use]
    pub const fn new(seed: u64, one_in: u64) -> Self {
        Self {
            seed,
            acquiring: one_in,
            giving_back: 0,
        }
    }

    /// One call in `one_in` fails of those that give something back: release, unmap, free,
    /// destroy. 0 is never, which is also the default.
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
            | Call::MemFreeHost => self.giving_back,
            _ => self.acquiring,
        }
    }
}

/// Spite at work.
#[derive(Debug)]
pub(crate) struct Spiting {
    pub(crate) spite: Spite,
    pub(crate) chance: Chance,
}

impl From<Spite> for Spiting {
    fn from(spite: Spite) -> Self {
        Self {
            spite,
            chance: Chance::new(spite.seed),
        }
    }
}
