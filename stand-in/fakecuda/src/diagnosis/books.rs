//! Sites of live objects, and of the most recently released ones.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cuvmm_model::model::ObjectKind;

use super::site::Site;

const REMEMBERED: usize = 16_384;

/// A class of names: no two live objects of a class have the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Reservation,
    Physical,
    Mapping,
    /// Allocations of every kind, pinned and managed memory.
    Memory,
    MemPool,
    Stream,
    Event,
    Graph,
    GraphExec,
    Context,
}

impl Class {
    pub(crate) fn of(kind: ObjectKind) -> Option<Self> {
        Some(match kind {
            ObjectKind::Reservation => Self::Reservation,
            ObjectKind::Physical => Self::Physical,
            ObjectKind::Mapping => Self::Mapping,
            ObjectKind::Allocation
            | ObjectKind::PoolAllocation
            | ObjectKind::Pinned
            | ObjectKind::Managed => Self::Memory,
            ObjectKind::MemPool => Self::MemPool,
            ObjectKind::Stream => Self::Stream,
            ObjectKind::Event => Self::Event,
            ObjectKind::Graph => Self::Graph,
            ObjectKind::GraphExec => Self::GraphExec,
            _ => return None,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Reservation => "reservation",
            Self::Physical => "physical",
            Self::Mapping => "mapping",
            Self::Memory => "allocation",
            Self::MemPool => "memory pool",
            Self::Stream => "stream",
            Self::Event => "event",
            Self::Graph => "graph",
            Self::GraphExec => "executable graph",
            Self::Context => "context",
        }
    }

    /// Returns `true` if a value is the start of a range of addresses.
    fn is_range(self) -> bool {
        matches!(self, Self::Reservation | Self::Mapping | Self::Memory)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) size: u64,
    /// References that need a release each.
    references: u64,
    pub(crate) site: Arc<Site>,
}

#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) size: u64,
    pub(crate) made: Arc<Site>,
    pub(crate) released: Arc<Site>,
    number: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Descriptor {
    pub(crate) fd: i32,
    pub(crate) identity: (u64, u64),
    pub(crate) what: &'static str,
    pub(crate) site: Arc<Site>,
}

type Key = (Class, u64);

#[derive(Debug, Default)]
pub(crate) struct Books {
    made: BTreeMap<Key, Made>,
    gone: BTreeMap<Key, Gone>,
    /// Released objects in order, with the number of each release.
    order: VecDeque<(Key, u64)>,
    releases: u64,
    pub(crate) descriptors: Vec<Descriptor>,
    /// For each device the sites of live references to its primary context.
    retained: BTreeMap<i32, Vec<Arc<Site>>>,
    /// Objects that do not count as leaks.
    forgiven: BTreeSet<Key>,
}

impl Books {
    /// Notes an object, or one more reference to it.
    pub(crate) fn make(&mut self, class: Class, value: u64, size: u64, site: Arc<Site>) {
        let key = (class, value);
        self.forgiven.remove(&key);
        self.outlive(class, value, size);
        if class == Class::Physical
            && let Some(made) = self.made.get_mut(&key)
        {
            made.references += 1;
            return;
        }
        let made = Made {
            size,
            references: 1,
            site,
        };
        self.made.insert(key, made);
    }

    /// Notes the end of one reference to an object, before the call that ends it. Returns the
    /// argument of [`restore`](Self::restore) for a call that then fails.
    pub(crate) fn release(&mut self, class: Class, value: u64, site: &Arc<Site>) -> Option<Made> {
        let key = (class, value);
        let made = self.made.get_mut(&key)?;
        let before = made.clone();
        made.references -= 1;
        if made.references == 0 {
            self.made.remove(&key);
            self.releases += 1;
            let gone = Gone {
                size: before.size,
                made: Arc::clone(&before.site),
                released: Arc::clone(site),
                number: self.releases,
            };
            self.order.push_back((key, gone.number));
            self.gone.insert(key, gone);
            while self.order.len() > REMEMBERED {
                self.drop_oldest();
            }
        }
        Some(before)
    }

