//! The state of each device, and the owners of charged memory.

use cuvmm_driver::{CUresult, Call, Ordinal};

#[derive(Debug, Default)]
pub(crate) struct Device {
    /// By physicals and allocations, in bytes.
    pub(crate) used: u64,
    /// By other programs, in bytes.
    pub(crate) elsewhere: u64,
    /// Mappings that this device has access to.
    pub(crate) opened: u64,
    /// The code that every use of the lost context returns.
    pub(crate) lost: Option<CUresult>,
    pub(crate) hold_new: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// By index.
    Device(usize),
    Host,
}

/// Memory that another program takes just before a call.
#[derive(Debug)]
pub(crate) struct ScheduledUse {
    pub(crate) call: Call,
    /// The number of this call among the calls of its kind.
    pub(crate) calls: u64,
    pub(crate) device: Ordinal,
    pub(crate) bytes: u64,
}
