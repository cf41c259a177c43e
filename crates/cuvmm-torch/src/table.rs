//! The live allocations of a device's heaps by address, with the counters of all its allocations. One
//! lock guards both, so that a pair of an allocation and a free takes it twice.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use cuvmm::Allocation;
use serde::Serialize;

use crate::figures::Figures;

/// The identity of a pool of graphs: `c10::MempoolId_t`, a `std::pair`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PoolId(pub u64, pub u64);

/// The table. An address is removed before its memory is freed, so the next allocation there finds
/// its place empty.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) figures: Figures,
    live: HashMap<usize, Live, BuildHasherDefault<AddressHasher>>,
}

/// A live allocation of a heap.
pub(crate) struct Live {
    pub(crate) allocation: Held,
    pub(crate) home: u64,
    /// The number of ended streams at the allocation.
    pub(crate) ended: u64,
    /// The pool of graphs that the allocation belongs to.
    pub(crate) pool: Option<PoolId>,
    /// `true` if the allocation counts as asleep.
    pub(crate) is_asleep: bool,
    /// `true` if a use could not be recorded: the memory is never reused.
    pub(crate) is_kept: bool,
}

/// An allocation, which offers keep too once it was offered.
pub(crate) enum Held {
    Own(Allocation),
    Shared(Arc<Allocation>),
}

impl Deref for Held {
    type Target = Allocation;

    #[inline]
    fn deref(&self) -> &Allocation {
        match self {
            Self::Own(allocation) => allocation,
            Self::Shared(allocation) => allocation,
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    pub(crate) address: usize,
    size: u64,
    pub(crate) requested: u64,
    stream: u64,
    pool: Option<PoolId>,
}

impl Table {
    /// Adds and counts an allocation.
    #[inline]
    pub(crate) fn add(&mut self, address: usize, live: Live) {
        self.figures.made(live.allocation.size());
        self.live.insert(address, live);
    }

    #[inline]
    pub(crate) fn get(&self, address: usize) -> Option<&Live> {
        self.live.get(&address)
    }

    pub(crate) fn get_mut(&mut self, address: usize) -> Option<&mut Live> {
        self.live.get_mut(&address)
    }

    /// Removes an allocation, whose end is counted next.
    #[inline]
    pub(crate) fn remove(&mut self, address: usize) -> Option<Live> {
        self.live.remove(&address)
    }

    /// Counts the end of an allocation that was removed.
    #[inline]
    pub(crate) fn count_end(&mut self, live: &Live) {
        let size = live.allocation.size();
        match live.is_asleep {
            true => self.figures.ended_asleep(size),
            false => self.figures.ended(size),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &Live)> {
        self.live.iter().map(|(&address, live)| (address, live))
    }

    /// Has an allocation shared, if it is live. Returns it.
    pub(crate) fn share(&mut self, address: usize) -> Option<Arc<Allocation>> {
        let mut live = self.live.remove(&address)?;
        let shared = match live.allocation {
            Held::Own(allocation) => Arc::new(allocation),
            Held::Shared(allocation) => allocation,
        };
        live.allocation = Held::Shared(Arc::clone(&shared));
        self.live.insert(address, live);
        Some(shared)
    }

    /// Counts the allocations of pools of graphs as asleep, or as awake. Calls a function with each
    /// address, size and stream.
    pub(crate) fn set_asleep(
        &mut self,
        pools: &[PoolId],
        is_asleep: bool,
        mut moved: impl FnMut(usize, u64, u64),
    ) {
        let is_chosen = |live: &&mut Live| live.pool.is_some_and(|pool| pools.contains(&pool));
        for (&address, live) in &mut self.live {
            let Some(live) = Some(live).filter(is_chosen) else {
                continue;
            };
            if live.is_asleep == is_asleep {
                continue;
            }
            live.is_asleep = is_asleep;
            let size = live.allocation.size();
            match is_asleep {
                true => self.figures.slept(size),
                false => self.figures.woke(size),
            }
            moved(address, size, live.home);
        }
    }

    /// Returns the allocations that are awake, and those that sleep.
    pub(crate) fn entries(&self) -> (Vec<Entry>, Vec<Entry>) {
        let (mut awake, mut asleep) = (Vec::new(), Vec::new());
        for (address, live) in self.iter() {
            let list = match live.is_asleep {
                true => &mut asleep,
                false => &mut awake,
            };
            list.push(live.entry(address));
        }
        for list in [&mut awake, &mut asleep] {
            list.sort_unstable_by_key(|entry: &Entry| entry.address);
        }
        (awake, asleep)
    }
}

impl Entry {
    /// Describes a block of a tag, without a stream and a pool.
    pub(crate) const fn block(address: usize, requested: u64) -> Self {
        Self {
            address,
            size: requested.next_multiple_of(cuvmm::heap::ALIGNMENT),
            requested,
            stream: 0,
            pool: None,
        }
    }
}

impl Live {
    fn entry(&self, address: usize) -> Entry {
        Entry {
            stream: self.home,
            pool: self.pool,
            ..Entry::block(address, self.allocation.size())
        }
    }
}

/// Returns a hash whose bits depend on all bits of an address.
const fn mixed(address: usize) -> u64 {
    // Addresses are multiples of 512, and large ones of 2 MiB.
    let product = (address as u64 >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    #[inline]
    fn write_usize(&mut self, address: usize) {
        // The map takes the low bits for the place, and the uppermost for a tag.
        self.0 = mixed(address);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::Hasher as _;

    use super::AddressHasher;

    #[test]
    fn addresses_spread_over_places_and_tags() {
        for step in [512, 2 << 20, 20 << 20, 1 << 30] {
            let addresses = (0..1024).map(|number| 0x7f00_0000_0000 + number * step);
            let hashes = addresses.map(|address: usize| {
                let mut hasher = AddressHasher::default();
                hasher.write_usize(address);
                hasher.finish()
            });
            let hashes: Vec<u64> = hashes.collect();
            let different = |of: fn(u64) -> u64| {
                let all: HashSet<u64> = hashes.iter().map(|&hash| of(hash)).collect();
                all.len()
            };
            // Of 4096 places, 1024 at random have about 900.
            let places = different(|hash| hash % 4096);
            assert!(places > 600, "{step}: {places} places");
            let tags = different(|hash| hash >> 57);
            assert!(tags > 100, "{step}: {tags} of 128 tags");
        }
    }
}
