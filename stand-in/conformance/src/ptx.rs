//! Kernels, which the trait `Driver` does not have: an interface for the few cases that need one, and
//! the kernels of the real driver, from a few lines of PTX that the driver compiles.
//!
//! `unsafe` is allowed here for the driver's calls that load and launch device code. The trait
//! `Driver` does not have them, so they are called through the table of functions.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::fmt::{self, Debug};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cuvmm_driver::cuda::CudaDriver;
use cuvmm_driver::sys::{
    CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
    CUmodule, CUresult, CUstream, MissingSymbol,
};
use cuvmm_driver::{Call, DeviceAddress, DriverError, Ordinal, StreamHandle};

/// Runs kernels that access memory or take time.
///
/// The methods that launch do nothing else. The outcome shows at the next synchronization, as with any kernel.
pub trait KernelToucher: Debug + Send + Sync {
    /// Launches a kernel of one thread that reads, or writes, four bytes at an address.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn touch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        address: DeviceAddress,
        write: bool,
    ) -> Result<(), DriverError>;

    /// Launches a kernel that does nothing for about `milliseconds`.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn spin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        milliseconds: u32,
    ) -> Result<(), DriverError>;

    /// Returns the kernels that compare what they read, which only a GPU runs.
    fn comparing(&self) -> Option<&PtxToucher> {
        None
    }
}

/// The kernels that every GPU runs; `TARGET` stands for the minimum architecture.
const PTX: &str = include_str!("kernels.ptx");

/// The kernels that start before the kernel ahead of them has ended.
const PROGRAMMATIC: &str = include_str!("programmatic.ptx");

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

/// Device code that is loaded as one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Code {
    /// For every GPU.
    Usual,
    /// For GPUs with programmatic dependent launch.
    Programmatic,
}

impl Code {
    /// Returns the texts of the code to try, each ended by a zero byte.
    fn images(self) -> Vec<String> {
        match self {
            Self::Usual => TARGETS
                .iter()
                .map(|target| format!("{}\0", PTX.replace("TARGET", target)))
                .collect(),
            Self::Programmatic => vec![format!("{PROGRAMMATIC}\0")],
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) code: Code,
    pub(crate) name: &'static CStr,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    /// `true` if the kernel may start before the one ahead of it on its stream has ended.
    pub(crate) early: bool,
}

impl Launch {
    pub(crate) const fn single(name: &'static CStr) -> Self {
        Self {
            code: Code::Usual,
            name,
            blocks: 1,
            threads: 1,
            early: false,
        }
    }
}

/// Kernels on the real driver.
pub struct PtxToucher {
    driver: Arc<CudaDriver>,
    /// The modules of each device. The pointers are stored as numbers because they are only
    /// handles.
    modules: Mutex<BTreeMap<(i32, Code), usize>>,
    programmatic: bool,
}

impl PtxToucher {
    /// Creates the kernels of a driver, compiled now for device 0.
    ///
    /// # Errors
    /// Returns an error if the driver lacks the calls or cannot compile the code: then no kernels
    /// can be run.
    pub fn new(driver: Arc<CudaDriver>) -> Result<Self, NoKernels> {
        let mut toucher = Self {
            driver,
            modules: Mutex::default(),
            programmatic: false,
        };
        let load = |code| {
            let device = Ordinal(0);
            toucher.within(device, || toucher.module(device, code).map(drop))
        };
        load(Code::Usual).map_err(|error| match error {
            DriverError::MissingSymbol { symbol, .. } => NoKernels::Missing { symbol },
            error => NoKernels::Refused { code: error.code() },
        })?;
        let programmatic = load(Code::Programmatic).is_ok();
        toucher.programmatic = programmatic && toucher.driver.api().cuLaunchKernelEx.is_present();
        Ok(toucher)
    }

    /// Returns `true` if device 0 runs kernels that start before the kernel ahead of them has ended.
    pub(crate) const fn is_programmatic(&self) -> bool {
        self.programmatic
    }

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

    /// Returns a module of the device whose context is current.
    fn module(&self, device: Ordinal, code: Code) -> Result<CUmodule, DriverError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&(device.0, code)) {
            return Ok(*module as CUmodule);
        }
        let load = self.driver.api().cuModuleLoadData.get().map_err(missing)?;
        let mut module: CUmodule = ptr::null_mut();
        let mut loaded = Ok(());
        for image in code.images() {
            // SAFETY: the image is null-terminated text that outlives the call; the result is
            // written to a local.
            loaded = outcome(LAUNCH, unsafe { load(&mut module, image.as_ptr().cast()) });
            if loaded.is_ok() {
                break;
            }
        }
        loaded?;
        modules.insert((device.0, code), module as usize);
        Ok(module)
    }

    /// Launches a kernel that takes numbers.
    pub(crate) fn launch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        launch: Launch,
        numbers: &mut [u64],
    ) -> Result<(), DriverError> {
        let api = self.driver.api();
        let find = api.cuModuleGetFunction.get().map_err(missing)?;
        self.within(device, || {
            let module = self.module(device, launch.code)?;
            let mut function: CUfunction = ptr::null_mut();
            // SAFETY: the module was loaded and is never unloaded; the result is written to a
            // local.
            outcome(LAUNCH, unsafe {
                find(&mut function, module, launch.name.as_ptr())
            })?;
            let arguments = numbers.iter_mut();
            let mut arguments: Vec<*mut c_void> = arguments
                .map(|number| ptr::from_mut(number).cast())
                .collect();
            let stream = stream.0 as CUstream;
            match launch.early {
                true => self.launch_early(function, stream, launch, &mut arguments),
                false => self.launch_usual(function, stream, launch, &mut arguments),
            }
        })
    }

    fn launch_usual(
        &self,
        function: CUfunction,
        stream: CUstream,
        launch: Launch,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let call = self.driver.api().cuLaunchKernel.get().map_err(missing)?;
        let (blocks, threads) = (launch.blocks, launch.threads);
        let arguments = arguments.as_mut_ptr();
        // SAFETY: each kernel takes parameters of eight bytes, as many as it is given, and the
        // driver copies them before it returns. The case chooses the memory that the kernel
        // accesses, and is `Isolated` if that is not allowed.
        outcome(LAUNCH, unsafe {
            call(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                arguments,
                ptr::null_mut(),
            )
        })
    }

    /// Launches a kernel that may start before the one ahead of it on its stream has ended.
    fn launch_early(
        &self,
        function: CUfunction,
        stream: CUstream,
        launch: Launch,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let call = self.driver.api().cuLaunchKernelEx.get().map_err(missing)?;
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue::int(1),
        };
        let config = CUlaunchConfig {
            gridDimX: launch.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: for the reasons in `launch_usual`; the configuration and its attribute live until
        // the call has returned.
        outcome(LAUNCH, unsafe {
            call(
                &raw const config,
                function,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
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
        self.launch(device, stream, Launch::single(name), &mut [address.0])
    }

    fn spin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        milliseconds: u32,
    ) -> Result<(), DriverError> {
        let nanoseconds = u64::from(milliseconds) * 1_000_000;
        self.launch(device, stream, Launch::single(c"spin"), &mut [nanoseconds])
    }

    fn comparing(&self) -> Option<&PtxToucher> {
        Some(self)
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

impl Debug for PtxToucher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PtxToucher").finish_non_exhaustive()
    }
}
