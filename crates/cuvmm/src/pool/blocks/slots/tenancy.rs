//! A tenant's part of the pool's state: its slots, and lists of the slots that can be reused or
//! give memory.
//!
//! A slot that an operation works on is *out*: not in its place, and on no list. Its place then
//! holds the slot's figures.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::ops::Bound;
use std::sync::Arc;

use super::ids::SlotId;
use super::rows::Rows;
use super::share_table::ShareTable;
use super::slot::{Class, Figures, Slot};
use crate::extent_sizes::ExtentSizes;

/// The class of empty slots that no block may be put in.
const NO_CLASS: Class = Class {
    size: 0,
    sizes: ExtentSizes::up_to(0),
};

pub(in crate::pool) type Aged = (u64, usize);

#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct FreedBlock {
    pub(crate) slot: SlotId,
    pub(crate) at: u64,
}

/// Freed blocks that the pool does not know of yet.
pub(in crate::pool) trait Unswept: Send + Sync {
    /// Takes all blocks; they belong to the pool from here on.
    fn sweep(&self) -> Vec<FreedBlock>;

    /// Takes all blocks, and makes every thread that frees a block later see what this thread did
    /// before.
    fn sweep_each(&self) -> Vec<FreedBlock>;

    /// Sets whether freed blocks go to the pool at once instead of being kept here.
    fn bypass(&self, yes: bool);

    /// Takes all blocks for the last time: blocks freed later go to the pool.
    fn close(&self) -> Vec<FreedBlock>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Give {
    Cached,
    Precommitted,
}

/// A tenant's [terms](crate::pool::accounts) and the limits that it is under, as far as its blocks
/// depend on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::pool) struct Standing {
    /// `true` if blocks may grow within their memory.
    pub(in crate::pool) may_grow: bool,
    /// `true` if the tenant is unregistered.
    pub(in crate::pool) drains: bool,
    /// `true` if the pool or any tenant may exceed a lowered limit.
    pub(in crate::pool) lowered: bool,
    /// `true` if the pool or the tenant exceeds a lowered limit.
    pub(in crate::pool) beyond: bool,
}

pub(in crate::pool) struct Tenancy {
    pub(in crate::pool) standing: Standing,
    pub(in crate::pool) unswept: Arc<dyn Unswept>,
    pub(crate) rows: Rows,
    pub(in crate::pool) share_table: ShareTable,
    slots: Vec<Place>,
    sleepers: usize,
    vacant: Vec<usize>,
    /// The slots that the locked section has taken, and has to put back before it ends.
    #[cfg(debug_assertions)]
    taken: usize,
    /// Slots without block and lease, by class, the most recently used last.
    reusable: BTreeMap<Class, BTreeSet<Aged>>,
    idle: BTreeSet<Aged>,
    precommitted: BTreeSet<Aged>,
}

enum Place {
    Vacant,
    /// The locked section has the slot.
    Taken,
    Out(Box<Out>),
    /// A panic lost the slot, whose memory stays charged.
    Lost(Box<Figures>),
    In(Listed),
}

struct Out {
    flight: NonZeroU64,
    /// From when the slot was taken out or last renewed.
    figures: Figures,
    tag: Option<Arc<str>>,
    /// Idle bytes that are about to be in use again.
    revived: u64,
}

/// A slot, and where it is listed.
struct Listed {
    slot: Box<Slot>,
    age: u64,
    class: Option<Class>,
    gives: Option<Give>,
}

impl Tenancy {
    pub(in crate::pool::blocks) fn new(unswept: Arc<dyn Unswept>) -> Self {
        Self {
            standing: Standing::default(),
            unswept,
            rows: Rows::new(),
            share_table: ShareTable::new(),
            slots: Vec::new(),
            sleepers: 0,
            vacant: Vec::new(),
            #[cfg(debug_assertions)]
            taken: 0,
            reusable: BTreeMap::new(),
            idle: BTreeSet::new(),
            precommitted: BTreeSet::new(),
        }
    }

    /// Lets freed blocks bypass the stream caches while a block of the tenant sleeps, and while the
    /// pool or the tenant exceeds a lowered limit.
    pub(in crate::pool::blocks) fn update_bypass(&self) {
        let bypassed = self.standing.beyond || self.has_sleepers();
        self.unswept.bypass(bypassed);
    }

    /// Returns the figures of all slots, also of those that are out, with their blocks' tags.
    pub(in crate::pool::blocks) fn figures(
        &self,
    ) -> impl Iterator<Item = (Figures, Option<&Arc<str>>)> {
        self.slots.iter().filter_map(Place::figures)
    }

