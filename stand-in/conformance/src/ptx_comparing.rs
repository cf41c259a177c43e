//! Kernels of the real driver that write words and compare what they read.

use cuvmm_driver::{DeviceAddress, DriverError, Ordinal, StreamHandle};

use crate::comparing::{ComparingKernels, Load, Words};
use crate::ptx::{Code, Launch, PtxToucher};

/// Blocks of a kernel that leaves room for another beside it, and of any other kernel.
const FEW: u32 = 16;
const MANY: u32 = 128;

const THREADS: u32 = 256;

/// How long a kernel waits before it writes, so that the kernel behind it reads before.
const LATE_NANOSECONDS: u64 = 100_000;

impl ComparingKernels for PtxToucher {
    fn is_programmatic(&self) -> bool {
        Self::is_programmatic(self)
    }

    fn write(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        words: Words,
        value: u32,
    ) -> Result<(), DriverError> {
        let launch = Launch {
            code: Code::Usual,
            name: c"write_words",
            blocks: MANY,
            threads: THREADS,
            early: false,
        };
        let numbers = &mut [words.at.0, words.count, value.into()];
        self.launch(device, stream, launch, numbers)
    }

    fn compare(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        (words, load): (Words, Load),
        value: u32,
        report: DeviceAddress,
    ) -> Result<(), DriverError> {
        let launch = Launch {
            code: Code::Usual,
            name: match load {
                Load::Cached => c"compare_cached",
                Load::NonCoherent => c"compare_noncoherent",
            },
            blocks: MANY,
            threads: THREADS,
            early: false,
        };
        let numbers = &mut [words.at.0, words.count, value.into(), report.0];
        self.launch(device, stream, launch, numbers)
    }

    fn write_late(
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

    fn compare_early(
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
