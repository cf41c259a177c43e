//! Opening a driver: the real one where there is a GPU, the host driver elsewhere.
//!
//! [`Opened`] says which driver was opened, and why. To require a certain driver, set [`Wanted`],
//! or construct that driver directly. No environment variable is read here.
//!
//! ```
//! use cuvmm::driver::auto::{self, OpenOptions};
//!
//! let opened = auto::open(OpenOptions::new())?;
//! println!("{}: {}", opened.kind.name(), opened.reason);
//! assert!(opened.driver.device_count()? > 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`open_current`] opens the real driver in a context that another library made.
//!
//! `unsafe` is allowed here because the caller must vouch for a library or a context that it names.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use cuvmm_driver::cuda::CudaDriver;
pub use cuvmm_driver::cuda::{KeepAlive, OpenError};
use cuvmm_driver::sys::CUcontext;
use cuvmm_driver::{DeviceAttribute, Driver, DriverKind, Ordinal, Result};
#[cfg(all(feature = "model", target_os = "linux"))]
use cuvmm_model::host::{HostDriver, HostOptions};

/// The driver to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wanted {
    /// The real driver if one of its devices supports virtual memory management, else the host
    /// driver.
    #[default]
    Best,
    /// The real driver, or an error.
    Cuda,
    /// The host driver, with or without a GPU.
    Host,
}

/// Options for [`open`]. The default is [`Wanted::Best`].
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    wanted: Wanted,
    library: Option<PathBuf>,
    #[cfg(all(feature = "model", target_os = "linux"))]
    host_options: HostOptions,
}

impl OpenOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the driver to open.
    #[must_use]
    pub fn wanted(mut self, wanted: Wanted) -> Self {
        self.wanted = wanted;
        self
    }

    /// Sets the options of the host driver, which apply if the host driver is opened.
    #[cfg(all(feature = "model", target_os = "linux"))]
    #[cfg_attr(docsrs, doc(cfg(feature = "model")))]
    #[must_use]
    #[doc(alias = "host")]
    pub fn host_options(mut self, options: HostOptions) -> Self {
        self.host_options = options;
        self
    }

    /// Sets the library of the real driver, instead of the one that the system finds.
    ///
    /// # Safety
    ///
    /// The library must be NVIDIA's driver or behave like it; see [`CudaDriver::open_library`].
    #[must_use]
    pub unsafe fn library(mut self, path: impl Into<PathBuf>) -> Self {
        self.library = Some(path.into());
        self
    }
}

/// A driver opened by [`open`] or [`open_current`].
#[derive(Clone, Debug)]
pub struct Opened {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The kind of the driver.
    pub kind: DriverKind,
    /// The reason for this driver: which GPU was found, or why none was. The text is not meant to
    /// be parsed.
    pub reason: String,
}

/// Opens a driver.
///
/// With [`Wanted::Best`], opens the real driver if it loads and one of its devices supports virtual
/// memory management. Otherwise (no library, no such device, or only a toolkit's stub) opens the
/// host driver, and [`Opened::reason`] says why.
///
/// Calls `cuInit`, `cuDeviceGetCount`, `cuDeviceGetAttribute`, `cuDeviceGetName` and
/// `cuDriverGetVersion`. Creates no context.
///
/// # Errors
///
/// With [`Wanted::Cuda`], returns why the real driver cannot be opened. With the other two, does not
/// fail, but in a build without the feature `model`: there the host driver is refused with
/// [`OpenError::NoHostDriver`].
#[doc(alias("ensure_loaded", "attach_vmm_functions"))]
#[doc(alias = "cuInit")]
pub fn open(options: OpenOptions) -> Result<Opened, OpenError> {
    let wanted = options.wanted;
    if wanted == Wanted::Host {
        return on_host(options, "the host driver was requested".to_owned());
    }
    let opened = match &options.library {
        // SAFETY: the caller of `OpenOptions::library` has vouched for the library at this path.
        Some(path) => unsafe { CudaDriver::open_library(path) },
        None => CudaDriver::open(),
    };
    let driver = match opened {
        Ok(driver) => driver,
        Err(error) if wanted == Wanted::Cuda => return Err(error),
        Err(error) => return on_host(options, format!("no GPU: {error}")),
    };
    let library = driver.api().library().display().to_string();
    let reason = match first_able(&driver) {
        Ok(Some(gpu)) => format!("{gpu}, {library}"),
        Ok(None) if wanted == Wanted::Best => {
            let reason = format!("{library} sees no GPU with virtual memory management");
            return on_host(options, reason);
        }
        Err(error) if wanted == Wanted::Best => {
            return on_host(options, format!("{library} does not answer: {error}"));
        }
        Ok(None) | Err(_) => format!("{library} was requested"),
    };
    Ok(Opened {
        driver: Arc::new(driver),
        kind: DriverKind::Cuda,
        reason,
    })
}

/// Opens the host driver, for a reason.
#[cfg(all(feature = "model", target_os = "linux"))]
fn on_host(options: OpenOptions, reason: String) -> Result<Opened, OpenError> {
    Ok(Opened {
        driver: Arc::new(HostDriver::new(options.host_options)),
        kind: DriverKind::Host,
        reason,
    })
}

/// Refuses the host driver, which this build does not have, with the reason why it was chosen.
#[cfg(not(all(feature = "model", target_os = "linux")))]
fn on_host(_: OpenOptions, reason: String) -> Result<Opened, OpenError> {
    Err(OpenError::NoHostDriver { reason })
}

