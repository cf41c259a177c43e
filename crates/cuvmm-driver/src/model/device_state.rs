//! What is kept of each device, and whose memory is charged.

use crate::{CUresult, Call, Ordinal};

#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Bytes taken by physicals and allocations.
    pub(crate) used: u64,
    /// The part of them that was freed into the memory pool, which has not given it back.
    pub(crate) pooled: u64,
    /// Bytes that other programs hold.
    pub(crate) elsewhere: u64,
    /// Mappings that this device has access to.
    pub(crate) opened: u64,
    /// The code that every use of a lost context answers.
    pub(crate) lost: Option<CUresult>,
    /// Streams made from now on are held back at once.
    pub(crate) hold_new: bool,
}

/// Whose memory is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A device, by index.
    Device(usize),
    /// The host.
    Host,
}

/// Another program takes memory just before a call.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) call: Call,
    /// Calls of that kind until then, with the one that it comes before.
    pub(crate) calls: u64,
    pub(crate) device: Ordinal,
    pub(crate) bytes: u64,
}
