//! A context of cudarc's taken up: the device and the streams.
//!
//! `unsafe` here: saying that a context and a stream stay valid, which is so while cudarc's own owners
//! of them are kept.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use ::cudarc::driver::{CudaContext, CudaStream};
use cuvmm_driver::StreamHandle;
use cuvmm_driver::auto::{self, KeepAlive, OpenOptions, Wanted};

use super::code;
use crate::device::Device;
use crate::error::CudarcError;
use crate::own::Stream;

/// A context of cudarc's, and the device of this library that works in it. Clones are the same.
///
/// Make one for a `CudaContext` and clone it: two made of the same context are two drivers to this
/// library, which do not take each other's streams.
#[derive(Clone)]
pub struct Context {
    context: Arc<CudaContext>,
    device: Device,
}

impl Context {
    /// Takes up a context, primary or not. It is made current on this thread, as cudarc does in each
    /// of its calls, and stays alive for as long as anything of the [`device`](Self::device) does.
    ///
    /// Calls `cuCtxSetCurrent`, `cuInit`, `cuCtxGetCurrent`, `cuCtxGetDevice` and what [`Device::open`]
    /// calls.
    ///
    /// # Errors
    /// [`CudarcError`] when the device has no virtual memory management, or cudarc and this library do
    /// not mean the same driver or device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudarcError> {
        context
            .bind_to_thread()
            .map_err(|error| CudarcError::Cudarc(code(error)))?;
        let keep_alive: KeepAlive = Arc::clone(context) as KeepAlive;
        // SAFETY: cudarc destroys or releases the context when its last owner goes, and one is kept.
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

    /// Has cudarc take the primary context of a device, and takes that up
    /// (`cuDevicePrimaryCtxRetain`). Where there is no driver or no GPU, and cudarc would panic, it is an
    /// error.
    ///
    /// # Errors
    /// As [`Self::new`], and when there is no driver or no such device.
    pub fn open(ordinal: u32) -> Result<Self, CudarcError> {
        auto::open(OpenOptions::new().wanted(Wanted::Cuda))?;
        let context = CudaContext::new(ordinal as usize);
        Self::new(&context.map_err(|error| CudarcError::Cudarc(code(error)))?)
    }

    /// The context as cudarc has it.
    #[must_use]
    pub const fn as_cudarc(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The device, whose calls are made in the context.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Takes up a stream of the context: the default one, or one of its own. It is destroyed by cudarc,
    /// when the last owner here and there has gone.
    ///
    /// Memory with this for its home stream can be made a [`Slice`](super::Slice).
    ///
    /// # Errors
    /// [`CudarcError`] when it is another context's, or the per-thread stream.
    pub fn stream(&self, stream: &Arc<CudaStream>) -> Result<Stream, CudarcError> {
        if stream.context() != &self.context {
            return Err(CudarcError::WrongContext);
        }
        let handle = StreamHandle(stream.cu_stream().addr() as u64);
        let keep_alive: KeepAlive = Arc::clone(stream) as KeepAlive;
        // SAFETY: it is a stream of the context that the driver uses for the device. cudarc destroys it
        // when its last owner goes, and one is kept; one that it borrowed itself stays for as long by the
        // promise that was given to cudarc.
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
