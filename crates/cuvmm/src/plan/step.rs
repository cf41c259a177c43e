//! The steps of a plan.

use std::time::Duration;

/// One step of a plan. Sizes and offsets are in bytes; sizes are rounded up to whole granules, and
/// offsets must be whole granules. Devices are indices into the list that the plan is run on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Reserves addresses (`cuMemAddressReserve`). Later steps either commit and grow in them, as
    /// in a [`Region`](crate::Region), or map physicals in them.
    Reserve {
        /// A new name.
        name: String,
        /// The bytes of addresses.
        size: u64,
        /// The device that the addresses are for.
        device: usize,
    },
    /// Creates physical memory (`cuMemCreate`).
    Create {
        /// A new name.
        name: String,
        /// The size in bytes.
        size: u64,
        /// The device that the memory is on.
        device: usize,
    },
    /// Maps a physical and sets access (`cuMemMap`, `cuMemSetAccess`).
    Map {
        /// The name of the physical.
        physical: String,
        /// The name of the addresses.
        within: String,
        /// The offset in the addresses.
        offset: u64,
        /// The devices that may read and write; an empty list means the physical's own device.
        /// Access for other devices is expensive.
        access: Vec<usize>,
    },
    /// Unmaps the mapping at an offset (`cuMemUnmap`).
    Unmap {
        /// The name of the addresses.
        within: String,
        /// The offset of the mapping.
        offset: u64,
    },
    /// Commits memory to a range (`cuMemCreate`, `cuMemMap` and `cuMemSetAccess` for each extent).
    /// Parts that have memory keep it.
    Commit {
        /// The name of the addresses.
        within: String,
        /// The start of the range. The default is after everything requested so far.
        offset: Option<u64>,
        /// The size of the range in bytes.
        size: u64,
    },
    /// Grows from the first byte on in small requests, as a [`DeviceVec`](crate::DeviceVec) does:
    /// memory is precommitted, as much again up to 16 MiB, and then up to an eighth.
    Grow {
        /// The name of the addresses.
        within: String,
        /// The size at the end, in bytes.
        to: u64,
        /// The bytes that each request adds.
        by: u64,
    },
    /// Decommits a range that is no longer used, and releases its whole extents (`cuMemUnmap` and
    /// `cuMemRelease` for each). Memory that was precommitted after the range is released too.
    Decommit {
        /// The name of the addresses.
        within: String,
        /// The start of the range.
        offset: u64,
        /// The size of the range in bytes.
        size: u64,
    },
    /// Reserves a range whose memory alternates between devices: one physical for each stripe,
    /// mapped next to each other.
    Stripe {
        /// A new name.
        name: String,
        /// The total bytes. The last stripe may be shorter.
        size: u64,
        /// The bytes of a stripe, a multiple of every device's granule.
        unit: u64,
        /// The devices, in the order of the stripes.
        devices: Vec<usize>,
        /// The devices that may read and write the whole range; an empty list means the first of
        /// `devices`.
        access: Vec<usize>,
    },
    /// Releases the memory or addresses of a name, with everything that is mapped in it. The name
    /// can be used again.
    Release {
        /// The name.
        name: String,
    },
    /// Lets time pass. For example, a creation half a second after the last release measures the
    /// cold path of the driver.
    Wait {
        /// The time to wait.
        time: Duration,
    },
}
