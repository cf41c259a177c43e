//! The lock of a heap, and the state that it protects.
//!
//! The lock is taken under the pool's lock, when the pool asks for figures, and never the other way
//! round: an operation that needs the pool releases the heap's lock first. Events are recorded and
//! polled under the lock; page tables are not changed. Without the lock an operation works on what
//! is its own: bytes that it marked as used, addresses that it took, and extents that are not
//! settled.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use super::cache::{Place, StreamCache, StreamCaches};
use super::chunks::Chunks;
use super::counts::Counts;
use super::extents::{Extent, ExtentId, Extents};
use super::gaps::Gaps;
use super::rest::Rest;
use super::spaces::Spaces;
use super::stitch::Policy;
use super::streams::Streams;
use super::tag::{StreamId, Tag, Tagged};
use crate::deferred::{self, Checked};
use crate::device::Device;
use crate::error::CallError;
use crate::extents::{Fence, Placed, Space, Unmapped};
use crate::own::{AccessGrant, Physical};
use crate::sync::Mutex;

/// With more mappings than this, counting one for each [`MANY_BYTES`] in chunks, only some locked
/// sections are checked.
#[cfg(debug_assertions)]
const MANY: u64 = 64;

#[cfg(debug_assertions)]
const MANY_BYTES: u64 = 1 << 20;

/// The unsearched mappings that are kept: this number, and [`RETIRED_EACH`] for each extent.
const RETIRED: usize = 1024;

const RETIRED_EACH: usize = 4;

/// Flag: freed memory must be reported to the pool.
pub(super) const REPORTS: u8 = 1;

/// Flag: graphs may use all the heap's memory.
pub(super) const PINNED: u8 = 2;

/// Flag: the heap sleeps or moves.
pub(super) const STILL: u8 = 4;

/// The largest chunk in bytes, unless a granule is larger.
const LARGEST_CHUNK: u64 = 32 << 20;

/// The part of all small bytes that a new chunk has.
const CHUNK_PART: u64 = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) policy: Policy,
    pub(super) waits: bool,
    pub(super) for_graphs: bool,
}

/// The parts of a heap that all its allocations share.
pub(super) struct Core {
    pub(super) device: Device,
    pub(super) policy: Policy,
    pub(super) waits: bool,
    /// The tenant's number as a last writer.
    pub(super) writer: u64,
    /// The most bytes to reserve.
    pub(super) addresses: u64,
    /// Held while addresses are reserved: a request that finds too few waits for the reservation
    /// that another thread is making, and is not refused because that reservation counts already.
    pub(super) reserving: Mutex<()>,
    pub(super) reservations: AtomicU64,
    /// The devices with access to the heap's memory, beside those that the pool is open to.
    pub(super) guests: Vec<AccessGrant>,
    pub(super) caches: StreamCaches,
    state: Mutex<State>,
    /// [`REPORTS`], [`PINNED`] and [`STILL`]. With any flag freed allocations go to no stream cache. A graph's
    /// heap uses none, so that repeated requests find the same memory free.
    flags: AtomicU8,
    /// Set when the tenant is unregistered.
    pub(super) closed: AtomicBool,
}

pub(super) struct State {
    pub(super) large: Extents,
    /// Chunks for small allocations. Each is an allocation of `large`.
    pub(super) small: Chunks,
    /// The address of a chunk that may be empty.
    kept_chunk: Option<u64>,
    granule: u64,
    pub(super) gaps: Gaps,
    pub(super) streams: Streams,
    /// By the numbers of the extents in `large`.
    pub(super) physicals: Vec<Option<Physical>>,
    /// The mappings. Empty after the end of the heap.
    pub(super) spaces: Spaces,
    /// Streams that allocations are used on, beside their home streams.
    pub(super) uses: HashMap<u64, Vec<StreamId>>,
    /// The last freed allocations that other streams had used. A request of the same size finds
    /// their memory again.
    recorded: VecDeque<Recorded>,
    /// Unsearched mappings, to be unmapped when they are unused.
    pub(super) retired: VecDeque<(ExtentId, u64)>,
    pub(super) counts: Counts,
    pub(super) rest: Rest,
    /// `true` once memory was offered to other processes.
    pub(super) is_offered: bool,
    /// The number of [parts](super::offered::AllocationParts) that are being offered.
    pub(super) offers_begun: usize,
    #[cfg(debug_assertions)]
    sections: u64,
}

