//! Copies of elements by the driver, which work on every device and wait only for themselves on the
//! host.

use std::ops::{Range, RangeBounds};

use bytemuck::Pod;

use super::uses::Kind;
use super::{UnifiedBuffer, bytes_at};
use crate::error::{ContainerError, MemoryError};
use crate::own::{Managed, Stream};

/// Up to this number of bytes a pattern is repeated in host memory; beyond it, on the device.
const REPEATED: usize = 64 << 10;

impl<T: Pod> UnifiedBuffer<T> {
    /// Reads the element at an index.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn get(&self, index: usize) -> Result<T, ContainerError> {
        let mut element = [T::zeroed()];
        self.read(index, &mut element)?;
        let [element] = element;
        Ok(element)
    }

    /// Reads as many elements as `into` holds, from `first` on, behind all writes of them
    /// (`cuMemcpyDtoHAsync` on the home stream, waited for).
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the buffer, the home stream captures, or the copy
    /// fails.
    pub fn read(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        let range = bytes_at::<T>(&self.run(first, into.len())?);
        let Some(memory) = self.memory.as_ref().filter(|_| !into.is_empty()) else {
            return Ok(());
        };
        let using = self.uses.begin(&self.home, Kind::Read)?;
        let bytes = bytemuck::cast_slice_mut(into);
        memory.span().read(using.stream(), range.start, bytes)?;
        using.passed();
        Ok(())
    }

    /// Copies all elements to ordinary host memory.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn to_vec(&self) -> Result<Vec<T>, ContainerError> {
        let mut elements = vec![T::zeroed(); self.len()];
        self.read(0, &mut elements)?;
        Ok(elements)
    }

    /// Overwrites elements from `first` on, behind all uses of them (`cuMemcpyHtoDAsync` on the
    /// home stream, waited for).
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the buffer, the home stream captures, or the copy
    /// fails, in which case the contents of the elements are unspecified.
    pub fn write(&mut self, first: usize, elements: &[T]) -> Result<(), ContainerError> {
        let range = bytes_at::<T>(&self.run(first, elements.len())?);
        let Some(memory) = self.memory.as_ref().filter(|_| !elements.is_empty()) else {
            return Ok(());
        };
        let using = self.uses.begin(&self.home, Kind::Write)?;
        let bytes = bytemuck::cast_slice(elements);
        memory.span().write(using.stream(), range.start, bytes)?;
        using.passed();
        Ok(())
    }

    /// Overwrites a range of elements with one value, behind all uses of them, on the home stream
    /// (`cuMemsetD8Async` if all bytes of the value are equal; otherwise a short
    /// `cuMemcpyHtoDAsync` and doubling `cuMemcpyDtoDAsync`). May return before that is complete;
    /// later uses wait for it.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn fill(&mut self, range: impl RangeBounds<usize>, value: T) -> Result<(), ContainerError> {
        let range = self.elements(range)?;
        let Some(memory) = self.memory.as_ref().filter(|_| !range.is_empty()) else {
            return Ok(());
        };
        let using = self.uses.begin(&self.home, Kind::Write)?;
        let bytes = bytemuck::bytes_of(&value);
        let whole = bytes_at::<T>(&range);
        match bytes {
            [byte, others @ ..] if others.iter().all(|other| other == byte) => {
                let size = whole.end.saturating_sub(whole.start);
                memory
                    .span()
                    .fill_async(using.stream(), whole.start, *byte, size)?;
            }
            _ => {
                let most = (REPEATED / size_of::<T>().max(1)).max(1);
                let pattern = vec![value; most.min(range.len())];
                let pattern = bytemuck::cast_slice(&pattern);
                memory.span().write(using.stream(), whole.start, pattern)?;
                let known = whole.start.saturating_add(pattern.len() as u64);
                repeat(memory, using.stream(), &whole, known)?;
            }
        }
        Ok(())
    }
}

/// Fills a range with repetitions of its beginning, up to `known`: each copy doubles it.
fn repeat(
    memory: &Managed,
    stream: &Stream,
    range: &Range<u64>,
    mut known: u64,
) -> Result<(), MemoryError> {
    let span = memory.span();
    while known < range.end {
        let size = (known - range.start).min(range.end - known);
        span.copy_async(stream, known, &span, range.start, size)?;
        known += size;
    }
    Ok(())
}
