//! Views for kernels: the places of a sequence's keys and values, borrowed from the cache, so that
//! no sequence can grow, shrink or be freed during the borrow.
//!
//! The borrow has to last until the launch is queued, not until the kernel has run: later
//! operations are ordered by the home stream.

use std::marker::PhantomData;

use cuvmm_driver::DeviceAddress;

use super::sequences::{Sequence, SequenceId};
use super::shape::{Geometry, Part};

/// One layer's keys or values of one sequence: `[token, head, element]`, strided.
///
/// The address of a sequence's first token and the strides are fixed for the sequence's life, so a
/// captured graph may contain them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvTensor<'a> {
    address: DeviceAddress,
    extents: [u64; 3],
    element_bytes: u64,
    /// In bytes.
    strides: [u64; 3],
    sequence: PhantomData<&'a [u8]>,
}

impl KvTensor<'_> {
    /// Returns the address of the first element.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns the numbers of tokens, heads and elements of a head.
    #[must_use]
    pub const fn shape(&self) -> [u64; 3] {
        self.extents
    }

    /// Returns the distances between tokens, heads and elements, in elements.
    #[must_use]
    pub fn strides(&self) -> [u64; 3] {
        self.strides.map(|bytes| bytes / self.element_bytes)
    }

    /// Returns the distances between tokens, heads and elements, in bytes.
    #[must_use]
    pub const fn byte_strides(&self) -> [u64; 3] {
        self.strides
    }

    /// Returns `true` if the elements are contiguous.
    #[must_use]
    pub const fn is_contiguous(&self) -> bool {
        let [_, heads, _] = self.extents;
        let [token, head, _] = self.strides;
        token == heads * head
    }
}

/// A view of a sequence in its current state.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    geometry: &'a Geometry,
    sequence: &'a Sequence,
}

impl<'a> SequenceView<'a> {
    pub(super) const fn new(geometry: &'a Geometry, sequence: &'a Sequence) -> Self {
        Self { geometry, sequence }
    }

    /// Returns the name of the sequence.
    #[must_use]
    pub const fn id(&self) -> SequenceId {
        self.sequence.id
    }

    /// Returns the number of tokens.
    #[must_use]
    pub const fn tokens(&self) -> u64 {
        self.sequence.tokens
    }

    /// Returns a layer's keys, or `None` if the model has no such layer.
    #[must_use]
    pub fn key(&self, layer: u32) -> Option<KvTensor<'a>> {
        self.tensor(layer, Part::Key)
    }

    /// Returns a layer's values, or `None` if the model has no such layer.
    #[must_use]
    pub fn value(&self, layer: u32) -> Option<KvTensor<'a>> {
        self.tensor(layer, Part::Value)
    }

    /// Returns a layer's keys or values, or `None` if the model has no such layer.
    #[must_use]
    pub fn tensor(&self, layer: u32, part: Part) -> Option<KvTensor<'a>> {
        let geometry = self.geometry;
        let (range, offset) = geometry.place(layer, part)?;
        let address = self.sequence.blocks.get(range)?.address();
        let element_bytes = u64::from(geometry.shape.element_bytes);
        Some(KvTensor {
            address: address.checked_add(offset)?,
            extents: [
                self.sequence.tokens,
                u64::from(geometry.shape.kv_heads),
                u64::from(geometry.shape.head_size),
            ],
            element_bytes,
            strides: [geometry.stride, geometry.head, element_bytes],
            sequence: PhantomData,
        })
    }
}
