//! The changes that one operation makes to several blocks, and how each is undone when another
//! fails.
//!
//! The changes are recorded until all have succeeded. Meanwhile the slots are in their places and
//! *pinned*: other operations may take idle memory behind a block, and none moves the block.
//!
//! Keeps I-30.

use super::Blocks;
use super::commit::PlacedMemory;
use super::slots::{BlockPlace, Slot};
use crate::extents::Fence;
use crate::pool::core::{Core, Locked};

/// A block that was grown or put in a slot, and its earlier state.
#[derive(Debug)]
pub(in crate::pool) struct Change {
    pub(in crate::pool) place: BlockPlace,
    /// The block's earlier sizes, or `None` if there was no block.
    before: Option<Sizes>,
    /// The time of the slot's last use before the change.
    touched: u64,
    /// `true` if a lease lived: its holder may have seen the block's new memory.
    leased: bool,
    /// `true` if the slot was opened for the block and goes with it.
    pub(in crate::pool) new: bool,
    /// The memory placed for the block; `None` if it took memory that was there.
    pub(in crate::pool) given: Option<PlacedMemory>,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    requested: u64,
    ever: u64,
    used: u64,
    reach: u64,
}

impl Change {
    pub(super) fn of(slot: &Slot, place: BlockPlace) -> Self {
        let before = slot.block.as_ref().map(|block| Sizes {
            requested: block.requested,
            ever: block.ever,
            used: block.used,
            reach: block.reach,
        });
        Self {
            place,
            before,
            touched: slot.touched,
            leased: slot.leases > 0,
            new: false,
            given: None,
        }
    }
}

impl Core {
    /// Ends an operation on several blocks: settles all changes, or undoes them, the last first.
    pub(super) fn conclude<'a>(
        &'a self,
        mut state: Locked<'a>,
        changes: Vec<Change>,
        succeeded: bool,
    ) -> Locked<'a> {
        for (count, change) in changes.into_iter().rev().enumerate() {
            state.end_section(count);
            // The mapper may go on placing memory behind a block that has grown.
            let size = if succeeded { 0 } else { u64::MAX };
            state = self.await_slots(state, std::iter::once((change.place.slot, size)));
            match succeeded {
                true => state.blocks.settle(&change),
                false => state.undo(change),
            }
        }
        state
    }
}

impl Blocks {
    fn settle(&mut self, change: &Change) {
        let id = change.place.slot;
        let Some(slot) = self.slots.get_mut(id) else {
            return;
        };
        slot.pinned = false;
        if let Some(given) = change.given {
            slot.space.settle(given.begun);
            if change.before.is_some() {
                self.request_precommit(id);
            }
        }
    }
}

