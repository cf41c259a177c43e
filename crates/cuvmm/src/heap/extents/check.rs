//! The invariants of a heap's memory, checked in debug builds at the end of locked sections.

use std::ops::Range;

use super::super::tag::{Class, Tag};
use super::{Extent, ExtentId, Extents};

impl Extents {
    pub(crate) fn check(&self) {
        let (mut held, mut free, mut ready, mut idle, mut mappings) = (0, 0, 0, 0, 0);
        let mut wholes = 0;
        for (id, extent) in self.extents() {
            Self::check_extent(id, extent);
            self.check_lists(id, extent);
            held += extent.size;
            free += extent.free_bytes;
            ready += extent.ready();
            idle += extent.count().idle;
            wholes += usize::from(extent.count().whole);
            mappings += extent.mappings.len() as u64;
            for mapping in &extent.mappings {
                debug_assert!(
                    self.line.get(&mapping.at) == Some(&id),
                    "{id} at {}",
                    mapping.at
                );
            }
        }
        debug_assert!(held == self.held, "{held} are held, not {}", self.held);
        debug_assert!(free == self.free, "{free} are free, not {}", self.free);
        debug_assert!(ready == self.ready, "{ready} are ready, not {}", self.ready);
        debug_assert!(idle == self.idle, "{idle} are idle, not {}", self.idle);
        debug_assert!(
            wholes == self.wholes,
            "{wholes} are whole, not {}",
            self.wholes
        );
        debug_assert!(mappings == self.mappings && mappings == self.line.len() as u64);
        debug_assert!(self.shown.is_empty() && self.walked.is_empty());
        self.check_windows();
        self.check_runs();
    }

    fn check_extent(id: ExtentId, extent: &Extent) {
        let mut last: Option<(u64, &Tag)> = None;
        let mut bytes = 0;
        for (start, free) in extent.free.all() {
            debug_assert!(
                start < free.end && free.end <= extent.size,
                "{id}: {extent:?}"
            );
            if let Some((end, tag)) = last {
                debug_assert!(end <= start, "{id}: {extent:?}");
                debug_assert!(end < start || !tag.joins(&free.tag), "{id}: {extent:?}");
            }
            last = Some((free.end, &free.tag));
            bytes += free.end - start;
        }
        debug_assert!(bytes == extent.free_bytes, "{id}: {extent:?}");
        let used = extent.mappings.iter().any(|mapping| mapping.live > 0);
        debug_assert!(
            !used || !extent.is_free(),
            "{id} is free and in use: {extent:?}"
        );
    }

    fn check_lists(&self, id: ExtentId, extent: &Extent) {
        let ends = extent.listed;
        let right = extent.is_stale || ends == extent.ends();
        debug_assert!(right, "{id}: {:?}, {ends:?}", extent.ends());
        let stale = self.stale.iter().filter(|&&stale| stale == id).count();
        debug_assert!(
            stale == usize::from(extent.is_stale),
            "{id} is stale: {stale}"
        );
        for (size, list) in [
            (ends.whole, &self.whole),
            (ends.prefix, &self.prefixes),
            (ends.suffix, &self.suffixes),
        ] {
            let listed = list.contains(&(size, id));
            debug_assert!(listed == (size > 0), "{id} is listed for {size}: {listed}");
        }
    }

    /// Checks that windows are the adjacent mappings, and that no extent is searched twice in a
    /// window.
    fn check_windows(&self) {
        let mut windows: Vec<(u64, u64)> = Vec::new();
        let mut searched: Vec<ExtentId> = Vec::new();
        for (&at, &id) in &self.line {
            let extent = self.extent(id);
            let end = at + extent.map_or(0, |extent| extent.size);
            match windows.last_mut() {
                Some((_, last)) if *last == at => *last = end,
                _ => {
                    searched.clear();
                    windows.push((at, end));
                }
            }
            let mut mappings = extent.iter().flat_map(|extent| &extent.mappings);
            if mappings.any(|mapping| mapping.at == at && mapping.searched) {
                debug_assert!(
                    !searched.contains(&id),
                    "{id} is searched twice in a window"
                );
                searched.push(id);
            }
        }
        let known: Vec<(u64, u64)> = self.windows.iter().map(|(&at, &end)| (at, end)).collect();
        debug_assert!(windows == known, "windows are {windows:?}, not {known:?}");
    }

    /// Checks that the runs are the searched free parts, joined, and that no class promises too
    /// much.
    fn check_runs(&self) {
        let mut runs: Vec<(Range<u64>, Class)> = Vec::new();
        for (&at, &id) in &self.line {
            let Some(extent) = self.extent(id).filter(|extent| extent.settled) else {
                continue;
            };
            let mut mappings = extent.mappings.iter();
            if !mappings.any(|mapping| mapping.at == at && mapping.searched) {
                continue;
            }
            for (start, free) in extent.free.all() {
                let (start, end, class) = (at + start, at + free.end, free.tag.class());
                match runs.last_mut() {
                    Some((run, known)) if run.end == start => {
                        run.end = end;
                        *known = known.with(class);
                    }
                    _ => runs.push((start..end, class)),
                }
            }
        }
        let known: Vec<(Range<u64>, Class)> = self
            .runs
            .all()
            .map(|(range, &class)| (range, class))
            .collect();
        debug_assert!(
            runs.len() == known.len(),
            "runs are {runs:?}, not {known:?}"
        );
        for ((run, class), (range, known)) in runs.into_iter().zip(known) {
            debug_assert!(run == range, "a run is {run:?}, not {range:?}");
            debug_assert!(
                known.with(class) == known,
                "a run at {run:?} is {class:?}, not {known:?}"
            );
        }
    }
}