    fn drop_oldest(&mut self) {
        if let Some((key, number)) = self.order.pop_front()
            && self
                .gone
                .get(&key)
                .is_some_and(|gone| gone.number == number)
        {
            self.gone.remove(&key);
        }
    }

    /// Undoes [`release`](Self::release), unless the value names a new object by now.
    pub(crate) fn restore(&mut self, class: Class, value: u64, before: Made) {
        let key = (class, value);
        match self.made.get_mut(&key) {
            Some(made) if Arc::ptr_eq(&made.site, &before.site) => made.references += 1,
            Some(_) => {}
            None => {
                self.gone.remove(&key);
                self.made.insert(key, before);
            }
        }
    }

    pub(crate) fn live(&self, class: Class, value: u64) -> Option<&Made> {
        self.made.get(&(class, value))
    }

    /// Returns the released object of a value that names no live one.
    pub(crate) fn released(&self, class: Class, value: u64) -> Option<&Gone> {
        self.gone.get(&(class, value))
    }

    /// Returns the most recently released range of some classes that contains an address without
    /// live memory, with its first address.
    pub(crate) fn released_at(
        &self,
        classes: &[Class],
        address: u64,
    ) -> Option<(Class, u64, &Gone)> {
        let lives = [Class::Memory, Class::Mapping]
            .into_iter()
            .any(|class| self.covers(class, address));
        let found = classes.iter().filter_map(|&class| {
            let range = self.gone.range((class, 0)..=(class, address));
            let (&(_, start), gone) = range.last()?;
            (address - start < gone.size).then_some((class, start, gone))
        });
        found
            .max_by_key(|(_, _, gone)| gone.number)
            .filter(|_| !lives)
    }

    fn covers(&self, class: Class, address: u64) -> bool {
        self.at(class, address).is_some()
    }

    /// Returns the live object of a class that contains an address.
    pub(crate) fn at(&self, class: Class, address: u64) -> Option<&Made> {
        let (&(_, start), made) = self.made.range((class, 0)..=(class, address)).last()?;
        (address - start < made.size).then_some(made)
    }

    pub(crate) fn retain(&mut self, device: i32, site: Arc<Site>) {
        self.retained.entry(device).or_default().push(site);
    }

    /// Notes the end of a reference to a device's primary context: the last one of the calling
    /// module.
    pub(crate) fn unretain(&mut self, device: i32, site: &Site) {
        let Some(sites) = self.retained.get_mut(&device) else {
            return;
        };
        let caller = |site: &Site| site.caller().map(|module| module.base);
        let by = caller(site);
        let same = sites.iter().rposition(|made| caller(made) == by);
        match same {
            Some(index) => drop(sites.remove(index)),
            None => drop(sites.pop()),
        }
    }

    /// Notes that a device's primary context ends with all references.
    pub(crate) fn reset(&mut self, device: i32) {
        self.retained.remove(&device);
    }

    pub(crate) fn sites(&self) -> Vec<Arc<Site>> {
        let made = self.made.values().map(|made| &made.site);
        let descriptors = self.descriptors.iter().map(|descriptor| &descriptor.site);
        let retained = self.retained.values().flatten();
        made.chain(descriptors).chain(retained).cloned().collect()
    }

    /// Returns the sites of live references to a device's primary context.
    pub(crate) fn retained(&self, device: i32) -> &[Arc<Site>] {
        self.retained.get(&device).map_or(&[], Vec::as_slice)
    }

    /// Returns the first addresses of a class's live objects in a range.
    pub(crate) fn within(&self, class: Class, start: u64, size: u64) -> Vec<u64> {
        let end = start.saturating_add(size);
        let range = self.made.range((class, start)..(class, end));
        let inside = range.filter(|((_, first), made)| first + made.size <= end);
        inside.map(|(&(_, first), _)| first).collect()
    }

