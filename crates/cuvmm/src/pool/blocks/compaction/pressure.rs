//! Compaction for requests that lack memory: blocks whose owners agreed to it give back what they
//! have given up.
//!
//! The owner of a *movable* block launches all work on it under leases. So while no lease lives,
//! the fence of the block's home stream and its recorded uses covers all work on it. The fence is
//! made and polled when the block's slot is out; no lease begins before the slot is back.
//!
//! Keeps I-87.

use super::{Compaction, Moved, Run, may_compact};
use crate::error::BlockError;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{Slot, SlotId};
use crate::pool::core::Locked;
use crate::pool::memory::Memory;

impl Locked<'_> {
    /// Cuts movable blocks until they have given back as much as a refused request lacks, or until
    /// none is left. Returns `true` if some memory was given back. Waits for no work but its copies.
    pub(in crate::pool) fn cut_for(&mut self, id: TenantId, refused: &BlockError) -> bool {
        let shortage = match refused {
            BlockError::OutOfMemory(shortage) | BlockError::DriverOutOfMemory { shortage, .. } => {
                shortage
            }
            _ => return false,
        };
        if !self.blocks.slots.has_movable() || may_compact(&self.memory).is_err() {
            return false;
        }
        let lacking = shortage.wanted.saturating_sub(shortage.available).max(1);
        let mut report = Compaction::default();
        for slot in self.blocks.movable(&self.memory, id, shortage.wanted) {
            if report.given_back >= lacking {
                break;
            }
            let account = self.memory.budget.account(slot.tenant);
            if slot.tenant != id && account.held <= account.guarantee {
                continue;
            }
            let cut = self.with_slot_out(slot, |state, slot| match may_be_cut(slot) {
                true => state.cut(slot, &mut report),
                // Another block may have come there while the last one was cut.
                false => Ok(Moved::InUse),
            });
            match cut {
                None | Some(Ok(Moved::Copied(_))) => {}
                Some(Ok(_)) => log!(debug, "a movable block stays as it is for now"),
                Some(Err(error)) => {
                    log!(warn, %error, "a movable block could not give memory back");
                    break;
                }
            }
        }
        report.given_back > 0
    }
}

/// Returns `true` if there is a movable block that is awake and has no lease.
fn may_be_cut(slot: &Slot) -> bool {
    let movable = slot.block.as_ref().is_some_and(|block| block.movable);
    movable && slot.is_free() && slot.sleep_state.is_awake()
}

impl Blocks {
    /// Returns the movable blocks that could help a tenant's request of `bytes` by a cut: its own,
    /// and those of other tenants if its own limit allows the request. Draining tenants come before
    /// others, then lower priorities, then blocks of which the least is copied.
    fn movable(&self, memory: &Memory, id: TenantId, bytes: u64) -> Vec<SlotId> {
        let is_own_limit = memory.budget.missing(id, bytes).0 > 0;
        let mut found = Vec::new();
        for (other, tenancy) in self.slots.iter() {
            if is_own_limit && other != id {
                continue;
            }
            let rank = (other != id, memory.budget.account(other).rank());
            for slot in tenancy.indices().filter_map(|index| tenancy.slot(index)) {
                if may_be_cut(slot)
                    && let Some(run) = Run::cut(slot)
                {
                    found.push((rank, run.size, slot.id));
                }
            }
        }
        found.sort_unstable();
        found.into_iter().map(|(.., id)| id).collect()
    }
}
