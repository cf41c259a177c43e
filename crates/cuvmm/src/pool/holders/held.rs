//! The holders of a pool, and their parts of their tenants' charges.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::holder::{Holder, HolderFigures};
use crate::pool::accounts::TenantId;

/// The name of a holder: its tenant, and a number that is never used twice in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HolderId {
    tenant: TenantId,
    number: u64,
}

impl HolderId {
    pub(super) const fn tenant(self) -> TenantId {
        self.tenant
    }
}

/// A holder, and its part of its tenant's charge.
pub(super) struct Held {
    pub(super) id: HolderId,
    pub(super) holder: Arc<dyn Holder>,
    /// Bytes charged, including those on their way to the holder or from it.
    pub(super) bytes: u64,
    /// Bytes that the ledger counts as obtained by the driver's memory pools.
    pub(super) obtained: u64,
    pub(super) mappings: u64,
    pub(super) addresses: u64,
    /// Set when its owner is gone: its memory goes to the pool as the work on it is complete.
    pub(super) ended: bool,
    /// Set while the mapper unmaps mappings of the holder, which until then is charged for them and
    /// stays.
    pub(super) tidied: bool,
}

impl Held {
    pub(super) fn is_untidy(&self) -> bool {
        self.holder.is_untidy()
    }

    /// Returns the bytes that can be reclaimed once further work is complete.
    fn pending(&self) -> u64 {
        let ready: u64 = self.holder.reclaimable(false).iter().sum();
        self.holder.figures().idle.saturating_sub(ready)
    }
}

#[derive(Default)]
pub(in crate::pool) struct Holders {
    of_tenants: BTreeMap<TenantId, Vec<Held>>,
    attached: u64,
    /// Those whose unused mappings the mapper is to unmap.
    untidy: Vec<HolderId>,
    /// `true` while tenants are charged more for memory pools of the driver than the ledger grants.
    pub(super) is_uncovered: bool,
}

impl Holders {
    pub(super) fn add(&mut self, tenant: TenantId, holder: Arc<dyn Holder>) -> HolderId {
        self.attached += 1;
        let id = HolderId {
            tenant,
            number: self.attached,
        };
        self.of_tenants.entry(tenant).or_default().push(Held {
            id,
            holder,
            bytes: 0,
            obtained: 0,
            mappings: 0,
            addresses: 0,
            ended: false,
            tidied: false,
        });
        id
    }

    pub(super) fn remove(&mut self, id: HolderId) -> Option<Held> {
        let of_tenant = self.of_tenants.get_mut(&id.tenant)?;
        let at = of_tenant.iter().position(|held| held.id == id)?;
        let held = of_tenant.swap_remove(at);
        if of_tenant.is_empty() {
            self.of_tenants.remove(&id.tenant);
        }
        Some(held)
    }

    pub(super) fn get(&self, id: HolderId) -> Option<&Held> {
        self.of(id.tenant).iter().find(|held| held.id == id)
    }

    pub(super) fn holder(&self, id: HolderId) -> Option<Arc<dyn Holder>> {
        self.get(id).map(|held| Arc::clone(&held.holder))
    }

    pub(super) fn get_mut(&mut self, id: HolderId) -> Option<&mut Held> {
        let of_tenant = self.of_tenants.get_mut(&id.tenant)?;
        of_tenant.iter_mut().find(|held| held.id == id)
    }

    pub(super) fn of(&self, tenant: TenantId) -> &[Held] {
        self.of_tenants.get(&tenant).map_or(&[], Vec::as_slice)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Held> {
        self.of_tenants.values().flatten()
    }

    pub(super) fn ids(&self) -> Vec<HolderId> {
        self.all().map(|held| held.id).collect()
    }

    pub(in crate::pool) fn is_empty(&self) -> bool {
        self.of_tenants.is_empty()
    }

    /// Returns `true` if a tenant has holders.
    pub(in crate::pool) fn has(&self, tenant: TenantId) -> bool {
        self.of_tenants.contains_key(&tenant)
    }

    /// Returns the figures of each of a tenant's holders, with the bytes charged for it.
    pub(in crate::pool) fn figures_of(
        &self,
        tenant: TenantId,
    ) -> impl Iterator<Item = (u64, HolderFigures)> {
        let holders = self.of(tenant).iter();
        holders.map(|held| (held.bytes, held.holder.figures()))
    }

    /// Returns the sizes of the extents that each of a tenant's holders can give, with its name. For
    /// another tenant (`others`), also those of holders that are growing. Polls fences with `polls`.
    pub(in crate::pool) fn reclaimable(
        &self,
        tenant: TenantId,
        others: bool,
        polls: bool,
    ) -> impl Iterator<Item = (HolderId, Vec<u64>)> {
        let holders = self.of(tenant).iter();
        let giving = holders.filter(move |held| others || !held.holder.is_growing());
        giving.map(move |held| (held.id, held.holder.reclaimable(polls)))
    }

    /// Returns `true` if a holder has mappings to give: memory pools of the driver have none.
    pub(in crate::pool) fn has_mappings(&self, id: HolderId) -> bool {
        self.get(id).is_some_and(|held| !held.holder.is_of_driver())
    }

    /// Sets whether a tenant's holders report freed memory to the pool; those that ended do. Those
    /// of a tenant that `drains` give back what they do not use.
    pub(in crate::pool) fn terms_changed(&self, tenant: TenantId, reports: bool, drains: bool) {
        for held in self.of(tenant) {
            held.holder.report_freed(reports || held.ended);
            if drains {
                held.holder.close();
            }
        }
    }

    /// Returns the bytes of a tenant's holders that can be reclaimed once their work is complete.
    pub(in crate::pool) fn pending(&self) -> u64 {
        self.all().map(Held::pending).sum()
    }

    pub(super) fn addresses_of(&self, id: HolderId) -> u64 {
        self.get(id).map_or(0, |held| held.addresses)
    }

    pub(super) fn add_addresses(&mut self, id: HolderId, bytes: u64) {
        if let Some(held) = self.get_mut(id) {
            held.addresses += bytes;
        }
    }

    pub(super) fn subtract_addresses(&mut self, id: HolderId, bytes: u64) {
        if let Some(held) = self.get_mut(id) {
            held.addresses -= bytes;
        }
    }

    /// Lists a holder to be tidied.
    pub(super) fn list(&mut self, id: HolderId) {
        if !self.untidy.contains(&id) {
            self.untidy.push(id);
        }
    }

    pub(super) fn take_listed(&mut self) -> Vec<HolderId> {
        std::mem::take(&mut self.untidy)
    }

    /// Returns `true` if a holder is listed to be tidied.
    pub(in crate::pool) const fn is_untidy(&self) -> bool {
        !self.untidy.is_empty()
    }
}
