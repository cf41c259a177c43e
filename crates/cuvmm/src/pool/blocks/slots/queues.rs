//! The queues of slots that are to be [purged](crate::pool::blocks::purge).

use std::collections::VecDeque;

use super::ids::SlotId;
use super::slot::Slot;

/// A queue of slots: those of registered tenants, or those of draining tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) enum PurgeQueue {
    Registered,
    Draining,
}

#[derive(Debug, Default)]
pub(in crate::pool) struct PurgeQueues {
    registered: VecDeque<SlotId>,
    draining: VecDeque<SlotId>,
    /// Slots of draining tenants that were listed since the last purge.
    listed: usize,
}

impl PurgeQueues {
    /// Lists a slot, before the slots listed already.
    pub(in crate::pool::blocks) fn list(&mut self, slot: &mut Slot, drains: bool) {
        if slot.purging && drains {
            self.registered.retain(|&id| id != slot.id);
            self.draining.retain(|&id| id != slot.id);
        } else if slot.purging {
            return;
        }
        slot.purging = true;
        match drains {
            true => {
                self.draining.push_front(slot.id);
                self.listed += 1;
            }
            false => self.registered.push_front(slot.id),
        }
    }

    pub(in crate::pool::blocks) const fn of(&mut self, queue: PurgeQueue) -> &mut VecDeque<SlotId> {
        match queue {
            PurgeQueue::Registered => &mut self.registered,
            PurgeQueue::Draining => &mut self.draining,
        }
    }

    pub(in crate::pool::blocks) fn is_empty(&self, queue: PurgeQueue) -> bool {
        match queue {
            PurgeQueue::Registered => self.registered.is_empty(),
            PurgeQueue::Draining => self.draining.is_empty(),
        }
    }

    pub(in crate::pool::blocks) fn are_empty(&self) -> bool {
        self.registered.is_empty() && self.draining.is_empty()
    }

    /// Returns how many slots of draining tenants were listed since the last call.
    pub(in crate::pool::blocks) const fn take_listed(&mut self) -> usize {
        std::mem::replace(&mut self.listed, 0)
    }

    pub(in crate::pool::blocks) const fn has_listed(&self) -> bool {
        self.listed > 0
    }

    #[cfg(debug_assertions)]
    pub(in crate::pool::blocks) fn has(&self, id: SlotId) -> bool {
        self.registered.contains(&id) || self.draining.contains(&id)
    }
}
