//! The engine of one model in front of its paged cache: free block numbers, and blocks of ended
//! requests that are kept for their prefixes.
//!
//! Servers keep the blocks of ended requests until their memory or their numbers are needed, and not
//! for a time. So does a service that keeps prefixes: the pressure hook of its tenant evicts the
//! blocks that empty extents, and a request that lacks numbers evicts the oldest ones.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use anyhow::Context as _;
use cuvmm::PagedKv;
use cuvmm::error::PagedKvError;

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

    /// Takes numbers for blocks, and evicts the oldest kept blocks if too few are free. Returns `None`
    /// if there are still too few.
    pub(super) fn take(&self, count: u32) -> anyhow::Result<Option<Vec<u32>>> {
        let mut books = self.books();
        let short = count.saturating_sub(books.free.len()) as usize;
        if short > books.kept.len() {
            return Ok(None);
        }
        let mut oldest: Vec<u32> = books.kept.iter().take(short).copied().collect();
        self.release(&oldest)?;
        books.evict(&mut oldest)?;
        books.free.take(count).map(Some)
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

    pub(super) fn back(&self, numbers: &[u32]) -> Result<(), PagedKvError> {
        match self.kv.get() {
            Some(kv) => kv.back(numbers),
            None => Ok(()),
        }
    }

    /// Returns the number of kept blocks, and that of blocks evicted so far.
    pub(super) fn kept(&self) -> (u64, u64) {
        let books = self.books();
        (books.kept.len() as u64, books.evicted)
    }
}