    /// Forgets released objects whose value or addresses a new object takes.
    fn outlive(&mut self, class: Class, value: u64, size: u64) {
        if !class.is_range() {
            self.gone.remove(&(class, value));
            return;
        }
        if class == Class::Reservation {
            // Mappings there belonged to the former reservation.
            self.outlive(Class::Mapping, value, size);
        }
        let end = (class, value.saturating_add(size.max(1)));
        let before = self.gone.range((class, 0)..(class, value)).last();
        let before = before.filter(|((_, start), gone)| start + gone.size > value);
        let inside = self.gone.range((class, value)..end);
        let met: Vec<_> = before
            .into_iter()
            .chain(inside)
            .map(|(&key, _)| key)
            .collect();
        for key in met {
            self.gone.remove(&key);
        }
    }

    /// Excludes these live objects from leaks, and forgets the exported descriptors.
    pub(crate) fn forgive(&mut self, live: impl Iterator<Item = (Class, u64)>) {
        self.forgiven = live.collect();
        self.descriptors.clear();
    }

    pub(crate) fn is_forgiven(&self, class: Class, value: u64) -> bool {
        self.forgiven.contains(&(class, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn books() -> (Books, Arc<Site>) {
        (Books::default(), Site::here())
    }

    #[test]
    fn a_physical_is_gone_with_its_last_reference() {
        let (mut books, site) = books();
        books.make(Class::Physical, 7, 64, Arc::clone(&site));
        books.make(Class::Physical, 7, 64, Arc::clone(&site));
        assert!(books.release(Class::Physical, 7, &site).is_some());
        assert!(books.live(Class::Physical, 7).is_some());
        assert!(books.release(Class::Physical, 7, &site).is_some());
        assert!(books.released(Class::Physical, 7).is_some());
        assert!(books.release(Class::Physical, 7, &site).is_none());
        // The value names a new object.
        books.make(Class::Physical, 7, 64, Arc::clone(&site));
        assert!(books.released(Class::Physical, 7).is_none());
    }

    #[test]
    fn a_release_that_failed_is_undone() {
        let (mut books, site) = books();
        books.make(Class::Stream, 3, 0, Arc::clone(&site));
        let before = books.release(Class::Stream, 3, &site).unwrap();
        books.restore(Class::Stream, 3, before);
        assert!(books.live(Class::Stream, 3).is_some());
        assert!(books.released(Class::Stream, 3).is_none());
    }

    #[test]
    fn released_addresses_are_found_until_they_are_used_again() {
        let (mut books, site) = books();
        books.make(Class::Memory, 100, 50, Arc::clone(&site));
        books.release(Class::Memory, 100, &site);
        let classes = [Class::Memory, Class::Mapping, Class::Reservation];
        let at = |books: &Books, address| {
            let found = books.released_at(&classes, address);
            found.map(|(_, start, _)| start)
        };
        assert_eq!(
            [99, 100, 149, 150].map(|address| at(&books, address)),
            [None, Some(100), Some(100), None]
        );
        // A mapping at the address lives, though the allocation there is gone.
        books.make(Class::Mapping, 140, 20, Arc::clone(&site));
        assert_eq!(
            [130, 145].map(|address| at(&books, address)),
            [Some(100), None]
        );
        books.make(Class::Memory, 120, 200, Arc::clone(&site));
        assert_eq!(at(&books, 100), None);
        // A new reservation has none of the last one's mappings.
        books.make(Class::Mapping, 1000, 10, Arc::clone(&site));
        books.release(Class::Mapping, 1000, &site);
        assert_eq!(at(&books, 1005), Some(1000));
        books.make(Class::Reservation, 900, 200, Arc::clone(&site));
        assert_eq!(at(&books, 1005), None);
    }

    #[test]
    fn only_the_last_releases_are_remembered() {
        let (mut books, site) = books();
        for value in 0..REMEMBERED as u64 + 1 {
            books.make(Class::Event, value, 0, Arc::clone(&site));
            books.release(Class::Event, value, &site);
        }
        assert!(books.released(Class::Event, 0).is_none());
        assert!(books.released(Class::Event, 1).is_some());
        assert_eq!(books.gone.len(), REMEMBERED);
    }
}
