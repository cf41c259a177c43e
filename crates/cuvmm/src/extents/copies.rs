//! Fills and copies in a space, split where the place of the memory changes.
//!
//! The driver crashes on a copy between the program and a range in which memory of a device meets
//! memory that the host's processors can reach too (`docs/semantics.md`), and is several times
//! slower where one copy spans several devices.

use super::fence::{Fence, Poll};
use super::space::{Extent, Space};
use crate::error::{CallError, MemoryError};
use crate::own::{Span, Stream};

#[derive(Debug)]
pub(crate) struct WaitError {
    pub(crate) error: CallError,
    /// Set if the stream's work has ended nevertheless, so that memory may be unmapped.
    pub(crate) ended: bool,
}

/// Waits for the work queued on a stream. If the driver refuses twice, polls a fence to find out
/// whether the work is complete. Other streams are not waited for, since the pool may be locked.
pub(crate) fn wait_for(stream: &Stream) -> Result<(), WaitError> {
    stream.settle().map_err(|error| {
        let polled = Fence::stream(stream.clone()).poll();
        let ended = matches!(polled, Ok(Poll::Complete));
        log!(warn, %error, ended, "a stream could not be waited for");
        WaitError { error, ended }
    })
}

impl Space {
    /// Queues filling a committed range with one byte on a stream. The next user of the range waits
    /// for that stream.
    pub(crate) fn fill(
        &self,
        stream: &Stream,
        offset: u64,
        byte: u8,
        size: u64,
    ) -> Result<(), MemoryError> {
        let span = self.span(stream, offset, size)?;
        self.sides(offset, size)
            .into_iter()
            .try_for_each(|(offset, size)| span.fill_async(stream, offset, byte, size))
    }

    /// Queues a copy of a range of another space to an offset in this space.
    pub(crate) fn copy_within(
        &self,
        stream: &Stream,
        to: u64,
        other: &Self,
        offset: u64,
        size: u64,
    ) -> Result<(), MemoryError> {
        let from = other.span(stream, offset, size)?;
        let into = self.span(stream, to, size)?;
        // One copy for each run that is at one place on both sides.
        let mut at = 0;
        for part in common_parts(other.runs(offset, size), self.runs(to, size)) {
            into.copy_async(stream, to + at, &from, offset + at, part)?;
            at += part;
        }
        Ok(())
    }

    fn runs(&self, offset: u64, size: u64) -> impl Iterator<Item = u64> + use<> {
        let parts = self.parts_by(offset, size, |extent| extent.location);
        parts.into_iter().map(|(_, size)| size)
    }

    pub(crate) fn write(
        &self,
        stream: &Stream,
        offset: u64,
        mut bytes: &[u8],
    ) -> Result<(), MemoryError> {
        let span = self.span(stream, offset, bytes.len() as u64)?;
        for (offset, size) in self.sides(offset, bytes.len() as u64) {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at(size.min(bytes.len()));
            span.write(stream, offset, part)?;
            bytes = rest;
        }
        Ok(())
    }

    pub(crate) fn read(
        &self,
        stream: &Stream,
        offset: u64,
        mut bytes: &mut [u8],
    ) -> Result<(), MemoryError> {
        let span = self.span(stream, offset, bytes.len() as u64)?;
        for (offset, size) in self.sides(offset, bytes.len() as u64) {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at_mut(size.min(bytes.len()));
            span.read(stream, offset, part)?;
            bytes = rest;
        }
        Ok(())
    }

    /// The parts of a committed range that one copy or fill can cover, as offset and size.
    fn sides(&self, offset: u64, size: u64) -> Vec<(u64, u64)> {
        self.parts_by(offset, size, |extent| extent.location.kind)
    }

    /// The runs of a committed range whose extents have the same key.
    fn parts_by<K: PartialEq>(
        &self,
        offset: u64,
        size: u64,
        common: impl Fn(&Extent) -> K,
    ) -> Vec<(u64, u64)> {
        let end = offset.saturating_add(size);
        let mut parts: Vec<(u64, u64)> = vec![];
        let mut last = None;
        for extent in self.extents_in(offset, end) {
            let (from, to) = (extent.offset.max(offset), extent.end().min(end));
            let here = Some(common(&extent));
            match parts.last_mut() {
                Some((_, size)) if last == here => *size += to - from,
                _ => parts.push((from, to - from)),
            }
            last = here;
        }
        parts
    }

    /// The whole space as a range for the stream's device to copy in, if the requested part is
    /// committed.
    fn span(&self, stream: &Stream, offset: u64, size: u64) -> Result<Span<'_>, MemoryError> {
        let uncommitted = MemoryError::NotCommitted(offset..offset.saturating_add(size));
        let Some(end) = offset.checked_add(size) else {
            return Err(uncommitted);
        };
        let mut at = offset;
        for extent in self.extents_in(offset, end) {
            if extent.offset > at {
                return Err(uncommitted);
            }
            at = extent.offset + extent.size;
        }
        if at < end {
            return Err(uncommitted);
        }
        let user = self.users().find(|device| *device == stream.device());
        Ok(self.target.reservation.span(user.unwrap_or(self.device())))
    }
}

/// The sizes of the common parts of two divisions of the same bytes.
fn common_parts(
    mut one: impl Iterator<Item = u64>,
    mut other: impl Iterator<Item = u64>,
) -> impl Iterator<Item = u64> {
    // The bytes left of the current part of each division.
    let (mut first, mut second) = (0, 0);
    std::iter::from_fn(move || {
        if first == 0 {
            first = one.next()?;
        }
        if second == 0 {
            second = other.next()?;
        }
        let part = first.min(second);
        first -= part;
        second -= part;
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::common_parts;

    #[test]
    fn parts_end_where_a_part_of_either_side_ends() {
        let parts = |one: &[u64], other: &[u64]| -> Vec<u64> {
            common_parts(one.iter().copied(), other.iter().copied()).collect()
        };
        assert_eq!(parts(&[6], &[1, 2, 3]), [1, 2, 3]);
        assert_eq!(parts(&[2, 4], &[3, 3]), [2, 1, 3]);
        assert_eq!(parts(&[5, 1], &[5, 1]), [5, 1]);
        assert_eq!(parts(&[], &[]), [0; 0]);
    }

    #[test]
    fn each_run_of_a_striped_copy_is_looked_at_once() {
        const STRIPES: u64 = 10_000;
        let looked = Cell::new(0);
        let runs = |size| {
            (0..STRIPES)
                .map(move |_| size)
                .inspect(|_| looked.set(looked.get() + 1))
        };
        let copied: u64 = common_parts(runs(3), runs(3)).sum();
        assert_eq!((copied, looked.get()), (3 * STRIPES, 2 * STRIPES));
    }
}