/// Opens the real driver to work in a context that another library made, on the device of that
/// context.
///
/// The context must be current on the calling thread. On other devices the driver works in their
/// primary contexts. The other library's context is never destroyed or released here; `keep_alive`
/// is dropped after the last call. Calls `cuInit`, `cuDeviceGetCount`, `cuCtxGetCurrent`,
/// `cuCtxGetDevice` and `cuDeviceGet`.
///
/// # Errors
///
/// Returns why the real driver cannot be opened. Returns [`OpenError::NotCurrent`] if the context
/// is not current, or if another copy of the driver made it.
///
/// # Safety
///
/// `context` stays valid at least until `keep_alive` is dropped.
pub unsafe fn open_current(
    context: CUcontext,
    keep_alive: KeepAlive,
) -> Result<(Opened, Ordinal), OpenError> {
    let driver = CudaDriver::open()?;
    let library = driver.api().library().display().to_string();
    // SAFETY: the caller promises that `context` outlives `keep_alive`, which is all that is
    // required.
    let (driver, device) = unsafe { driver.with_current_context(context, keep_alive) }?;
    let opened = Opened {
        driver: Arc::new(driver),
        kind: DriverKind::Cuda,
        reason: format!("another library's context on {device}, {library}"),
    };
    Ok((opened, device))
}

/// Describes the first device that supports virtual memory management and the number of devices.
///
/// Returns `None` if there is no such device.
fn first_able(driver: &dyn Driver) -> Result<Option<String>> {
    let count = driver.device_count()?;
    for device in (0..count).map(Ordinal) {
        if driver.device_attribute(device, DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT)? == 0 {
            continue;
        }
        let name = driver.device_name(device)?;
        let version = driver.version()?;
        let others = match count {
            1 => String::new(),
            more => format!(" (one of {more} devices)"),
        };
        return Ok(Some(format!("{name}{others}, CUDA {version}")));
    }
    Ok(None)
}

#[cfg(all(test, feature = "model", target_os = "linux"))]
mod tests {
    use cuvmm_driver::sys::{CudaVersion, SYMBOLS};

    use super::{DriverKind, OpenError, OpenOptions, Wanted, open};

    fn nowhere() -> OpenOptions {
        // SAFETY: there is no such file.
        unsafe { OpenOptions::new().library("/nowhere/libcuda.so.1") }
    }

    #[test]
    fn without_a_gpu_it_is_the_host_and_the_reason_says_why() {
        let opened = open(nowhere()).expect("does not fail");
        assert_eq!(opened.kind, DriverKind::Host);
        assert_eq!(opened.driver.kind(), DriverKind::Host);
        let reason = opened.reason;
        assert!(reason.contains("/nowhere/libcuda.so.1"), "{reason}");
    }

    /// The library is a driver of CUDA 10.2 with two devices, which support nothing.
    #[test]
    fn a_driver_whose_devices_cannot_map_memory_is_passed_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let source = folder.path().join("unable.c");
        let library = folder.path().join("libunable.so");
        let two = "int cuDeviceGetCount(int *n) { *n = 2; return 0; }\n\
                   int cuDriverGetVersion(int *v) { *v = 10020; return 0; }\n";
        let rest = SYMBOLS.iter().filter(|symbol| {
            let written = two.contains(&format!("int {}(", symbol.name));
            symbol.since <= CudaVersion::OLDEST_SUPPORTED && !written
        });
        let rest: String = rest
            .map(|symbol| format!("int {}(void) {{ return 0; }}\n", symbol.name))
            .collect();
        std::fs::write(&source, format!("{two}{rest}")).expect("a file");
        let built = std::process::Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status();
        assert!(built.expect("a C compiler").success());

        // SAFETY: the functions that are called behave like CUDA's.
        let options = || unsafe { OpenOptions::new().library(&library) };
        let opened = open(options()).expect("does not fail");
        assert_eq!(opened.kind, DriverKind::Host);
        let reason = opened.reason;
        assert!(reason.contains("libunable.so"), "{reason}");
        assert!(reason.contains("virtual memory"), "{reason}");

        let opened = open(options().wanted(Wanted::Cuda)).expect("opens");
        assert_eq!(opened.kind, DriverKind::Cuda);
        assert_eq!(opened.driver.device_count(), Ok(2));
    }

    #[test]
    fn a_gpu_that_was_asked_for_is_not_replaced() {
        let error = open(nowhere().wanted(Wanted::Cuda)).expect_err("there is no such file");
        assert!(matches!(error, OpenError::Load(_)), "{error:?}");
    }

    #[test]
    fn the_host_can_be_asked_for() {
        let opened = open(OpenOptions::new().wanted(Wanted::Host)).expect("does not fail");
        assert_eq!(opened.kind, DriverKind::Host);
        assert!(opened.reason.contains("requested"), "{}", opened.reason);
    }

    #[test]
    fn the_kind_is_what_the_driver_says() {
        let opened = open(OpenOptions::new()).expect("does not fail");
        assert_eq!(opened.kind, opened.driver.kind());
        assert!(!opened.reason.is_empty());
    }
}

#[cfg(all(test, not(all(feature = "model", target_os = "linux"))))]
mod tests_without_the_model {
    use super::{OpenError, OpenOptions, Wanted, open};

    #[test]
    fn the_host_driver_is_refused_with_the_reason() {
        // SAFETY: there is no such file.
        let nowhere = unsafe { OpenOptions::new().library("/nowhere/libcuda.so.1") };
        for options in [OpenOptions::new().wanted(Wanted::Host), nowhere] {
            let error = open(options).expect_err("there is no host driver");
            assert!(matches!(error, OpenError::NoHostDriver { .. }), "{error:?}");
            assert!(error.to_string().contains("feature `model`"), "{error}");
        }
    }
}
