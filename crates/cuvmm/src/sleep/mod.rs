//! Sleep and wake of blocks, heaps and paged caches: their memory is given up and committed again at
//! the same addresses.
//!
//! Pointers, tensors over the memory and captured graphs stay valid.
//!
//! - **Selection**: all blocks of a tenant, or those with one of some
//!   [tags](crate::pool::BlockBuilder::tag), chosen with [`Tenant::blocks`]. An operation moves all
//!   of them, or none.
//! - **Contents** are [discarded](Contents::Discard) (caches, or weights that are loaded again), or
//!   [kept](Contents::Keep) in a [`HostStore`], whose memory was allocated in advance or is taken
//!   as contents come; or [only what is marked](Contents::KeepMarked) is kept.
//! - **Conditions**: no memory is unmapped while a [`Lease`](crate::Lease) on a block lives or
//!   before the work queued on the block is complete; [`Blocks::timeout`] sets how long to wait for
//!   that. Work that is queued while the operation runs is not noticed: a thread that launches such
//!   work must hold a lease, or the program must rule it out. A lease that is taken meanwhile keeps
//!   contents from being put to sleep, even if it has ended: they may have been copied before.
//! - **A sleeping block** is charged to no tenant, does not grow or shrink, and can be dropped. GPU
//!   access to it faults. [`Block::is_asleep`](crate::Block::is_asleep) reports it.
//! - **Waking** charges for the memory as an allocation does: cached memory of other tenants is
//!   reclaimed, and pressure hooks are called. If it does not fit, all blocks stay asleep and the
//!   error says what is missing. A tenant's guarantee is kept for it while it sleeps. Blocks that
//!   shared memory as [forks](crate::Block::fork) have separate memory when they wake, and take
//!   more than before.
//!
//! # Heaps
//! A [`Heap`] sleeps where it is selected, [with blocks](Blocks::heap) or [alone](Heap::alone): all
//! its memory goes, and comes back at every address that it was mapped at, aliases included, with
//! the access of other devices. Allocations stay valid. So a captured graph can be launched again
//! once the [heap of its intermediate values](crate::heap::HeapBuilder::for_graphs) is awake.
//!
//! - While the heap sleeps, [allocations](crate::Heap::allocate) are refused
//!   ([`HeapAsleep`](crate::MemoryError::HeapAsleep)), and those that end are free when it wakes.
//! - A heap for graphs sleeps when all work of each device with access is complete, since a launch
//!   of a graph is not known to it: the work that was queued when the operation began, and once its
//!   contents are copied what was queued meanwhile. So it also sleeps on a device that always works.
//!   Before CUDA 12.5 only a wait tells that, so it needs a [timeout](Blocks::timeout).
//!   Any heap waits for the streams that its allocations [name](crate::Allocation::record_use). What
//!   is true of blocks holds for it too: work that is queued while the operation runs must be ruled
//!   out by the program.
//! - Whole extents are copied, free bytes in them too. Extents that are free are given up, and do
//!   not come back, unless graphs use them.
//! - [`Contents::Discard`] suits a heap for graphs if each graph writes what it reads. Its memory
//!   then has other contents after it wakes, but never another tenant's.
//!
//! # Paged caches
//! A [`PagedKv`] sleeps where it is selected, [with blocks](Blocks::paged) or
//! [alone](PagedKv::alone): the memory of all its extents goes, and comes back at the same addresses.
//! Views stay valid, and so do captured graphs that contain them. Blocks in use, pinned and reserved
//! ones are so when it wakes.
//!
//! - It does not fall asleep while a [`Step`](crate::paged::Step) lives, or if one began while it was
//!   being copied, even if that has ended; nor before the work of its home stream and of [recorded](PagedKv::record_use) streams is complete, or
//!   [all work](crate::paged::PagedKvBuilder::sleep_after_all_work).
//! - Whole extents are copied: those that a block in use, pinned or reserved touches. Others are given
//!   up. After [`Contents::Discard`] all blocks have zeros.
//! - While it sleeps, blocks are not backed, released, reserved, read or written
//!   ([`CacheAsleep`](crate::MemoryError::CacheAsleep)), and no memory is
//!   [mapped ahead](crate::paged::PagedKvBuilder::precommit).
//!
//! Contents are copied in parts on several streams at once. Blocks are unmapped, or extents mapped,
//! while other parts are being copied.
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use cuvmm::driver::host::{HostDriver, HostOptions};
//! use cuvmm::{Contents, Device, HostStore, Pool};
//!
//! # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
//! # let device = Device::open(driver, 0)?;
//! let pool = Pool::builder(&device).build()?;
//! let model = pool.tenant("model").register()?;
//! let weights = model.block(64 << 20).tag("weights").allocate()?;
//! weights.write(0, b"some weights")?;
//!
//! let store = HostStore::builder(&device).pinned(64 << 20).build()?; // once, in advance
//! model.blocks().sleep(Contents::Keep(&store))?;
//! assert!(weights.is_asleep());
//! assert_eq!(model.stats().committed, 0);
//!
//! model.blocks().wake()?;
//! let mut bytes = [0; 12];
//! weights.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"some weights");
//! # Ok(())
//! # }
//! ```
//!
//! # Not provided
//! This module does not decide which blocks sleep when. Exported blocks cannot sleep, because other
//! processes could still use the memory.

