//! The blocks of a caching allocator, side by side in their segments; free blocks by size.

use std::collections::BTreeSet;

/// The allocations of one stream of at most 1 MiB each, or the larger ones. A free block serves
/// only its own pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pool {
    pub(super) small: bool,
    pub(super) stream: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Used,
    Free,
    /// Addresses without memory.
    Unmapped,
}

pub(super) type Id = usize;

#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) pool: Pool,
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) state: State,
    /// The neighboring blocks in the segment.
    pub(super) before: Option<Id>,
    pub(super) after: Option<Id>,
}

#[derive(Debug, Default)]
pub(super) struct Blocks {
    all: Vec<Block>,
    /// Indices of removed blocks.
    gone: Vec<Id>,
    /// Free blocks: pool, size, address.
    free: BTreeSet<(Pool, u64, u64, Id)>,
    /// Unmapped blocks: pool, address.
    unmapped: BTreeSet<(Pool, u64, Id)>,
    /// The address of the next segment.
    end: u64,
}

/// The alignment of segments, a multiple of all pages.
const ALIGNMENT: u64 = 1_000 << 20;

impl Blocks {
    pub(super) fn get(&self, id: Id) -> Block {
        self.all[id]
    }

    /// Adds a segment of one block. Returns `None` if no addresses are left.
    pub(super) fn segment(&mut self, pool: Pool, size: u64, state: State) -> Option<Id> {
        let address = self.end;
        let end = address.checked_add(size)?;
        self.end = end.checked_next_multiple_of(ALIGNMENT)?;
        Some(self.add(Block {
            pool,
            address,
            size,
            state,
            before: None,
            after: None,
        }))
    }

    /// Removes a segment of one block.
    pub(super) fn remove(&mut self, id: Id) {
        self.unlist(id);
        self.gone.push(id);
    }

    pub(super) fn set(&mut self, id: Id, state: State) {
        self.unlist(id);
        self.all[id].state = state;
        self.list(id);
    }

    /// Cuts a block to `size` bytes. The rest becomes a block of the same state.
    pub(super) fn split(&mut self, id: Id, size: u64) -> Id {
        self.unlist(id);
        let whole = self.all[id];
        let rest = self.add(Block {
            address: whole.address + size,
            size: whole.size - size,
            before: Some(id),
            ..whole
        });
        if let Some(after) = whole.after {
            self.all[after].before = Some(rest);
        }
        let first = &mut self.all[id];
        (first.size, first.after) = (size, Some(rest));
        self.list(id);
        rest
    }

    /// Joins a block with its neighbors of the same state, and returns the whole.
    pub(super) fn join(&mut self, id: Id) -> Id {
        let alike = |other: &Id| self.all[*other].state == self.all[id].state;
        let first = self.all[id].before.filter(alike);
        let after = self.all[id].after.filter(alike);
        if let Some(after) = after {
            self.absorb(id, after);
        }
        match first {
            Some(first) => {
                self.absorb(first, id);
                first
            }
            None => id,
        }
    }

    /// Returns the free blocks of a pool with at least `size` bytes, the smallest first.
    pub(super) fn fitting(&self, pool: Pool, size: u64) -> impl Iterator<Item = Id> {
        let from = self.free.range((pool, size, 0, 0)..);
        from.take_while(move |&&(of, ..)| of == pool)
            .map(|&(.., id)| id)
    }

    /// Returns the unmapped blocks of a pool in the order of their addresses.
    pub(super) fn holes(&self, pool: Pool) -> impl Iterator<Item = Id> {
        let from = self.unmapped.range((pool, 0, 0)..);
        from.take_while(move |&&(of, ..)| of == pool)
            .map(|&(.., id)| id)
    }

    pub(super) fn free(&self) -> Vec<Id> {
        self.free.iter().map(|&(.., id)| id).collect()
    }

    /// Checks that blocks are side by side, that free ones are joined and listed, and returns the
    /// bytes of used and of free blocks.
    #[cfg(test)]
    pub(super) fn check(&self) -> (u64, u64) {
        let (mut used, mut free, mut listed, mut holes) = (0, 0, 0, 0);
        for id in (0..self.all.len()).filter(|id| !self.gone.contains(id)) {
            let block = self.all[id];
            assert!(block.size > 0);
            if let Some(after) = block.after {
                let next = self.all[after];
                assert_eq!(next.before, Some(id));
                assert_eq!(next.address, block.address + block.size);
                assert_eq!(next.pool, block.pool);
                assert!(next.state != block.state || block.state == State::Used);
            }
            match block.state {
                State::Used => used += block.size,
                State::Free => {
                    free += block.size;
                    listed += 1;
                    let key = (block.pool, block.size, block.address, id);
                    assert!(self.free.contains(&key));
                }
                State::Unmapped => {
                    holes += 1;
                    let key = (block.pool, block.address, id);
                    assert!(self.unmapped.contains(&key));
                }
            }
        }
        assert_eq!((listed, holes), (self.free.len(), self.unmapped.len()));
        (used, free)
    }

    fn absorb(&mut self, id: Id, next: Id) {
        self.unlist(id);
        self.unlist(next);
        let Block { size, after, .. } = self.all[next];
        self.gone.push(next);
        if let Some(after) = after {
            self.all[after].before = Some(id);
        }
        self.all[id].size += size;
        self.all[id].after = after;
        self.list(id);
    }

    fn add(&mut self, block: Block) -> Id {
        let id = match self.gone.pop() {
            Some(id) => {
                self.all[id] = block;
                id
            }
            None => {
                self.all.push(block);
                self.all.len() - 1
            }
        };
        self.list(id);
        id
    }

    fn list(&mut self, id: Id) {
        let block = self.all[id];
        match block.state {
            State::Used => true,
            State::Free => self
                .free
                .insert((block.pool, block.size, block.address, id)),
            State::Unmapped => self.unmapped.insert((block.pool, block.address, id)),
        };
    }

    fn unlist(&mut self, id: Id) {
        let block = self.all[id];
        match block.state {
            State::Used => true,
            State::Free => self
                .free
                .remove(&(block.pool, block.size, block.address, id)),
            State::Unmapped => self.unmapped.remove(&(block.pool, block.address, id)),
        };
    }
}
