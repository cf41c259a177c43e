//! Stream caches: blocks just freed, ready for the next block of the same shape on the same stream
//! without the pool's lock, a driver call or a fence.
//!
//! For the pool a block in a stream cache is still in use. Operations that need exact figures, or
//! the memory, sweep the stream caches first, which frees their blocks. Each stream cache has its
//! own lock, and each of a tenant's first 64 streams its own stream cache, so that threads with
//! streams of their own do not contend. A stream cache's lock is taken under the pool's, never the
//! other way round.
//!
//! Keeps I-49 and I-80.

use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError};

use super::Blocks;
use super::clock::Clock;
use super::slots::{BlockPlace, FreedBlock, Unswept};
use crate::own::{Stream, StreamKeys};
use crate::pool::accounts::TenantId;
use crate::pool::core::Core;
use crate::pool::line::ExtentOptions;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// The most blocks in a stream cache. Further blocks are freed to the pool.
const ROOM: usize = 128;

/// The pool's clock advances once in this number of frees here. All threads read it with each free,
/// and each advance costs each of them a miss of its cache line.
const FREES_A_TICK: u32 = 256;

pub(in crate::pool) struct Owner {
    pub(crate) core: Arc<Core>,
    pub(crate) tenant: TenantId,
    pub(in crate::pool) stream_caches: Arc<StreamCaches>,
}

#[derive(Clone, Debug)]
pub(in crate::pool) struct Held {
    pub(crate) owner: Arc<Owner>,
    pub(crate) place: BlockPlace,
    pub(crate) size: u64,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) grain: ExtentOptions,
    pub(crate) home: Option<Stream>,
    pub(super) stream_cache: Option<Arc<StreamCache>>,
}

struct CachedBlock {
    held: Held,
    freed: u64,
}

impl CachedBlock {
    fn freed(self) -> FreedBlock {
        FreedBlock {
            slot: self.held.place.slot,
            at: self.freed,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Shape<'a> {
    pub(crate) size: u64,
    pub(crate) capacity: u64,
    pub(crate) tag: Option<&'a Arc<str>>,
    pub(crate) grain: ExtentOptions,
}

pub(crate) struct StreamCaches {
    keys: StreamKeys,
    /// Made with the first block of each stream.
    stream_caches: [OnceLock<Arc<StreamCache>>; StreamKeys::PLACES],
    /// `true` while no block is put in these caches.
    bypassed: AtomicBool,
    clock: Arc<Clock>,
}

/// One stream cache, on cache lines of its own.
#[repr(align(128))]
pub(crate) struct StreamCache {
    contents: Mutex<Contents>,
    /// `true` if the cache has blocks: sweeps need not lock empty caches.
    has_blocks: AtomicBool,
    clock: Arc<Clock>,
}

#[derive(Default)]
struct Contents {
    blocks: Vec<CachedBlock>,
    frees: u32,
    closed: bool,
}

impl StreamCache {
    fn new(clock: Arc<Clock>) -> Self {
        Self {
            contents: Mutex::default(),
            has_blocks: AtomicBool::new(false),
            clock,
        }
    }

    /// Takes a block of exactly this shape freed on `home`.
    #[inline]
    pub(super) fn take(&self, home: &Stream, shape: Shape<'_>) -> Option<Held> {
        let mut contents = self.lock();
        let index = contents.blocks.iter().rposition(|stream_cached| {
            let held = &stream_cached.held;
            held.size == shape.size
                && held.place.capacity == shape.capacity
                && held.home.as_ref() == Some(home)
                && held.grain == shape.grain
                && held.tag.as_ref() == shape.tag
        })?;
        let stream_cached = contents.blocks.remove(index);
        if contents.blocks.is_empty() {
            self.has_blocks.store(false, Ordering::Release);
        }
        Some(stream_cached.held)
    }

    /// Puts in the cache a block that only its home stream used. Hands the block back if the cache
    /// is full, closed or bypassed, or a request waits for memory.
    #[inline]
    pub(super) fn put(&self, held: Held) -> Result<(), Held> {
        let mut contents = self.lock();
        // Checked under the lock: a request that begins to wait visits every stream cache after
        // counting itself, and so does an operation that bypasses the caches.
        let bypassed = held.owner.stream_caches.is_bypassed();
        let awaited = bypassed || held.owner.core.is_awaited();
        if contents.closed || contents.blocks.len() >= ROOM || awaited {
            return Err(held);
        }
        contents.frees = contents.frees.wrapping_add(1);
        let freed = if contents.frees.is_multiple_of(FREES_A_TICK) {
            self.clock.tick()
        } else {
            self.clock.now()
        };
        contents.blocks.push(CachedBlock { held, freed });
        self.has_blocks.store(true, Ordering::Release);
        Ok(())
    }

    fn clear(&self) -> Vec<CachedBlock> {
        let mut contents = self.lock();
        self.has_blocks.store(false, Ordering::Release);
        std::mem::take(&mut contents.blocks)
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owner").field(&self.tenant).finish()
    }
}

impl fmt::Debug for StreamCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamCache")
            .field("stocked", &self.has_blocks)
            .finish_non_exhaustive()
    }
}

