//! Device code for GPUs: a kernel that writes and waits, and a kernel that checks.
//!
//! `unsafe` here: device code is loaded and launched through the table of driver symbols, because
//! the `Driver` trait has no such calls. A kernel touches a block that is borrowed for the launch;
//! the bench tests that the library keeps the block mapped while the kernel runs.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::sys::{CUfunction, CUmodule, CUresult, CUstream};
use cuvmm::driver::{DeviceAddress, Driver, Ordinal};
use cuvmm::{Block, Stream};

const PTX: &str = include_str!("kernels.ptx");

/// Target architectures to try: the oldest that the newest compilers support, and an older one.
const TARGETS: [&str; 2] = ["sm_75", "sm_52"];

/// A small grid, so that other kernels can run beside a waiting kernel.
const WAITING: (u32, u32) = (16, 512);
const WIDE: (u32, u32) = (256, 512);
const ONE: (u32, u32) = (1, 1);

const REPORT: u64 = 8;

/// The loaded kernels. A launch needs the device's context current.
pub(super) struct Kernels {
    driver: Arc<CudaDriver>,
    device: Ordinal,
    module: CUmodule,
    fill: CUfunction,
    check: CUfunction,
    /// The device address of a count of words with wrong values.
    report: DeviceAddress,
}

impl Kernels {
    /// Loads the kernels. The device's context must be current.
    ///
    /// # Errors
    /// The reason why the kernels cannot be loaded.
    pub(super) fn load(driver: Arc<CudaDriver>, device: Ordinal) -> Result<Self, String> {
        let api = driver.api();
        let load = api
            .cuModuleLoadData
            .get()
            .map_err(|error| error.to_string())?;
        let find = api
            .cuModuleGetFunction
            .get()
            .map_err(|error| error.to_string())?;
        let mut module: CUmodule = ptr::null_mut();
        let mut code = CUresult::CUDA_SUCCESS;
        for target in TARGETS {
            let image = format!("{}\0", PTX.replace("TARGET", target));
            // SAFETY: the image ends with a zero byte and outlives the call; the result is written
            // to a local.
            code = unsafe { load(&mut module, image.as_ptr().cast()) };
            if code == CUresult::CUDA_SUCCESS {
                break;
            }
        }
        if code != CUresult::CUDA_SUCCESS {
            return Err(format!("the driver does not load device code: {code}"));
        }
        let function = |name: &CStr| {
            let mut function: CUfunction = ptr::null_mut();
            // SAFETY: the module was loaded above; the result is written to a local.
            match unsafe { find(&mut function, module, name.as_ptr()) } {
                CUresult::CUDA_SUCCESS => Ok(function),
                code => Err(format!(
                    "the driver finds no {name:?} in its module: {code}"
                )),
            }
        };
        let (fill, check) = (function(c"fill")?, function(c"check")?);
        let report = driver
            .alloc(device, REPORT)
            .map_err(|error| error.to_string())?;
        let kernels = Self {
            driver,
            device,
            module,
            fill,
            check,
            report,
        };
        kernels.warm_up().map_err(|error| error.to_string())?;
        Ok(kernels)
    }

    /// Launches every kernel once: the first use of a function loads it, which may wait for all
    /// work of the context.
    fn warm_up(&self) -> anyhow::Result<()> {
        let none = ptr::null_mut();
        self.launch(self.fill, ONE, none, [self.report.0, 0, 0, 0])?;
        self.launch(self.check, ONE, none, [self.report.0, 0, 0, self.report.0])?;
        self.driver.context_synchronize(self.device)?;
        self.changed().map(drop)
    }

    pub(super) fn use_block(
        &self,
        stream: &Stream,
        block: &Block,
        pattern: u32,
        time: Duration,
    ) -> anyhow::Result<()> {
        let (at, words, pattern) = (block.address().0, block.size() / 4, u64::from(pattern));
        let wait = u64::try_from(time.as_nanos())?;
        self.launch(self.fill, WAITING, raw(stream), [at, words, pattern, wait])?;
        self.launch(
            self.check,
            WIDE,
            raw(stream),
            [at, words, pattern, self.report.0],
        )
    }

    pub(super) fn wait(&self, stream: &Stream, time: Duration) -> anyhow::Result<()> {
        let wait = u64::try_from(time.as_nanos())?;
        self.launch(self.fill, ONE, raw(stream), [self.report.0, 0, 0, wait])
    }

    /// Returns the number of words with wrong values since the last call.
    pub(super) fn changed(&self) -> anyhow::Result<u64> {
        let mut bytes = [0; REPORT as usize];
        // SAFETY: this value owns the report; the copy and the fill are waited for.
        unsafe {
            self.driver
                .copy_to_host(self.device, &mut bytes, self.report)?;
            self.driver.fill(self.device, self.report, 0, REPORT)?;
        }
        self.driver.context_synchronize(self.device)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn launch(
        &self,
        function: CUfunction,
        (blocks, threads): (u32, u32),
        stream: CUstream,
        mut numbers: [u64; 4],
    ) -> anyhow::Result<()> {
        let launch = self.driver.api().cuLaunchKernel.get()?;
        let mut arguments = numbers
            .each_mut()
            .map(|number| ptr::from_mut(number).cast::<c_void>());
        // SAFETY: each kernel takes four numbers, which are read before the call returns. It
        // touches only memory of a block or the report.
        let code = unsafe {
            launch(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        ensure!(code == CUresult::CUDA_SUCCESS, "cuLaunchKernel: {code}");
        Ok(())
    }
}

fn raw(stream: &Stream) -> CUstream {
    stream.as_raw().0 as CUstream
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // A lost context has freed everything.
        if self.driver.context_synchronize(self.device).is_err() {
            return;
        }
        // SAFETY: all work has ended, and this value owns the report and the module.
        unsafe {
            let _ = self.driver.free(self.device, self.report);
            if let Ok(unload) = self.driver.api().cuModuleUnload.get() {
                let _ = unload(self.module);
            }
        }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels").finish_non_exhaustive()
    }
}
