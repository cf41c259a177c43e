//! A device to test on: always the host driver, and a GPU where there is one.
//!
//! A test is written once, over a [`Stage`]: real streams, work that takes time, memory filled with
//! patterns. On the GPU the work is kernels. On the host driver it is work that is held back until
//! its time has come, so that the same scenarios run without a GPU. An error of the library shows
//! as a word with the wrong pattern, or as a lost context.
//!
//! `unsafe` is used for pinned host memory that the device copies to, which outlives the copies.
#![allow(unsafe_code, dead_code)]

mod cuda;
mod host;
#[path = "../common/manner.rs"]
mod manner;
#[path = "../../../../crates/cuvmm-model/testing/own_process.rs"]
pub mod own_process;

use std::io::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::host::HostDriver;
use cuvmm::driver::{DeviceAddress, Driver, MemoryInfo, Ordinal};
use cuvmm::{Block, Device, Limit, Pool, Stream};

pub const D0: Ordinal = Ordinal(0);

/// Memory that the driver may keep after everything is released: streams and launches allocate some
/// device memory when first used.
const SLACK: u64 = 64 << 20;

/// Printed by a test that has a process of its own when it has completed there.
const ENDED: &str = "the context was lost and the process went on";

/// Work that a device does in the order of a stream. Whether memory is mapped at the addresses is
/// what the tests are about, so it is not checked.
pub trait Work: Send + Sync {
    /// Waits, then writes a stamp's pattern to every word.
    fn fill(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32, after: Duration);

    /// Waits, then adds one to every word. Returns `false` and does nothing if work cannot compute.
    fn increment(&self, stream: &Stream, at: DeviceAddress, bytes: u64, after: Duration) -> bool;

    /// Records every word that does not hold a stamp's pattern. Stamp 0 is zeros.
    fn check(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32);

    /// Copies rows between a strided tensor and a dense buffer, to the tensor if `write` is set.
    fn rows(&self, stream: &Stream, rows: &Rows, write: bool);

    /// Returns the pattern of a stamp as it is in memory.
    fn pattern(&self, stamp: u32) -> [u8; 4];

    /// Holds back the stream's next work until the gate opens.
    fn gate(&self, stream: &Stream) -> Gate;

    /// Returns the recorded errors, once all work is done.
    fn noted(&self) -> Option<String>;

    /// Fails if the library has not released everything.
    fn nothing_left(&self, before: MemoryInfo);
}

/// Words `[token, head, word]` with strides, and the same number of words in a dense buffer.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub tensor: DeviceAddress,
    pub dense: DeviceAddress,
    /// Device address of the number of tokens, 8 bytes. Kernels read it when they run; work of the
    /// host driver gets the number when it is queued.
    pub tokens: DeviceAddress,
    pub heads: u64,
    /// Words per head.
    pub words: u64,
    /// Bytes from one token to the next.
    pub token_stride: u64,
    /// Bytes from one head to the next.
    pub head_stride: u64,
}

/// Held-back work of a stream. Dropping the gate opens it.
pub struct Gate {
    open: Option<Box<dyn FnOnce() + Send>>,
}

impl Gate {
    fn new(open: impl FnOnce() + Send + 'static) -> Self {
        Self {
            open: Some(Box::new(open)),
        }
    }

    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            open();
        }
    }
}

/// A device and the means to keep it busy.
pub struct Stage {
    pub device: Device,
    work: Box<dyn Work>,
    gpu: bool,
    before: MemoryInfo,
    stamps: AtomicU32,
    /// Serializes the tests, which share one context: captures and marks on the whole context
    /// disturb each other.
    turn: Option<MutexGuard<'static, ()>>,
}

impl Stage {
    pub fn on_host() -> Self {
        let driver = Arc::new(HostDriver::new(host::options()));
        let work = Box::new(host::HostWork::new(Arc::clone(&driver)));
        Self::new(driver, work, false, None)
    }

