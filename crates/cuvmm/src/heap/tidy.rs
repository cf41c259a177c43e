//! Unmapping of mappings that are not searched, when very many are retired or addresses are short.

use super::core::{Core, PINNED};
use crate::pool::{HolderId, Tenant};

/// The most unsearched mappings that an allocation unmaps.
const TIDIED: usize = 16;

impl Core {
    pub(super) fn release_mappings(&self, (tenant, holder): (&Tenant, HolderId), most: usize) {
        let given = crate::pool::Given {
            mappings: self.unmap_retired(most),
            ..Default::default()
        };
        tenant.give_up(holder, given);
    }

    /// Has a few mappings unmapped if very many are retired: by the mapper, or here if there is no
    /// mapper or it is far behind.
    pub(super) fn tidy_some(&self, owner: (&Tenant, HolderId)) {
        if self.has(PINNED) {
            return;
        }
        let (retired, most) = {
            let state = self.lock();
            (state.retired.len(), state.most_retired(self.addresses))
        };
        if retired <= most || (retired <= 2 * most && owner.0.tidy_later(owner.1)) {
            return;
        }
        self.tidy_now(owner, TIDIED);
    }

    pub(super) fn tidy_now(&self, owner: (&Tenant, HolderId), most: usize) {
        let polling = owner.0.polling();
        self.lock().refresh(polling.is_some());
        drop(polling);
        self.release_mappings(owner, most);
    }
}
