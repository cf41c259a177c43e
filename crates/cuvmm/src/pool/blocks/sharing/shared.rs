//! Memory that several blocks of a tenant share under their first bytes: mapped under each, held
//! and charged once.
//!
//! A slot knows the offset up to which it shares, and leaves that memory out of its figures. Two
//! slots that share an extent share all extents before it: sharing begins with a
//! [fork](super::fork), which takes a prefix, and ends from behind.
//!
//! Every slot unmaps an extent only behind its own fence, so the last slot, which frees the memory,
//! does so behind all of them. A slot that is the last to map an extent owns it. Memory that a slot
//! shares, or may only read, and does not use is not reused by any block: it is
//! [purged](crate::pool::blocks::purge).

use cuvmm_driver::PhysicalHandle;

use crate::own::Physical;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{Sharers, Slot, SlotId};

impl Blocks {
    /// Notes that `slot` maps the memory of `source` up to `end`. Both are out.
    pub(super) fn share(&mut self, source: &mut Slot, slot: &mut Slot, end: u64) {
        let Some(tenancy) = self.slots.of_mut(slot.id.tenant) else {
            return;
        };
        let (from, to) = (source.id.index, slot.id.index);
        for (extent, physical) in slot.space.parts_in(0, end) {
            tenancy.share_table.add(physical, extent.offset, from, to);
        }
        slot.shared = end;
        slot.lent = end;
        source.shared = source.shared.max(end);
        self.slots.renew(source);
        self.slots.renew(slot);
    }

    /// Notes that a slot no longer maps the extent at an offset. Returns `true` if no other slot
    /// maps it.
    pub(in crate::pool::blocks) fn leave(
        &mut self,
        slot: &mut Slot,
        offset: u64,
        handle: PhysicalHandle,
    ) -> bool {
        let SlotId { tenant, index } = slot.id;
        let tenancy = self.slots.of_mut(tenant);
        let Some(left) = tenancy.and_then(|it| it.share_table.remove(handle, index)) else {
            return true;
        };
        slot.shared = slot.shared.min(offset);
        // A slot that is out finds that it is the last when it is put back.
        if let Sharers::One(index) = left {
            self.with_slot(SlotId { tenant, index }, |_| ());
        }
        left == Sharers::None
    }

    /// Ends the sharing of memory that no slot maps any more, since a panic has lost the slots that did.
    /// Returns `false` if a slot may map it.
    pub(in crate::pool::blocks) fn ends_sharing(
        &mut self,
        id: TenantId,
        memory: &Physical,
    ) -> bool {
        let ends = !memory.is_shared();
        if ends && let Some(tenancy) = self.slots.of_mut(id) {
            tenancy.share_table.forget(memory.as_raw());
        }
        ends
    }

    /// Returns how many other slots map a slot's extent at an offset.
    pub(super) fn count_others(&self, slot: &Slot, offset: u64) -> usize {
        let mut here = slot.space.parts_in(offset, offset.saturating_add(1));
        let tenancy = self.slots.of(slot.id.tenant);
        let (Some((_, physical)), Some(tenancy)) = (here.next(), tenancy) else {
            return 0;
        };
        tenancy.share_table.others(physical.as_raw())
    }
}