mod apart;
mod down;
mod exchange;
mod prepared;
mod units;
mod wake;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::display::Count;
use crate::error::{ArgumentError, SleepError};
use crate::heap::Heap;
use crate::paged::PagedKv;
use crate::pool::{CanSleep, Choice, Tenant, after};
use crate::store::HostStore;
use crate::sync::atomic::{AtomicBool, Ordering};

pub use apart::SleepFuture;
pub use exchange::{Exchange, Exchanged};
pub use prepared::{PreparedSleep, PreparedWake};

pub use crate::store::HostStoreBuilder;

/// The treatment of the contents of sleeping blocks.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Contents<'a> {
    /// The contents are lost: a woken block reads like a newly allocated one. Refused if a block has
    /// [marked](crate::Block::set_kept) bytes.
    Discard,
    /// The contents are copied to host memory, and back.
    Keep(&'a HostStore),
    /// The contents of ranges that [`Block::set_kept`](crate::Block::set_kept) has marked are copied
    /// to host memory, and back. The rest is lost: it reads like the memory of a newly allocated
    /// block. The marked ranges of a block take whole parts of 2 MiB together. Nothing of a heap or of
    /// a paged cache is marked.
    KeepMarked(&'a HostStore),
}

/// The progress of an operation, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Progress {
    /// The bytes that were copied; where nothing is copied, the bytes unmapped or mapped.
    pub done: u64,
    /// The total bytes of the operation.
    pub total: u64,
}

/// The outcome of putting blocks to sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Slept {
    /// The number of blocks. Blocks that were already asleep do not count. 0 may also mean that no
    /// block has a tag that was given, such as a misspelled one.
    pub blocks: u64,
    /// The number of heaps. Heaps that were already asleep do not count.
    pub heaps: u64,
    /// The number of paged caches. Caches that were already asleep do not count.
    pub caches: u64,
    /// The bytes of memory that were given up, including the tenant's cached memory if no tag was
    /// given.
    pub given: u64,
    /// The part of `given` that the driver refused to take back, also when it was asked again at the
    /// end. It is in the pool's [`quarantined`](crate::PoolStats::quarantined) memory.
    pub quarantined: u64,
    /// The bytes of contents that were kept.
    pub kept: u64,
    /// The bytes that heaps and paged caches which are awake, memory pools and containers of the
    /// tenant use.
    pub awake: u64,
}

/// The outcome of waking blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Woken {
    /// The number of blocks. Blocks that were awake do not count. 0 may also mean that no block has a
    /// tag that was given.
    pub blocks: u64,
    /// The number of heaps. Heaps that were awake do not count.
    pub heaps: u64,
    /// The number of paged caches. Caches that were awake do not count.
    pub caches: u64,
    /// The bytes of memory that were mapped.
    pub mapped: u64,
    /// The bytes of contents that were restored.
    pub restored: u64,
}

