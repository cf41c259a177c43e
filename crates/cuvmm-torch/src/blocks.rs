//! The blocks of tags by address.
//!
//! A block has whole granules, so small allocations of a tag share blocks, one behind the other. A
//! freed part is not used again before its block is: a block is freed with its last part, and then
//! waits for the work of the device, as each free under a tag does.
//!
//! Memory of allocations is marked to be kept by a sleep that discards the rest. A mark ends with its
//! allocation.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use cuvmm::heap::ALIGNMENT;
use cuvmm::{Block, MemoryError};

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
    /// The marks by their tokens.
    marks: BTreeMap<u64, Mark>,
    /// The token of the last mark.
    token: u64,
}

/// Memory that is marked to be kept.
struct Mark {
    /// The address of the block.
    place: usize,
    /// The range in the block.
    range: Range<u64>,
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
            self.marks.retain(|_, mark| mark.place != address);
            return Some(Removed {
                size: block.size(),
                tag,
                block: Some(block),
            });
        }
        let (size, place) = self.parts.remove(&address)?;
        let part = offset(place, address)..offset(place, address) + size;
        let is_in = |mark: &Mark| mark.place == place && part.contains(&mark.range.start);
        self.marks.retain(|_, mark| !is_in(mark));
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

    /// Returns the blocks of a tag with their addresses.
    fn blocks(&self, tag: usize) -> impl Iterator<Item = (usize, &Block)> {
        let whole = self.whole.iter();
        let whole = whole.map(|(&place, (block, tag))| (place, block, *tag));
        let shared = self.shared.iter();
        let shared = shared.map(|(&place, shared)| (place, &shared.block, shared.tag));
        let ours = whole.chain(shared).filter(move |&(.., of)| of == tag);
        ours.map(|(place, block, _)| (place, block))
    }

    pub(crate) fn sizes(&self, tag: usize) -> impl Iterator<Item = u64> {
        self.blocks(tag).map(|(_, block)| block.size())
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

    /// Returns the tag and the block's address of the allocation that contains a range of addresses.
    fn containing(&self, address: usize, size: u64) -> Option<(usize, usize)> {
        let (block, begun, tag) = self.holding(address)?;
        let place = address - usize::try_from(begun).ok()?;
        let end = begun.checked_add(size)?;
        let is_in = |first: u64, bytes: u64| first <= begun && end <= first + bytes;
        let mut parts = self.parts.iter();
        let within = match self.shared.contains_key(&place) {
            true => parts
                .any(|(&first, &(bytes, of))| of == place && is_in(offset(place, first), bytes)),
            false => is_in(0, block.size()),
        };
        within.then_some((tag, place))
    }

    /// Returns the tag of the allocation that contains a range of addresses.
    pub(crate) fn tag_of(&self, address: usize, size: u64) -> Option<usize> {
        self.containing(address, size).map(|(tag, _)| tag)
    }

    /// Marks memory of one allocation to be kept. Returns the mark's token, or `None` if no
    /// allocation contains the memory.
    pub(crate) fn mark(&mut self, address: usize, size: u64) -> Option<u64> {
        let (_, place) = self.containing(address, size)?;
        let range = offset(place, address)..offset(place, address) + size;
        self.token += 1;
        self.marks.insert(self.token, Mark { place, range });
        Some(self.token)
    }

    pub(crate) fn end_mark(&mut self, token: u64) {
        self.marks.remove(&token);
    }

    /// Tells the blocks of a tag which of their bytes are marked, before they sleep.
    ///
    /// # Errors
    /// A block sleeps.
    pub(crate) fn tell_marks(&self, tag: usize) -> Result<(), MemoryError> {
        let mut blocks = self.blocks(tag);
        blocks.try_for_each(|(place, block)| block.set_kept(self.marks_in(place)))
    }

    /// Returns the marked bytes of each block of a tag that has some.
    pub(crate) fn marked(&self, tag: usize) -> impl Iterator<Item = u64> {
        let blocks = self.blocks(tag).map(|(place, _)| {
            let mut ranges: Vec<Range<u64>> = self.marks_in(place).collect();
            ranges.sort_unstable_by_key(|range| range.start);
            let joined = ranges.iter().fold((0, 0), |(sum, last), range| {
                let begun = range.start.max(last);
                (sum + range.end.saturating_sub(begun), range.end.max(last))
            });
            joined.0
        });
        blocks.filter(|&bytes| bytes > 0)
    }

    fn marks_in(&self, place: usize) -> impl Iterator<Item = Range<u64>> {
        let marks = self.marks.values().filter(move |mark| mark.place == place);
        marks.map(|mark| mark.range.clone())
    }
}

/// Returns an address's offset in the block at `place`, which contains it.
const fn offset(place: usize, address: usize) -> u64 {
    (address - place) as u64
}
