//! Views for kernels: where all blocks of one layer's part lie.

use cuvmm_driver::DeviceAddress;

/// One part of a layer of all blocks: `[block, token, head, element]`, strided.
///
/// The element of a token's head in block `number` is at `address + number * block stride + token *
/// token stride + ...`. Only blocks in use have memory: a kernel that reaches another one loses the
/// context.
///
/// Address and strides are fixed for the life of the cache, so a captured graph may contain them.
/// Offsets can exceed 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedView {
    pub(super) address: DeviceAddress,
    pub(super) shape: [u64; 4],
    pub(super) element_bytes: u64,
    /// In bytes.
    pub(super) strides: [u64; 4],
}

impl PagedView {
    /// Returns the address of the first element of block 0.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns the numbers of blocks, tokens of a block, heads, and elements of a head.
    #[must_use]
    pub const fn shape(&self) -> [u64; 4] {
        self.shape
    }

    /// Returns the bytes of an element.
    #[must_use]
    pub const fn element_bytes(&self) -> u64 {
        self.element_bytes
    }

    /// Returns the distances between blocks, tokens, heads and elements, in elements.
    #[must_use]
    pub fn strides(&self) -> [u64; 4] {
        self.strides.map(|bytes| bytes / self.element_bytes)
    }

    /// Returns the distances between blocks, tokens, heads and elements, in bytes.
    #[must_use]
    pub const fn byte_strides(&self) -> [u64; 4] {
        self.strides
    }

    /// Returns the address of the first element of a block; `None` if there is no such block.
    #[must_use]
    pub fn block(&self, number: u32) -> Option<DeviceAddress> {
        let ([blocks, ..], [stride, ..]) = (self.shape, self.strides);
        let number = u64::from(number);
        (number < blocks).then(|| self.address + number * stride)
    }

    /// Returns `true` if the elements are contiguous over all blocks.
    #[must_use]
    pub const fn is_contiguous(&self) -> bool {
        let [_, tokens, heads, _] = self.shape;
        let [block, token, head, _] = self.strides;
        token == heads * head && block == tokens * token
    }
}