/// The most entries of [`State::recorded`].
const RECORDED: usize = 64;

struct Recorded {
    home: StreamId,
    /// The allocated size.
    size: u64,
    work: Tag,
}

/// The lock on a heap.
pub(super) type Locked<'a> = deferred::Locked<'a, State>;

impl Checked for State {
    /// Checks the heap's memory; with many mappings only in some sections.
    #[cfg(debug_assertions)]
    fn check(&mut self) {
        self.sections += 1;
        let many = self.large.mappings() + self.small.held() / MANY_BYTES > MANY;
        if !many || self.sections.is_power_of_two() {
            self.large.check();
            self.small.check();
        }
    }
}

impl State {
    pub(super) fn new(granule: u64) -> Self {
        Self {
            large: Extents::default(),
            small: Chunks::default(),
            kept_chunk: None,
            granule,
            gaps: Gaps::default(),
            streams: Streams::default(),
            physicals: Vec::new(),
            spaces: Spaces::default(),
            uses: HashMap::new(),
            recorded: VecDeque::new(),
            retired: VecDeque::new(),
            counts: Counts::default(),
            rest: Rest::Awake,
            is_offered: false,
            offers_begun: 0,
            #[cfg(debug_assertions)]
            sections: 0,
        }
    }

    /// Removes complete work from all tags. Polls the streams with `polls`.
    pub(super) fn refresh(&mut self, polls: bool) {
        let mut maps: [&mut dyn Tagged; 2] = [&mut self.large, &mut self.small];
        self.streams.refresh(&mut maps, polls);
    }

    /// Returns the extents that the pool may take, the least recently used first.
    pub(super) fn idle(&mut self) -> Vec<(ExtentId, u64)> {
        self.large.list();
        let whole = self.large.whole(None);
        let is_leaving = |id| self.large.extent(id).is_some_and(Extent::is_leaving);
        let idle =
            whole.filter(|&(_, id)| !is_leaving(id) && self.large.all_work_of(id) == Tag::Ready);
        let mut idle: Vec<(ExtentId, u64)> = idle.map(|(size, id)| (id, size)).collect();
        let age = |id| self.large.extent(id).map_or(0, |extent| extent.freed_at);
        idle.sort_by_key(|&(id, _)| age(id));
        idle
    }

    /// Returns `true` if an allocation of this size on the stream, which other streams had used
    /// too, was freed a short time ago.
    pub(super) fn has_recorded(&self, home: StreamId, size: u64) -> bool {
        let mut recorded = self.recorded.iter();
        recorded.any(|freed| freed.home == home && freed.size == size)
    }

    /// Polls the work of such allocations. If all work of one is complete, removes complete work
    /// from all tags. Memory of which one stream is done and another is not stays apart.
    pub(super) fn refresh_recorded(&mut self, home: StreamId, size: u64) {
        let streams = &self.streams;
        let before = self.recorded.len();
        self.recorded.retain(|freed| {
            freed.home != home || freed.size != size || !streams.is_complete(&freed.work)
        });
        if self.recorded.len() < before {
            self.refresh(false);
        }
    }

    pub(super) fn is_open_to(&self, at: u64, device: &Device) -> bool {
        let mut users = self.spaces.at(at).into_iter().flat_map(Space::users);
        users.any(|user| user.is_same(device))
    }

    pub(super) fn add_space(&mut self, space: Space) {
        self.gaps.add_part(space.address().0, space.size());
        self.spaces.add(space);
    }

