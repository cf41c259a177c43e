//! Giving physical memory back to the driver: down to a mark, or all of it at the end.

use super::budget::TenantId;
use super::state::State;
use super::tenancy::Tenancy;
use crate::error::CallError;

impl State {
    pub(crate) fn trim(&mut self, keep: u64) -> Result<u64, CallError> {
        let before = self.budget.obtained();
        self.retire_all();
        let excess = |state: &Self| state.budget.obtained().saturating_sub(keep);
        if excess(self) > self.stock.bytes() {
            let wanted = excess(self) - self.stock.bytes();
            // Nobody in particular asks, so everybody's guarantee counts.
            self.take_back_any(TenantId(u64::MAX), wanted)?;
        }
        let stock = self.stock.bytes().saturating_sub(excess(self));
        self.release_stock(stock);
        // What was exported was released on the way.
        Ok(before - self.budget.obtained())
    }

    /// Gives everything back. Nobody holds a tenant, block or lease any more.
    pub(crate) fn shut(&mut self) -> Result<(), CallError> {
        if let Some(forked) = self.device.forked() {
            return Err(forked);
        }
        if self.device.lost().is_none() && self.has_limbo()? {
            self.device.drain()?;
        }
        let mut outcome = Ok(());
        for id in self.tenants.keys().copied().collect::<Vec<_>>() {
            if let Err(error) = self.empty(id) {
                outcome = Err(error);
            }
        }
        self.release_stock(0);
        self.retry_quarantine();
        outcome
    }

    fn has_limbo(&mut self) -> Result<bool, CallError> {
        let (capturing, needs) = (self.capturing, &mut self.needs_synchronise);
        let slots = self.tenants.values_mut().flat_map(Tenancy::slots_mut);
        for slot in slots {
            if !Self::poll(capturing, needs, &mut slot.fence)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Unmaps everything of a tenant, whose fences have passed.
    fn empty(&mut self, id: TenantId) -> Result<(), CallError> {
        let indices: Vec<usize> = match self.tenants.get(&id) {
            Some(tenancy) => tenancy.indices().collect(),
            None => return Ok(()),
        };
        for index in indices {
            let Some(mut slot) = self.take_slot(id, index) else {
                continue;
            };
            let extents = slot.space.extents().rev();
            let offsets: Vec<u64> = extents.map(|extent| extent.offset).collect();
            for offset in offsets {
                match slot.space.withdraw(offset) {
                    Ok(Some(piece)) if offset < slot.shared => {
                        self.parted(id, index, &mut slot, offset, piece);
                    }
                    Ok(Some(piece)) => self.taken(id, piece),
                    Ok(None) => {}
                    Err(error) => {
                        self.put_slot(id, index, slot);
                        return Err(error);
                    }
                }
            }
            self.drop_slot(id, index, slot);
        }
        self.budget.drain(id);
        Ok(())
    }

    /// Tries once more to give back what could not be given.
    fn retry_quarantine(&mut self) {
        let (physicals, mut spaces) = std::mem::take(&mut self.quarantine);
        for space in &mut spaces {
            drop(space.retry_stuck());
        }
        drop(spaces);
        drop(physicals);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let held = self.budget.obtained();
        if let Err(error) = self.shut() {
            self.device.report_drop("pool", held, error);
        }
    }
}
