//! A device to work on: the GPU where there is one, and the host driver always.
//!
//! A test is written once, over a [`Stage`]: real streams, work that takes time, memory with
//! patterns in it. On the GPU the work is kernels; on the host driver it is work that is held
//! back until its time has come, so that the same scenarios run where there is no GPU. What the
//! library did wrong shows as a word that holds somebody else's pattern, or as a lost context.
//!
//! `unsafe` here: pinned host memory that the device copies to, which outlives the copies.
#![allow(
    unsafe_code,
    dead_code,
    missing_docs,
    unreachable_pub,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

mod cuda;
mod host;
#[path = "../common/manner.rs"]
mod manner;

use std::io::Write as _;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::host::HostDriver;
use cuvmm::driver::{DeviceAddress, Driver, MemoryInfo, Ordinal};
use cuvmm::{Block, Device, Limit, Pool, Stream};

pub const D0: Ordinal = Ordinal(0);

/// What the driver may keep for itself of memory that was given back: streams and launches take
/// some of the device when they are first used.
const SLACK: u64 = 64 << 20;

/// What a process of a test's own says when it has come to its end.
const ENDED: &str = "the context was lost and the process went on";

/// What a device is asked to do, in the order of a stream. Whether memory lies at the addresses is
/// what the tests are about, so nobody checks that.
pub trait Work: Send + Sync {
    /// Waits, then writes a stamp's pattern into every word.
    fn fill(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32, after: Duration);

    /// Waits, then adds one to every word. False, and nothing done, where no work computes.
    fn increment(&self, stream: &Stream, at: DeviceAddress, bytes: u64, after: Duration) -> bool;

    /// Notes every word that does not hold a stamp's pattern; stamp 0 is zeros.
    fn check(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32);

    /// Copies rows between where they lie strided and where they lie side by side, to the tensor if
    /// it is to `write`.
    fn rows(&self, stream: &Stream, rows: &Rows, write: bool);

    /// The pattern of a stamp as it lies in memory.
    fn pattern(&self, stamp: u32) -> [u8; 4];

    /// What the stream has next waits until the gate opens.
    fn gate(&self, stream: &Stream) -> Gate;

    /// What has been noted, once all work is done.
    fn noted(&self) -> Option<String>;

    /// Complains of what the library has not given back.
    fn nothing_left(&self, before: MemoryInfo);
}

/// Words `[token, head, word]` at strides, and as many side by side.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub tensor: DeviceAddress,
    pub dense: DeviceAddress,
    /// Where on the device the number of tokens is, 8 bytes. Kernels read it when they run; the host
    /// driver's work is told it when it is queued.
    pub tokens: DeviceAddress,
    pub heads: u64,
    /// Words of a head.
    pub words: u64,
    /// From one token to the next, in bytes.
    pub token_stride: u64,
    /// From one head to the next, in bytes.
    pub head_stride: u64,
}