/// A selection of a tenant's blocks, to be put to sleep or woken together.
#[derive(Clone)]
#[must_use = "nothing sleeps or wakes before `sleep` or `wake`"]
pub struct Blocks<'a> {
    tenant: &'a Tenant,
    /// The blocks with one of these tags, all without tags; `None` for no block.
    tags: Option<Vec<Arc<str>>>,
    /// Heaps and paged caches, in the order of their addresses in this process.
    holders: Vec<Arc<dyn CanSleep>>,
    wait: Option<Duration>,
    release: bool,
    watch: Option<Watch<'a>>,
    /// Set when the operation is to end.
    cancelled: Option<&'a AtomicBool>,
}

/// A function that observes the progress of an operation, and returns whether to go on.
type Watch<'a> = &'a (dyn Fn(&Progress) -> bool + Sync);

impl Tenant {
    /// Selects all blocks of the tenant, to be put to [sleep](crate::sleep) or woken.
    pub const fn blocks(&self) -> Blocks<'_> {
        Blocks {
            tenant: self,
            tags: Some(Vec::new()),
            holders: Vec::new(),
            wait: None,
            release: false,
            watch: None,
            cancelled: None,
        }
    }

    fn no_blocks(&self) -> Blocks<'_> {
        Blocks {
            tags: None,
            ..self.blocks()
        }
    }
}

impl Heap {
    /// Selects the heap alone, to be put to [sleep](crate::sleep#heaps) or woken.
    pub fn alone(&self) -> Blocks<'_> {
        self.tenant().no_blocks().heap(self)
    }
}

impl PagedKv {
    /// Selects the cache alone, to be put to [sleep](crate::sleep#paged-caches) or woken.
    pub fn alone(&self) -> Blocks<'_> {
        self.tenant().no_blocks().paged(self)
    }
}

