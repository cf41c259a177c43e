//! The engine of one model in front of its paged cache: free block numbers, and blocks of ended
//! requests that are kept for their prefixes.
//!
//! Servers keep the blocks of ended requests until these are needed, and not for a time: a request
//! takes the oldest ones over. So does a service that keeps prefixes, when numbers or memory are
//! short. For other models the pressure hook of its tenant evicts the blocks that empty extents.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use anyhow::Context as _;
use cuvmm::PagedKv;

use super::numbers::{Numbers, Order};

pub(super) struct Service {
    /// Empty until the tenant that the cache needs has been registered with its hook.
    kv: OnceLock<PagedKv>,
    books: Mutex<Books>,
    /// `true` if all blocks stay backed, in use or not.
    pinned: bool,
}

struct Books {
    free: Numbers,
    /// Blocks of ended requests, the oldest first.
    kept: VecDeque<u32>,
    evicted: u64,
}

impl Books {
    /// Gives up kept blocks that have been released.
    fn evict(&mut self, numbers: &mut [u32]) -> anyhow::Result<()> {
        numbers.sort_unstable();
        self.kept.retain(|it| numbers.binary_search(it).is_err());
        self.evicted += numbers.len() as u64;
        self.free.give_back(numbers)
    }
}

impl Service {
    pub(super) fn new(order: Order, blocks: u32, pinned: bool) -> anyhow::Result<Self> {
        Ok(Self {
            kv: OnceLock::new(),
            books: Mutex::new(Books {
                free: Numbers::new(order, blocks)?,
                kept: VecDeque::new(),
                evicted: 0,
            }),
            pinned,
        })
    }

    /// Sets the cache. There is none before.
    pub(super) fn set(&self, kv: PagedKv) {
        // A cache that is there already would stay.
        let _ = self.kv.set(kv);
    }

    pub(super) fn kv(&self) -> anyhow::Result<&PagedKv> {
        self.kv.get().context("a service has no cache yet")
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next free numbers. The caller has checked that there are enough.
    pub(super) fn take(&self, count: u32) -> anyhow::Result<Vec<u32>> {
        self.books().free.take(count)
    }

    /// Takes over the `count` oldest kept blocks, which stay backed: they are evicted, and are the
    /// request's now.
    pub(super) fn take_over(&self, count: u32) -> Vec<u32> {
        let mut books = self.books();
        let count = books.kept.len().min(count as usize);
        books.evicted += count as u64;
        books.kept.drain(..count).collect()
    }

    /// Returns numbers that were taken and found no memory.
    pub(super) fn untake(&self, numbers: &[u32]) -> anyhow::Result<()> {
        self.books().free.untake(numbers)
    }

    /// Ends a request: keeps its blocks up to the last one, which may be partly filled, or frees all.
    pub(super) fn end(&self, numbers: &[u32], keep: bool) -> anyhow::Result<()> {
        let kept = if keep {
            numbers.len().saturating_sub(1)
        } else {
            0
        };
        let (kept, freed) = numbers.split_at(kept);
        self.release(freed)?;
        let mut books = self.books();
        books.kept.extend(kept);
        books.free.give_back(freed)
    }

    /// Releases blocks within a step, as an engine does that prepares its next launch.
    fn release(&self, numbers: &[u32]) -> anyhow::Result<()> {
        if self.pinned || numbers.is_empty() {
            return Ok(());
        }
        let kv = self.kv()?;
        let step = kv.step();
        kv.release(numbers)?;
        drop(step);
        Ok(())
    }

    /// Evicts kept blocks whose extents have at least `bytes` bytes, or all if they have less.
    pub(super) fn evict(&self, bytes: u64) -> anyhow::Result<()> {
        let mut books = self.books();
        let Some(kv) = self.kv.get().filter(|_| !books.kept.is_empty()) else {
            return Ok(());
        };
        let mut chosen = kv.emptiest(bytes, books.kept.make_contiguous())?.numbers;
        self.release(&chosen)?;
        books.evict(&mut chosen)
    }

    /// Reserves memory for blocks to come, for fewer where fewer numbers are free. Returns `false` if
    /// there is none.
    pub(super) fn reserve(&self, blocks: u32) -> anyhow::Result<bool> {
        let count = blocks.min(self.books().free.len());
        match self.kv()?.reserve(count) {
            Ok(()) => Ok(true),
            Err(error) if error.is_shortage() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the number of free block numbers, and that of kept blocks.
    pub(super) fn counts(&self) -> (u32, u32) {
        let books = self.books();
        (books.free.len(), books.kept.len() as u32)
    }

    /// Returns the number of kept blocks that were evicted so far.
    pub(super) fn evicted(&self) -> u64 {
        self.books().evicted
    }
}
