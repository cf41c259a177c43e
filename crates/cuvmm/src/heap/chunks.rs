//! Chunks: memory for small allocations. Each is an allocation of the heap's extents.
//!
//! Free parts of a chunk are cut and joined within the chunk, so an unused chunk can be given up.
//! Free bytes that one stream can use without waiting are one range, with the latest work of any of
//! them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::ranges::Ranges;
use super::tag::{Class, Point, StreamId, Tag, Tagged};

#[derive(Debug)]
struct Chunk {
    size: u64,
    free: u64,
}

#[derive(Debug, Default)]
pub(super) struct Chunks {
    chunks: BTreeMap<u64, Chunk>,
    free: Ranges<Tag>,
    held: u64,
}

impl Chunks {
    #[cfg(debug_assertions)]
    pub(super) const fn held(&self) -> u64 {
        self.held
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.free.bytes()
    }

    pub(super) fn ready(&self) -> u64 {
        self.free.bytes_of(Class::Ready)
    }

    pub(super) fn longest(&self) -> u64 {
        self.free.longest()
    }

    /// Returns the size of the chunk that begins at an address, and `true` if nothing uses it.
    pub(super) fn get(&self, at: u64) -> Option<(u64, bool)> {
        let chunk = self.chunks.get(&at)?;
        Some((chunk.size, chunk.free == chunk.size))
    }

    pub(super) fn add(&mut self, at: u64, size: u64, work: Tag) {
        self.chunks.insert(at, Chunk { size, free: size });
        self.held += size;
        self.free.join(at..at + size, work, &(at..at + size));
    }

    /// Removes an unused chunk. Returns its size, and the work that its bytes wait for.
    pub(super) fn remove(&mut self, at: u64) -> Option<(u64, Tag)> {
        let size = self.chunks.remove(&at)?.size;
        self.held -= size;
        let mut work = Tag::Ready;
        let free = self.free.ending_in(at..at + size);
        let free: Vec<Range<u64>> = free.map(|(range, _)| range).collect();
        for range in free {
            if let Some(tag) = self.free.cut(range) {
                work.merge(&tag);
            }
        }
        Some((size, work))
    }

    /// Returns the first address for `size` bytes in the shortest free range that has them and that
    /// a stream can use without waiting; with `any`, in the shortest range of any class.
    pub(super) fn find(
        &self,
        size: u64,
        alignment: u64,
        stream: StreamId,
        any: bool,
    ) -> Option<u64> {
        let free = self.free.find(size, alignment, stream, any)?;
        Some(free.start)
    }

    /// Allocates free bytes at an address. Returns the work that they wait for.
    pub(super) fn allocate(&mut self, at: u64, size: u64) -> Tag {
        if let Some((_, chunk)) = self.chunks.range_mut(..=at).next_back() {
            chunk.free -= size;
        }
        self.free.cut(at..at + size).unwrap_or_default()
    }

    /// Frees allocated bytes behind some work. Returns the address of their chunk if it is unused
    /// now.
    pub(super) fn free(&mut self, at: u64, size: u64, work: Tag) -> Option<u64> {
        let (&first, chunk) = self.chunks.range_mut(..=at).next_back()?;
        chunk.free += size;
        let within = first..first + chunk.size;
        let is_free = chunk.free == chunk.size;
        self.free.join(at..at + size, work, &within);
        is_free.then_some(first)
    }

    #[cfg(debug_assertions)]
    pub(super) fn check(&self) {
        let mut last: Option<(u64, &Tag)> = None;
        let mut held = 0;
        let mut all = self.free.all().peekable();
        for (&at, chunk) in &self.chunks {
            let (end, mut free) = (at + chunk.size, 0);
            while let Some((range, tag)) = all.next_if(|(range, _)| range.end <= end) {
                debug_assert!(range.start >= at, "{range:?} is in no chunk");
                let joins = |(last, known): (u64, &Tag)| {
                    let mixed = known.class().with(tag.class()) == Class::Mixed;
                    last == range.start && last > at && !mixed
                };
                debug_assert!(!last.is_some_and(joins), "{range:?} is not joined");
                debug_assert!(last.is_none_or(|(last, _)| last <= range.start));
                last = Some((range.end, tag));
                free += range.end - range.start;
            }
            debug_assert!(free == chunk.free, "{at}: {free} are free of {chunk:?}");
            held += chunk.size;
        }
        debug_assert!(all.next().is_none(), "a free range is in no chunk");
        debug_assert!(held == self.held, "{held} are held, not {}", self.held);
    }
}

impl Tagged for Chunks {
    fn prune(&mut self, done: &dyn Fn(Point) -> bool) {
        let mut changed = Vec::new();
        let prune = |_, tag: &mut Tag| {
            tag.prune(done);
        };
        self.free.change(prune, |range| changed.push(range));
        for range in changed {
            let chunk = self.chunks.range(..=range.start).next_back();
            // The range may be part of a longer range by now.
            if let Some((&at, chunk)) = chunk
                && let Some(around) = self.free.around(range.start)
                && let Some(tag) = self.free.cut(around.clone())
            {
                self.free.join(around, tag, &(at..at + chunk.size));
            }
        }
    }

    fn for_each_point(&self, see: &mut dyn FnMut(Point)) {
        for (_, tag) in self.free.all() {
            tag.points().iter().for_each(|&point| see(point));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);

    fn find(chunks: &Chunks, size: u64, stream: StreamId) -> Option<u64> {
        chunks.find(size, 1, stream, false)
    }

    #[test]
    fn a_chunk_can_be_given_up_when_nothing_uses_it_with_all_work_of_its_bytes() {
        let mut chunks = Chunks::default();
        chunks.add(1000, 100, Tag::Ready);
        chunks.add(1100, 50, Tag::Ready);
        assert_eq!(find(&chunks, 101, A), None, "not across a border");
        chunks.allocate(1000, 60);
        chunks.allocate(1060, 40);
        assert_eq!(chunks.get(1000), Some((100, false)));
        assert_eq!(chunks.free(1000, 60, Tag::on(A, 1)), None);
        assert_eq!(find(&chunks, 60, B), None, "it waits for another stream");
        assert_eq!(chunks.free(1060, 40, Tag::on(B, 2)), Some(1000));
        chunks.check();
        assert_eq!((chunks.free_bytes(), chunks.ready()), (150, 50));
        let (size, work) = chunks.remove(1000).unwrap();
        assert_eq!((size, work.points().len()), (100, 2));
        assert_eq!((chunks.free_bytes(), chunks.longest()), (50, 50));
        assert!(chunks.remove(1000).is_none());
        chunks.check();
    }

    #[test]
    fn what_has_waited_for_different_streams_is_one_range_when_their_work_is_complete() {
        let mut chunks = Chunks::default();
        chunks.add(0, 90, Tag::Ready);
        chunks.allocate(0, 90);
        for (at, tag) in [(0, Tag::on(A, 1)), (30, Tag::on(B, 2)), (60, Tag::on(A, 3))] {
            chunks.free(at, 30, tag);
        }
        assert_eq!((chunks.longest(), chunks.ready()), (30, 0));
        chunks.prune(&|point| point.stamp < 3);
        chunks.check();
        assert_eq!((chunks.longest(), find(&chunks, 90, A)), (90, Some(0)));
        assert_eq!(find(&chunks, 1, B), None, "the last part waits for A");
        chunks.prune(&|_| true);
        assert_eq!((chunks.ready(), find(&chunks, 90, B)), (90, Some(0)));
        let mut points = 0;
        chunks.for_each_point(&mut |_| points += 1);
        assert_eq!(points, 0);
        chunks.check();
    }
}
