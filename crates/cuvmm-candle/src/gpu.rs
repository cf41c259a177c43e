//! candle's device and this library's: one GPU, one context, one stream.
//!
//! Nothing is allocated here. What waits to be freed until candle's last tensor of it has gone is kept
//! here, since this outlives whatever it came from.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{CudaDevice, Device};
use cuvmm::Stream;
use cuvmm::cudarc::Context;

use crate::error::OpenError;
use crate::loan::Backing;
use crate::waiting::{Wait as _, Waiting};

/// A GPU as candle knows it and as this library does. Clones are the same.
///
/// Work of both is queued on one stream, so nothing waits for anything between them.
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
    /// Opens a GPU: a candle device with a stream of its own, and this library's device in the same
    /// context.
    ///
    /// # Errors
    /// [`OpenError`] when there is no driver or no such GPU, or it has no virtual memory management.
    pub fn open(ordinal: u32) -> Result<Self, OpenError> {
        // Asked first: it is an error there, where others panic.
        let context = Context::open(ordinal)?;
        let device = Device::new_cuda_with_stream(ordinal as usize)?;
        Self::over(context, &device)
    }

    /// Takes up a device of candle's. One device of a GPU is taken up so, others of the same GPU
    /// [beside](Self::beside) it: two taken up alone are two drivers to this library, and have no pool in
    /// common.
    ///
    /// # Errors
    /// [`OpenError::Cudarc`] for what `Device::new_cuda` makes: its stream is another one on each
    /// thread, and nobody could wait for it. Take `Device::new_cuda_with_stream`, or [`Self::open`].
    pub fn new(device: &Device) -> Result<Self, OpenError> {
        let cuda = cuda(device)?;
        let context = Context::new(cuda.cuda_stream().context())?;
        Self::over(context, device)
    }

    /// Takes up another device of candle's on the same GPU, with its own stream: for another model,
    /// say. Both may use one pool.
    ///
    /// # Errors
    /// As [`Self::new`], and [`OpenError::Cudarc`] when it is a device of another GPU.
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

    /// The device as candle has it: models and tensors are made on it.
    #[must_use]
    pub fn candle(&self) -> &Device {
        &self.shared.candle
    }

    /// The device as this library has it: pools are made on it.
    #[must_use]
    pub fn device(&self) -> &cuvmm::Device {
        self.shared.context.device()
    }

    /// The stream that both work on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.shared.stream
    }

    /// Frees the blocks whose last tensor has gone since, and returns how many bytes are still kept by
    /// tensors alone: those of caches and weights that were dropped or reset.
    ///
    /// Every operation here looks at a few of them, and at all where memory is short. This looks at all:
    /// it is worth a call where nothing does for long, and in a tenant's pressure hook. It waits for
    /// nothing.
    pub fn sweep(&self) -> u64 {
        let mut waiting = self.shared.waiting();
        let over = waiting.take_all();
        let bytes = waiting.bytes();
        waiting.iter().for_each(Backing::forget_refusals);
        drop(waiting);
        // Blocks are freed under the pool's lock, and not under this one too.
        drop(over);
        bytes
    }

    /// Allocates behind a look at a few blocks that may have come free, and, where memory is short, once
    /// more behind a look at all of them.
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

    /// Frees what of a few blocks has come free.
    pub(crate) fn sweep_some(&self) {
        let over = self.shared.waiting().take_some();
        drop(over);
    }

    /// Frees blocks, at once or when the last tensor over them has gone.
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
            // Nothing is left to see their tensors go, and those must find their memory.
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
