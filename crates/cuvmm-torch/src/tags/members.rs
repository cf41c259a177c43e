//! The memory of a tag that sleeps and wakes together: blocks, heaps of graphs, and paged caches.

use std::sync::Arc;

use cuvmm::Tenant;
use cuvmm::sleep::Blocks;

use super::lock;
use crate::graphs::{self, Tagged};
use crate::heaps::DeviceHeap;
use crate::paged::caches::{self, Cache};

/// The parts of a tag's memory, which sleep and wake together.
pub(super) struct Members {
    /// The tenant of all of it.
    pub(super) tenant: Tenant,
    pub(super) heaps: Vec<Tagged>,
    pub(super) caches: Vec<Arc<Cache>>,
}

impl Members {
    pub(super) fn of(index: usize) -> Self {
        let state = lock();
        let tag = &state.tags[index];
        let (tenant, of, name) = (tag.tenant.clone(), tag.of, tag.name.clone());
        drop(state);
        Self {
            tenant,
            heaps: graphs::tagged(of, &name),
            caches: caches::of_tag(of, &name),
        }
    }

    /// Returns `true` if heaps or caches have memory under the tag, or get it when they wake.
    pub(super) const fn has_holders(&self) -> bool {
        !self.heaps.is_empty() || !self.caches.is_empty()
    }

    /// Returns the bytes of contents that a sleep copies of heaps that are kept, and with `all` of
    /// paged caches.
    pub(super) fn contents(&self, all: bool) -> u64 {
        let heaps = self.heaps.iter().filter(|it| it.keeps);
        let heaps: u64 = heaps.map(|it| it.heap.stats().held).sum();
        let caches = self.caches.iter().filter(|_| all);
        heaps + caches.map(|it| it.contents()).sum::<u64>()
    }

    /// Selects all memory, to be woken.
    pub(super) fn all(&self) -> Blocks<'_> {
        let heaps = self.heaps.iter();
        let blocks = heaps.fold(self.tenant.blocks(), |all, it| all.heap(&it.heap));
        with_caches(blocks, &self.caches)
    }

    /// Selects blocks with some of the library's tags, heaps by whether their contents are kept, and
    /// with `caches` the paged caches, to be put to sleep.
    pub(super) fn selected(&self, tags: &[&str], keeps: bool, caches: bool) -> Blocks<'_> {
        let blocks = self.tenant.blocks().release(true);
        let blocks = tags.iter().fold(blocks, |all, &tag| all.tag(tag));
        let heaps = self.heaps.iter().filter(|it| it.keeps == keeps);
        let blocks = heaps.fold(blocks, |all, it| all.heap(&it.heap));
        with_caches(blocks, if caches { &self.caches } else { &[] })
    }
}

fn with_caches<'a>(blocks: Blocks<'a>, caches: &[Arc<Cache>]) -> Blocks<'a> {
    caches.iter().fold(blocks, |all, it| all.paged(it.kv()))
}

/// Returns the bytes of memory that a tag's heaps have, or get when they wake.
pub(super) fn bytes_of_heaps(of: &DeviceHeap, name: &str) -> u64 {
    let stats = graphs::tagged(of, name).into_iter();
    let stats = stats.map(|it| it.heap.stats());
    stats.map(|stats| stats.held + stats.asleep).sum()
}
