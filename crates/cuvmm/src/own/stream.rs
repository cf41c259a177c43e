//! Streams: queues of work on a device.
//!
//! `unsafe` is used for calls with a stream's handle, which is owned here or kept alive by the
//! object passed with it.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cuvmm_driver::{Call, Ordinal, StreamFlags, StreamHandle};

use crate::deferred::defer;
use crate::device::{Device, Events};
use crate::error::{ArgumentError, CallError};

/// A stream of a device. Clones are the same stream, destroyed with the last clone.
///
/// Memory used on a stream keeps the stream alive until that use is complete.
///
/// ```rust
/// # use cuvmm::driver::auto;
/// # use cuvmm::{Device, Event, Stream};
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// let (copies, compute) = (Stream::new(&device)?, Stream::new(&device)?);
/// let event = Event::new(&device)?;
/// event.record(&copies)?; // covers what `copies` has queued
/// compute.wait(&event)?; // later work of `compute` runs behind it
/// compute.synchronize()?;
/// assert!(compute.is_done()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "CUstream")]
#[derive(Clone)]
pub struct Stream {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    handle: StreamHandle,
    /// How often a stream with this handle has ended before.
    generation: u64,
    owner: Owner,
    events: Events,
}

enum Owner {
    Us,
    /// Another library, which keeps the stream alive until this value is dropped.
    Other(Option<Arc<dyn Any + Send + Sync>>),
}

impl Stream {
    /// Creates a stream that takes no part in the ordering of the legacy default stream
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

    /// Returns the legacy default stream of the device's context.
    #[must_use]
    pub fn legacy(device: &Device) -> Self {
        Self::with_owner(device, StreamHandle::NULL, Owner::Other(None))
    }

    /// Wraps a stream that another library owns and destroys. Both handles of the legacy default
    /// stream give a stream equal to [`legacy`](Self::legacy).
    ///
    /// # Errors
    /// [`CallError::PerThreadStream`] for [`StreamHandle::PER_THREAD`]: the streams of two threads
    /// would be equal, and one thread could not wait for the other's work.
    ///
    /// # Safety
    /// `handle` must be a stream of the context that the driver uses for `device`, and it must stay
    /// one until `keep_alive` is dropped.
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

    /// Returns the calling thread's default stream, which must not leave the thread, nor be
    /// compared with another thread's.
    pub(crate) fn per_thread(device: &Device) -> Self {
        Self::with_owner(device, StreamHandle::PER_THREAD, Owner::Other(None))
    }

    fn with_owner(device: &Device, handle: StreamHandle, owner: Owner) -> Self {
        Self {
            shared: Arc::new(Shared {
                device: device.clone(),
                handle,
                generation: device.generation(handle),
                owner,
                events: Events::default(),
            }),
        }
    }

    /// Prepares for another library to destroy the stream: waits for its work
    /// (`cuStreamSynchronize`), and never gives its handle to the driver again. Memory used on the
    /// stream stays usable, and the next stream with its handle is not equal to it. Calls that
    /// would queue work on it are refused ([`CallError::StreamEnded`]).
    ///
    /// Breaks no capture of another stream. Clones end too; values wrapped separately do not. Does
    /// nothing for the legacy default stream.
    ///
    /// # Errors
    /// [`CallError::InUse`] while the stream captures. [`CallError`] when its work fails.
    pub fn end(&self) -> Result<(), CallError> {
        self.settle().map_err(|error| match error {
            CallError::Capturing => CallError::InUse,
            error => error,
        })?;
        self.note_ended();
        Ok(())
    }

    /// Ends the stream like [`end`](Self::end) if its work is complete; returns `false` otherwise.
    ///
    /// # Errors
    /// [`CallError`] when its work has failed.
    pub fn try_end(&self) -> Result<bool, CallError> {
        let asked = self.device().relaxed(|| match self.is_capturing() {
            Ok(false) => self.is_done(),
            Ok(true) => Ok(false),
            Err(error) => Err(error),
        });
        let ends = asked??;
        if ends {
            self.note_ended();
        }
        Ok(ends)
    }

    fn note_ended(&self) {
        let Shared {
            device,
            handle,
            events,
            ..
        } = &*self.shared;
        if *handle != StreamHandle::NULL && !events.have_ended() {
            events.end(device);
            device.note_ended(*handle);
        }
    }

