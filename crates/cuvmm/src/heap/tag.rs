//! When free memory may be used again: at once, behind the work of a stream, or behind the work of
//! several streams.
//!
//! Streams are numbers here, and points in their work are stamps. [`Streams`](super::streams) knows
//! the streams behind the numbers, and asks the driver.

use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct StreamId(pub(super) u32);

/// A point in the work of a stream: all work queued before the stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) stream: StreamId,
    pub(super) stamp: u64,
}

/// The work that must be complete before memory may be unmapped, or ordered before new work on the
/// memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Tag {
    #[default]
    Ready,
    On(Point),
    /// Work of several streams, each named once.
    Several(Arc<[Point]>),
}

pub(super) trait Tagged {
    fn prune(&mut self, done: &dyn Fn(Point) -> bool);

    fn for_each_point(&self, see: &mut dyn FnMut(Point));
}

/// The streams that a tag names, without points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Ready,
    /// Usable on this stream without waiting.
    On(StreamId),
    /// Usable on no stream without waiting.
    Mixed,
}

impl Class {
    /// Returns the class of memory whose parts have these two classes.
    pub(super) fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ready, class) | (class, Self::Ready) => class,
            (one, other) if one == other => one,
            _ => Self::Mixed,
        }
    }

    /// Returns `true` if work queued on a stream from now on runs after the work that the memory
    /// waits for.
    pub(super) fn serves(self, stream: StreamId) -> bool {
        match self {
            Self::Ready => true,
            Self::On(named) => named == stream,
            Self::Mixed => false,
        }
    }
}

impl Tag {
    pub(super) const fn on(stream: StreamId, stamp: u64) -> Self {
        Self::On(Point { stream, stamp })
    }

    pub(super) fn class(&self) -> Class {
        match self {
            Self::Ready => Class::Ready,
            Self::On(point) => Class::On(point.stream),
            Self::Several(_) => Class::Mixed,
        }
    }

    pub(super) fn points(&self) -> &[Point] {
        match self {
            Self::Ready => &[],
            Self::On(point) => std::slice::from_ref(point),
            Self::Several(points) => points,
        }
    }

    /// Makes the tag of points that may name a stream several times.
    pub(super) fn of(points: impl IntoIterator<Item = Point>) -> Self {
        let mut all: Vec<Point> = Vec::new();
        for point in points {
            match all.iter_mut().find(|known| known.stream == point.stream) {
                Some(known) => known.stamp = known.stamp.max(point.stamp),
                None => all.push(point),
            }
        }
        match all[..] {
            [] => Self::Ready,
            [point] => Self::On(point),
            _ => Self::Several(all.into()),
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        match (&mut *self, other) {
            (_, Self::Ready) => {}
            (Self::Ready, _) => *self = other.clone(),
            (Self::On(ours), Self::On(theirs)) if ours.stream == theirs.stream => {
                ours.stamp = ours.stamp.max(theirs.stamp);
            }
            _ => {
                let points = self.points().iter().chain(other.points());
                *self = Self::of(points.copied().collect::<Vec<_>>());
            }
        }
    }

    /// Removes the points for which `done` returns `true`; returns `true` if it removed any.
    pub(super) fn prune(&mut self, done: impl Fn(Point) -> bool) -> bool {
        let points = self.points();
        let left: Vec<Point> = points.iter().copied().filter(|&it| !done(it)).collect();
        let pruned = left.len() < points.len();
        if pruned {
            *self = Self::of(left);
        }
        pruned
    }

    /// Returns `true` if two adjacent free parts with these tags may become one. Parts of one
    /// stream may: the later point covers both.
    pub(super) fn joins(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::On(one), Self::On(other)) => one.stream == other.stream,
            (one, other) => one == other,
        }
    }
}
