//! One GPU for candle and cuvmm: one context, one stream.
//!
//! This module allocates nothing. It keeps blocks that wait for their last tensor, because a
//! [`Gpu`] outlives the objects that made them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{CudaDevice, Device};
use cuvmm::Stream;
use cuvmm::cudarc::Context;

use crate::error::OpenError;
use crate::loan::Backing;
use crate::waiting::{Wait as _, Waiting};

/// A GPU, as a device of candle and as a device of cuvmm. Clones share both.
///
/// The work of both is queued on one stream, so neither waits for the other.
#[derive(Clone)]
pub struct Gpu {
    shared: Arc<Shared>,
}

struct Shared {
    context: Context,
    candle: Device,
    cuda: CudaDevice,
    stream: Stream,
    waiting: Mutex<Waiting<Backing>>,
}

impl Gpu {
    /// Opens a GPU: creates a candle device with a stream of its own, and a cuvmm device in the
    /// same context.
    ///
    /// # Errors
    /// [`OpenError`] if there is no driver or no such GPU, or it has no virtual memory management.
    pub fn open(ordinal: u32) -> Result<Self, OpenError> {
        // Called first: it returns an error where candle and cudarc panic.
        let context = Context::open(ordinal)?;
        let device = Device::new_cuda_with_stream(ordinal as usize)?;
        Self::over(context, &device)
    }

    /// Wraps a candle device. Wrap the first device of each GPU in this way, and further ones with
    /// [`beside`](Self::beside): devices wrapped separately are separate drivers to cuvmm, and
    /// cannot share a pool.
    ///
    /// # Errors
    /// [`OpenError::Cudarc`] for a device of `Device::new_cuda`: its stream differs on each thread,
    /// so no thread could wait for its work. Use `Device::new_cuda_with_stream`, or [`Self::open`].
    pub fn new(device: &Device) -> Result<Self, OpenError> {
        let cuda = cuda(device)?;
        let context = Context::new(cuda.cuda_stream().context())?;
        Self::over(context, device)
    }

    /// Wraps another candle device on the same GPU, with its own stream, for example for another
    /// model. Both can use one pool.
    ///
    /// # Errors
    /// [`OpenError`] in the cases of [`new`](Self::new), and [`OpenError::Cudarc`] if the device is
    /// another GPU.
    pub fn beside(&self, device: &Device) -> Result<Self, OpenError> {
        Self::over(self.shared.context.clone(), device)
    }

    fn over(context: Context, device: &Device) -> Result<Self, OpenError> {
        let cuda = cuda(device)?.clone();
        let stream = context.stream(&cuda.cuda_stream())?;
        let shared = Shared {
            context,
            candle: device.clone(),
            cuda,
            stream,
            waiting: Mutex::new(Waiting::new()),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns the candle device, for models and tensors.
    #[must_use]
    pub fn candle(&self) -> &Device {
        &self.shared.candle
    }

    /// Returns the cuvmm device, for pools.
    #[must_use]
    pub fn device(&self) -> &cuvmm::Device {
        self.shared.context.device()
    }

    /// Returns the stream of both devices.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.shared.stream
    }

    /// Frees blocks whose last tensor was dropped, and returns the bytes of the other blocks whose
    /// caches and weights were dropped or reset: only tensors still keep them.
    ///
    /// Every operation of this crate checks a few of these blocks, or all if memory is short. This
    /// method checks all without waiting: call it if no operation runs for a long time, and in a
    /// tenant's pressure hook.
    pub fn sweep(&self) -> u64 {
        let mut waiting = self.shared.waiting();
        let over = waiting.take_all();
        let bytes = waiting.bytes();
        waiting.iter().for_each(Backing::forget_refusals);
        drop(waiting);
        // The blocks are freed without this lock, because freeing takes the pool's lock.
        drop(over);
        bytes
    }

    /// Allocates after checking a few waiting blocks, and tries again after checking all of them if
    /// memory is short.
    pub(crate) fn allocate<T, E>(
        &self,
        is_short: impl Fn(&E) -> bool,
        mut attempt: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        self.sweep_some();
        match attempt() {
            Err(error) if is_short(&error) && !self.shared.waiting().is_empty() => {
                self.sweep();
                attempt()
            }
            outcome => outcome,
        }
    }

    /// Checks a few blocks, and frees those without tensors.
    pub(crate) fn sweep_some(&self) {
        let over = self.shared.waiting().take_some();
        drop(over);
    }

    /// Frees blocks now, or after the drop of their last tensor.
    pub(crate) fn keep_until_done(&self, mut backing: Backing) {
        if backing.is_used() {
            backing.forget_refusals();
            self.shared.waiting().add(backing);
        }
    }

    pub(crate) fn cuda(&self) -> &CudaDevice {
        &self.shared.cuda
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting<Backing>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let waiting = self.waiting.get_mut();
        let waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        drop(waiting.take_all());
        let kept = std::mem::replace(waiting, Waiting::new());
        if !kept.is_empty() {
            // No code is left that could detect their drop, and their memory must stay valid.
            let bytes = kept.bytes();
            tracing::warn!(bytes, "tensors outlive the last owner of their GPU");
            std::mem::forget(kept);
        }
    }
}

fn cuda(device: &Device) -> Result<&CudaDevice, OpenError> {
    match device {
        Device::Cuda(cuda) => Ok(cuda),
        _ => Err(OpenError::NotCuda),
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("device", self.device())
            .field("stream", self.stream())
            .finish_non_exhaustive()
    }
}