    /// Returns `true` if no clone of this stream is left, and no memory used on it.
    #[must_use]
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }

    /// Returns the device, the handle, and how often a stream with this handle has ended before,
    /// which identify the stream.
    pub(crate) fn identity(&self) -> (Ordinal, StreamHandle, u64) {
        let Shared {
            device,
            handle,
            generation,
            ..
        } = &*self.shared;
        (device.ordinal(), *handle, *generation)
    }

    /// Returns a number that no other live stream of the device has. A later stream may get the
    /// number of an ended one, whose work is complete, once the handle was used 65,536 times.
    #[inline]
    pub(crate) fn key(&self) -> u64 {
        // Addresses have at most 48 bits.
        self.shared.handle.0 ^ (self.shared.generation << 48)
    }

    /// Returns the driver's handle, which stays owned by this stream.
    #[must_use]
    pub fn as_raw(&self) -> StreamHandle {
        self.shared.handle
    }

    /// Returns the handle for a driver call. Refused once the stream has ended, because the driver
    /// may have destroyed it.
    pub(crate) fn handle(&self) -> Result<StreamHandle, CallError> {
        match self.has_ended() {
            true => Err(CallError::StreamEnded),
            false => Ok(self.shared.handle),
        }
    }

    /// Returns `true` if the stream has [ended](Self::end): its work is complete, and no more
    /// comes.
    pub(crate) fn has_ended(&self) -> bool {
        self.shared.events.have_ended()
    }

    /// Returns the object that keeps another library's stream alive, given to
    /// [`from_raw`](Self::from_raw), if it is a `T`.
    #[must_use]
    pub fn keep_alive<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        match &self.shared.owner {
            Owner::Other(Some(kept)) => Arc::clone(kept).downcast().ok(),
            Owner::Other(None) | Owner::Us => None,
        }
    }

    /// Returns `true` if no more work can be queued on the stream: it was created here, and this is
    /// the last owner. Never `true` for another library's stream.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self.shared.owner, Owner::Us) && Arc::strong_count(&self.shared) == 1
    }

    /// Returns the device of the stream.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    pub(crate) fn check_on(&self, device: &Device) -> Result<(), ArgumentError> {
        match self.device().is_same(device) {
            true => Ok(()),
            false => Err(ArgumentError::STREAM),
        }
    }

    /// Checks that the stream's handle means something to the driver of this device.
    pub(crate) fn check_driver(&self, device: &Device) -> Result<(), CallError> {
        match self.device().same_driver(device) {
            true => Ok(()),
            false => Err(CallError::WrongDriver),
        }
    }

    /// Waits until all work queued so far is complete (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel is reported here.
    #[doc(alias = "cuStreamSynchronize")]
    pub fn synchronize(&self) -> Result<(), CallError> {
        if self.has_ended() {
            return Ok(());
        }
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

    /// Returns `true` if all work queued so far is complete (`cuStreamQuery`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel is reported here.
    #[doc(alias = "cuStreamQuery")]
    pub fn is_done(&self) -> Result<bool, CallError> {
        if self.has_ended() {
            return Ok(true);
        }
        let handle = self.shared.handle;
        // SAFETY: the handle is alive.
        self.shared
            .device
            .call(Call::StreamQuery, |driver, device| unsafe {
                driver.stream_query(device, handle)
            })
    }

    /// Waits until all work queued so far is complete, as [`synchronize`](Self::synchronize) does,
    /// and breaks no capture: is refused while the stream captures, and leaves captures of other
    /// streams alone. The library waits for named streams in no other way. If the driver refuses,
    /// asks it again.
    ///
    /// # Errors
    /// [`CallError::Capturing`] while the stream captures. [`CallError`] when its work fails.
    pub fn settle(&self) -> Result<(), CallError> {
        self.twice(|| {
            self.check_uncaptured()?;
            self.synchronize()
        })
    }

    /// Waits as [`settle`](Self::settle) does for the calling thread's own default stream, for which
    /// no other thread can wait.
    ///
    /// # Errors
    /// Those of [`Self::settle`].
    #[doc(alias = "CU_STREAM_PER_THREAD")]
    pub fn settle_per_thread(device: &Device) -> Result<(), CallError> {
        Self::per_thread(device).settle()
    }

    /// Waits until all work queued so far is complete, and breaks a capture of the stream.
    pub(crate) fn settle_unasked(&self) -> Result<(), CallError> {
        self.twice(|| self.synchronize())
    }

    /// Waits in relaxed capture mode. Tries twice, so that one refusal of the driver does not leave
    /// work in an unknown state.
    fn twice(&self, wait: impl Fn() -> Result<(), CallError>) -> Result<(), CallError> {
        let wait = || self.device().relaxed(&wait)?;
        wait().or_else(|error| match error.is_of_capture() {
            true => Err(error),
            false => {
                log!(warn, %error, "a stream is waited for again");
                wait()
            }
        })
    }

    /// Refuses an operation that would wait for a capturing stream.
    pub(crate) fn check_uncaptured(&self) -> Result<(), CallError> {
        match self.is_capturing()? {
            true => Err(CallError::Capturing),
            false => Ok(()),
        }
    }

    /// Refuses an operation that waits for all work of devices while a capture is known: a capture
    /// guard of one of them lives, or one of these streams captures.
    pub(crate) fn check_none_captured<'a>(
        devices: impl IntoIterator<Item = &'a Device>,
        streams: impl IntoIterator<Item = &'a Self>,
    ) -> Result<(), CallError> {
        devices.into_iter().try_for_each(Device::check_unguarded)?;
        streams.into_iter().try_for_each(Self::check_uncaptured)
    }

    pub(crate) fn events(&self) -> &Events {
        &self.shared.events
    }

    /// Returns `true` if the stream records its work into a graph instead of running it
    /// (`cuStreamIsCapturing`). The legacy stream does while any blocking stream does.
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias = "cuStreamIsCapturing")]
    pub fn is_capturing(&self) -> Result<bool, CallError> {
        if self.has_ended() {
            return Ok(false);
        }
        self.shared.device.is_capturing(self.shared.handle)
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.shared, &*other.shared);
        a.handle == b.handle && a.generation == b.generation && a.device == b.device
    }
}

impl Eq for Stream {}

impl Drop for Shared {
    /// Ends the stream. Its last owner may be a fence of a pool, dropped under the pool's lock.
    fn drop(&mut self) {
        let (device, handle) = (self.device.clone(), self.handle);
        let mut events = std::mem::take(&mut self.events);
        let owner = std::mem::replace(&mut self.owner, Owner::Other(None));
        defer(move || {
            events.destroy(&device);
            match owner {
                Owner::Us => destroy(&device, handle),
                Owner::Other(kept) => drop(kept),
            }
        });
    }
}

fn destroy(device: &Device, handle: StreamHandle) {
    // SAFETY: the handle was owned by the caller, and nothing uses it after this.
    let destroyed = device.give_back(Call::StreamDestroy, |driver, device| unsafe {
        driver.stream_destroy(device, handle)
    });
    device.report_end("stream", 0, destroyed);
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.shared.handle).finish()
    }
}