    /// Returns the idle bytes in the slots with `count` numbers from `first` on, or `None` if all
    /// numbers are lower.
    pub(in crate::pool::blocks) fn idle_in(&self, first: usize, count: usize) -> Option<u64> {
        let end = first.saturating_add(count).min(self.slots.len());
        let part = self.slots.get(first..end).filter(|part| !part.is_empty())?;
        Some(part.iter().map(Place::idle).sum())
    }

    /// Returns the bytes that cannot be reclaimed, however long a request waits for the GPU.
    pub(in crate::pool::blocks) fn kept(&self) -> u64 {
        let kept: u64 = self.slots.iter().map(Place::kept).sum();
        kept + self.shared_in_use()
    }

    pub(in crate::pool::blocks) fn uses_memory(&self) -> bool {
        self.figures().any(|(figures, _)| figures.in_use > 0) || self.shared_in_use() > 0
    }

    /// Returns the bytes of shared memory that a block uses or a lease keeps.
    pub(in crate::pool::blocks) fn shared_in_use(&self) -> u64 {
        let uses = |holder: usize, offset: u64| {
            let slot = self.slot(holder);
            slot.is_none_or(|slot| slot.used() > offset || slot.leases > 0)
        };
        let entries = self.share_table.entries();
        entries
            .filter(|entry| {
                let mut holders = entry.holders.iter();
                holders.any(|&holder| uses(holder, entry.offset))
            })
            .map(|entry| entry.size)
            .sum()
    }

    /// Returns the bytes of shared memory that no block uses any more, and that wait to be unmapped
    /// in the last slot that maps them.
    pub(in crate::pool::blocks) fn shared_pending_free(&self) -> u64 {
        match self.share_table.bytes() {
            0 => 0,
            bytes => bytes - self.shared_in_use(),
        }
    }

