//! One operation of a plan, and how it is written down.

use std::time::Duration;

/// One operation. Sizes and offsets are in bytes; sizes are rounded up to whole granules, offsets
/// must be whole granules. Devices are places in the list that the plan is run on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Reserves addresses (`cuMemAddressReserve`). Later steps either commit and grow in them, as
    /// in a [`Region`](crate::Region), or map physicals there.
    Reserve {
        /// A name of its own.
        name: String,
        /// Bytes of addresses.
        size: u64,
        /// The device they are for.
        device: usize,
    },
    /// Creates physical memory (`cuMemCreate`).
    Create {
        /// A name of its own.
        name: String,
        /// Its bytes.
        size: u64,
        /// The device it lies on.
        device: usize,
    },
    /// Maps a physical and gives access (`cuMemMap`, `cuMemSetAccess`).
    Map {
        /// The physical.
        physical: String,
        /// The addresses.
        within: String,
        /// Where in them.
        offset: u64,
        /// The devices that may read and write there; none means the physical's own. Each device
        /// beyond the physical's own is dear.
        access: Vec<usize>,
    },
    /// Unmaps what begins at an offset (`cuMemUnmap`).
    Unmap {
        /// The addresses.
        within: String,
        /// Where the mapping begins.
        offset: u64,
    },
    /// Puts memory behind a range (`cuMemCreate`, `cuMemMap` and `cuMemSetAccess` for each
    /// extent); what has memory already keeps it.
    Commit {
        /// The addresses.
        within: String,
        /// Where the range begins; by default behind all that was asked for.
        offset: Option<u64>,
        /// Its bytes.
        size: u64,
    },
    /// Grows from the first byte on, asked for little by little as a
    /// [`DeviceVec`](crate::DeviceVec) is: memory comes ahead, as much again up to 16 MiB, and then
    /// up to an eighth.
    Grow {
        /// The addresses.
        within: String,
        /// Bytes in the end.
        to: u64,
        /// How many bytes are asked for at a time.
        by: u64,
    },
    /// Withdraws a range that nothing uses any more, and gives its whole extents back
    /// (`cuMemUnmap` and `cuMemRelease` for each). What lay ahead of it goes too.
    Decommit {
        /// The addresses.
        within: String,
        /// Where the range begins.
        offset: u64,
        /// Its bytes.
        size: u64,
    },
    /// Addresses whose memory lies on several devices in turn: one physical for each stripe, all
    /// mapped side by side.
    Stripe {
        /// A name of its own.
        name: String,
        /// Bytes in all; the last stripe may be shorter.
        size: u64,
        /// Bytes of a stripe, a whole number of every device's granules.
        unit: u64,
        /// The devices, in the order of the stripes.
        devices: Vec<usize>,
        /// The devices that may read and write everywhere; none means the first of `devices`.
        access: Vec<usize>,
    },
    /// Gives back what a name stands for, with all that is mapped in it. The name is free again.
    Release {
        /// The name.
        name: String,
    },
    /// Lets time pass: half a second later a create is truly cold.
    Wait {
        /// How long.
        time: Duration,
    },
}