impl<'a> Blocks<'a> {
    /// Restricts the selection of blocks to those with this tag, or with another tag that was
    /// added. A tag that no live block has selects none, which is no error: its blocks may have been
    /// dropped. The outcome then counts none ([`Slept::blocks`], [`Woken::blocks`]).
    pub fn tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.tags.get_or_insert_default().push(tag.into());
        self
    }

    /// Adds a heap of the tenant to the selection: it [sleeps](crate::sleep#heaps) and wakes with
    /// the blocks. Without this no heap does, whatever the tags.
    pub fn heap(mut self, heap: &Heap) -> Self {
        self.add(heap.sleeper());
        self
    }

    /// Adds a paged cache of the tenant to the selection: it [sleeps](crate::sleep#paged-caches) and
    /// wakes with the blocks. Without this no cache does, whatever the tags.
    pub fn paged(mut self, cache: &PagedKv) -> Self {
        self.add(cache.sleeper());
        self
    }

    /// Adds a holder once. All selections have their holders in one order: two threads that move two
    /// holders in opposite orders would each wait for the holder that the other thread moves.
    fn add(&mut self, holder: Arc<dyn CanSleep>) {
        let address = |it: &Arc<dyn CanSleep>| Arc::as_ptr(it).cast::<()>().addr();
        let place = (self.holders).binary_search_by_key(&address(&holder), address);
        if let Err(index) = place {
            self.holders.insert(index, holder);
        }
    }

    /// Sets how long to wait: before sleeping, for leases to end and work to complete; before
    /// waking, for memory in use to become free. By default neither waits. Pressure hooks are
    /// called in any case.
    #[doc(alias = "deadline")]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Sets whether the memory is released to the driver, for other processes (`cuMemRelease`).
    /// Otherwise the pool keeps it for its other tenants, which is faster, both now and for the
    /// next allocation.
    pub const fn release(mut self, yes: bool) -> Self {
        self.release = yes;
        self
    }

    /// Sets a function called with the progress of the operation, about every 16 MiB that are
    /// copied, or after each block if nothing is copied, and that returns whether to go on. If it
    /// returns `false` or panics, everything is restored as after a failure of the driver, and the
    /// operation fails with `Cancelled`. The function may use this library and the same store: a
    /// copy that it makes there uses one stream of its own (`cuStreamCreate`).
    #[doc(alias = "watch")]
    pub const fn on_progress(mut self, hook: &'a (dyn Fn(&Progress) -> bool + Sync)) -> Self {
        self.watch = Some(hook);
        self
    }

    /// Puts the selected blocks that are awake to sleep. If contents are kept, this returns when
    /// they have been copied.
    ///
    /// Calls `cuMemUnmap` for each extent, and `cuMemcpyDtoHAsync` for each 2 MiB of contents that
    /// are kept, and for each marked range.
    ///
    /// # Errors
    /// [`SleepError`] if a block is leased, exported or still in use, a heap or a paged cache is in
    /// use, marked contents were to be discarded, the store is full, or the driver refuses. All blocks are then as before, unless the error says that some [stayed
    /// asleep](SleepError::Stayed).
    #[doc(alias("cuMemUnmap", "cuMemcpyDtoHAsync"))]
    pub fn sleep(&self, contents: Contents<'_>) -> Result<Slept, SleepError> {
        Ok(self.prepare_sleep(contents)?.finish())
    }

    /// Does all of [`sleep`](Self::sleep) that can fail, so that blocks of several tenants can sleep
    /// together or not at all.
    ///
    /// ```
    /// # use cuvmm::driver::host::{HostDriver, HostOptions};
    /// # use cuvmm::{Contents, Device, Pool};
    /// # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
    /// # let device = Device::open(driver, 0)?;
    /// # let pool = Pool::builder(&device).build()?;
    /// # let (chat, code) = (pool.tenant("chat").register()?, pool.tenant("code").register()?);
    /// # let blocks = [chat.allocate(4 << 20)?, code.allocate(4 << 20)?];
    /// let tenants = [chat, code];
    /// let prepared = tenants.iter().map(|tenant| tenant.blocks().prepare_sleep(Contents::Discard));
    /// let prepared = prepared.collect::<Result<Vec<_>, _>>()?; // after an error all stay awake
    /// for one in prepared {
    ///     one.finish();
    /// }
    /// assert!(blocks.iter().all(|block| block.is_asleep()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`sleep`](Self::sleep).
    pub fn prepare_sleep(&self, contents: Contents<'_>) -> Result<PreparedSleep, SleepError> {
        match contents {
            Contents::Discard => down::discard(self),
            Contents::Keep(store) => down::keep(self, store, true),
            Contents::KeepMarked(store) => down::keep(self, store, false),
        }
    }

    /// Wakes the selected blocks that are asleep. When this returns, kept contents are restored and
    /// removed from the store; fills with zeros are ordered on each block's home stream.
    ///
    /// For each extent, this calls `cuMemMap` and `cuMemSetAccess`, with `cuMemCreate` if the
    /// pool's free list is empty, and `cuMemcpyHtoDAsync` for each 2 MiB of contents, and for each
    /// range.
    ///
    /// # Errors
    /// [`SleepError`] if there is not enough memory, with the figures, or the driver refuses. All
    /// blocks then stay asleep with their contents. If the driver, in addition, twice refuses to
    /// unmap what had been mapped, or does not confirm that queued fills with zeros are complete,
    /// that memory is quarantined at the block's addresses, and the block cannot be woken any more.
    #[doc(alias("cuMemMap", "cuMemcpyHtoDAsync"))]
    pub fn wake(&self) -> Result<Woken, SleepError> {
        Ok(self.prepare_wake()?.finish())
    }

    /// Does all of [`wake`](Self::wake) that can fail, so that blocks of several tenants can wake
    /// together or not at all.
    ///
    /// # Errors
    /// The errors of [`wake`](Self::wake).
    pub fn prepare_wake(&self) -> Result<PreparedWake, SleepError> {
        wake::wake(self, self.choice())
    }

    fn choice(&self) -> Choice<'_> {
        Choice {
            tags: self.tags.as_deref(),
            addresses: None,
        }
    }

    /// Returns `true` if all blocks are selected.
    fn is_whole(&self) -> bool {
        self.tags.as_ref().is_some_and(Vec::is_empty)
    }

    /// Returns `true` if a block, a heap or a paged cache may be in both selections.
    fn overlaps(&self, other: &Self) -> bool {
        let tags = self.tags.as_ref().zip(other.tags.as_ref());
        let has_both = tags.is_some_and(|(own, others)| {
            own.is_empty() || others.is_empty() || own.iter().any(|tag| others.contains(tag))
        });
        let mut holders = self.holders.iter();
        self.tenant.is_same(other.tenant) && has_both
            || holders.any(|one| other.holders.iter().any(|it| it.is_same(&**one)))
    }

    fn check(&self) -> Result<(), SleepError> {
        let is_foreign = |one: &&Arc<dyn CanSleep>| !one.tenant().is_same(self.tenant);
        match self.holders.iter().find(is_foreign) {
            None => Ok(()),
            Some(one) if one.is_heap() => Err(ArgumentError::WrongTenant("the heap").into()),
            Some(_) => Err(ArgumentError::WrongTenant("the paged cache").into()),
        }
    }

    fn until(&self) -> Option<Instant> {
        self.wait.map(after)
    }

    /// Returns `true` unless the operation was cancelled.
    fn is_wanted(&self) -> bool {
        self.cancelled
            .is_none_or(|cancelled| !cancelled.load(Ordering::SeqCst))
    }

    pub(crate) fn goes_on(&self, progress: &Progress) -> bool {
        self.watch.is_none_or(|watch| watch(progress))
    }

    /// Returns a text for the selection, with its sorted tags and the numbers of its heaps and
    /// paged caches. Other selections have other texts: tags may contain anything, so they are quoted.
    pub(crate) fn name(&self) -> String {
        let tags: BTreeSet<&str> = self.tags.iter().flatten().map(|tag| &**tag).collect();
        let blocks = match &self.tags {
            None => None,
            Some(all) if all.is_empty() => Some("all blocks".to_owned()),
            Some(_) => Some(serde_json::json!(tags).to_string()),
        };
        let heaps = self.holders.iter().filter(|one| one.is_heap()).count();
        let caches = self.holders.len() - heaps;
        let heaps = (heaps > 0).then(|| Count(heaps, "heap").to_string());
        let caches = (caches > 0).then(|| Count(caches, "paged cache").to_string());
        let parts: Vec<String> = [blocks, heaps, caches].into_iter().flatten().collect();
        parts.join(" and ")
    }
}