    /// Opens the GPU. Without one, returns `None` and says so on the terminal even if the test
    /// harness captures output. `CUVMM_REQUIRE_GPU=1` turns a missing GPU into a failure.
    pub fn on_gpu(test: &str) -> Option<Self> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let why = match CudaDriver::open() {
            Ok(driver) => match cuda::CudaWork::load(Arc::new(driver)) {
                Ok(work) => {
                    let driver = work.driver();
                    return Some(Self::new(driver, Box::new(work), true, Some(turn)));
                }
                Err(missing) => missing.to_string(),
            },
            Err(error) => error.to_string(),
        };
        if std::env::var_os("CUVMM_REQUIRE_GPU").is_some_and(|value| value == "1") {
            panic!("CUVMM_REQUIRE_GPU=1, and there is no GPU: {why}");
        }
        let said = writeln!(
            std::io::stderr(),
            "\n*** {test} DID NOT RUN: it needs a GPU. {why} ***"
        );
        drop(said);
        None
    }

    fn new(
        driver: Arc<dyn Driver>,
        work: Box<dyn Work>,
        gpu: bool,
        turn: Option<MutexGuard<'static, ()>>,
    ) -> Self {
        let device = Device::open(driver, 0).unwrap();
        let before = device.memory_info().unwrap();
        Self {
            device,
            work,
            gpu,
            before,
            stamps: AtomicU32::new(0),
            turn,
        }
    }

    /// Returns the first number on the GPU and the second on the host driver.
    pub const fn scaled<T: Copy>(&self, gpu: T, host: T) -> T {
        if self.gpu { gpu } else { host }
    }

    /// Returns the granule.
    pub fn g(&self) -> u64 {
        self.device.granularity()
    }

    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.device.driver()
    }

    /// Creates a pool of `granules` granules, in extents that can be reclaimed one by one.
    pub fn pool(&self, granules: u64) -> Pool {
        Pool::builder(&self.device)
            .limit(Limit::Bytes(granules * self.g()))
            .build()
            .unwrap()
    }

    pub fn stream(&self) -> Stream {
        Stream::new(&self.device).unwrap()
    }

    pub fn streams<const N: usize>(&self) -> [Stream; N] {
        std::array::from_fn(|_| self.stream())
    }

    /// Returns a new stamp.
    pub fn stamp(&self) -> u32 {
        self.stamps.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn work(&self) -> &dyn Work {
        &*self.work
    }

    /// Queues writing a stamp's pattern to all of a block.
    pub fn fill(&self, stream: &Stream, block: &Block, stamp: u32) {
        self.late_fill(stream, block, stamp, Duration::ZERO);
    }

    /// Queues writing a stamp's pattern to all of a block, some time after the stream gets there.
    pub fn late_fill(&self, stream: &Stream, block: &Block, stamp: u32, after: Duration) {
        let bytes = words(block.size());
        self.work.fill(stream, block.address(), bytes, stamp, after);
    }

    /// Queues a check that all of a block holds a stamp's pattern.
    pub fn check(&self, stream: &Stream, block: &Block, stamp: u32) {
        self.work
            .check(stream, block.address(), words(block.size()), stamp);
    }

    /// Waits for all work and fails if any word was wrong.
    pub fn settle(&self) {
        self.device.synchronize().unwrap();
        if let Some(wrong) = self.work.noted() {
            panic!("{wrong}");
        }
    }

    /// Runs an ignored test in a process of its own, with the GPU for itself. Fails unless it
    /// [reports its end](say_ended).
    pub fn leave_to_a_process_of_its_own(mut self, test: &str) {
        let _turn = self.turn.take();
        drop(self);
        let output = own_process::only(test).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr);
        let success = output.status.success() && said.contains(ENDED);
        assert!(success, "{}\n{said}\n{complained}", output.status);
    }

    /// Ends a test: nothing is lost, wrong or left over.
    pub fn finish(self) {
        self.settle();
        assert_eq!(self.device.drop_failures(), 0);
        assert_eq!(self.device.lost(), None);
        self.work.nothing_left(self.before);
    }

    /// Allocates pinned host memory, as a target of copies.
    pub fn pinned(&self, bytes: u64) -> Pinned {
        let at = self.driver().host_alloc(D0, bytes, 0).unwrap();
        Pinned {
            driver: Arc::clone(self.driver()),
            at,
            bytes,
        }
    }
}

/// Reports that a test in a process of its own has completed.
pub fn say_ended() {
    let said = writeln!(std::io::stdout(), "{ENDED}");
    drop(said);
}

/// Rounds a size down to whole words.
pub const fn words(bytes: u64) -> u64 {
    bytes & !3
}

pub struct Pinned {
    driver: Arc<dyn Driver>,
    at: *mut u8,
    bytes: u64,
}

impl Pinned {
    /// Queues a copy from the device that fills all of this memory.
    pub fn copy_from(&self, stream: &Stream, at: DeviceAddress) {
        // SAFETY: this memory lives until the stream has been synchronized. Whether the source
        // stays mapped is what the test checks.
        unsafe {
            self.driver
                .copy_to_host_async(D0, self.at, at, self.bytes, stream.as_raw())
                .unwrap();
        }
    }

    /// Fails unless every word holds the pattern. The copies into this memory must be done.
    pub fn expect(&self, pattern: [u8; 4]) {
        // SAFETY: this value owns the memory, and nothing writes to it while the borrow lives.
        let bytes = unsafe { std::slice::from_raw_parts(self.at, self.bytes as usize) };
        let wrong = bytes
            .chunks_exact(4)
            .position(|word| word != pattern.as_slice());
        if let Some(word) = wrong {
            let holds = &bytes[4 * word..4 * word + 4];
            panic!("word {word} holds {holds:02x?} instead of {pattern:02x?}");
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by this driver and is freed once.
        let freed = unsafe { self.driver.host_free(D0, self.at) };
        // A failed test may have lost the context.
        assert!(freed.is_ok() || std::thread::panicking(), "{freed:?}");
    }
}

/// Retries an operation until it succeeds. Fails after ten seconds.
pub fn eventually<T, E: std::fmt::Display>(mut act: impl FnMut() -> Result<T, E>) -> T {
    let begun = Instant::now();
    loop {
        match act() {
            Ok(done) => return done,
            Err(error) if begun.elapsed() > Duration::from_secs(10) => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

/// Runs a test on the host driver, and on the GPU where there is one.
#[macro_export]
macro_rules! on_each {
    ($($(#[$meta:meta])* fn $name:ident($stage:ident) $body:block)+) => {
        $(
            mod $name {
                #[allow(unused_imports)]
                use super::*;

                fn body($stage: &$crate::gpu::Stage) $body

                $(#[$meta])*
                #[test]
                fn on_host() {
                    let stage = $crate::gpu::Stage::on_host();
                    body(&stage);
                    stage.finish();
                }

                $(#[$meta])*
                #[test]
                fn on_gpu() {
                    let Some(stage) = $crate::gpu::Stage::on_gpu(concat!(module_path!(), "::on_gpu"))
                    else {
                        return;
                    };
                    body(&stage);
                    stage.finish();
                }
            }
        )+
    };
}

fn limit_of_slack(before: MemoryInfo) -> u64 {
    before.free.saturating_sub(SLACK)
}
