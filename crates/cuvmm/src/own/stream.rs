//! A queue of work on a device.
//!
//! `unsafe` here: calls that take a stream's handle. The handle is ours, or kept alive by what its
//! owner gave with it.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cuvmm_driver::{Call, CaptureStatus, StreamFlags, StreamHandle};

use crate::deferred::defer;
use crate::device::{Device, Events};
use crate::error::CallError;

/// A stream. Clones are the same stream; it is destroyed when the last has gone.
///
/// Memory that was used on a stream keeps it alive until that use has passed.
#[doc(alias = "CUstream")]
#[derive(Clone)]
pub struct Stream {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    handle: StreamHandle,
    owner: Owner,
    /// The events behind its work.
    events: Events,
}

/// Who destroys the stream.
enum Owner {
    Us,
    /// Somebody else, who keeps it until this is dropped.
    Other(Option<Arc<dyn Any + Send + Sync>>),
}

impl Stream {
    /// Makes a stream that takes no part in the legacy default stream's ordering
    /// (`cuStreamCreate`).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias = "cuStreamCreate")]
    pub fn new(device: &Device) -> Result<Self, CallError> {
        let handle = device.call(Call::StreamCreate, |driver, device| {
            driver.stream_create(device, StreamFlags::NON_BLOCKING)
        })?;
        Ok(Self::with_owner(device, handle, Owner::Us))
    }

    /// The legacy default stream of the device's context.
    #[must_use]
    pub fn legacy(device: &Device) -> Self {
        Self::with_owner(device, StreamHandle::NULL, Owner::Other(None))
    }

    /// Uses a stream that belongs to somebody else. It is not destroyed here.
    ///
    /// Both handles of the legacy default stream make a stream that is equal to
    /// [`legacy`](Self::legacy).
    ///
    /// # Errors
    /// [`CallError::PerThreadStream`] for [`StreamHandle::PER_THREAD`]: the streams of two threads
    /// would be equal by their handle, and one thread could not wait for the other's work.
    ///
    /// # Safety
    /// `handle` is a stream of the context that the driver uses for `device`, and it stays one
    /// until `keep_alive` is dropped.
    pub unsafe fn from_raw(
        device: &Device,
        handle: StreamHandle,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, CallError> {
        let handle = match handle {
            StreamHandle::PER_THREAD => return Err(CallError::PerThreadStream),
            StreamHandle::LEGACY => StreamHandle::NULL,
            handle => handle,
        };
        let owner = Owner::Other(Some(keep_alive));
        Ok(Self::with_owner(device, handle, owner))
    }

    /// The calling thread's default stream. It must not leave the thread, nor be compared with a
    /// stream that came from another.
    #[cfg(feature = "dlpack")]
    pub(crate) fn per_thread(device: &Device) -> Self {
        Self::with_owner(device, StreamHandle::PER_THREAD, Owner::Other(None))
    }

    fn with_owner(device: &Device, handle: StreamHandle, owner: Owner) -> Self {
        Self {
            shared: Arc::new(Shared {
                device: device.clone(),
                handle,
                owner,
                events: Events::default(),
            }),
        }
    }

    /// The driver's handle. It stays owned by this.
    #[must_use]
    pub fn as_raw(&self) -> StreamHandle {
        self.shared.handle
    }

    /// What keeps a stream of somebody else alive, if it is a `T`: what was given to
    /// [`from_raw`](Self::from_raw).
    #[must_use]
    pub fn keep_alive<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        match &self.shared.owner {
            Owner::Other(Some(kept)) => Arc::clone(kept).downcast().ok(),
            Owner::Other(None) | Owner::Us => None,
        }
    }

    /// Whether no work can be queued on it any more: it was made here, and this is the last owner.
    /// Of another library's stream that cannot be known.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self.shared.owner, Owner::Us) && Arc::strong_count(&self.shared) == 1
    }

    /// The device it belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Waits until all work queued so far is done (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel shows here.
    #[doc(alias = "cuStreamSynchronize")]
    pub fn synchronize(&self) -> Result<(), CallError> {
        let handle = self.shared.handle;
        let device = &self.shared.device;
        let begun = device.tick();
        // SAFETY: the handle is alive.
        device.call(Call::StreamSynchronize, |driver, device| unsafe {
            driver.stream_synchronize(device, handle)
        })?;
        self.shared.events.synchronised(begun);
        Ok(())
    }

    /// Whether all work queued so far is done (`cuStreamQuery`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel shows here.
    #[doc(alias = "cuStreamQuery")]
    pub fn is_done(&self) -> Result<bool, CallError> {
        let handle = self.shared.handle;
        // SAFETY: the handle is alive.
        self.shared
            .device
            .call(Call::StreamQuery, |driver, device| unsafe {
                driver.stream_query(device, handle)
            })
    }

    /// Waits until all work queued so far is done, in relaxed capture mode. What the driver refuses is
    /// tried once more, so that one refusal leaves no work of which nothing is known.
    pub(crate) fn settle(&self) -> Result<(), CallError> {
        let wait = || self.device().relaxed(|| self.synchronize())?;
        wait().or_else(|error| {
            tracing::warn!(%error, "a stream is waited for again");
            wait()
        })
    }

    /// The events behind its work.
    pub(crate) fn events(&self) -> &Events {
        &self.shared.events
    }

    /// Whether the stream records its work into a graph instead of running it
    /// (`cuStreamIsCapturing`).
    ///
    /// # Errors
    /// [`CallError`] when the driver does not answer.
    #[doc(alias = "cuStreamIsCapturing")]
    pub fn is_capturing(&self) -> Result<bool, CallError> {
        let handle = self.shared.handle;
        // SAFETY: the handle is alive.
        let status = self
            .shared
            .device
            .call(Call::StreamIsCapturing, |driver, device| unsafe {
                driver.capture_status(device, handle)
            })?;
        Ok(status != CaptureStatus::NONE)
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.shared.handle == other.shared.handle && self.shared.device == other.shared.device
    }
}

impl Eq for Stream {}

impl Drop for Shared {
    fn drop(&mut self) {
        self.events.destroy(&self.device);
        if let Owner::Other(kept) = &mut self.owner {
            if let Some(kept) = kept.take() {
                defer(move || drop(kept));
            }
            return;
        }
        let handle = self.handle;
        // SAFETY: the handle is ours and this is the last owner.
        let destroyed = self
            .device
            .give_back(Call::StreamDestroy, |driver, device| unsafe {
                driver.stream_destroy(device, handle)
            });
        // What belonged to a context that is lost went with it.
        if let (Err(error), None) = (destroyed, self.device.lost()) {
            self.device.report_drop("stream", 0, error);
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.shared.handle).finish()
    }
}
