//! Fills and copies, which run behind the work queued on a home stream, or on a stream of the pool
//! and are waited for.
//!
//! Keeps I-28.

use super::slots::Slot;
use crate::error::{BlockError, CallError};
use crate::extents::{Fence, WaitError, wait_for};
use crate::own::Stream;
use crate::pool::core::Locked;

#[derive(Debug)]
pub(in crate::pool) struct Unfinished {
    pub(in crate::pool) error: BlockError,
    /// Covers the part that may still be running; complete if nothing runs.
    pub(in crate::pool) running: Fence,
}

impl Unfinished {
    pub(in crate::pool) fn of(failed: WaitError, stream: Stream) -> Self {
        Self {
            error: failed.error.into(),
            running: match failed.ended {
                true => Fence::complete(),
                false => Fence::stream(stream),
            },
        }
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
    pub(in crate::pool) fn scrubber(&mut self) -> Result<Stream, CallError> {
        if let Some(stream) = &self.scrubber {
            return Ok(stream.clone());
        }
        let device = self.device.clone();
        let created = self.unlocked(|| device.relaxed(|| Stream::new(&device)))??;
        // Another thread may have created a stream meanwhile.
        Ok(self.scrubber.get_or_insert(created).clone())
    }

    /// Fills a range with zeros on the home stream, or on the pool's scrub stream, which is waited
    /// for. Makes one fill, so that a failure leaves nothing running.
    pub(in crate::pool) fn zero(
        &mut self,
        slot: &Slot,
        offset: u64,
        size: u64,
        home: Option<&Stream>,
    ) -> Result<(), Unfinished> {
        let stream = match home {
            Some(home) => home.clone(),
            None => self.scrubber()?,
        };
        slot.space.fill(&stream, offset, 0, size)?;
        if home.is_some() {
            return Ok(());
        }
        let waited = self.unlocked(|| wait_for(&stream));
        waited.map_err(|failed| Unfinished::of(failed, stream))
    }

    /// Copies bytes at an offset of one slot to the same offset of another, on the streams that
    /// [`zero`](Self::zero) uses. Both slots are out. The source's memory is not unmapped before
    /// the copy is complete. If the wait fails, [`Unfinished::running`] has to keep the target too.
    pub(super) fn copy_between(
        &mut self,
        source: &mut Slot,
        to: &Slot,
        (offset, size): (u64, u64),
        home: Option<&Stream>,
    ) -> Result<(), Unfinished> {
        let stream = match home {
            Some(home) => home.clone(),
            None => self.scrubber()?,
        };
        let copied = to
            .space
            .copy_within(&stream, offset, &source.space, offset, size);
        copied?;
        if let Some(home) = home {
            source.is_read_on(home);
            return Ok(());
        }
        let waited = self.unlocked(|| wait_for(&stream));
        waited.map_err(|failed| {
            let failed = Unfinished::of(failed, stream.clone());
            if !failed.running.is_complete() {
                source.is_read_on(&stream);
            }
            failed
        })
    }
}