/// Work of a stream that waits. Dropping the gate opens it.
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
    /// Captures and marks on the whole context disturb each other, and the tests share one.
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Stage {
    pub fn on_host() -> Self {
        let driver = Arc::new(HostDriver::new(host::options()));
        let work = Box::new(host::HostWork::new(Arc::clone(&driver)));
        Self::new(driver, work, false, None)
    }

    /// The GPU, or nothing where there is none, which is then said on the terminal even if the
    /// test harness keeps quiet. `CUVMM_REQUIRE_GPU=1` makes it a failure.
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
            _turn: turn,
        }
    }

    /// A number for the GPU, and a smaller one for the host, where all work is ours.
    pub const fn scaled<T: Copy>(&self, gpu: T, host: T) -> T {
        if self.gpu { gpu } else { host }
    }

    /// The granule.
    pub fn g(&self) -> u64 {
        self.device.granularity()
    }

    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.device.driver()
    }

    /// A pool of so many granules, in extents that can be taken back one by one.
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

    /// A stamp that nobody has had.
    pub fn stamp(&self) -> u32 {
        self.stamps.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn work(&self) -> &dyn Work {
        &*self.work
    }

    /// Queues writing a pattern into all of a block.
    pub fn fill(&self, stream: &Stream, block: &Block, stamp: u32) {
        self.late_fill(stream, block, stamp, Duration::ZERO);
    }

    /// The same, some time after the stream gets there.
    pub fn late_fill(&self, stream: &Stream, block: &Block, stamp: u32, after: Duration) {
        let bytes = words(block.size());
        self.work.fill(stream, block.address(), bytes, stamp, after);
    }

    /// Queues looking whether all of a block holds a pattern.
    pub fn check(&self, stream: &Stream, block: &Block, stamp: u32) {
        self.work
            .check(stream, block.address(), words(block.size()), stamp);
    }

    /// Waits for all work and fails if any word was not as it should be.
    pub fn settle(&self) {
        self.device.synchronize().unwrap();
        if let Some(wrong) = self.work.noted() {
            panic!("{wrong}");
        }
    }

    /// Has the ignored test `in_a_process_of_its_own` of the same file run in one, with the GPU
    /// for itself; fails unless it [says that it came to its end](say_ended).
    pub fn leave_to_a_process_of_its_own(self) {
        drop(self);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--ignored",
            "--exact",
            "--nocapture",
            "in_a_process_of_its_own",
        ]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr);
        let success = output.status.success() && said.contains(ENDED);
        assert!(success, "{}\n{said}\n{complained}", output.status);
    }

    /// The end of a test: nothing is lost, wrong or left.
    pub fn finish(self) {
        self.settle();
        assert_eq!(self.device.drop_failures(), 0);
        assert_eq!(self.device.lost(), None);
        self.work.nothing_left(self.before);
    }

    /// Pinned host memory, to copy to.
    pub fn pinned(&self, bytes: u64) -> Pinned {
        let at = self.driver().host_alloc(D0, bytes, 0).unwrap();
        Pinned {
            driver: Arc::clone(self.driver()),
            at,
            bytes,
        }
    }
}

/// Says that a test which has a process of its own has come to its end there.
pub fn say_ended() {
    let said = writeln!(std::io::stdout(), "{ENDED}");
    drop(said);
}

/// What of a size is whole words.
pub const fn words(bytes: u64) -> u64 {
    bytes & !3
}

/// Pinned host memory.
pub struct Pinned {
    driver: Arc<dyn Driver>,
    at: *mut u8,
    bytes: u64,
}

impl Pinned {
    /// Queues copying as many bytes as this has from the device.
    pub fn copy_from(&self, stream: &Stream, at: DeviceAddress) {
        // SAFETY: this lives until the stream has been waited for, and whether the source stays
        // mapped is the question.
        unsafe {
            self.driver
                .copy_to_host_async(D0, self.at, at, self.bytes, stream.as_raw())
                .unwrap();
        }
    }

    /// Fails unless every word holds a pattern. The copies into it are done.
    pub fn expect(&self, pattern: [u8; 4]) {
        // SAFETY: the memory is ours, and nothing writes to it while the borrow lives.
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
        // SAFETY: it was had from this driver and is given back once.
        let freed = unsafe { self.driver.host_free(D0, self.at) };
        // A test that failed may have lost the context.
        assert!(freed.is_ok() || std::thread::panicking(), "{freed:?}");
    }
}

/// Runs an act again until it succeeds; fails after ten seconds.
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
                use super::*;

                fn body($stage: &gpu::Stage) $body

                $(#[$meta])*
                #[test]
                fn on_host() {
                    let stage = gpu::Stage::on_host();
                    body(&stage);
                    stage.finish();
                }

                $(#[$meta])*
                #[test]
                fn on_gpu() {
                    let Some(stage) = gpu::Stage::on_gpu(concat!(stringify!($name), "::on_gpu"))
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
