//! The state of each device, and the owners that memory is charged to.

use cuvmm_driver::{CUresult, Call, Ordinal};

#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Bytes taken by physicals and allocations.
    pub(crate) used: u64,
    /// Bytes that other programs hold.
    pub(crate) elsewhere: u64,
    /// Mappings that this device has access to.
    pub(crate) opened: u64,
    /// The code that every use of the lost context returns.
    pub(crate) lost: Option<CUresult>,
    /// New streams are held back from the start.
    pub(crate) hold_new: bool,
}

/// The owner that memory is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A device, by index.
    Device(usize),
    /// The host.
    Host,
}

/// A scheduled event: another program takes memory just before a call.
#[derive(Debug)]
pub(crate) struct ScheduledUse {
    pub(crate) call: Call,
    /// The number of calls of this kind up to and including the one that the event precedes.
    pub(crate) calls: u64,
    pub(crate) device: Ordinal,
    pub(crate) bytes: u64,
}
