//! What a kernel is given: where a sequence's keys and values are, borrowed from the cache, so that
//! no sequence can grow, shrink or be freed before the borrow ends.
//!
//! The borrow ends when the launch has been queued, not when the kernel has run: what comes after
//! that is ordered by the home stream.

use std::marker::PhantomData;

use cuvmm_driver::DeviceAddress;

use super::sequences::{Sequence, SequenceId};
use super::shape::{Geometry, Part};

/// One layer's keys or values of one sequence: `[token, head, element]`, strided.
///
/// The address of a sequence's first token, and the strides, are fixed for the sequence's life: a
/// captured graph may hold them.
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
    /// The first element's address.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// How many tokens, heads and elements of a head there are.
    #[must_use]
    pub const fn shape(&self) -> [u64; 3] {
        self.extents
    }

    /// From one token, head and element to the next, in elements.
    #[must_use]
    pub fn strides(&self) -> [u64; 3] {
        self.strides.map(|bytes| bytes / self.element_bytes)
    }

    /// The same in bytes.
    #[must_use]
    pub const fn byte_strides(&self) -> [u64; 3] {
        self.strides
    }

    /// Whether the elements lie side by side, without gaps.
    #[must_use]
    pub const fn is_contiguous(&self) -> bool {
        let [_, heads, _] = self.extents;
        let [token, head, _] = self.strides;
        token == heads * head
    }
}

/// A sequence as it is now.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    geometry: &'a Geometry,
    sequence: &'a Sequence,
}

impl<'a> SequenceView<'a> {
    pub(super) const fn new(geometry: &'a Geometry, sequence: &'a Sequence) -> Self {
        Self { geometry, sequence }
    }

    /// Which one it is.
    #[must_use]
    pub const fn id(&self) -> SequenceId {
        self.sequence.id
    }

    /// How many tokens it has.
    #[must_use]
    pub const fn tokens(&self) -> u64 {
        self.sequence.tokens
    }

    /// A layer's keys; nothing if the model has no such layer.
    #[must_use]
    pub fn key(&self, layer: u32) -> Option<KvTensor<'a>> {
        self.tensor(layer, Part::Key)
    }

    /// A layer's values; nothing if the model has no such layer.
    #[must_use]
    pub fn value(&self, layer: u32) -> Option<KvTensor<'a>> {
        self.tensor(layer, Part::Value)
    }

    /// A layer's keys or values; nothing if the model has no such layer.
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
