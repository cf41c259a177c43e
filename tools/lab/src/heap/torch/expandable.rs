//! PyTorch's expandable segments: ranges of addresses that grow and shrink by pages.

use super::blocks::{Id, Pool, State};
use super::{Allocator, LARGE, SMALL};

const fn page(pool: Pool) -> u64 {
    match pool.small {
        true => SMALL,
        false => LARGE,
    }
}

impl Allocator<'_> {
    /// Returns a free block that fits. Unmaps free pages if the driver refuses to map more.
    pub(super) fn expandable(&mut self, pool: Pool, size: u64) -> Option<Id> {
        let found = self.smallest(pool, size).or_else(|| self.grow(pool, size));
        found.or_else(|| {
            self.give_pages_back();
            self.grow(pool, size)
        })
    }

    /// Returns the smallest free block that fits a request. Addresses behind a block that can be
    /// mapped count as its part.
    fn smallest(&self, pool: Pool, size: u64) -> Option<Id> {
        let reach = |id: Id| {
            let block = self.blocks.get(id);
            let next = block.after.map(|after| self.blocks.get(after));
            let next = next.filter(|next| next.state == State::Unmapped);
            block.size + next.map_or(0, |next| next.size)
        };
        let mut fitting = self.blocks.fitting(pool, size);
        let mut best = fitting.next()?;
        for next in fitting {
            if reach(next) >= reach(best) {
                break;
            }
            best = next;
        }
        Some(best)
    }

    /// Returns the first of consecutive free or unmapped blocks of a pool with `size` bytes
    /// together, in an existing range or a new one. Returns `None` if no range has that many.
    fn room(&mut self, pool: Pool, size: u64) -> Option<Id> {
        for hole in self.blocks.holes(pool) {
            let before = self.blocks.get(hole).before;
            let before = before.filter(|&id| self.blocks.get(id).state == State::Free);
            let first = before.unwrap_or(hole);
            let (mut next, mut bytes) = (Some(first), 0);
            while let Some(id) = next.filter(|_| bytes < size) {
                let block = self.blocks.get(id);
                if block.state == State::Used {
                    break;
                }
                bytes += block.size;
                next = block.after;
            }
            if bytes >= size {
                return Some(first);
            }
        }
        let bytes = self.meter.memory.saturating_add(self.meter.memory / 8);
        let bytes = bytes.checked_next_multiple_of(page(pool))?;
        if size > bytes {
            return None;
        }
        self.meter.reserve(bytes);
        self.blocks.segment(pool, bytes, State::Unmapped)
    }

    /// Maps memory until a free block has `size` bytes. Returns `None` if the driver refuses.
    fn grow(&mut self, pool: Pool, size: u64) -> Option<Id> {
        let mut id = self.room(pool, size)?;
        if self.blocks.get(id).state == State::Unmapped {
            id = self.map(id, size)?;
        }
        while self.blocks.get(id).size < size {
            let block = self.blocks.get(id);
            id = self.map(block.after?, size - block.size)?;
        }
        Some(id)
    }

    /// Maps the pages of the first `size` bytes of an unmapped block, or all of it. Returns the
    /// free block that contains them.
    fn map(&mut self, id: Id, size: u64) -> Option<Id> {
        let block = self.blocks.get(id);
        let page = page(block.pool);
        let pages = size.min(block.size).div_ceil(page);
        let mut access = 0.0;
        for created in 0..pages {
            let Some(cost) = self.meter.create(page) else {
                (0..created).for_each(|_| self.meter.release(page));
                return None;
            };
            access += cost;
        }
        (0..pages).for_each(|_| self.meter.map(page));
        self.meter.set_access(access);
        if pages * page < block.size {
            self.blocks.split(id, pages * page);
        }
        self.blocks.set(id, State::Free);
        Some(self.blocks.join(id))
    }

    /// Unmaps pages that lie wholly in free blocks.
    fn give_pages_back(&mut self) {
        self.meter.synchronize();
        for id in self.blocks.free() {
            let block = self.blocks.get(id);
            let page = page(block.pool);
            let end = block.address + block.size;
            let from = block.address.next_multiple_of(page);
            let to = end / page * page;
            if from >= to {
                continue;
            }
            self.meter.synchronize();
            for _ in 0..(to - from) / page {
                self.meter.unmap(page);
                self.meter.release(page);
            }
            if to < end {
                self.blocks.split(id, to - block.address);
            }
            let middle = match from - block.address {
                0 => id,
                before => self.blocks.split(id, before),
            };
            self.blocks.set(middle, State::Unmapped);
            let whole = self.blocks.join(middle);
            let block = self.blocks.get(whole);
            if block.before.is_none() && block.after.is_none() {
                self.meter.unreserve(block.size);
                self.blocks.remove(whole);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::meter::Meter;
    use super::super::{Kind, MIB, pool};
    use super::*;
    use cuvmm::driver::model::Costs;

    fn held(expandable: &Allocator<'_>) -> u64 {
        expandable.meter.held / MIB
    }

    #[test]
    fn a_range_grows_by_pages_and_free_pages_at_its_end_are_used() {
        let costs = Costs::default();
        let mut heap = Allocator::new(Kind::Expandable, Meter::new(&costs, u64::MAX, 1 << 30));
        let small = heap.allocate(1, 0).unwrap();
        assert_eq!(held(&heap), 2);
        let first = heap.allocate(30 * MIB, 0).unwrap();
        assert_eq!(held(&heap), 42);
        let second = heap.allocate(30 * MIB, 0).unwrap();
        assert_eq!(held(&heap), 62, "ten of the second's were there");
        let between = heap.blocks.get(second).address - heap.blocks.get(first).address;
        assert_eq!(between, 30 * MIB);
        // Two ranges; four pages: create, map; three times access.
        assert_eq!(heap.meter.calls, 2 + 2 * 4 + 3);
        heap.free(small);
        heap.free(first);
        heap.allocate(40 * MIB, 0).unwrap();
        assert_eq!(
            held(&heap),
            102,
            "30 free MiB in front serve nothing larger"
        );
        heap.allocate(MIB + 1, 3).unwrap();
        assert_eq!(held(&heap), 122, "another stream has a range of its own");
    }

    #[test]
    fn out_of_memory_unmaps_whole_pages_and_holes_are_mapped_again() {
        let costs = Costs::default();
        let mut heap = Allocator::new(Kind::Expandable, Meter::new(&costs, 100 * MIB, 1 << 30));
        let first = heap.allocate(50 * MIB, 0).unwrap();
        let second = heap.allocate(50 * MIB, 0).unwrap();
        heap.free(first);
        // The hole has 40 MiB, with 10 free MiB behind it.
        assert!(heap.allocate(61 * MIB, 0).is_none());
        assert_eq!(held(&heap), 60);
        let third = heap.allocate(45 * MIB, 0).unwrap();
        assert_eq!(
            heap.blocks.get(third).address,
            0,
            "the hole is mapped from its start"
        );
        assert_eq!(held(&heap), 100);
        heap.free(second);
        heap.free(third);
        assert!(heap.allocate(2 * MIB, 1).is_some());
        assert_eq!(heap.meter.peak_held, 100 * MIB);
        assert_eq!(held(&heap), 20, "the whole range went back");
        assert_eq!(heap.blocks.holes(pool(2 * MIB, 0)).count(), 0);
    }
}
