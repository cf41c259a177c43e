//! The blocks of tags by address.
//!
//! A block has whole granules, so small allocations of a tag share blocks, one behind the other. A
//! freed part is not used again before its block is: a block is freed with its last part, and then
//! waits for the work of the device, as each free under a tag does.

use std::collections::HashMap;

use cuvmm::Block;
use cuvmm::heap::ALIGNMENT;

/// The largest allocation that shares a block, in bytes.
const SMALL: u64 = 1 << 20;

const SHARED: u64 = 2 << 20;

/// The blocks of all tags. Tags are numbers here.
#[derive(Default)]
pub(crate) struct Blocks {
    /// Blocks of one allocation with their tags, by address.
    whole: HashMap<usize, (Block, usize)>,
    shared: HashMap<usize, Shared>,
    /// Allocations in shared blocks, by address: the size and the block's address.
    parts: HashMap<usize, (u64, usize)>,
    /// For each tag the address of the block that gets the next small allocation.
    open: HashMap<usize, usize>,
}

struct Shared {
    block: Block,
    tag: usize,
    /// The offset behind the last part.
    end: u64,
    /// The number of parts that are not freed.
    parts: usize,
}

pub(crate) struct Removed {
    pub(crate) size: u64,
    pub(crate) tag: usize,
    /// The block, if it ends with the allocation.
    pub(crate) block: Option<Block>,
}

pub(crate) const fn block_for(size: u64) -> u64 {
    if size <= SMALL { SHARED } else { size }
}

impl Blocks {
    /// Makes a small allocation in the tag's open block. Returns its address, or `None` if it is
    /// not small or the block is full.
    pub(crate) fn share(&mut self, tag: usize, size: u64) -> Option<usize> {
        if size > SMALL {
            return None;
        }
        let place = *self.open.get(&tag)?;
        let shared = self.shared.get_mut(&place)?;
        let end = shared.end.checked_add(size.next_multiple_of(ALIGNMENT))?;
        if end > shared.block.size() {
            return None;
        }
        let address = place + usize::try_from(shared.end).ok()?;
        shared.end = end;
        shared.parts += 1;
        self.parts.insert(address, (size, place));
        Some(address)
    }

    /// Adds a block of [`block_for`] the size for an allocation, and returns the allocation's
    /// address.
    pub(crate) fn add(&mut self, tag: usize, size: u64, block: Block) -> usize {
        let place = usize::try_from(block.address().0).unwrap_or(usize::MAX);
        if size > SMALL {
            self.whole.insert(place, (block, tag));
            return place;
        }
        let shared = Shared {
            block,
            tag,
            end: size.next_multiple_of(ALIGNMENT),
            parts: 1,
        };
        self.shared.insert(place, shared);
        self.parts.insert(place, (size, place));
        self.open.insert(tag, place);
        place
    }

    pub(crate) fn remove(&mut self, address: usize) -> Option<Removed> {
        if let Some((block, tag)) = self.whole.remove(&address) {
            return Some(Removed {
                size: block.size(),
                tag,
                block: Some(block),
            });
        }
        let (size, place) = self.parts.remove(&address)?;
        let shared = self.shared.get_mut(&place)?;
        shared.parts -= 1;
        let (tag, left) = (shared.tag, shared.parts);
        let mut block = None;
        if left == 0 {
            block = self.shared.remove(&place).map(|shared| shared.block);
            if self.open.get(&tag) == Some(&place) {
                self.open.remove(&tag);
            }
        }
        Some(Removed { size, tag, block })
    }

    pub(crate) fn sizes(&self, tag: usize) -> impl Iterator<Item = u64> {
        let whole = self.whole.values().map(|(block, tag)| (block, *tag));
        let shared = self.shared.values();
        let shared = shared.map(|shared| (&shared.block, shared.tag));
        let ours = whole.chain(shared).filter(move |&(_, of)| of == tag);
        ours.map(|(block, _)| block.size())
    }

    /// Returns the block at an address, the address' offset in it, and the block's tag.
    pub(crate) fn holding(&self, address: usize) -> Option<(&Block, u64, usize)> {
        let whole = self.whole.values().map(|(block, tag)| (block, *tag));
        let shared = self.shared.values();
        let mut all = whole.chain(shared.map(|shared| (&shared.block, shared.tag)));
        let address = address as u64;
        all.find_map(|(block, tag)| {
            let offset = address.checked_sub(block.address().0)?;
            (offset < block.size()).then_some((block, offset, tag))
        })
    }

    /// Returns the address, the size and the tag of each allocation.
    pub(crate) fn allocations(&self) -> impl Iterator<Item = (usize, u64, usize)> {
        let whole = self.whole.iter();
        let whole = whole.map(|(&address, (block, tag))| (address, block.size(), *tag));
        let parts = self.parts.iter().filter_map(|(&address, &(size, place))| {
            let tag = self.shared.get(&place)?.tag;
            Some((address, size, tag))
        });
        whole.chain(parts)
    }
}