    pub(in crate::pool::blocks) fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        let places = self.slots.iter().enumerate();
        places.filter_map(|(index, place)| place.slot().map(|_| index))
    }

    #[inline]
    pub(in crate::pool::blocks) fn slot(&self, index: usize) -> Option<&Slot> {
        self.slots.get(index)?.slot()
    }

    /// Returns a slot for changes that do not alter where it is listed.
    #[inline]
    pub(in crate::pool::blocks) fn slot_mut(&mut self, index: usize) -> Option<&mut Slot> {
        match self.slots.get_mut(index)? {
            Place::In(listed) => Some(&mut listed.slot),
            _ => None,
        }
    }

    const fn has_sleepers(&self) -> bool {
        self.sleepers > 0
    }

    pub(in crate::pool::blocks) const fn is_empty(&self) -> bool {
        self.slots.len() == self.vacant.len()
    }

    /// Returns a number for a new slot, which is out.
    pub(in crate::pool::blocks) fn vacancy(&mut self, flight: NonZeroU64) -> usize {
        let place = Place::out(flight, Figures::default(), None);
        if let Some(index) = self.vacant.pop()
            && let Some(vacant) = self.slots.get_mut(index)
        {
            *vacant = place;
            return index;
        }
        self.slots.push(place);
        self.slots.len() - 1
    }

    pub(super) fn is_out(&self, index: usize) -> bool {
        matches!(self.slots.get(index), Some(Place::Out(_)))
    }

    pub(super) fn sleeps(&self, index: usize) -> bool {
        self.slots.get(index).is_some_and(Place::is_sleepers)
    }

    /// Returns the blocks whose slots are out: the operation, the block's tag, and the slot's
    /// figures.
    pub(in crate::pool::blocks) fn blocks_out(
        &self,
    ) -> impl Iterator<Item = (NonZeroU64, Option<&Arc<str>>, &Figures)> {
        self.slots.iter().filter_map(|place| match place {
            Place::Out(out) if out.figures.blocks > 0 => {
                Some((out.flight, out.tag.as_ref(), &out.figures))
            }
            _ => None,
        })
    }

    pub(in crate::pool::blocks) fn note_revived(&mut self, index: usize, bytes: u64) {
        if let Some(Place::Out(out)) = self.slots.get_mut(index) {
            out.revived = bytes;
        }
    }

    /// Updates the figures of a slot that is out, except `sleeps`, which is updated when the slot
    /// is put back.
    pub(super) fn renew(&mut self, slot: &Slot) {
        if let Some(Place::Out(out)) = self.slots.get_mut(slot.id.index) {
            let sleeps = out.figures.sleeps;
            out.figures = slot.figures();
            out.figures.sleeps = sleeps;
        }
    }

    pub(in crate::pool::blocks) fn remove_slot(&mut self, index: usize) {
        self.rows.forget(index);
        self.set(index, Place::Vacant);
        self.vacant.push(index);
    }

    /// Replaces a place, and counts the blocks that sleep and the slots that are taken. Returns the
    /// earlier place.
    #[inline]
    fn set(&mut self, index: usize, place: Place) -> Option<Place> {
        let at = self.slots.get_mut(index)?;
        let before = std::mem::replace(at, place);
        self.sleepers += usize::from(at.is_sleepers());
        self.sleepers -= usize::from(before.is_sleepers());
        #[cfg(debug_assertions)]
        {
            self.taken += usize::from(matches!(at, Place::Taken));
            self.taken -= usize::from(matches!(before, Place::Taken));
        }
        Some(before)
    }

    /// Takes a slot off all lists and out, for an operation that releases the lock.
    pub(super) fn take_out(&mut self, index: usize, flight: NonZeroU64) -> Option<Box<Slot>> {
        let slot = self.take(index)?;
        let tag = slot.block.as_ref().and_then(|block| block.tag.clone());
        self.set(index, Place::out(flight, slot.figures(), tag));
        Some(slot)
    }

    /// Takes a slot off all lists and from its place, for the locked section.
    pub(super) fn take(&mut self, index: usize) -> Option<Box<Slot>> {
        self.slots.get(index)?.slot()?;
        let Some(Place::In(listed)) = self.set(index, Place::Taken) else {
            return None;
        };
        let (slot, aged) = (listed.slot, (listed.age, index));
        if let Some(class) = listed.class
            && let Some(list) = self.reusable.get_mut(&class)
        {
            list.remove(&aged);
        }
        if let Some(give) = listed.gives {
            self.giving_mut(give).remove(&aged);
        }
        Some(slot)
    }

    pub(in crate::pool::blocks) fn put(&mut self, mut slot: Box<Slot>) {
        let index = slot.id.index;
        if slot.shared > 0 {
            self.share_table.settle(&mut slot);
        }
        let age = slot.touched;
        let class = slot.is_vacant().then(|| match slot.serves_once() {
            true => NO_CLASS,
            false => slot.class,
        });
        let gives = slot.has_spare().then(|| match slot.precommitted() {
            0 => Give::Cached,
            _ => Give::Precommitted,
        });
        if let Some(class) = class {
            self.reusable.entry(class).or_default().insert((age, index));
        }
        if let Some(give) = gives {
            self.giving_mut(give).insert((age, index));
        }
        let listed = Listed {
            slot,
            age,
            class,
            gives,
        };
        self.set(index, Place::In(listed));
    }

    #[cfg(debug_assertions)]
    pub(super) fn has_lost(&self) -> bool {
        let mut places = self.slots.iter();
        places.any(|place| matches!(place, Place::Lost(_)))
    }

    /// Returns two flags: a slot is listed for a block to be put in, and listed as giving memory.
    #[cfg(debug_assertions)]
    pub(in crate::pool::blocks) fn lists(&self, index: usize) -> (bool, bool) {
        match self.slots.get(index) {
            Some(Place::In(listed)) => (listed.class.is_some(), listed.gives.is_some()),
            _ => (false, false),
        }
    }

    #[cfg(debug_assertions)]
    pub(in crate::pool::blocks) fn audit(&self) {
        let sleepers = self.slots.iter().filter(|place| place.is_sleepers());
        let sleepers = sleepers.count();
        debug_assert!(sleepers == self.sleepers, "{sleepers} blocks sleep");
        let vacant = |place: &&Place| matches!(place, Place::Vacant);
        let vacant = self.slots.iter().filter(vacant).count();
        debug_assert!(vacant == self.vacant.len(), "{vacant} numbers are vacant");
        let listed = self.indices().filter(|&index| self.lists(index).0).count();
        let reusable = self.reusable.values().map(BTreeSet::len).sum::<usize>();
        debug_assert!(listed == reusable, "{reusable} slots are reusable");
        let gives = self.indices().filter(|&index| self.lists(index).1).count();
        let giving = self.idle.len() + self.precommitted.len();
        debug_assert!(gives == giving, "{giving} slots give");
        let entries = self.share_table.entries().map(|entry| entry.size);
        let shared: u64 = entries.sum();
        debug_assert!(shared == self.share_table.bytes(), "{shared} are shared");
    }

    #[cfg(debug_assertions)]
    pub(super) const fn has_taken(&self) -> bool {
        self.taken > 0
    }

    /// Gives up the slots that an operation had out when a panic ended it.
    pub(super) fn lose(&mut self, flight: NonZeroU64) {
        for place in &mut self.slots {
            if let Place::Out(out) = place
                && out.flight == flight
            {
                self.sleepers -= usize::from(out.figures.sleeps);
                *place = Place::Lost(Box::new(out.figures.lost()));
            }
        }
    }

    /// Returns the figures of a slot that a panic has lost.
    pub(super) fn lost_mut(&mut self, index: usize) -> Option<&mut Figures> {
        match self.slots.get_mut(index)? {
            Place::Lost(figures) => Some(figures),
            _ => None,
        }
    }

    /// Returns the slots that a block of the class may be put in, the most recently used first.
    pub(in crate::pool::blocks) fn reusable(
        &self,
        class: Class,
    ) -> impl Iterator<Item = (usize, &Slot)> {
        let listed = self.reusable.get(&class);
        let latest_first = listed.into_iter().flatten().rev();
        latest_first.filter_map(|&(_, index)| Some((index, self.slot(index)?)))
    }

    /// Returns the slots without block and memory, each with the slots whose addresses are freed
    /// together with its own.
    pub(in crate::pool::blocks) fn bare(&self) -> Vec<Vec<usize>> {
        let is_bare = |index: &usize| self.slot(*index).is_some_and(Slot::is_bare);
        let vacant = self.reusable.values().flatten().map(|&(_, index)| index);
        let single = vacant.filter(|index| is_bare(index) && !self.rows.has(*index));
        let rows = self.rows.iter().filter(|row| row.iter().all(is_bare));
        let single = single.map(|index| vec![index]);
        single.chain(rows.map(<[usize]>::to_vec)).collect()
    }

    /// Returns the oldest slot that gives memory and is younger than `after`.
    pub(in crate::pool::blocks) fn next_giving(
        &self,
        give: Give,
        after: Option<Aged>,
    ) -> Option<Aged> {
        let list = match give {
            Give::Cached => &self.idle,
            Give::Precommitted => &self.precommitted,
        };
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        list.range((after, Bound::Unbounded)).next().copied()
    }

    /// Returns `false` if the tenant has no memory that could be reclaimed, even later, unless a
    /// block is freed.
    pub(in crate::pool::blocks) fn may_give(&self) -> bool {
        let listed = !self.idle.is_empty() || !self.precommitted.is_empty();
        listed || self.share_table.bytes() > 0
    }

    const fn giving_mut(&mut self, give: Give) -> &mut BTreeSet<Aged> {
        match give {
            Give::Cached => &mut self.idle,
            Give::Precommitted => &mut self.precommitted,
        }
    }
}