impl Blocks {
    /// Returns the stream caches of a new tenant; in a hardened pool they are closed.
    pub(in crate::pool) fn new_stream_caches(&self) -> Arc<StreamCaches> {
        let stream_caches = StreamCaches::new(Arc::clone(&self.clock));
        if self.are_hardened() {
            drop(stream_caches.close());
        }
        Arc::new(stream_caches)
    }
}

impl StreamCaches {
    fn new(clock: Arc<Clock>) -> Self {
        Self {
            keys: StreamKeys::new(),
            stream_caches: std::array::from_fn(|_| OnceLock::new()),
            bypassed: AtomicBool::new(false),
            clock,
        }
    }

    fn made<'a>(&'a self, stream_cache: &'a OnceLock<Arc<StreamCache>>) -> &'a Arc<StreamCache> {
        stream_cache.get_or_init(|| Arc::new(StreamCache::new(Arc::clone(&self.clock))))
    }

    /// Returns `true` while freed blocks bypass the caches: a block of the tenant sleeps or moves,
    /// or a lowered limit is exceeded.
    pub(super) fn is_bypassed(&self) -> bool {
        self.bypassed.load(Ordering::Relaxed)
    }

    /// Returns a stream's cache: its own for each of the first streams.
    pub(super) fn of(&self, stream: &Stream) -> &Arc<StreamCache> {
        let place = self.keys.place_of(stream);
        self.made(StreamKeys::at(&self.stream_caches, place))
    }
}

impl Unswept for StreamCaches {
    fn sweep(&self) -> Vec<FreedBlock> {
        self.stream_caches
            .iter()
            .filter_map(OnceLock::get)
            .filter(|stream_cache| stream_cache.has_blocks.load(Ordering::Acquire))
            .flat_map(|stream_cache| stream_cache.clear())
            .map(CachedBlock::freed)
            .collect()
    }

    fn sweep_each(&self) -> Vec<FreedBlock> {
        // A missing cache is made now, since the thread that would make it later may not see this
        // thread's changes.
        let all = self.stream_caches.iter();
        let blocks = all.flat_map(|stream_cache| self.made(stream_cache).clear());
        blocks.map(CachedBlock::freed).collect()
    }

    fn bypass(&self, yes: bool) {
        self.bypassed.store(yes, Ordering::SeqCst);
    }

    fn close(&self) -> Vec<FreedBlock> {
        // A missing cache must not be made open later.
        let all = self.stream_caches.iter();
        all.for_each(|stream_cache| self.made(stream_cache).lock().closed = true);
        self.sweep_each()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::extents::rig::{G, rig};
    use crate::pool::{Limit, Pool};

    // I-80
    #[test]
    fn a_stream_cache_holds_128_blocks() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(256 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let of = |_| tenant.block(G).home_stream(&stream).try_allocate().unwrap();
        let blocks: Vec<_> = (0..137).map(of).collect();
        let cached = || -> usize {
            let all = &tenant.owner().stream_caches.stream_caches;
            let all = all.iter().filter_map(OnceLock::get);
            all.map(|one| one.lock().blocks.len()).sum()
        };
        assert_eq!(cached(), 0);
        drop(blocks);
        assert_eq!(cached(), 128);
    }
}