    /// Returns the number of exported extents, and their bytes.
    pub(super) fn exported(&self) -> (u64, u64) {
        if !self.is_offered {
            return (0, 0);
        }
        let all = self.physicals.iter().flatten();
        let exported = all.filter(|physical| physical.is_exported());
        exported.fold((0, 0), |(count, bytes), it| (count + 1, bytes + it.size()))
    }

    /// Takes out the reservations in which nothing is mapped, nor about to be.
    pub(super) fn take_free_spaces(&mut self) -> Vec<Space> {
        let free = self.gaps.take_free_parts().into_iter();
        free.filter_map(|start| self.spaces.take(start)).collect()
    }

    pub(super) fn end(&mut self, place: Place) {
        let mut work = self.streams.now(place.home);
        let uses = match self.uses.is_empty() {
            true => None,
            false => self.uses.remove(&place.at),
        };
        for id in uses.into_iter().flatten() {
            let other: Tag = self.streams.now(id);
            work.merge(&other);
            self.streams.count(id, false);
        }
        if work.points().len() > 1 {
            self.recorded.truncate(RECORDED - 1);
            self.recorded.push_front(Recorded {
                home: place.home,
                size: place.rounded,
                work: work.clone(),
            });
        }
        self.streams.count(place.home, false);
        self.counts.end(place.size);
        self.free(place.at, place.rounded, place.small, work);
    }

    pub(super) fn drain(&mut self, cache: &StreamCache, small: bool) {
        cache.drain(small, |place| self.end(place));
    }

    pub(super) fn drain_both(&mut self, cache: &StreamCache) {
        self.drain(cache, true);
        self.drain(cache, false);
    }

    /// Frees small or large bytes behind some work. An unused chunk then becomes large free bytes,
    /// except for one chunk.
    fn free(&mut self, at: u64, size: u64, small: bool, work: Tag) {
        if !small {
            self.large.free_at(at, size, &work);
            return;
        }
        self.counts.small -= size;
        if let Some(chunk) = self.small.free(at, size, work)
            && !self.keeps_chunk(chunk)
        {
            self.free_chunk(chunk);
        }
    }

    /// Keeps an empty chunk for the next small allocation, if no other chunk is kept and it is no
    /// larger than a new chunk. Otherwise a lone small allocation would cost a chunk each time.
    fn keeps_chunk(&mut self, at: u64) -> bool {
        let size = self.small.get(at).map_or(0, |(size, _)| size);
        // The chunk may be the kept chunk, which was used again.
        let other = self.kept_chunk.filter(|&kept| kept != at);
        let is_kept = other.is_some_and(|other| self.is_empty_chunk(other));
        if is_kept || size > self.chunk_size() {
            return false;
        }
        self.kept_chunk = Some(at);
        true
    }

    fn is_empty_chunk(&self, at: u64) -> bool {
        self.small.get(at).is_some_and(|(_, is_free)| is_free)
    }

    fn give_kept_chunk(&mut self) {
        if let Some(at) = self.kept_chunk.take()
            && self.is_empty_chunk(at)
        {
            self.free_chunk(at);
        }
    }

    fn free_chunk(&mut self, at: u64) {
        if let Some((size, work)) = self.small.remove(at) {
            self.large.free_at(at, size, &work);
        }
    }

    pub(super) fn chunk_size(&self) -> u64 {
        let part = self.counts.small / CHUNK_PART / self.granule * self.granule;
        part.min(LARGEST_CHUNK).max(self.granule)
    }

    /// Returns how many unsearched mappings are worth keeping: at most half of them if less than a
    /// quarter is left of the addresses that the heap may reserve.
    pub(super) fn most_retired(&self, addresses: u64) -> usize {
        let most = RETIRED + RETIRED_EACH * self.large.extents().count();
        match addresses.saturating_sub(self.gaps.used()) < addresses / 4 {
            true => most.min(self.retired.len().div_ceil(2)),
            false => most,
        }
    }

