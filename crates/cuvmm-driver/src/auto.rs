//! A GPU when there is one, else the host; and which it was, and why.
//!
//! Whoever wants a certain driver opens it by its own name, or says so with [`Wanted`]. No
//! environment variable is read here.
//!
//! ```
//! use cuvmm_driver::auto::{self, OpenOptions};
//!
//! let opened = auto::open(OpenOptions::new())?;
//! println!("{}: {}", opened.kind.name(), opened.reason);
//! assert!(opened.driver.device_count()? > 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Whoever has a context of another library's works in that one: [`open_current`].
//!
//! `unsafe` is allowed here because a library or a context that the caller names has to be vouched
//! for.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use cuvmm_sys::CUcontext;

use crate::cuda::CudaDriver;
pub use crate::cuda::{KeepAlive, OpenError};
use crate::host::{HostDriver, HostOptions};
use crate::{DeviceAttribute, Driver, DriverKind, Ordinal, Result};

/// Which driver is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wanted {
    /// The real driver where it sees a GPU that can map memory, else the host.
    #[default]
    Best,
    /// The real driver or an error.
    Cuda,
    /// The host, GPU or not.
    Host,
}

/// What to open, and how. The default is [`Wanted::Best`].
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    wanted: Wanted,
    library: Option<PathBuf>,
    host: HostOptions,
}

impl OpenOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Which driver is wanted.
    #[must_use]
    pub fn wanted(mut self, wanted: Wanted) -> Self {
        self.wanted = wanted;
        self
    }

    /// How the host driver is set up, if it comes to that.
    #[must_use]
    pub fn host(mut self, options: HostOptions) -> Self {
        self.host = options;
        self
    }

    /// The real driver's library, instead of the one that the system finds.
    ///
    /// # Safety
    ///
    /// The library must be NVIDIA's driver or keep its promises, as for
    /// [`CudaDriver::open_library`].
    #[must_use]
    pub unsafe fn library(mut self, path: impl Into<PathBuf>) -> Self {
        self.library = Some(path.into());
        self
    }
}

/// An open driver.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// Which it is.
    pub kind: DriverKind,
    /// Why it is this one: what GPU was found, or why none was. For people, not for programs.
    pub reason: String,
}

/// Opens a driver.
///
/// With [`Wanted::Best`] the real driver is taken if it opens and one of its devices supports
/// virtual memory management. In every other case, be it that there is no library, no device or a
/// toolkit's stub, the host driver is, and [`Opened::reason`] says what was in the way.
///
/// Calls `cuInit`, `cuDeviceGetCount`, `cuDeviceGetAttribute`, `cuDeviceGetName` and
/// `cuDriverGetVersion`; makes no context.
///
/// # Errors
///
/// With [`Wanted::Cuda`], why the real driver cannot be opened. The other two do not fail.
#[doc(alias = "cuInit")]
pub fn open(options: OpenOptions) -> Result<Opened, OpenError> {
    let OpenOptions {
        wanted,
        library,
        host,
    } = options;
    let on_host = |reason| Opened {
        driver: Arc::new(HostDriver::new(host)),
        kind: DriverKind::Host,
        reason,
    };
    if wanted == Wanted::Host {
        return Ok(on_host("the host driver was asked for".to_owned()));
    }
    let opened = match library {
        // SAFETY: whoever set the path has vouched for what is there.
        Some(path) => unsafe { CudaDriver::open_library(path) },
        None => CudaDriver::open(),
    };
    let driver = match opened {
        Ok(driver) => driver,
        Err(error) if wanted == Wanted::Cuda => return Err(error),
        Err(error) => return Ok(on_host(format!("no GPU: {error}"))),
    };
    let library = driver.api().library().display().to_string();
    let reason = match first_able(&driver) {
        Ok(Some(gpu)) => format!("{gpu}, {library}"),
        Ok(None) if wanted == Wanted::Best => {
            return Ok(on_host(format!(
                "{library} sees no GPU with virtual memory management"
            )));
        }
        Err(error) if wanted == Wanted::Best => {
            return Ok(on_host(format!("{library} does not answer: {error}")));
        }
        Ok(None) | Err(_) => format!("{library} was asked for"),
    };
    Ok(Opened {
        driver: Arc::new(driver),
        kind: DriverKind::Cuda,
        reason,
    })
}

/// Opens the real driver to work in a context that another library made and that is current on this
/// thread, on the device that it belongs to. On other devices it works in their primary contexts.
///
/// Nothing is destroyed or released here that is the other library's; `keep_alive` is dropped after
/// the last call. Calls `cuInit`, `cuDeviceGetCount`, `cuCtxGetCurrent`, `cuCtxGetDevice` and
/// `cuDeviceGet`.
///
/// # Errors
///
/// Why the real driver cannot be opened; [`OpenError::NotCurrent`] when the context is not current, or
/// another copy of the driver made it.
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
    // SAFETY: the promise is the same.
    let (driver, device) = unsafe { driver.with_current_context(context, keep_alive) }?;
    let opened = Opened {
        driver: Arc::new(driver),
        kind: DriverKind::Cuda,
        reason: format!("another library's context on {device}, {library}"),
    };
    Ok((opened, device))
}

/// The first device that can map memory, in words, and how many there are beside it.
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

#[cfg(test)]
mod tests {
    use super::{OpenError, OpenOptions, Wanted, open};
    use crate::DriverKind;

    fn nowhere() -> OpenOptions {
        // SAFETY: there is no such file.
        unsafe { OpenOptions::new().library("/nowhere/libcuda.so.1") }
    }

    #[test]
    fn without_a_gpu_it_is_the_host_and_the_reason_says_why() {
        let opened = open(nowhere()).expect("does not fail");
        assert_eq!(opened.kind, DriverKind::Host);
        assert_eq!(opened.driver.kind(), DriverKind::Host);
        assert!(
            opened.reason.contains("/nowhere/libcuda.so.1"),
            "{}",
            opened.reason
        );
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
        assert!(opened.reason.contains("asked for"), "{}", opened.reason);
    }

    #[test]
    fn the_kind_is_what_the_driver_says() {
        let opened = open(OpenOptions::new()).expect("does not fail");
        assert_eq!(opened.kind, opened.driver.kind());
        assert!(!opened.reason.is_empty());
    }
}
