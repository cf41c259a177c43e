//! The streams of a heap by number, and the progress of their work.

use super::tag::{Point, StreamId, Tag, Tagged};
use crate::error::CallError;
use crate::extents::{Fence, Round};
use crate::own::Stream;

#[derive(Debug)]
struct Entry {
    stream: Stream,
    /// Live allocations that work of the stream may use.
    users: u64,
}

/// The streams of a heap. A number is free again when no allocation and no tag names it.
#[derive(Debug, Default)]
pub(super) struct Streams {
    entries: Vec<Option<Entry>>,
}

/// The first and the last stamp of each stream that points name, by number.
type Bounds = Vec<Option<(u64, u64)>>;

fn widen(bounds: &mut Bounds, Point { stream, stamp }: Point) {
    if let Some(bounds) = bounds.get_mut(stream.0 as usize) {
        let (first, last) = bounds.unwrap_or((stamp, stamp));
        *bounds = Some((first.min(stamp), last.max(stamp)));
    }
}

impl Streams {
    pub(super) fn id(&mut self, stream: &Stream) -> StreamId {
        let known = |entry: &Option<Entry>| entry.as_ref().is_some_and(|it| it.stream == *stream);
        let vacant = || self.entries.iter().position(Option::is_none);
        let index = self.entries.iter().position(known);
        if let Some(index) = index {
            return StreamId(u32::try_from(index).unwrap_or(u32::MAX));
        }
        let index = vacant().unwrap_or(self.entries.len());
        let entry = Some(Entry {
            stream: stream.clone(),
            users: 0,
        });
        match self.entries.get_mut(index) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        StreamId(u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// Returns a fence over all work that all known streams have queued.
    pub(super) fn all_work(&self) -> Fence {
        let entries = self.entries.iter().flatten();
        Fence::streams(entries.map(|entry| entry.stream.clone()).collect())
    }

    fn entry(&self, id: StreamId) -> Option<&Entry> {
        self.entries.get(id.0 as usize)?.as_ref()
    }

    /// Counts an allocation that uses a stream (`more`), or one less.
    pub(super) fn count(&mut self, id: StreamId, more: bool) {
        if let Some(Some(entry)) = self.entries.get_mut(id.0 as usize) {
            entry.users = match more {
                true => entry.users + 1,
                false => entry.users.saturating_sub(1),
            };
        }
    }

    pub(super) fn now(&self, id: StreamId) -> Tag {
        match self.entry(id) {
            Some(entry) => Tag::on(id, entry.stream.device().tick()),
            None => Tag::Ready,
        }
    }

    pub(super) fn fence(&self, tag: &Tag) -> Fence {
        let points = tag.points().iter();
        Fence::before(points.filter_map(|point| {
            let entry = self.entry(point.stream)?;
            Some((entry.stream.clone(), point.stamp))
        }))
    }

    /// Orders later work of a stream behind the work that a tag names. Returns `false` if the
    /// driver cannot.
    pub(super) fn order(&self, tag: &Tag, before: StreamId) -> Result<bool, CallError> {
        match self.entry(before) {
            Some(entry) => self.fence(tag).order_before(&entry.stream),
            None => Ok(false),
        }
    }

    /// Returns `true` if a point is known to be complete. On a lost context nothing runs.
    fn is_done(&self, point: Point) -> bool {
        let Some(Entry { stream, .. }) = self.entry(point.stream) else {
            return true;
        };
        let device = stream.device();
        let done = stream.events().is_complete(point.stamp);
        done || device.events().is_complete(point.stamp) || device.lost().is_some()
    }

    /// Polls the work that a tag names; returns `true` if it is complete. A stream for which the
    /// driver fails counts as pending.
    pub(super) fn is_complete(&self, tag: &Tag) -> bool {
        let mut entries = tag.points().iter().filter_map(|it| self.entry(it.stream));
        let Some(first) = entries.next() else {
            return true;
        };
        let round = Round::begin(first.stream.device());
        let mut fence = self.fence(tag);
        if let Err(error) = fence.poll_in(&round) {
            log!(debug, %error, "a stream could not be polled: it counts as pending");
        }
        fence.is_complete()
    }

    pub(super) fn are_several(&self) -> bool {
        self.entries.iter().flatten().nth(1).is_some()
    }

    /// Removes complete work from tags, polling with `polls`. A stream for which the driver fails
    /// counts as pending.
    pub(super) fn refresh(&mut self, maps: &mut [&mut dyn Tagged], polls: bool) {
        if polls {
            let mut bounds = self.no_bounds();
            for map in &*maps {
                map.for_each_point(&mut |point| widen(&mut bounds, point));
            }
            self.poll(bounds);
        }
        for map in &mut *maps {
            map.prune(&|point| self.is_done(point));
        }
        let mut named = vec![false; self.entries.len()];
        for map in maps {
            map.for_each_point(&mut |point| {
                if let Some(named) = named.get_mut(point.stream.0 as usize) {
                    *named = true;
                }
            });
        }
        for (entry, named) in self.entries.iter_mut().zip(named) {
            if !named && entry.as_ref().is_some_and(|entry| entry.users == 0) {
                *entry = None;
            }
        }
    }

    /// Polls the work that some tags name. Returns for each of them whether it is complete.
    pub(super) fn are_complete(&self, tags: &[Tag]) -> Vec<bool> {
        let mut bounds = self.no_bounds();
        let points = tags.iter().flat_map(Tag::points);
        points.for_each(|&point| widen(&mut bounds, point));
        self.poll(bounds);
        let is_complete = |tag: &Tag| tag.points().iter().all(|&point| self.is_done(point));
        tags.iter().map(is_complete).collect()
    }

    fn no_bounds(&self) -> Bounds {
        vec![None; self.entries.len()]
    }

    /// Polls each stream for the first and then for the last of its stamps.
    fn poll(&self, bounds: Bounds) {
        for (entry, bounds) in self.entries.iter().zip(bounds) {
            let (Some(entry), Some((first, last))) = (entry, bounds) else {
                continue;
            };
            let round = Round::begin(entry.stream.device());
            for stamp in [first, last] {
                let mut fence = Fence::before(std::iter::once((entry.stream.clone(), stamp)));
                if let Err(error) = fence.poll_in(&round) {
                    log!(debug, %error, "a stream could not be polled: it counts as pending");
                }
                if !fence.is_complete() {
                    break;
                }
            }
        }
    }
}