impl Place {
    fn out(flight: NonZeroU64, figures: Figures, tag: Option<Arc<str>>) -> Self {
        Self::Out(Box::new(Out {
            flight,
            figures,
            tag,
            revived: 0,
        }))
    }

    fn slot(&self) -> Option<&Slot> {
        match self {
            Self::In(listed) => Some(&listed.slot),
            _ => None,
        }
    }

    fn is_sleepers(&self) -> bool {
        match self {
            Self::In(listed) => !listed.slot.sleep_state.is_awake(),
            Self::Out(out) => out.figures.sleeps,
            Self::Vacant | Self::Taken | Self::Lost(_) => false,
        }
    }

    fn idle(&self) -> u64 {
        match self {
            Self::In(listed) => listed.slot.idle(),
            Self::Out(out) => out.figures.idle,
            Self::Vacant | Self::Taken | Self::Lost(_) => 0,
        }
    }

    fn kept(&self) -> u64 {
        match self {
            Self::In(listed) => listed.slot.kept(),
            Self::Out(out) => out.figures.kept + out.revived,
            Self::Lost(figures) => figures.kept,
            Self::Vacant | Self::Taken => 0,
        }
    }

    fn figures(&self) -> Option<(Figures, Option<&Arc<str>>)> {
        match self {
            Self::In(listed) => {
                let slot = &listed.slot;
                let tag = slot.block.as_ref().and_then(|block| block.tag.as_ref());
                Some((slot.figures(), tag))
            }
            Self::Out(out) => Some((out.figures.clone(), out.tag.as_ref())),
            Self::Lost(figures) => Some(((**figures).clone(), None)),
            Self::Vacant | Self::Taken => None,
        }
    }
}
