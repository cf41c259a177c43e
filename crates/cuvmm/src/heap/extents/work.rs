//! The work that memory waits for.

use super::super::tag::{Class, Point, Tag, Tagged};
use super::extent::insert;
use super::{Extent, ExtentId, Extents, Taken};

impl Extents {
    fn tag_of(&self, id: ExtentId) -> Tag {
        self.extent(id).map_or(Tag::Ready, Extent::tag)
    }

    /// Returns all work that bytes or mappings of an extent wait for.
    pub(in crate::heap) fn all_work_of(&self, id: ExtentId) -> Tag {
        let mut tag = self.tag_of(id);
        if let Some(extent) = self.extent(id) {
            extent
                .mappings
                .iter()
                .for_each(|mapping| tag.merge(&mapping.tag));
        }
        tag
    }
}

impl Tagged for Extents {
    /// Also makes the classes of runs exact.
    fn prune(&mut self, done: &dyn Fn(Point) -> bool) {
        for extent in self.extents.iter_mut().flatten() {
            let mut pruned = false;
            extent
                .free
                .for_each_value(|free| pruned |= free.tag.prune(done));
            if pruned {
                let pieces = std::mem::take(&mut extent.free);
                for (start, free) in pieces.all() {
                    insert(&mut extent.free, start..free.end, free.tag.clone());
                }
            }
            for mapping in &mut extent.mappings {
                mapping.tag.prune(done);
            }
        }
        self.ready = self.extents().map(|(_, extent)| extent.ready()).sum();
        let mut runs = std::mem::take(&mut self.runs);
        let exact = |range, class: &mut Class| {
            if *class != Class::Ready {
                *class = self.class_at(&range);
            }
        };
        runs.change(exact, |_| {});
        self.runs = runs;
    }

    fn for_each_point(&self, see: &mut dyn FnMut(Point)) {
        for (_, extent) in self.extents() {
            let free = extent.free.all().map(|(_, free)| &free.tag);
            let mappings = extent.mappings.iter().map(|mapping| &mapping.tag);
            for tag in free.chain(mappings) {
                tag.points().iter().for_each(|&point| see(point));
            }
        }
    }
}

pub(in crate::heap) fn work_of(taken: &[Taken]) -> Tag {
    let mut tag = Tag::Ready;
    let pieces = taken.iter().flat_map(|(_, pieces)| pieces);
    pieces.for_each(|(_, piece)| tag.merge(piece));
    tag
}
