//! Kernels of the real driver that write words and compare what they read, for the cases in which one
//! kernel reads what another has written. All methods only launch.
//!
//! A report is two counters of eight bytes: the words that differed, and those that differed before
//! the kernel ahead had ended.

use cuvmm_driver::{DeviceAddress, DriverError, Ordinal, StreamHandle};

use crate::ptx::{Code, Launch, PtxToucher};

/// Blocks of a kernel that leaves room for another beside it, and of any other kernel.
const FEW: u32 = 16;
const MANY: u32 = 128;

const THREADS: u32 = 256;

/// How long a kernel waits before it writes, so that the kernel behind it reads before.
const LATE_NANOSECONDS: u64 = 100_000;

/// Words of four bytes: the address of the first, and their number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    pub(crate) at: DeviceAddress,
    pub(crate) count: u64,
}

/// How a kernel loads what it compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Through the cache of the multiprocessor (`ld.ca`).
    Cached,
    /// By read-only loads (`ld.nc`), through the texture path where there is one.
    NonCoherent,
}

impl PtxToucher {
    /// Launches a kernel that writes a value to all words.
    pub(crate) fn write(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        words: Words,
        value: u32,
    ) -> Result<(), DriverError> {
        let launch = Launch {
            blocks: MANY,
            threads: THREADS,
            ..Launch::single(c"write_words")
        };
        let numbers = &mut [words.at.0, words.count, value.into()];
        self.launch(device, stream, launch, numbers)
    }

    /// Launches a kernel that counts the words that differ from a value.
    pub(crate) fn compare(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        (words, load): (Words, Load),
        value: u32,
        report: DeviceAddress,
    ) -> Result<(), DriverError> {
        let launch = Launch {
            blocks: MANY,
            threads: THREADS,
            ..Launch::single(match load {
                Load::Cached => c"compare_cached",
                Load::NonCoherent => c"compare_noncoherent",
            })
        };
        let numbers = &mut [words.at.0, words.count, value.into(), report.0];
        self.launch(device, stream, launch, numbers)
    }

    /// Launches a kernel that lets the kernel behind it start, waits for a while, and then writes a
    /// value to all words.
    pub(crate) fn write_late(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        words: Words,
        value: u32,
    ) -> Result<(), DriverError> {
        let launch = Launch {
            code: Code::Programmatic,
            name: c"write_late",
            blocks: FEW,
            threads: THREADS,
            early: false,
        };
        let numbers = &mut [words.at.0, words.count, value.into(), LATE_NANOSECONDS];
        self.launch(device, stream, launch, numbers)
    }

    /// Launches a kernel that starts before the one ahead of it has ended, waits for that
    /// (`griddepcontrol.wait`), and counts the words that differ from a value. With `reads_early` it
    /// counts them before it waits, too.
    pub(crate) fn compare_early(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        (words, reads_early): (Words, bool),
        value: u32,
        report: DeviceAddress,
    ) -> Result<(), DriverError> {
        let launch = Launch {
            code: Code::Programmatic,
            name: c"compare_twice",
            blocks: MANY,
            threads: THREADS,
            early: true,
        };
        let early = u64::from(reads_early);
        let numbers = &mut [words.at.0, words.count, value.into(), report.0, early];
        self.launch(device, stream, launch, numbers)
    }
}
