//! Devices and streams of this library over cudarc's contexts and streams.
//!
//! `unsafe` in this file: the guarantee that a context and a stream stay valid, which holds while
//! cudarc's own owners of them are kept.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use ::cudarc::driver::{CudaContext, CudaStream};
use cuvmm_driver::StreamHandle;

use super::code;
use crate::device::Device;
use crate::driver::auto::{self, KeepAlive, OpenOptions, Wanted};
use crate::error::CudarcError;
use crate::own::Stream;

/// A context of cudarc, with the device of this library that works in it. Clones share both.
///
/// Create one for each `CudaContext` and clone it: two created from the same context are two
/// drivers to this library, which do not accept each other's streams.
///
/// # Examples
/// ```no_run
/// use cuvmm::Pool;
/// use cuvmm::cudarc::Context;
///
/// let context = Context::open(0)?; // or `Context::new`, for a context that exists
/// let stream = context.as_cudarc().new_stream()?;
/// let home = context.stream(&stream)?; // the same stream, for this library
/// let pool = Pool::builder(context.device()).build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Context {
    context: Arc<CudaContext>,
    device: Device,
}

impl Context {
    /// Wraps a context, primary or not. It is made current on this thread, as in each of cudarc's
    /// calls, and stays alive while anything made with the [`device`](Self::device).
    ///
    /// Calls `cuCtxSetCurrent`, `cuInit`, `cuCtxGetCurrent`, `cuCtxGetDevice` and the functions
    /// that [`Device::open`] calls.
    ///
    /// # Errors
    /// [`CudarcError`] if the device has no virtual memory management, or cudarc and this library
    /// use different drivers or devices.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudarcError> {
        context
            .bind_to_thread()
            .map_err(|error| CudarcError::Cudarc(code(error)))?;
        let keep_alive: KeepAlive = Arc::clone(context) as KeepAlive;
        // SAFETY: cudarc destroys or releases the context when its last owner is dropped, and the
        // keep-alive is an owner.
        let opened = unsafe { auto::open_current(context.cu_ctx().cast(), keep_alive) };
        let (opened, ordinal) = opened?;
        let claimed = context.ordinal();
        match u32::try_from(ordinal.0) {
            Ok(found) if found as usize == claimed => Ok(Self {
                context: Arc::clone(context),
                device: Device::open(opened.driver, found)?,
            }),
            _ => Err(CudarcError::WrongDevice {
                claimed,
                found: ordinal.0,
            }),
        }
    }

    /// Creates cudarc's object for the primary context of a device, and wraps it
    /// (`cuDevicePrimaryCtxRetain`). Returns an error without a driver or a GPU, where cudarc would
    /// panic.
    ///
    /// # Errors
    /// [`CudarcError`] in the cases of [`new`](Self::new), and if there is no driver or no such
    /// device.
    pub fn open(ordinal: u32) -> Result<Self, CudarcError> {
        auto::open(OpenOptions::new().wanted(Wanted::Cuda))?;
        let context = CudaContext::new(ordinal as usize);
        Self::new(&context.map_err(|error| CudarcError::Cudarc(code(error)))?)
    }

    /// Returns cudarc's object for the context.
    #[must_use]
    pub const fn as_cudarc(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Returns the device, whose calls are made in the context.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Wraps a stream of the context: the default one, or one that cudarc created. cudarc destroys
    /// it after its last owner here and in cudarc is dropped.
    ///
    /// Memory with this home stream can be made a [`Slice`](super::Slice).
    ///
    /// # Errors
    /// [`CudarcError`] if the stream belongs to another context, or is the per-thread stream.
    pub fn stream(&self, stream: &Arc<CudaStream>) -> Result<Stream, CudarcError> {
        if stream.context() != &self.context {
            return Err(CudarcError::WrongContext);
        }
        let handle = StreamHandle(stream.cu_stream().addr() as u64);
        let keep_alive: KeepAlive = Arc::clone(stream) as KeepAlive;
        // SAFETY: it is a stream of the context that the driver uses for the device. cudarc
        // destroys it when its last owner is dropped, and the keep-alive is an owner; a stream that
        // cudarc itself borrowed lives as long, by the guarantee given to cudarc.
        let adopted = unsafe { Stream::from_raw(&self.device, handle, keep_alive) };
        adopted.map_err(|_| CudarcError::PerThread)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
