//! What a pool knows of a tenant: its slots, and which of them can be reused or taken from.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::pressure::PressureHook;
use super::rows::Rows;
use super::share_table::ShareTable;
use super::slot::{Class, Slot, SlotId};

/// Where slots are listed that no block may be put in, though they are empty.
const NO_CLASS: Class = Class {
    size: 0,
    largest: 0,
};

/// A slot in a list, in the order of age.
pub(crate) type Aged = (u64, usize);

/// A block that was freed, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) place: SlotId,
    pub(crate) at: u64,
}

/// Blocks that were freed and that the pool does not know of yet.
pub(crate) trait Unswept: Send + Sync {
    /// All of them, which are the pool's from now on.
    fn sweep(&self) -> Vec<Freed>;

    /// The same, and sees to it that whoever frees one later knows what this thread did before.
    fn sweep_each(&self) -> Vec<Freed>;

    /// Whether blocks that are freed are to go to the pool at once, and not lie here.
    fn bypass(&self, yes: bool);

    /// The same as [`Self::sweep`], for the last time: whoever frees a block later tells the pool.
    fn close(&self) -> Vec<Freed>;
}

/// Memory that can be taken back from a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Give {
    /// It was in use.
    Cached,
    /// It was put ahead of a block's growth.
    Precommitted,
}

pub(crate) struct Tenancy {
    pub(crate) name: String,
    pub(crate) priority: i32,
    pub(crate) hook: Option<PressureHook>,
    pub(crate) registered: bool,
    pub(crate) refusals: u64,
    /// Blocks that were freed and that the lists do not know of yet.
    pub(crate) unswept: Arc<dyn Unswept>,
    /// Slots that lie side by side.
    pub(crate) rows: Rows,
    /// What several of its slots show.
    pub(crate) share_table: ShareTable,
    slots: Vec<Option<Listed>>,
    /// How many of them have a block that is not awake.
    sleepers: usize,
    /// Places in `slots` without a slot.
    vacant: Vec<usize>,
    /// Slots with no block and no lease, by class, the one used last at the end.
    reusable: BTreeMap<Class, BTreeSet<Aged>>,
    /// Slots that memory can be taken from.
    idle: BTreeSet<Aged>,
    precommitted: BTreeSet<Aged>,
}

/// A slot and where it is listed.
struct Listed {
    slot: Box<Slot>,
    age: u64,
    class: Option<Class>,
    gives: Option<Give>,
}

impl Tenancy {
    pub(crate) const fn new(
        name: String,
        priority: i32,
        hook: Option<PressureHook>,
        unswept: Arc<dyn Unswept>,
    ) -> Self {
        Self {
            name,
            priority,
            hook,
            registered: true,
            refusals: 0,
            unswept,
            rows: Rows::new(),
            share_table: ShareTable::new(),
            slots: Vec::new(),
            sleepers: 0,
            vacant: Vec::new(),
            reusable: BTreeMap::new(),
            idle: BTreeSet::new(),
            precommitted: BTreeSet::new(),
        }
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().flatten().map(|place| &*place.slot)
    }

    /// The slots among `count` numbers from `first` on; nothing where all numbers are lower.
    pub(crate) fn part(&self, first: usize, count: usize) -> Option<impl Iterator<Item = &Slot>> {
        let end = first.saturating_add(count).min(self.slots.len());
        let part = self.slots.get(first..end).filter(|part| !part.is_empty())?;
        Some(part.iter().flatten().map(|place| &*place.slot))
    }

    pub(crate) fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, place)| place.as_ref().map(|_| index))
    }

    pub(crate) fn slot(&self, index: usize) -> Option<&Slot> {
        self.slots.get(index)?.as_ref().map(|place| &*place.slot)
    }

    /// For changes that do not alter where a slot is listed.
    pub(crate) fn slot_mut(&mut self, index: usize) -> Option<&mut Slot> {
        self.slots
            .get_mut(index)?
            .as_mut()
            .map(|place| &mut *place.slot)
    }

    /// Whether a block of its slots is not awake.
    pub(crate) const fn has_sleepers(&self) -> bool {
        self.sleepers > 0
    }

    /// Whether it has no slot at all.
    pub(crate) const fn is_empty(&self) -> bool {
        self.slots.len() == self.vacant.len()
    }

    /// A number for a new slot.
    pub(crate) fn vacancy(&mut self) -> usize {
        self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        })
    }

    /// Whether a slot has this number and has been taken out.
    pub(crate) fn is_out(&self, index: usize) -> bool {
        let place = self.slots.get(index);
        place.is_some_and(Option::is_none) && !self.vacant.contains(&index)
    }

    /// A number that no slot has any more.
    pub(crate) fn vacate(&mut self, index: usize) {
        self.rows.forget(index);
        self.vacant.push(index);
    }

    /// Takes a slot out, and from all lists.
    pub(crate) fn take(&mut self, index: usize) -> Option<Box<Slot>> {
        let Listed {
            slot,
            age,
            class,
            gives,
        } = self.slots.get_mut(index)?.take()?;
        let aged = (age, index);
        if let Some(class) = class
            && let Some(list) = self.reusable.get_mut(&class)
        {
            list.remove(&aged);
        }
        if let Some(give) = gives {
            self.giving_mut(give).remove(&aged);
        }
        if !slot.sleep_state.is_awake() {
            self.sleepers -= 1;
        }
        Some(slot)
    }

    /// Puts a slot in its place, and on the lists it belongs on.
    pub(crate) fn put(&mut self, index: usize, mut slot: Box<Slot>) {
        if slot.shared > 0 {
            self.share_table.settle(index, &mut slot);
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
        if !slot.sleep_state.is_awake() {
            self.sleepers += 1;
        }
        if let Some(place) = self.slots.get_mut(index) {
            *place = Some(Listed {
                slot,
                age,
                class,
                gives,
            });
        }
    }

    /// Slots that a block of a class may be put in, the one used last first.
    pub(crate) fn reusable(&self, class: Class) -> impl Iterator<Item = (usize, &Slot)> {
        self.reusable
            .get(&class)
            .into_iter()
            .flatten()
            .rev()
            .filter_map(|&(_, index)| Some((index, self.slot(index)?)))
    }

    /// Slots without a block that have no memory, each with those whose addresses go with its own.
    pub(crate) fn bare(&self) -> Vec<Vec<usize>> {
        let is_bare = |index: &usize| {
            let slot = self.slot(*index);
            slot.is_some_and(|slot| slot.is_vacant() && slot.space.bytes() == 0)
        };
        let vacant = self.reusable.values().flatten().map(|&(_, index)| index);
        let single = vacant.filter(|index| is_bare(index) && !self.rows.has(*index));
        let rows = self.rows.iter().filter(|row| row.iter().all(is_bare));
        let single = single.map(|index| vec![index]);
        single.chain(rows.map(<[usize]>::to_vec)).collect()
    }

    /// The slot that gives and comes after another in age, the oldest first.
    pub(crate) fn next_giving(&self, give: Give, after: Option<Aged>) -> Option<Aged> {
        let list = match give {
            Give::Cached => &self.idle,
            Give::Precommitted => &self.precommitted,
        };
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        list.range((after, Bound::Unbounded)).next().copied()
    }

    const fn giving_mut(&mut self, give: Give) -> &mut BTreeSet<Aged> {
        match give {
            Give::Cached => &mut self.idle,
            Give::Precommitted => &mut self.precommitted,
        }
    }
}