    /// Takes up to `most` unused, unsearched mappings out of the space. The pool must not get their
    /// extents until they are unmapped.
    fn take_retired(&mut self, most: usize) -> Vec<(ExtentId, u64, Placed)> {
        let mut taken = Vec::new();
        // Most of the oldest are unused.
        for _ in 0..self.retired.len().min(most.saturating_mul(4)) {
            if taken.len() >= most {
                break;
            }
            let Some((id, at)) = self.retired.pop_front() else {
                break;
            };
            let extent = self.large.extent(id);
            let is_settled = extent.is_none_or(|extent| extent.settled);
            let mut mappings = extent.iter().flat_map(|extent| &extent.mappings);
            let Some(mapping) = mappings.find(|mapping| mapping.at == at) else {
                // The mapping was unmapped with its extent.
                continue;
            };
            if !mapping.is_unused() || !is_settled {
                self.retired.push_back((id, at));
                continue;
            }
            self.large.remove_mapping(id, at);
            if let Some(placed) = self.spaces.remove(at) {
                self.large.leave(id, true);
                taken.push((id, at, placed));
            }
        }
        taken
    }
}

impl Core {
    pub(super) fn new(
        device: Device,
        options: Options,
        writer: u64,
        (addresses, guests): (u64, Vec<AccessGrant>),
    ) -> Self {
        let granule = device.granularity();
        Self {
            device,
            policy: options.policy,
            waits: options.waits,
            writer,
            addresses,
            reserving: Mutex::default(),
            reservations: AtomicU64::new(0),
            guests,
            caches: StreamCaches::new(),
            state: Mutex::new(State::new(granule)),
            flags: AtomicU8::new(if options.for_graphs { PINNED } else { 0 }),
            closed: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags.load(Ordering::SeqCst) & flag != 0
    }

    #[inline]
    pub(super) fn has_flags(&self) -> bool {
        self.flags.load(Ordering::SeqCst) != 0
    }

    pub(super) fn set(&self, flag: u8, yes: bool) {
        match yes {
            true => self.flags.fetch_or(flag, Ordering::SeqCst),
            false => self.flags.fetch_and(!flag, Ordering::SeqCst),
        };
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked::of(&self.state)
    }

    /// Takes the lock, and frees all allocations in stream caches, and the kept chunk.
    pub(super) fn lock_drained(&self) -> Locked<'_> {
        let mut state = self.lock();
        self.drain_all(&mut state);
        state
    }

    /// Frees all allocations in stream caches, and the kept chunk.
    pub(super) fn drain_all(&self, state: &mut State) {
        self.caches.drain(|place| state.end(place));
        state.give_kept_chunk();
        // Memory from stream caches is not counted when it is allocated.
        state.counts.note_peak(|| self.caches.bytes());
    }

    /// Unmaps up to `most` unused, unsearched mappings. Returns their number. Unmaps none in a heap
    /// for graphs: a graph may use each of them.
    pub(super) fn unmap_retired(&self, most: usize) -> u64 {
        if self.has(PINNED) {
            return 0;
        }
        let taken = self.lock().take_retired(most);
        let mut unmapped = 0;
        for (id, at, placed) in taken {
            let size = placed.size();
            // Without its handle, since the pool may take the extent once the lock is released.
            let outcome = unmap(placed, &Fence::complete()).map(drop);
            let mut state = self.lock();
            state.large.leave(id, false);
            match outcome {
                Ok(()) => {
                    unmapped += 1;
                    state.gaps.give(at, size);
                }
                // What is dropped is stuck.
                Err((_, error)) => {
                    log!(error, %error, "a mapping could not be unmapped: quarantined");
                }
            }
        }
        unmapped
    }
}

/// Unmaps a mapping that only some work may use. Asks the driver twice.
pub(super) fn unmap(placed: Placed, work: &Fence) -> Result<Unmapped, (Placed, CallError)> {
    placed.unmap_after(work).or_else(|(placed, error)| {
        log!(warn, %error, "a mapping is unmapped again");
        placed.unmap_after(work)
    })
}
