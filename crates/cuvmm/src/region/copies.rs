//! Bytes in and out of a space, and within it: split where the place of the memory changes.
//!
//! The driver dies at a copy between the program and a range in which memory of a device meets memory
//! that the host's processors reach too (`docs/semantics.md`), and is several times slower where one
//! copy goes over several devices.

use super::space::{Extent, Space};
use crate::error::CopyError;
use crate::own::{Span, Stream};

impl Space {
    /// Queues filling a committed range with one byte on a stream that its next user waits for.
    pub(crate) fn fill(
        &self,
        stream: &Stream,
        offset: u64,
        byte: u8,
        size: u64,
    ) -> Result<(), CopyError> {
        let span = self.span(stream, offset, size)?;
        self.sides(offset, size)
            .into_iter()
            .try_for_each(|(offset, size)| span.fill_async(stream, offset, byte, size))
    }

    /// Queues a copy of a range of another space to the beginning of this one.
    pub(crate) fn copy_from(
        &self,
        stream: &Stream,
        other: &Self,
        offset: u64,
        size: u64,
    ) -> Result<(), CopyError> {
        self.copy_within(stream, 0, other, offset, size)
    }

    /// The same to any place in this one.
    pub(crate) fn copy_within(
        &self,
        stream: &Stream,
        to: u64,
        other: &Self,
        offset: u64,
        size: u64,
    ) -> Result<(), CopyError> {
        let from = other.span(stream, offset, size)?;
        let into = self.span(stream, to, size)?;
        // Where memory of several places is read or written, one copy for each run of one place.
        let (mut read, mut written) = (other.runs(offset, size), self.runs(to, size));
        let mut at = 0;
        while let (Some(reads), Some(writes)) = (read.first_mut(), written.first_mut()) {
            let part = reads.1.min(writes.1);
            into.copy_async(stream, to + at, &from, offset + at, part)?;
            at += part;
            for (run, runs) in [(reads.1, &mut read), (writes.1, &mut written)] {
                match runs.first_mut() {
                    Some(first) if run > part => first.1 -= part,
                    _ => drop(runs.remove(0)),
                }
            }
        }
        Ok(())
    }

    /// The parts of a committed range that each lie at one place, as offset and size.
    fn runs(&self, offset: u64, size: u64) -> Vec<(u64, u64)> {
        self.parts_by(offset, size, |extent| extent.location)
    }

    /// Writes behind what `stream` has queued.
    pub(crate) fn write(
        &self,
        stream: &Stream,
        offset: u64,
        mut bytes: &[u8],
    ) -> Result<(), CopyError> {
        let span = self.span(stream, offset, bytes.len() as u64)?;
        for (offset, size) in self.sides(offset, bytes.len() as u64) {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at(size.min(bytes.len()));
            span.write(stream, offset, part)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Reads behind what `stream` has queued.
    pub(crate) fn read(
        &self,
        stream: &Stream,
        offset: u64,
        mut bytes: &mut [u8],
    ) -> Result<(), CopyError> {
        let span = self.span(stream, offset, bytes.len() as u64)?;
        for (offset, size) in self.sides(offset, bytes.len() as u64) {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at_mut(size.min(bytes.len()));
            span.read(stream, offset, part)?;
            bytes = rest;
        }
        Ok(())
    }

    /// The parts of a committed range that one copy or fill can take, as offset and size: the
    /// driver dies at one that goes over the border between memory of a device and memory that the
    /// host's processors reach too (`docs/semantics.md`).
    fn sides(&self, offset: u64, size: u64) -> Vec<(u64, u64)> {
        self.parts_by(offset, size, |extent| extent.location.kind)
    }

    /// The runs of a committed range whose extents have something in common.
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

    /// The whole space as a range for the stream's device to copy in, if the part that is asked
    /// for is committed.
    fn span(&self, stream: &Stream, offset: u64, size: u64) -> Result<Span<'_>, CopyError> {
        let uncommitted = CopyError::NotCommitted { offset, size };
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
        Ok(self.reservation.span(user.unwrap_or(self.device())))
    }
}
