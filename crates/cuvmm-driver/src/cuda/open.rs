//! Opening the driver, and what there is when it is open.
//!
//! `unsafe` is allowed here for driver calls (see `answer`), and because a library or a context
//! that the caller names has to be vouched for.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};

use cuvmm_sys::{Api, CUcontext, CUdevice, CUresult, LoadError};

use super::answer::{ask, outcome};
use super::context::{Contexts, KeepAlive};
use crate::{Call, DriverError, Ordinal, Result};

/// The real driver. See the [module](super).
///
/// Several may be open at once: each holds references of its own to the primary contexts, which
/// the driver counts. The library itself stays loaded until the process ends.
#[derive(Debug)]
pub struct CudaDriver {
    api: Api,
    contexts: Contexts,
}

/// Why the real driver cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no library, or it is too old.
    #[error(transparent)]
    Load(#[from] LoadError),

    /// The library is the toolkit's stand-in for linking. Where a real driver is installed, its
    /// `libcuda.so.1` was not found first; a container may lack the mount that brings it.
    #[error(
        "{} is the CUDA toolkit's stub and no driver: it is there to link against only",
        library.display()
    )]
    Stub {
        /// Where it was found.
        library: PathBuf,
    },

    /// The driver is there and refuses to start. `CUDA_ERROR_NO_DEVICE` means that it sees no
    /// GPU.
    #[error("{} was loaded, but {error}", library.display())]
    Refused {
        /// Where it was found.
        library: PathBuf,
        /// What it answered, to which call.
        error: DriverError,
    },

    /// The context to work in is not current on this thread, as far as this driver knows: it was
    /// not made current, or another copy of the driver made it.
    #[error(
        "{} does not have the context {context:#x} current on this thread, but {current:#x}",
        library.display()
    )]
    NotCurrent {
        /// Where the driver was found.
        library: PathBuf,
        /// The context that was given.
        context: usize,
        /// The context that is current; 0 for none.
        current: usize,
    },
}

impl OpenError {
    /// Whether the driver is in order and merely sees no GPU.
    #[must_use]
    pub fn is_no_device(&self) -> bool {
        matches!(self, Self::Refused { error, .. }
            if error.code() == Some(CUresult::CUDA_ERROR_NO_DEVICE))
    }
}

impl CudaDriver {
    /// Loads the installed driver and initialises it.
    ///
    /// Calls `cuInit` and `cuDeviceGetCount`. No context is made yet.
    ///
    /// # Errors
    ///
    /// [`OpenError::Load`] says what was tried, [`OpenError::Stub`] that a toolkit's stub was all
    /// there was, [`OpenError::Refused`] what the driver itself answered.
    #[doc(alias = "cuInit")]
    pub fn open() -> Result<Self, OpenError> {
        Self::over(Api::load()?)
    }

    /// The same with the library at `path` and no other.
    ///
    /// # Errors
    ///
    /// As for [`CudaDriver::open`].
    ///
    /// # Safety
    ///
    /// The library must be NVIDIA's driver or keep its promises, as for
    /// [`Api::load_from`](cuvmm_sys::Api::load_from).
    pub unsafe fn open_library(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        // SAFETY: the caller vouches for the library.
        Self::over(unsafe { Api::load_from(path) }?)
    }

    /// The same over a table that is filled already.
    ///
    /// # Errors
    ///
    /// As for [`CudaDriver::open`], without [`OpenError::Load`].
    pub fn over(api: Api) -> Result<Self, OpenError> {
        // SAFETY: it takes no pointers and may be called at any time, any number of times.
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
        // SAFETY: the result goes to a local.
        let code = unsafe { (api.cuDeviceGetCount)(&mut count) };
        outcome(Call::DeviceGetCount, code).map_err(refused)?;
        Ok(Self {
            contexts: Contexts::new(usize::try_from(count).unwrap_or(0)),
            api,
        })
    }

    /// The same driver, working in a context that another library made on `device`, instead of
    /// the device's primary context.
    ///
    /// A thread on which that context is current already is left alone; on others it is pushed
    /// for the length of each call. It is never destroyed or released here. `keep_alive` is
    /// dropped after the last call.
    ///
    /// # Errors
    ///
    /// [`OpenError::Refused`] with `CUDA_ERROR_INVALID_DEVICE` when there is no such device.
    ///
    /// # Safety
    ///
    /// `context` is a context of `device`, made by the same libcuda, and stays valid at least
    /// until `keep_alive` is dropped.
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

    /// As [`with_context`](Self::with_context), with a context that is current on this thread, and
    /// the device that it belongs to. That it is current shows that it is this libcuda's, which then
    /// says of which device it is; neither has to be vouched for.
    ///
    /// Calls `cuCtxGetCurrent`, `cuCtxGetDevice` and `cuDeviceGet`.
    ///
    /// # Errors
    ///
    /// [`OpenError::NotCurrent`] when it is not, [`OpenError::Refused`] when the driver does not say
    /// which device it is of.
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
        // SAFETY: the driver has just said that the context is its own and of this device; how long
        // it stays valid is the caller's word.
        let driver = unsafe { self.with_context(device, context, keep_alive) }?;
        Ok((driver, device))
    }

    /// The bare table of functions, for calls that the trait does not make.
    #[must_use]
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// The context in which calls for `device` are made, taking the primary context if this is
    /// the first use. It is valid for as long as this driver is.
    ///
    /// # Errors
    ///
    /// What `cuDevicePrimaryCtxRetain` answers.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn context(&self, device: Ordinal) -> Result<CUcontext> {
        self.contexts.of(self, device)
    }

    /// The driver's name for a device. A refusal is reported as an answer to `call`, for which
    /// the name is wanted.
    pub(super) fn device(&self, call: Call, device: Ordinal) -> Result<CUdevice> {
        let mut id = 0;
        // SAFETY: the result goes to a local.
        let code = unsafe { (self.api.cuDeviceGet)(&mut id, device.0) };
        outcome(call, code)?;
        Ok(id)
    }

    /// How many devices the driver sees.
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
