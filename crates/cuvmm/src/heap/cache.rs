//! Stream caches: allocations just freed, for the next allocation of the same size on the same
//! stream, without the heap's lock.
//!
//! For the heap's extents an allocation in a stream cache is still live. A
//! [tight](super::Preset::Tight) heap *drains* the cache before it serves a request that the cache
//! cannot serve: all free memory decides where the request lies. A fast heap drains it only before
//! a large request for which there is no run of exactly its size, and before it adds a chunk,
//! because most sizes come again. A request that no free run fits drains all caches, as does
//! everything that asks how much is free.
//!
//! Each stream cache has its own lock, and each of the first 64 streams a cache of its own, so that
//! threads with streams of their own do not contend. A stream cache's lock is taken under the
//! heap's, never the other way round.

use std::sync::PoisonError;

use super::tag::StreamId;
use crate::own::{Stream, StreamKeys};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// The most small, and the most large, allocations in a stream cache.
const ROOM: usize = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The offset in the heap's addresses.
    pub(super) at: u64,
    pub(super) size: u64,
    pub(super) rounded: u64,
    pub(super) home: StreamId,
    pub(super) stream: u64,
    pub(super) small: bool,
}

/// Places of small or of large allocations, the last freed last.
#[derive(Default)]
struct Places {
    /// The sizes of the places, which each request searches.
    sizes: Vec<u64>,
    places: Vec<Place>,
}

impl Places {
    fn push(&mut self, place: Place) {
        self.sizes.push(place.size);
        self.places.push(place);
    }

    fn pop(&mut self) {
        self.sizes.pop();
        self.places.pop();
    }

    /// Takes out the last place of a size that `fits`.
    #[inline]
    fn take(&mut self, size: u64, fits: impl Fn(&Place) -> bool) -> Option<Place> {
        let mut sizes = self.sizes.iter().enumerate().rev();
        let fits = |index: usize| self.places.get(index).is_some_and(&fits);
        let (index, _) = sizes.find(|&(index, known)| *known == size && fits(index))?;
        self.sizes.remove(index);
        Some(self.places.remove(index))
    }

    fn drain(&mut self) -> impl Iterator<Item = Place> {
        self.sizes.clear();
        self.places.drain(..)
    }
}

/// One stream cache, on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct StreamCache {
    /// Large places, then small places.
    places: Mutex<[Places; 2]>,
    /// The sizes of all places, as requested. Written under the lock.
    bytes: AtomicU64,
    /// `false` if there is no place. Written under the lock. Most pairs of an allocation and a free
    /// leave it as it is, and do without a write that all processors see in one order.
    may_have: AtomicBool,
}

impl StreamCache {
    /// Takes the place of the last small or large allocation of exactly `size` bytes freed on the
    /// stream and is aligned.
    #[inline]
    pub(super) fn take(
        &self,
        stream: &Stream,
        size: u64,
        alignment: u64,
        small: bool,
    ) -> Option<Place> {
        let key = stream.key();
        let mut both = self.lock();
        let place = of(&mut both, small).take(size, |place| {
            place.stream == key && place.at & (alignment - 1) == 0
        })?;
        self.set_bytes(self.bytes() - size);
        Some(place)
    }

    /// Puts the place of a freed allocation in the cache. Hands it back if the cache is full or
    /// `refuses` returns `true`.
    ///
    /// `refuses` is called once the place is in the cache. So a thread that changes its answer to
    /// `true` and then drains the cache gets the place, or the place is handed back. `refuses` must
    /// take no lock.
    #[inline]
    pub(super) fn put(&self, place: Place, refuses: impl FnOnce() -> bool) -> Result<(), Place> {
        let mut both = self.lock();
        let places = of(&mut both, place.small);
        if places.sizes.len() >= ROOM {
            return Err(place);
        }
        places.push(place);
        self.set_bytes(self.bytes() + place.size);
        // In one order with what `refuses` reads: a thread that drains sees the flag, or this thread
        // sees what that one has changed. The thread that set the flag earlier had this lock, so what
        // holds for it holds here.
        if !self.may_have.load(Ordering::Relaxed) {
            self.may_have.store(true, Ordering::SeqCst);
        }
        if !refuses() {
            return Ok(());
        }
        places.pop();
        self.set_bytes(self.bytes() - place.size);
        Err(place)
    }

    pub(super) fn drain(&self, small: bool, mut take: impl FnMut(Place)) {
        if !self.may_have.load(Ordering::SeqCst) {
            return;
        }
        let mut both = self.lock();
        for place in of(&mut both, small).drain() {
            self.set_bytes(self.bytes() - place.size);
            take(place);
        }
        if of(&mut both, !small).sizes.is_empty() {
            self.may_have.store(false, Ordering::SeqCst);
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, [Places; 2]> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn of(both: &mut [Places; 2], small: bool) -> &mut Places {
    let [large_places, small_places] = both;
    if small { small_places } else { large_places }
}

pub(super) struct StreamCaches {
    keys: StreamKeys,
    caches: Box<[StreamCache; StreamKeys::PLACES]>,
}

impl StreamCaches {
    pub(super) fn new() -> Self {
        Self {
            keys: StreamKeys::new(),
            caches: Box::new(std::array::from_fn(|_| StreamCache::default())),
        }
    }

    #[inline]
    pub(super) fn index_of(&self, stream: &Stream) -> usize {
        self.keys.place_of(stream)
    }

    #[inline]
    pub(super) fn at(&self, index: usize) -> &StreamCache {
        StreamKeys::at(&self.caches, index)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.caches.iter().map(StreamCache::bytes).sum()
    }

    pub(super) fn drain(&self, mut take: impl FnMut(Place)) {
        for cache in &*self.caches {
            cache.drain(true, &mut take);
            cache.drain(false, &mut take);
        }
    }
}
