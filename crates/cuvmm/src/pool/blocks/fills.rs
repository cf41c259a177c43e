//! Fills and copies, which run behind the work queued on a home stream, or on a stream of the pool
//! and are waited for.
//!
//! A capture that begins on a home stream takes in none of them:
//! [`Stream::queue_uncaptured`] asks before and after.
//!
//! Keeps I-28.

use super::slots::Slot;
use crate::error::{BlockError, CallError, MemoryError};
use crate::extents::{Fence, wait_for};
use crate::own::Stream;
use crate::pool::accounts::TenantId;
use crate::pool::core::Locked;

#[derive(Debug)]
pub(in crate::pool) struct Unfinished {
    pub(in crate::pool) error: BlockError,
    /// Covers the part that may still be running; complete if nothing runs.
    pub(in crate::pool) running: Fence,
}

impl Unfinished {
    fn of(error: impl Into<BlockError>, ended: bool, stream: Stream) -> Self {
        Self {
            error: error.into(),
            running: match ended {
                true => Fence::complete(),
                false => Fence::stream(stream),
            },
        }
    }
}

impl Unfinished {
    /// Returns `true` if a capture prevented the work, and nothing runs.
    pub(super) fn is_of_capture(&self) -> bool {
        matches!(self.error, BlockError::Capturing(_)) && self.running.is_complete()
    }
}

impl<E: Into<BlockError>> From<E> for Unfinished {
    fn from(error: E) -> Self {
        Self {
            error: error.into(),
            running: Fence::complete(),
        }
    }
}

impl Locked<'_> {
    /// Returns the stream that scrubs for blocks without a home stream. Releases the lock to create
    /// it.
    pub(super) fn scrubber(&mut self) -> Result<Stream, CallError> {
        if let Some(stream) = &self.blocks.scrubber {
            return Ok(stream.clone());
        }
        let device = self.memory.device.clone();
        let created = self.unlocked(|| device.relaxed(|| Stream::new(&device)))??;
        // Another thread may have created a stream meanwhile.
        Ok(self.blocks.scrubber.get_or_insert(created).clone())
    }

    /// Queues a fill or a copy of some bytes of a tenant on the home stream, or on the pool's scrub
    /// stream, which is waited for. Refused while a capture guard lives, and if a capture of the home
    /// stream took it in.
    fn queue(
        &mut self,
        (id, bytes): (TenantId, u64),
        home: Option<&Stream>,
        queue: impl FnOnce(&Stream) -> Result<(), MemoryError>,
    ) -> Result<(), Unfinished> {
        let stream = match home {
            Some(home) => home.clone(),
            None => self.scrubber()?,
        };
        if self.memory.gate.is_capturing() {
            return Err(self.captured(id, bytes).into());
        }
        if home.is_none() {
            queue(&stream)?;
            let waited = self.unlocked(|| wait_for(&stream));
            return waited.map_err(|failed| Unfinished::of(failed.error, failed.ended, stream));
        }
        let queued = stream.queue_uncaptured(|| queue(&stream));
        queued.map_err(|failed| {
            let error = match failed.is_of_capture() {
                true => self.captured(id, bytes),
                false => failed.error.into(),
            };
            Unfinished::of(error, failed.ended, stream.clone())
        })
    }

    /// Fills a range with zeros on the home stream, or on the pool's scrub stream, which is waited
    /// for. Makes one fill, so that a failure leaves nothing running.
    pub(super) fn zero(
        &mut self,
        slot: &Slot,
        offset: u64,
        size: u64,
        home: Option<&Stream>,
    ) -> Result<(), Unfinished> {
        self.queue((slot.id.tenant, size), home, |stream| {
            slot.space.fill(stream, offset, 0, size)
        })
    }

    /// Copies bytes at an offset of one slot to the same offset of another, on the streams that
    /// [`zero`](Self::zero) uses. Both slots are out. The source's memory is not unmapped before
    /// the copy is complete. On failure, [`Unfinished::running`] has to keep the target too.
    pub(super) fn copy_between(
        &mut self,
        source: &mut Slot,
        to: &Slot,
        (offset, size): (u64, u64),
        home: Option<&Stream>,
    ) -> Result<(), Unfinished> {
        let copied = self.queue((to.id.tenant, size), home, |stream| {
            to.space
                .copy_within(stream, offset, &source.space, offset, size)
        });
        let runs = match &copied {
            Ok(()) => home.is_some(),
            Err(failed) => !failed.running.is_complete(),
        };
        let stream = home.or(self.blocks.scrubber.as_ref());
        if let Some(stream) = stream.filter(|_| runs) {
            source.is_read_on(stream);
        }
        copied
    }
}
