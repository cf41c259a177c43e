//! Free bytes through all mappings, searched or not.

use std::ops::Range;

use super::super::tag::StreamId;
use super::{ExtentId, Extents};
use crate::size::aligned;

/// Adjacent free ranges, and the best of them for a request.
struct Walk {
    size: u64,
    alignment: u64,
    range: Range<u64>,
    /// The extents in the range. An extent that comes again begins another range, which would
    /// otherwise contain its bytes twice.
    extents: Vec<ExtentId>,
    /// The length of the shortest range that fits, and the address in it.
    best: Option<(u64, u64)>,
}

impl Walk {
    fn add(&mut self, id: ExtentId, range: Range<u64>) {
        let again = self.extents.last() != Some(&id) && self.extents.contains(&id);
        if range.start != self.range.end || again {
            self.end();
            self.range.start = range.start;
        }
        self.range.end = range.end;
        if self.extents.last() != Some(&id) {
            self.extents.push(id);
        }
    }

    fn end(&mut self) {
        let Range { start, end } = self.range;
        if let Some(at) = aligned(start, self.alignment)
            && at.checked_add(self.size).is_some_and(|last| last <= end)
        {
            let this = (end - start, at);
            self.best = Some(self.best.map_or(this, |best| best.min(this)));
        }
        self.extents.clear();
        self.range = 0..0;
    }
}

impl Extents {
    /// Returns the address of `size` bytes at a multiple of `alignment`, in the shortest free range
    /// of a window that has them and that a stream can use without waiting. The mappings need not
    /// be searched.
    pub(in crate::heap) fn find_anywhere(
        &self,
        size: u64,
        alignment: u64,
        stream: StreamId,
    ) -> Option<u64> {
        let mut walk = Walk {
            size,
            alignment,
            range: 0..0,
            extents: Vec::new(),
            best: None,
        };
        let long = self
            .windows
            .iter()
            .filter(|&(start, end)| end - start >= size);
        for (&start, &end) in long {
            for (&at, &id) in self.line.range(start..end) {
                let extent = self.extent(id).filter(|extent| extent.settled);
                for (first, free) in extent.iter().flat_map(|extent| extent.free.all()) {
                    if free.tag.class().serves(stream) {
                        walk.add(id, at + first..at + free.end);
                    }
                }
            }
            walk.end();
        }
        walk.best.map(|(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tag;
    use super::*;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);

    #[test]
    fn windows_that_are_not_searched_serve_once_for_each_byte() {
        let mut extents = Extents::default();
        let ids = [(); 3].map(|()| extents.add_extent(64));
        for (at, id) in [(0, 0), (64, 1), (128, 0), (192, 2), (1000, 2), (1064, 1)] {
            extents.add_mapping(ids[id], at, 0);
            extents.stop_searching(ids[id], at);
        }
        let find = |extents: &Extents, size| extents.find_anywhere(size, 1, A);
        assert_eq!(find(&extents, 1), None, "all is in use");
        for id in ids {
            extents.give(id, 0..64, Tag::Ready);
        }
        assert_eq!(find(&extents, 128), Some(0));
        assert_eq!(
            find(&extents, 129),
            None,
            "the first extent would be in it twice"
        );
        extents.allocate(32, 8);
        assert_eq!(find(&extents, 128), Some(1000), "beside the part in use");
        assert_eq!(extents.find_anywhere(20, 8, A), Some(40 - 40));
        extents.free_at(32, 8, &Tag::on(B, 1));
        assert_eq!(
            find(&extents, 64 + 24),
            Some(40),
            "it waits for another stream"
        );
        extents.allocate(1000, 128);
        assert_eq!(find(&extents, 33), None);
        extents.check();
    }
}
