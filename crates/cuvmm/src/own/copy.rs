//! Copies in and out of owned memory.
//!
//! `unsafe` is used because the driver's copies take addresses. The maker of a [`Span`] keeps its
//! range mapped while the span lives. A copy has ended when the call returns, unless the driver
//! refused three times to wait for it: then [`CopyFailed::ended`] is false, and the caller keeps
//! both ends. [`Span::write`] and [`Span::read`] only borrow the caller's bytes and just return an
//! error: the driver has finished with pageable memory when the call that queues a copy returns.
//! Page-locked memory of the caller would have to stay.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use cuvmm_driver::{Call, DeviceAddress, StreamHandle};

use super::stream::Stream;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::size::range_within;

#[derive(Debug)]
pub(crate) struct CopyFailed {
    pub(crate) error: MemoryError,
    /// Set if no part of the copy runs any more, so that both ends may be unmapped or reused.
    pub(crate) ended: bool,
}

impl CopyFailed {
    /// Returns `true` if a capture prevented the copy.
    pub(crate) fn is_of_capture(&self) -> bool {
        self.error.call().is_some_and(CallError::is_of_capture)
    }
}

impl From<CopyFailed> for MemoryError {
    fn from(failed: CopyFailed) -> Self {
        failed.error
    }
}

impl Stream {
    /// Queues a fill or a copy that the library owes, and that must run in no graph. Refused while
    /// the stream captures. A capture that began meanwhile may have taken the work in, so it is
    /// invalidated: each launch of its graph would write to memory that others may have by then.
    pub(crate) fn queue_uncaptured(
        &self,
        queue: impl FnOnce() -> Result<(), MemoryError>,
    ) -> Result<(), CopyFailed> {
        let failed = |error: MemoryError, ended| CopyFailed { error, ended };
        let asked = self.check_uncaptured().map_err(MemoryError::from);
        asked
            .and_then(|()| queue())
            .map_err(|it| failed(it, true))?;
        // The legacy stream's own work is never captured.
        if self.as_raw() == StreamHandle::NULL {
            return Ok(());
        }
        // Asked twice, so that one refusal of the driver does not leave the work in doubt.
        match self.is_capturing().or_else(|_| self.is_capturing()) {
            Ok(false) => Ok(()),
            Ok(true) => {
                // A query invalidates the capture. If it is answered, the capture has ended, and a
                // graph may have the work.
                let asked = self.device().relaxed(|| self.is_done());
                let broken = matches!(asked, Ok(Err(error)) if error.is_of_capture());
                Err(failed(CallError::Capturing.into(), broken))
            }
            Err(error) => Err(failed(error.into(), false)),
        }
    }
}

/// A mapped range borrowed from its owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    device: &'a Device,
    address: DeviceAddress,
    size: u64,
    owner: PhantomData<&'a ()>,
}

impl<'a> Span<'a> {
    /// # Safety
    /// The range must stay mapped for `'a`.
    pub(crate) const unsafe fn new(device: &'a Device, address: DeviceAddress, size: u64) -> Self {
        Self {
            device,
            address,
            size,
            owner: PhantomData,
        }
    }

    pub(crate) const fn size(&self) -> u64 {
        self.size
    }

    fn at(&self, stream: &Stream, offset: u64, size: u64) -> Result<DeviceAddress, MemoryError> {
        stream.check_on(self.device)?;
        range_within(offset, size, self.size)
            .and_then(|range| self.address.checked_add(range.start))
            .ok_or(ArgumentError::bytes(offset, size, self.size).into())
    }

    pub(crate) fn write(
        &self,
        stream: &Stream,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), MemoryError> {
        if bytes.is_empty() && offset <= self.size {
            return Ok(());
        }
        Ok(self.write_all(stream, [(offset, bytes)])?)
    }

    pub(crate) fn read(
        &self,
        stream: &Stream,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), MemoryError> {
        if bytes.is_empty() && offset <= self.size {
            return Ok(());
        }
        Ok(self.read_all(stream, [(offset, bytes)])?)
    }

