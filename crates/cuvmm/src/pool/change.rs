//! What one operation does to several blocks, and how each is undone when another cannot be had.
//!
//! What each took is kept apart until all have succeeded. Meanwhile the slots are in their places and
//! *pinned*: other operations may take what is idle behind a block, and none
//! moves it.

use super::commit::Furnished;
use super::core::{Core, Locked};
use super::ids::BlockPlace;
use super::slot::Slot;
use super::state::State;
use crate::region::Fence;

/// A block that was grown or put in a slot, and what it was before.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) place: BlockPlace,
    /// What the block was. Nothing if there was none.
    before: Option<Sizes>,
    /// When the slot had been used last.
    touched: u64,
    /// Whether a lease lived, whose holder may have been told what the block was given.
    leased: bool,
    /// Whether the slot was opened for it and goes with it.
    pub(super) new: bool,
    /// Nothing if it took what was there.
    pub(super) given: Option<Furnished>,
}

/// How much a block uses, in bytes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    requested: u64,
    ever: u64,
    used: u64,
    reach: u64,
}

impl Change {
    /// Of a slot that nothing was done to yet.
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
    /// Ends an operation that changed several blocks: all have succeeded, or everything becomes what
    /// it was.
    pub(super) fn conclude<'a>(
        &'a self,
        mut state: Locked<'a>,
        changes: Vec<Change>,
        succeeded: bool,
    ) -> Locked<'a> {
        for change in changes.into_iter().rev() {
            // The mapper may go on placing behind a block that has grown.
            let size = if succeeded { 0 } else { u64::MAX };
            state = self.await_slots(state, std::iter::once((change.place.slot, size)));
            match succeeded {
                true => state.settle(&change),
                false => state.undo(change),
            }
        }
        state
    }
}

impl Locked<'_> {
    fn settle(&mut self, change: &Change) {
        let id = change.place.slot;
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        slot.pinned = false;
        if let Some(given) = change.given {
            slot.space.settle(given.begun);
            if change.before.is_some() {
                self.ask_precommit(id);
            }
        }
    }

    /// Makes a slot, which is in its place, what it was.
    fn undo(&mut self, change: Change) {
        if let Some(slot) = self.take_out(change.place.slot) {
            self.undo_out(slot, &change);
        }
    }

    /// Makes a slot, which is out, what it was. Memory that is being written to on the block's home
    /// stream stays.
    pub(super) fn undo_out(&mut self, mut slot: Box<Slot>, change: &Change) {
        slot.pinned = false;
        let home = slot.home().cloned();
        match (change.before, &mut slot.block) {
            (Some(before), Some(block)) => {
                block.requested = before.requested;
                block.used = before.used;
                // What was exported meanwhile may be written to.
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
                // With a new slot nothing else waits for it.
                written = !(change.new && self.has_passed(&mut slot));
            }
            if !written && !change.leased {
                // Where a lease may have been asked what is there it stays, as precommitted memory.
                self.uncommit(&mut slot, given.begun, &Fence::complete());
            }
            if change.new && !written {
                return self.drop_slot(slot);
            }
        }
        self.put_slot(slot);
    }

    fn has_passed(&mut self, slot: &mut Slot) -> bool {
        let state: &mut State = self;
        let needs = &mut state.needs_synchronise;
        matches!(
            State::poll(state.capturing, needs, &mut slot.fence),
            Ok(true)
        )
    }
}
