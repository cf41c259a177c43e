//! Opening the driver, and the type of an open driver.
//!
//! `unsafe` makes driver calls (see `answer`), and marks functions whose caller must vouch for a
//! library or a context that it names.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};

use cuvmm_sys::{Api, CUcontext, CUdevice, CUresult, LoadError};

use super::answer::{ask, outcome};
use super::context::{Contexts, KeepAlive};
use crate::{Call, DriverError, Ordinal, Result};

/// The real driver. See the [module](super).
///
/// Several may be open at once: each holds its own references to the primary contexts, which the
/// driver counts. The library itself stays loaded until the process ends.
#[derive(Debug)]
pub struct CudaDriver {
    api: Api,
    contexts: Contexts,
}

/// The reason why the real driver cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no library, or it is too old.
    #[error(transparent)]
    Load(#[from] LoadError),

    /// The library is the CUDA toolkit's stub, which is only for linking.
    ///
    /// Where a real driver is installed, its `libcuda.so.1` was not found first; a container may
    /// lack the mount that provides it.
    #[error(
        "{} is the CUDA toolkit's stub, which is only for linking",
        library.display()
    )]
    Stub {
        /// The path of the library.
        library: PathBuf,
    },

    /// The driver was loaded and refuses to start. `CUDA_ERROR_NO_DEVICE` means that it sees no
    /// GPU.
    #[error("{} was loaded, but {error}", library.display())]
    Refused {
        /// The path of the library.
        library: PathBuf,
        /// The failed call and its code.
        error: DriverError,
    },

    /// The given context is not current on this thread, as far as this driver knows: it was not
    /// made current, or another copy of the driver made it.
    #[error(
        "{} does not have the context {context:#x} current on this thread: the current context is {current:#x}",
        library.display()
    )]
    NotCurrent {
        /// The path of the driver's library.
        library: PathBuf,
        /// The context that was given.
        context: usize,
        /// The context that is current; 0 for none.
        current: usize,
    },

    /// The host driver was to be opened, in a program that was built without it.
    #[error(
        "the host driver is not in this program (feature `model` of cuvmm, on Linux): {reason}"
    )]
    NoHostDriver {
        /// The reason why the host driver was chosen, such as the absence of a GPU.
        reason: String,
    },
}

impl OpenError {
    /// Returns `true` if the driver works and merely sees no GPU.
    #[must_use]
    pub fn is_no_device(&self) -> bool {
        matches!(self, Self::Refused { error, .. }
            if error.code() == Some(CUresult::CUDA_ERROR_NO_DEVICE))
    }
}

impl CudaDriver {
    /// Loads the installed driver and initializes it.
    ///
    /// Calls `cuInit` and `cuDeviceGetCount`. Creates no context.
    ///
    /// # Errors
    ///
    /// [`OpenError::Load`] lists the libraries that were tried. [`OpenError::Stub`] is returned if
    /// only a toolkit's stub was found, [`OpenError::Refused`] if the driver itself returned an
    /// error.
    #[doc(alias = "cuInit")]
    pub fn open() -> Result<Self, OpenError> {
        Self::from_api(Api::load()?)
    }

    /// Loads the driver's library at `path`, and no other, and initializes it.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`CudaDriver::open`].
    ///
    /// # Safety
    ///
    /// The library must be NVIDIA's driver or behave like it; see
    /// [`Api::load_from`](cuvmm_sys::Api::load_from).
    pub unsafe fn open_library(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        // SAFETY: the caller vouches for the library.
        Self::from_api(unsafe { Api::load_from(path) }?)
    }

    /// Initializes the driver whose functions are in `api`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`CudaDriver::open`], except [`OpenError::Load`].
    #[doc(alias = "over")]
    pub fn from_api(api: Api) -> Result<Self, OpenError> {
        // SAFETY: `cuInit` takes no pointers and may be called at any time, any number of times.
        let code = unsafe { (api.cuInit)(0) };
        if code == CUresult::CUDA_ERROR_STUB_LIBRARY {
            return Err(OpenError::Stub {
                library: api.library().to_owned(),
            });
        }
        let refused = |error| OpenError::Refused {
            library: api.library().to_owned(),
            error,
        };
        outcome(Call::Init, code).map_err(refused)?;
        let mut count = 0;
        // SAFETY: the result is written to a local.
        let code = unsafe { (api.cuDeviceGetCount)(&mut count) };
        outcome(Call::DeviceGetCount, code).map_err(refused)?;
        Ok(Self {
            contexts: Contexts::new(usize::try_from(count).unwrap_or(0)),
            api,
        })
    }

