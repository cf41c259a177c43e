//! Kernels on the real driver, from a few lines of PTX that the driver compiles.
//!
//! `unsafe` is allowed here for the driver's calls that load and launch device code. The trait
//! `Driver` does not have them, so they are called through the table of functions.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cuvmm_driver::cuda::CudaDriver;
use cuvmm_driver::sys::{CUfunction, CUmodule, CUresult, CUstream, MissingSymbol};
use cuvmm_driver::{Call, DeviceAddress, DriverError, Ordinal, StreamHandle};

use crate::KernelToucher;

/// The kernels; `TARGET` stands for the minimum architecture.
const PTX: &str = "
.version 6.3
.target TARGET
.address_size 64

.visible .entry read_word(.param .u64 at)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [at];
    cvta.to.global.u64 %rd2, %rd1;
    ld.volatile.global.u32 %r1, [%rd2];
    ret;
}

.visible .entry write_word(.param .u64 at)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [at];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 16843009;
    st.volatile.global.u32 [%rd2], %r1;
    ret;
}

.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [nanoseconds];
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd3, %rd2, %rd1;
again:
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p1, %rd4, %rd3;
    @%p1 bra again;
    ret;
}
\0";

/// The architectures to try: the oldest that the newest compilers support, and an older one.
const TARGETS: [&str; 2] = ["sm_75", "sm_52"];

/// The reason why kernels cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoKernels {
    /// The driver has no calls for device code.
    #[error("the driver has no {symbol}")]
    Missing {
        /// The missing symbol.
        symbol: &'static str,
    },
    /// The driver does not load the code.
    #[error("the driver does not load device code: {}", code.map_or_else(String::new, |code| code.to_string()))]
    Refused {
        /// The code it returned.
        code: Option<CUresult>,
    },
}

/// Kernels on the real driver.
pub struct PtxToucher {
    driver: Arc<CudaDriver>,
    /// The module of each device. The pointer is stored as a number because it is only a handle.
    modules: Mutex<BTreeMap<i32, usize>>,
}

impl PtxToucher {
    /// Creates the kernels of a driver, compiled now for device 0.
    ///
    /// # Errors
    /// Returns an error if the driver lacks the calls or cannot compile the code: then no kernels
    /// can be run.
    pub fn new(driver: Arc<CudaDriver>) -> Result<Self, NoKernels> {
        let toucher = Self {
            driver,
            modules: Mutex::default(),
        };
        toucher
            .within(Ordinal(0), || toucher.module(Ordinal(0)).map(drop))
            .map_err(|error| match error {
                DriverError::MissingSymbol { symbol, .. } => NoKernels::Missing { symbol },
                error => NoKernels::Refused { code: error.code() },
            })?;
        Ok(toucher)
    }

    /// Makes a device's context current while `act` runs.
    fn within(
        &self,
        device: Ordinal,
        act: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let context = self.driver.context(device)?;
        let api = self.driver.api();
        // SAFETY: the context is valid for as long as the driver is.
        outcome(Call::CtxPushCurrent, unsafe {
            (api.cuCtxPushCurrent_v2)(context)
        })?;
        let acted = act();
        let mut popped = ptr::null_mut();
        // SAFETY: the popped context was pushed above; the result is written to a local.
        let restored = outcome(Call::CtxPopCurrent, unsafe {
            (api.cuCtxPopCurrent_v2)(&mut popped)
        });
        acted.and(restored)
    }

    /// Returns the module of the device whose context is current.
    fn module(&self, device: Ordinal) -> Result<CUmodule, DriverError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&device.0) {
            return Ok(*module as CUmodule);
        }
        let load = self.driver.api().cuModuleLoadData.get().map_err(missing)?;
        let mut module: CUmodule = ptr::null_mut();
        let mut loaded = Ok(());
        for target in TARGETS {
            let image = PTX.replace("TARGET", target);
            // SAFETY: the image is null-terminated text that outlives the call; the result is
            // written to a local.
            loaded = outcome(LAUNCH, unsafe { load(&mut module, image.as_ptr().cast()) });
            if loaded.is_ok() {
                break;
            }
        }
        loaded?;
        modules.insert(device.0, module as usize);
        Ok(module)
    }

    /// Launches one thread of a kernel that takes one number.
    fn launch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        name: &CStr,
        mut argument: u64,
    ) -> Result<(), DriverError> {
        let api = self.driver.api();
        let find = api.cuModuleGetFunction.get().map_err(missing)?;
        let launch = api.cuLaunchKernel.get().map_err(missing)?;
        self.within(device, || {
            let module = self.module(device)?;
            let mut function: CUfunction = ptr::null_mut();
            // SAFETY: the module was loaded and is never unloaded; the result is written to a
            // local.
            outcome(LAUNCH, unsafe {
                find(&mut function, module, name.as_ptr())
            })?;
            let mut arguments = [ptr::from_mut(&mut argument).cast::<c_void>()];
            // SAFETY: the function takes one parameter of eight bytes, and the driver copies it
            // before it returns. The case chooses the memory that the kernel accesses, and is
            // `Isolated` if that is not allowed.
            outcome(LAUNCH, unsafe {
                launch(
                    function,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    0,
                    stream.0 as CUstream,
                    arguments.as_mut_ptr(),
                    ptr::null_mut(),
                )
            })
        })
    }
}

impl KernelToucher for PtxToucher {
    fn touch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        address: DeviceAddress,
        write: bool,
    ) -> Result<(), DriverError> {
        let name = if write { c"write_word" } else { c"read_word" };
        self.launch(device, stream, name, address.0)
    }

    fn spin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        milliseconds: u32,
    ) -> Result<(), DriverError> {
        self.launch(device, stream, c"spin", u64::from(milliseconds) * 1_000_000)
    }
}

/// The trait's calls do not include loading and launching, so errors name the nearest one.
const LAUNCH: Call = Call::GraphLaunch;

fn outcome(call: Call, code: CUresult) -> Result<(), DriverError> {
    if code == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(DriverError::new(call, code))
    }
}

fn missing(missing: MissingSymbol) -> DriverError {
    DriverError::MissingSymbol {
        call: LAUNCH,
        symbol: missing.symbol,
        since: missing.since,
    }
}

impl fmt::Debug for PtxToucher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PtxToucher").finish_non_exhaustive()
    }
}