impl fmt::Debug for Blocks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks")
            .field("tenant", &self.tenant)
            .field("tags", &self.tags)
            .field("holders", &self.holders.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::extents::rig::{G, rig};
    use crate::heap::Heap;
    use crate::own::Stream;
    use crate::paged::{LayerGroup, PagedKv};
    use crate::pool::{Limit, Pool};

    #[test]
    fn all_selections_move_their_heaps_and_caches_in_one_order() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(32 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let home = Stream::new(&rig.device).unwrap();
        let cache = |_| {
            let group = LayerGroup::new(1, 1).part(1, G as u32, 1);
            let builder = PagedKv::builder(&tenant, &home, 4).group(group);
            builder.build().unwrap()
        };
        let caches: Vec<PagedKv> = (0..4).map(cache).collect();
        let heaps = [0; 2].map(|_| Heap::builder(&tenant).build().unwrap());
        let all = |order: &[usize]| {
            let mut blocks = heaps[order[0] % 2].alone();
            for &index in order {
                blocks = blocks.paged(&caches[index]).heap(&heaps[index % 2]);
            }
            blocks.holders
        };
        let first = all(&[0, 1, 2, 3]);
        assert_eq!(first.len(), 6);
        for order in [[3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let holders = all(&order);
            let mut both = first.iter().zip(&holders);
            assert!(both.all(|(one, other)| one.is_same(&**other)));
            assert_eq!(holders.len(), 6);
        }
    }
}
