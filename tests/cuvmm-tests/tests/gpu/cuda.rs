//! Work on a GPU: five kernels from a few lines of PTX that the driver compiles.
//!
//! `unsafe` is used to load and launch device code through the raw symbol table, and for the pinned
//! words that open gates.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cuvmm::Stream;
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::sys::{CUfunction, CUmodule, CUresult, CUstream, MissingSymbol};
use cuvmm::driver::{DeviceAddress, Driver, MemoryInfo, StreamFlags, StreamHandle};

use super::{D0, Gate, Rows, Work};

const PTX: &str = include_str!("kernels.ptx");

/// Target architectures: the oldest that the newest compilers support, and an older one.
const TARGETS: [&str; 2] = ["sm_75", "sm_52"];

/// Time after which a gate opens by itself, so that a failed test ends.
const GATE_LIMIT: Duration = Duration::from_secs(5);

const GATES: usize = 1024;
const REPORT: usize = 4;

/// Blocks per launch: many for kernels that fill memory quickly, few for kernels that wait, to
/// leave capacity for the kernels that they run beside.
const MANY: u32 = 256;
const FEW: u32 = 16;

pub(super) struct CudaWork {
    driver: Arc<CudaDriver>,
    module: CUmodule,
    fill: CUfunction,
    increment: CUfunction,
    check: CUfunction,
    gate: CUfunction,
    rows: CUfunction,
    /// The result of checks; see the kernel.
    report: DeviceAddress,
    /// A pinned word for each gate.
    gates: *mut u32,
    next_gate: AtomicUsize,
}

// SAFETY: the driver allows any thread to use module and functions, and the words are only accessed
// atomically.
unsafe impl Send for CudaWork {}
// SAFETY: the driver allows any thread to use module and functions, and the words are only accessed
// atomically.
unsafe impl Sync for CudaWork {}

fn ok(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

impl CudaWork {
    /// Loads the kernels. Returns the missing symbol if the driver is a stand-in that lacks a call.
    pub(super) fn load(driver: Arc<CudaDriver>) -> Result<Self, MissingSymbol> {
        driver.api().cuModuleLoadData.get()?;
        driver.api().cuLaunchKernel.get()?;
        let report = driver.alloc(D0, 8 * REPORT as u64).unwrap();
        let gates = driver.host_alloc(D0, 4 * GATES as u64, 0).unwrap();
        let mut work = Self {
            driver,
            module: ptr::null_mut(),
            fill: ptr::null_mut(),
            increment: ptr::null_mut(),
            check: ptr::null_mut(),
            gate: ptr::null_mut(),
            rows: ptr::null_mut(),
            report,
            gates: gates.cast(),
            next_gate: AtomicUsize::new(0),
        };
        // SAFETY: the memory was just allocated with this size.
        unsafe { gates.write_bytes(0, 4 * GATES) };
        work.load_kernels();
        work.warm_up();
        Ok(work)
    }

    pub(super) fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver) as _
    }

    fn load_kernels(&mut self) {
        let driver = Arc::clone(&self.driver);
        let load = driver.api().cuModuleLoadData.get().unwrap();
        let find = driver.api().cuModuleGetFunction.get().unwrap();
        within(&driver, || {
            let mut code = CUresult::CUDA_SUCCESS;
            for target in TARGETS {
                let image = format!("{}\0", PTX.replace("TARGET", target));
                // SAFETY: the image ends with a zero byte and outlives the call. The result is
                // written to a field.
                code = unsafe { load(&mut self.module, image.as_ptr().cast()) };
                if code == CUresult::CUDA_SUCCESS {
                    break;
                }
            }
            ok(code);
            let kernels: [(&mut CUfunction, &CStr); 5] = [
                (&mut self.fill, c"fill"),
                (&mut self.increment, c"increment"),
                (&mut self.check, c"check"),
                (&mut self.gate, c"gate"),
                (&mut self.rows, c"rows"),
            ];
            for (function, name) in kernels {
                // SAFETY: the module was loaded above, and the result is written to a field.
                ok(unsafe { find(function, self.module, name.as_ptr()) });
            }
        });
    }

    /// Uses each function once. The first use loads it, which may wait for all work of the context.
    fn warm_up(&self) {
        let none = StreamHandle::NULL;
        let stream = self
            .driver
            .stream_create(D0, StreamFlags::NON_BLOCKING)
            .unwrap();
        for stream in [none, stream] {
            self.launch(self.fill, (1, 32), stream, [self.report.0, 0, 0, 0]);
            self.launch(self.increment, (1, 32), stream, [self.report.0, 0, 0, 0]);
            self.launch(self.check, (1, 32), stream, [self.report.0, 0, 0, 0]);
            let flag = self.gates as u64;
            self.launch(self.gate, (1, 1), stream, [flag, 0, 0, 0]);
            // With zero heads.
            let report = self.report.0;
            let nothing = [report, report, report, 0, 0, 0, 0, 0];
            self.launch(self.rows, (1, 32), stream, nothing);
            // SAFETY: this value owns the report.
            unsafe {
                let bytes = 8 * REPORT as u64;
                self.driver
                    .fill_async(D0, self.report, 0, bytes, stream)
                    .unwrap();
            }
        }
        self.driver.context_synchronize(D0).unwrap();
        // SAFETY: the stream was created above, and its work is complete.
        unsafe { self.driver.stream_destroy(D0, stream).unwrap() };
        self.touch_managed();
    }

    /// Touches managed memory once: the driver then allocates 124 MiB for itself, which it keeps.
    fn touch_managed(&self) {
        let Ok(managed) = self.driver.managed_alloc(D0, 1 << 20, 1) else {
            return;
        };
        let numbers = [managed.0, 1, 0, 0];
        self.launch(self.fill, (1, 32), StreamHandle::NULL, numbers);
        self.driver.context_synchronize(D0).unwrap();
        // SAFETY: the memory was allocated above, and its work is complete.
        unsafe { self.driver.free(D0, managed).unwrap() };
    }

    fn launch<const N: usize>(
        &self,
        function: CUfunction,
        (blocks, threads): (u32, u32),
        stream: StreamHandle,
        mut numbers: [u64; N],
    ) {
        let launch = self.driver.api().cuLaunchKernel.get().unwrap();
        let mut arguments = numbers
            .each_mut()
            .map(|number| ptr::from_mut(number).cast::<c_void>());
        within(&self.driver, || {
            // SAFETY: each kernel takes the number of arguments that it is given here, and they are
            // read before the call returns. The validity of the memory that it accesses is what the
            // test checks.
            ok(unsafe {
                launch(
                    function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream.0 as CUstream,
                    arguments.as_mut_ptr(),
                    ptr::null_mut(),
                )
            });
        });
    }
}