    /// Writes several ranges in turn, with one wait.
    pub(crate) fn write_all<'b>(
        &self,
        stream: &Stream,
        parts: impl IntoIterator<Item = (u64, &'b [u8])>,
    ) -> Result<(), CopyFailed> {
        let handle = Self::uncaptured(stream)?;
        let queued = parts.into_iter().try_for_each(|(offset, bytes)| {
            let size = bytes.len() as u64;
            let to = self.at(stream, offset, size)?;
            self.device
                // SAFETY: the bytes are borrowed and the range is mapped until the stream has been
                // waited for below, the context is lost and runs nothing, or the error says that
                // the copy has not ended.
                .call(Call::MemcpyHtoDAsync, |driver, device| unsafe {
                    driver.copy_to_device_async(device, to, bytes.as_ptr(), size, handle)
                })
                .map_err(|cause| MemoryError::range(offset, size, cause))
        });
        self.waited_for(stream, queued)
    }

    /// Reads several ranges in turn, with one wait.
    pub(crate) fn read_all<'b>(
        &self,
        stream: &Stream,
        parts: impl IntoIterator<Item = (u64, &'b mut [u8])>,
    ) -> Result<(), CopyFailed> {
        let handle = Self::uncaptured(stream)?;
        let queued = parts.into_iter().try_for_each(|(offset, bytes)| {
            let size = bytes.len() as u64;
            let from = self.at(stream, offset, size)?;
            self.device
                // SAFETY: as in `write_all`, and the bytes are borrowed mutably.
                .call(Call::MemcpyDtoHAsync, |driver, device| unsafe {
                    driver.copy_to_host_async(device, bytes.as_mut_ptr(), from, size, handle)
                })
                .map_err(|cause| MemoryError::range(offset, size, cause))
        });
        self.waited_for(stream, queued)
    }

    /// Returns the handle of a stream. Refuses a capturing stream: each replay of the graph would
    /// use the host's bytes.
    fn uncaptured(stream: &Stream) -> Result<StreamHandle, CopyFailed> {
        let uncaptured = stream.check_uncaptured().and_then(|()| stream.handle());
        uncaptured.map_err(|error| CopyFailed {
            error: match error {
                CallError::Capturing => MemoryError::Capturing,
                error => error.into(),
            },
            ended: true,
        })
    }

    /// Clears a range, and waits for it.
    pub(crate) fn clear(&self, stream: &Stream, offset: u64, size: u64) -> Result<(), CopyFailed> {
        Self::uncaptured(stream)?;
        let queued = self.fill_async(stream, offset, 0, size);
        self.waited_for(stream, queued)
    }

    /// Waits for all queued copies, also after a copy that could not be queued. If the driver
    /// refuses to wait for the stream, waits for the whole device.
    ///
    /// Does not ask whether the stream captures: a capture that began meanwhile may contain the
    /// copies and has to break. Captures of other streams go on.
    fn waited_for(
        &self,
        stream: &Stream,
        queued: Result<(), MemoryError>,
    ) -> Result<(), CopyFailed> {
        let mut ended = true;
        let waited = stream.settle_unasked().map_err(|cause| {
            let drained = match cause.is_of_capture() {
                true => Err(cause),
                false => self.device.drain(),
            };
            if let Err(error) = drained {
                log!(error, %error, "a copy could not be waited for");
                ended = false;
            }
            MemoryError::range(0, self.size, cause)
        });
        let done = queued.and(waited);
        done.map_err(|error| CopyFailed { error, ended })
    }

    /// Queues a copy from another span. The caller keeps both ranges mapped until it is complete.
    pub(crate) fn copy_async(
        &self,
        stream: &Stream,
        offset: u64,
        source: &Self,
        from: u64,
        size: u64,
    ) -> Result<(), MemoryError> {
        let to = self.at(stream, offset, size)?;
        let from = source.at(stream, from, size)?;
        let handle = stream.handle()?;
        self.device
            // SAFETY: both ranges are mapped now, and the caller unmaps neither before the stream's
            // work is complete.
            .call(Call::MemcpyDtoDAsync, |driver, device| unsafe {
                driver.copy_on_device_async(device, to, from, size, handle)
            })
            .map_err(|cause| MemoryError::range(offset, size, cause))
    }

    /// Queues a fill with one byte. The caller adds the stream to the fence of the memory.
    pub(crate) fn fill_async(
        &self,
        stream: &Stream,
        offset: u64,
        byte: u8,
        size: u64,
    ) -> Result<(), MemoryError> {
        let to = self.at(stream, offset, size)?;
        let handle = stream.handle()?;
        self.device
            // SAFETY: the range is mapped, and this crate unmaps memory only when its fence, which
            // covers the stream, is complete.
            .call(Call::MemsetD8Async, |driver, device| unsafe {
                driver.fill_async(device, to, byte, size, handle)
            })
            .map_err(|cause| MemoryError::range(offset, size, cause))
    }
}