    /// Makes the driver work in a context that another library made on `device`, instead of the
    /// device's primary context.
    ///
    /// On a thread where that context is current already, nothing is pushed; on other threads it is
    /// pushed for the duration of each call. The context is never destroyed or released here.
    /// `keep_alive` is dropped after the last call.
    ///
    /// # Errors
    ///
    /// Returns [`OpenError::Refused`] with `CUDA_ERROR_INVALID_DEVICE` if there is no such device.
    ///
    /// # Safety
    ///
    /// `context` is a context of `device`, made by the same libcuda, and stays valid at least until
    /// `keep_alive` is dropped.
    pub unsafe fn with_context(
        mut self,
        device: Ordinal,
        context: CUcontext,
        keep_alive: KeepAlive,
    ) -> Result<Self, OpenError> {
        if self.contexts.borrow(&self.api, device, context, keep_alive) {
            Ok(self)
        } else {
            Err(OpenError::Refused {
                library: self.api.library().to_owned(),
                error: DriverError::new(Call::CtxPushCurrent, CUresult::CUDA_ERROR_INVALID_DEVICE),
            })
        }
    }

    /// Makes the driver work in a context that is current on this thread, and returns the context's
    /// device.
    ///
    /// See [`with_context`](Self::with_context) for how the context is used. Because it is current,
    /// it is known to belong to this libcuda, which then reports its device; the caller need not
    /// vouch for either.
    ///
    /// Calls `cuCtxGetCurrent`, `cuCtxGetDevice` and `cuDeviceGet`.
    ///
    /// # Errors
    ///
    /// Returns [`OpenError::NotCurrent`] if the context is not current, [`OpenError::Refused`] if
    /// the driver does not report its device.
    ///
    /// # Safety
    ///
    /// `context` stays valid at least until `keep_alive` is dropped.
    #[doc(alias = "cuCtxGetDevice")]
    pub unsafe fn with_current_context(
        self,
        context: CUcontext,
        keep_alive: KeepAlive,
    ) -> Result<(Self, Ordinal), OpenError> {
        let refused = |error| OpenError::Refused {
            library: self.api.library().to_owned(),
            error,
        };
        let mut current = std::ptr::null_mut();
        ask!(self, CtxGetCurrent: cuCtxGetCurrent(&mut current)).map_err(refused)?;
        if current.is_null() || current != context {
            return Err(OpenError::NotCurrent {
                library: self.api.library().to_owned(),
                context: context.addr(),
                current: current.addr(),
            });
        }
        let mut id = 0;
        ask!(self, CtxGetDevice: cuCtxGetDevice(&mut id)).map_err(refused)?;
        let count = self.count().map_err(refused)?;
        let device = (0..count)
            .map(Ordinal)
            .find(|&device| self.device(Call::CtxGetDevice, device) == Ok(id))
            .ok_or_else(|| {
                let code = CUresult::CUDA_ERROR_INVALID_DEVICE;
                refused(DriverError::new(Call::CtxGetDevice, code))
            })?;
        // SAFETY: the driver has just confirmed that the context is its own and of this device; the
        // caller promises how long it stays valid.
        let driver = unsafe { self.with_context(device, context, keep_alive) }?;
        Ok((driver, device))
    }

    /// Returns the table of driver functions, for calls that are not in the trait.
    #[must_use]
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Returns the context in which calls for `device` are made, and retains the primary context if
    /// this is its first use.
    ///
    /// The context is valid as long as this driver.
    ///
    /// # Errors
    ///
    /// Returns the error of `cuDevicePrimaryCtxRetain`.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn context(&self, device: Ordinal) -> Result<CUcontext> {
        self.contexts.of(self, device)
    }

    /// Returns the driver's handle of a device. An error is reported as an error of `call`, for
    /// which the handle is needed.
    pub(super) fn device(&self, call: Call, device: Ordinal) -> Result<CUdevice> {
        let mut id = 0;
        // SAFETY: the result is written to a local.
        let code = unsafe { (self.api.cuDeviceGet)(&mut id, device.0) };
        outcome(call, code)?;
        Ok(id)
    }

    /// Returns the number of devices that the driver sees.
    pub(super) fn count(&self) -> Result<i32> {
        let mut count = 0;
        ask!(self, DeviceGetCount: cuDeviceGetCount(&mut count))?;
        Ok(count)
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        self.contexts.give_back(&self.api);
    }
}