impl Locked<'_> {
    fn undo(&mut self, change: Change) {
        if let Some(slot) = self.take_out(change.place.slot) {
            self.undo_out(slot, &change);
        }
    }

    /// Undoes the change of a slot that is out. Memory that is being written on the block's home
    /// stream stays.
    pub(super) fn undo_out(&mut self, mut slot: Box<Slot>, change: &Change) {
        slot.pinned = false;
        let home = slot.home().cloned();
        match (change.before, &mut slot.block) {
            (Some(before), Some(block)) => {
                block.requested = before.requested;
                block.used = before.used;
                // Exported memory may have been written meanwhile.
                if !slot.exported {
                    block.ever = before.ever;
                    block.reach = before.reach;
                }
            }
            _ => slot.block = None,
        }
        if let Some(given) = change.given {
            slot.touched = change.touched;
            let mut written = given.filled;
            if written {
                slot.fence.merge(Fence::streams(home.into_iter().collect()));
                // No other operation uses a new slot, so it can go as soon as its fence is
                // complete.
                written =
                    !(change.new && matches!(self.memory.gate.poll(&mut slot.fence), Ok(true)));
            }
            if !written && !change.leased {
                // A lease may have listed the extents: they stay as precommitted memory.
                self.uncommit(&mut slot, given.begun, &Fence::complete());
            }
            if change.new && !written {
                return self.drop_slot(slot);
            }
        }
        self.blocks.put_slot(slot);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::extents::rig::{G, Rig, rig};
    use crate::own::Stream;
    use crate::pool::blocks::slots::{Occupant, SlotId};
    use crate::pool::state::State;
    use crate::pool::{Block, Growth, Limit, Pool, Tenant};

    /// Returns a pool in which each granule has an extent of its own, and blocks grow exactly.
    fn pool(rig: &Rig, granules: u64) -> Pool {
        let builder = Pool::builder(&rig.device).limit(Limit::Bytes(granules * G));
        let builder = builder.largest_extent(G).growth(Growth::Exact);
        builder.build().unwrap()
    }

    fn tenant(pool: &Pool, name: &str) -> Tenant {
        pool.tenant(name).register().unwrap()
    }

    fn small(tenant: &Tenant) -> Block {
        tenant.block(G).capacity(4 * G).try_allocate().unwrap()
    }

    fn slot(state: &State, block: &Block) -> (u64, [u64; 4]) {
        let slot = state.blocks.slots.get(block.place().slot).unwrap();
        assert!(!slot.pinned, "the operation has ended");
        (slot.space.bytes(), sizes(slot.block.as_ref().unwrap()))
    }

    fn sizes(block: &Occupant) -> [u64; 4] {
        [block.requested, block.ever, block.used, block.reach]
    }

    fn held(state: &State, tenant: &Tenant) -> u64 {
        state.memory.budget.account(tenant.id()).held
    }

    #[test]
    fn blocks_that_have_all_grown_can_be_moved_again() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let me = tenant(&pool, "me");
        let (mut one, mut other) = (small(&me), small(&me));
        let mut steps = [(&mut one, 2 * G), (&mut other, 3 * G)];
        me.try_grow_all(&mut steps).unwrap();
        let mut state = pool.core.lock();
        assert_eq!(slot(&state, &one), (2 * G, [2 * G, 2 * G, 2 * G, G]));
        assert_eq!(slot(&state, &other), (3 * G, [3 * G, 3 * G, 3 * G, G]));
        let fresh = state.with_slot_out(other.place().slot, |state, slot| {
            state.unlocked(|| {
                let last = slot.space.never_used(2 * G).withdraw(2 * G);
                let last = last.unwrap().unwrap();
                let fresh = last.fresh;
                slot.space.place(2 * G, vec![last]).unwrap();
                fresh
            })
        });
        assert_eq!(
            fresh,
            Some(false),
            "the operation that created it has ended"
        );
    }

    /// Grows a block that has shrunk together with a block that cannot grow; returns the state of
    /// the first block's slot. The slot had two granules, of which the block used one.
    fn grow_in_vain(pool: &Pool, me: &Tenant, between: impl FnOnce(&Block)) -> (u64, [u64; 4]) {
        let (mut one, mut other) = (small(me), small(me));
        one.try_grow_to(2 * G - 7).unwrap();
        one.shrink_to(G - 5).unwrap();
        between(&one);
        let before = slot(&pool.core.lock(), &one);
        assert_eq!(before, (2 * G, [G - 5, 2 * G - 7, G, 2 * G]));
        let touched = pool
            .core
            .lock()
            .blocks
            .slots
            .get(one.place().slot)
            .unwrap()
            .touched;
        let mut steps = [(&mut one, 4 * G - 3), (&mut other, 4 * G)];
        assert!(me.try_grow_all(&mut steps).is_err());
        let state = pool.core.lock();
        assert_eq!(slot(&state, &other), (G, [G, G, G, G]));
        assert_eq!(
            state.blocks.slots.get(one.place().slot).unwrap().touched,
            touched
        );
        assert_eq!(state.memory.budget.totals().obtained, held(&state, me));
        slot(&state, &one)
    }

    #[test]
    fn when_one_block_cannot_grow_the_others_become_what_they_were() {
        let rig = rig();
        let pool = pool(&rig, 6);
        let me = tenant(&pool, "me");
        let after = grow_in_vain(&pool, &me, |_| ());
        assert_eq!(after, (2 * G, [G - 5, 2 * G - 7, G, 2 * G]));
    }

    #[test]
    fn what_a_lease_may_have_been_told_of_stays_behind_the_block() {
        let rig = rig();
        let pool = pool(&rig, 6);
        let me = tenant(&pool, "me");
        let mut lease = None;
        let after = grow_in_vain(&pool, &me, |block| lease = Some(block.lease()));
        assert_eq!(after, (4 * G, [G - 5, 2 * G - 7, G, 2 * G]));
        drop(lease);
    }

    #[test]
    fn a_block_that_was_exported_meanwhile_may_have_been_written_to_as_far_as_it_went() {
        let rig = rig();
        let pool = pool(&rig, 4);
        let me = tenant(&pool, "me");
        let block = me.block(3 * G).try_allocate().unwrap();
        let place = *block.place();
        let set = |slot: &mut Slot, [requested, ever, used, reach]: [u64; 4]| {
            let block = slot.block.as_mut().unwrap();
            (block.requested, block.ever) = (requested, ever);
            (block.used, block.reach) = (used, reach);
        };
        let (few, all) = ([G - 5, G - 3, G, 2 * G], [3 * G; 4]);
        for (exported, after) in [(false, few), (true, [G - 5, 3 * G, G, 3 * G])] {
            let mut state = pool.core.lock();
            let change = state.with_slot_out(place.slot, |_, slot| {
                set(slot, few);
                Change::of(slot, place)
            });
            let mut grown = state.take_out(place.slot).unwrap();
            set(&mut grown, all);
            (grown.pinned, grown.exported) = (true, exported);
            state.undo_out(grown, &change.unwrap());
            assert_eq!(slot(&state, &block), (3 * G, after));
        }
        pool.core
            .lock()
            .blocks
            .slots
            .get_mut(place.slot)
            .unwrap()
            .exported = false;
    }

    /// Leaves memory idle that must be zeroed before another tenant uses it.
    fn leave_idle(rig: &Rig, tenant: &Tenant, granules: u64) {
        let stream = Stream::new(&rig.device).unwrap();
        drop(tenant.allocate_on(&stream, granules * G).unwrap());
    }

    #[test]
    fn what_was_zeroed_for_it_stays_behind_the_block() {
        let rig = rig();
        for home in [Stream::new(&rig.device).unwrap(), rig.busy_stream()] {
            let pool = pool(&rig, 4);
            let (me, other) = (tenant(&pool, "me"), tenant(&pool, "other"));
            leave_idle(&rig, &other, 2);
            let two = me.block(G).capacity(4 * G).home_stream(&home);
            let mut blocks = two.try_allocate_many(2).unwrap();
            let [one, two] = &mut blocks[..] else {
                panic!("two blocks");
            };
            assert!(me.try_grow_all(&mut [(one, 2 * G), (two, 3 * G)]).is_err());
            let state = pool.core.lock();
            assert_eq!(slot(&state, &blocks[0]), (2 * G, [G; 4]));
            assert_eq!(slot(&state, &blocks[1]), (G, [G; 4]));
            let grown = state.blocks.slots.get(blocks[0].place().slot).unwrap();
            assert_eq!(grown.precommitted(), G);
            assert!(grown.fence.precedes(&home));
            assert_eq!((held(&state, &me), held(&state, &other)), (3 * G, G));
            drop(state);
            rig.finish(&home);
        }
    }

    /// Allocates two blocks of two granules on a stream while there is memory for one block, which
    /// is zeroed. The other tenant uses a granule.
    fn allocate_in_vain(rig: &Rig, home: &Stream) -> (Pool, [Tenant; 2], Block) {
        let pool = pool(rig, 4);
        let tenants = ["me", "other"].map(|name| tenant(&pool, name));
        let [me, other] = &tenants;
        let used = other.try_allocate(G).unwrap();
        leave_idle(rig, other, 2);
        let two = me.block(2 * G).home_stream(home);
        assert!(two.try_allocate_many(2).is_err());
        (pool, tenants, used)
    }

    #[test]
    fn a_new_slot_whose_memory_was_zeroed_goes_with_it() {
        let rig = rig();
        let home = Stream::new(&rig.device).unwrap();
        let (pool, [me, other], _used) = allocate_in_vain(&rig, &home);
        let state = pool.core.lock();
        assert!(state.blocks.slots.of(me.id()).unwrap().is_empty());
        assert_eq!((held(&state, &me), held(&state, &other)), (0, 2 * G));
        assert_eq!(state.memory.budget.totals().mappings, 2);
    }

    #[test]
    fn a_new_slot_whose_memory_is_being_zeroed_stays_until_that_has_passed() {
        let rig = rig();
        let home = rig.busy_stream();
        let (pool, [me, other], _used) = allocate_in_vain(&rig, &home);
        let mut state = pool.core.lock();
        assert_eq!((held(&state, &me), held(&state, &other)), (2 * G, 2 * G));
        let tenant = me.id();
        let slot = state.blocks.slots.get(SlotId { tenant, index: 0 }).unwrap();
        assert!(slot.is_vacant() && !slot.fence.is_complete());
        assert_eq!(slot.idle(), 2 * G);
        rig.finish(&home);
        assert_eq!(state.take_back_own(tenant, u64::MAX), (2 * G, Ok(())));
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_failed_audit_lets_the_lock_go() {
        let rig = rig();
        let pool = pool(&rig, 2);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.core.lock().memory.budget.created(G);
        }));
        assert!(failed.is_err());
        let locked = pool.core.state.try_lock();
        let free = !matches!(locked, Err(std::sync::TryLockError::WouldBlock));
        drop(locked);
        // The end of the lock would be audited too.
        std::mem::forget(pool);
        assert!(free, "the lock is held for ever");
    }
}