/// Runs `act` with the device's context current.
fn within(driver: &CudaDriver, act: impl FnOnce()) {
    let context = driver.context(D0).unwrap();
    // SAFETY: the context is valid for as long as the driver is.
    ok(unsafe { (driver.api().cuCtxPushCurrent_v2)(context) });
    act();
    let mut popped = ptr::null_mut();
    // SAFETY: the context was pushed above, and the result is written to a local variable.
    ok(unsafe { (driver.api().cuCtxPopCurrent_v2)(&mut popped) });
}

fn word(stamp: u32) -> u32 {
    // An odd factor gives different stamps different patterns, and maps 0 to 0.
    stamp.wrapping_mul(0x9e37_79b1)
}

impl Work for CudaWork {
    fn fill(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32, after: Duration) {
        let blocks = if after.is_zero() { MANY } else { FEW };
        let numbers = [at.0, bytes / 4, word(stamp).into(), after.as_nanos() as u64];
        self.launch(self.fill, (blocks, 512), stream.as_raw(), numbers);
    }

    fn increment(&self, stream: &Stream, at: DeviceAddress, bytes: u64, after: Duration) -> bool {
        let blocks = if after.is_zero() { MANY } else { FEW };
        let numbers = [at.0, bytes / 4, 1, after.as_nanos() as u64];
        self.launch(self.increment, (blocks, 512), stream.as_raw(), numbers);
        true
    }

    fn check(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32) {
        let numbers = [at.0, bytes / 4, word(stamp).into(), self.report.0];
        self.launch(self.check, (MANY, 512), stream.as_raw(), numbers);
    }

    fn rows(&self, stream: &Stream, rows: &Rows, write: bool) {
        let numbers = [
            rows.tensor.0,
            rows.dense.0,
            rows.tokens.0,
            rows.heads,
            rows.words,
            rows.token_stride,
            rows.head_stride,
            write.into(),
        ];
        self.launch(self.rows, (MANY, 512), stream.as_raw(), numbers);
    }

    fn pattern(&self, stamp: u32) -> [u8; 4] {
        word(stamp).to_le_bytes()
    }

    fn gate(&self, stream: &Stream) -> Gate {
        let index = self.next_gate.fetch_add(1, Ordering::Relaxed);
        assert!(index < GATES, "more gates than one test should need");
        // SAFETY: the index is within the words.
        let flag = unsafe { self.gates.add(index) };
        let limit = GATE_LIMIT.as_nanos() as u64;
        self.launch(
            self.gate,
            (1, 1),
            stream.as_raw(),
            [flag as u64, limit, 0, 0],
        );
        let (flag, driver) = (flag as usize, Arc::clone(&self.driver));
        Gate::new(move || {
            // SAFETY: the word is pinned memory that is freed after all gates, and is only written
            // here.
            unsafe { AtomicU32::from_ptr(flag as *mut u32) }.store(1, Ordering::Release);
            drop(driver);
        })
    }

    fn noted(&self) -> Option<String> {
        let mut bytes = [0; 8 * REPORT];
        // SAFETY: this value owns the report, and all work is complete.
        unsafe {
            self.driver
                .copy_to_host(D0, &mut bytes, self.report)
                .unwrap();
            let size = bytes.len() as u64;
            self.driver.fill(D0, self.report, 0, size).unwrap();
        }
        self.driver.context_synchronize(D0).unwrap();
        let mut numbers = [0u64; REPORT];
        for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
            *number = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        let [count, at, holds, expected] = numbers;
        (count > 0).then(|| {
            format!("{count} words are wrong; the one at {at:#x} holds {holds:#x} instead of {expected:#x}")
        })
    }

    fn nothing_left(&self, before: MemoryInfo) {
        let least = super::limit_of_slack(before);
        let begun = Instant::now();
        loop {
            let free = self.driver.memory_info(D0).unwrap().free;
            if free >= least {
                return;
            }
            // The driver may take a moment, and another process may use the same GPU.
            let left = before.free - free;
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "{left} bytes of the device did not come back"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for CudaWork {
    fn drop(&mut self) {
        // A lost context frees everything with it.
        if self.driver.context_synchronize(D0).is_err() {
            return;
        }
        let unload = self.driver.api().cuModuleUnload.get().unwrap();
        // SAFETY: all work is complete, and each resource is released once.
        unsafe {
            within(&self.driver, || ok(unload(self.module)));
            self.driver.free(D0, self.report).unwrap();
            self.driver.host_free(D0, self.gates.cast()).unwrap();
        }
    }
}
