//! The tenants of a pool and their terms: names, priorities, hooks, and whether a tenant is
//! registered. Figures of tenants are in their [accounts](super::budget).

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Weak;

use super::budget::TenantId;
use crate::pool::line::PressureHook;

/// The hooks of a tenant: the one that other tenants' requests call, and the one that its own do.
pub(crate) type Hooks = (Option<PressureHook>, Option<PressureHook>);

/// The users' handle of a tenant.
pub(crate) type Handle = Weak<dyn Any + Send + Sync>;

struct Terms {
    name: String,
    priority: i32,
    hooks: Hooks,
    registered: bool,
    /// `true` if the tenant exceeds its own lowered limit. Updated when a limit changes and when
    /// memory beyond a limit was reclaimed.
    beyond: bool,
    refusals: u64,
    /// While a handle lives.
    handle: Option<Handle>,
}

/// The tenants of a pool that are registered or draining.
#[derive(Default)]
pub(in crate::pool) struct Tenants {
    terms: BTreeMap<TenantId, Terms>,
    next: u64,
}

impl Tenants {
    pub(in crate::pool) fn open(&mut self, name: String, priority: i32, hooks: Hooks) -> TenantId {
        let id = TenantId(self.next);
        self.next += 1;
        let terms = Terms {
            name,
            priority,
            hooks,
            registered: true,
            beyond: false,
            refusals: 0,
            handle: None,
        };
        self.terms.insert(id, terms);
        id
    }

    /// Ends a tenant's registration; returns its hooks, which are user code to be dropped without
    /// the lock. Returns `None` if the tenant is not registered.
    pub(in crate::pool) fn unregister(&mut self, id: TenantId) -> Option<Hooks> {
        let terms = self.terms.get_mut(&id).filter(|terms| terms.registered)?;
        terms.registered = false;
        Some(std::mem::take(&mut terms.hooks))
    }

    pub(in crate::pool) fn close(&mut self, id: TenantId) {
        self.terms.remove(&id);
    }

    pub(super) fn set_priority(&mut self, id: TenantId, priority: i32) {
        self.change(id, |terms| terms.priority = priority);
    }

    /// Notes whether a tenant exceeds its own lowered limit.
    pub(super) fn set_beyond(&mut self, id: TenantId, yes: bool) {
        self.change(id, |terms| terms.beyond = yes);
    }

    /// Replaces a tenant's hooks. Returns the old ones, which are user code to be dropped without
    /// the lock.
    pub(super) fn replace_hooks(&mut self, id: TenantId, hooks: Hooks) -> Option<Hooks> {
        self.change(id, |terms| std::mem::replace(&mut terms.hooks, hooks))
    }

    pub(in crate::pool) fn set_handle(&mut self, id: TenantId, handle: Handle) {
        self.change(id, |terms| terms.handle = Some(handle));
    }

    pub(in crate::pool) fn count_refusal(&mut self, id: TenantId) {
        self.change(id, |terms| terms.refusals += 1);
    }

    fn change<T>(&mut self, id: TenantId, change: impl FnOnce(&mut Terms) -> T) -> Option<T> {
        self.terms.get_mut(&id).map(change)
    }

    fn of<T>(&self, id: TenantId, of: impl FnOnce(&Terms) -> T) -> Option<T> {
        self.terms.get(&id).map(of)
    }

    pub(in crate::pool) fn ids(&self) -> impl Iterator<Item = TenantId> {
        self.terms.keys().copied()
    }

    /// Returns a tenant's name; an empty name if the tenant is gone.
    pub(in crate::pool) fn name_of(&self, id: TenantId) -> String {
        self.of(id, |terms| terms.name.clone()).unwrap_or_default()
    }

    pub(in crate::pool) fn is_registered(&self, id: TenantId) -> bool {
        self.of(id, |terms| terms.registered) == Some(true)
    }

    /// Returns `true` if the tenant is unregistered and some of its memory is left.
    pub(in crate::pool) fn drains(&self, id: TenantId) -> bool {
        self.of(id, |terms| terms.registered) == Some(false)
    }

    /// Returns `true` if the tenant exceeds its own lowered limit.
    pub(in crate::pool) fn is_beyond(&self, id: TenantId) -> bool {
        self.of(id, |terms| terms.beyond) == Some(true)
    }

    /// Returns the rank of a tenant, by which memory is taken from it, the lowest first: whether it
    /// is registered, and its priority.
    pub(in crate::pool) fn rank(&self, id: TenantId) -> (bool, i32) {
        let rank = self.of(id, |terms| (terms.registered, terms.priority));
        rank.unwrap_or_default()
    }

    /// Returns the [ranks](Self::rank) of all tenants, in the order of their numbers.
    pub(in crate::pool) fn ranks(&self) -> impl Iterator<Item = (TenantId, (bool, i32))> {
        let all = self.terms.iter();
        all.map(|(&id, terms)| (id, (terms.registered, terms.priority)))
    }

    /// Returns a tenant's name, its [rank](Self::rank), and how many of its requests were refused.
    pub(in crate::pool) fn described(&self, id: TenantId) -> Option<(String, (bool, i32), u64)> {
        self.of(id, |terms| {
            let rank = (terms.registered, terms.priority);
            (terms.name.clone(), rank, terms.refusals)
        })
    }

    /// Returns the hook that a tenant's own requests call.
    pub(in crate::pool) fn shortage_hook(&self, id: TenantId) -> Option<PressureHook> {
        self.of(id, |terms| terms.hooks.1.clone()).flatten()
    }

    /// Returns the tenants with a hook that a request of `id` calls, with their priorities.
    pub(in crate::pool) fn hooks_for(
        &self,
        id: TenantId,
    ) -> impl Iterator<Item = (TenantId, i32, &PressureHook)> {
        let others = self.terms.iter().filter(move |&(&other, _)| other != id);
        others.filter_map(|(&other, terms)| Some((other, terms.priority, terms.hooks.0.as_ref()?)))
    }

    /// Returns the registered tenant with a name.
    pub(in crate::pool) fn find(&self, name: &str) -> Option<TenantId> {
        let has_name = |terms: &Terms| terms.registered && terms.name == name;
        let mut all = self.terms.iter();
        all.find_map(|(&id, terms)| has_name(terms).then_some(id))
    }

    /// Returns the handles of the registered tenants.
    pub(in crate::pool) fn handles(&self) -> Vec<Handle> {
        let registered = self.terms.values().filter(|terms| terms.registered);
        registered
            .filter_map(|terms| terms.handle.clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn open(tenants: &mut Tenants, name: &str) -> TenantId {
        tenants.open(name.to_owned(), 0, (Some(Arc::new(|_| ())), None))
    }

    #[test]
    fn a_tenant_is_registered_then_drains_then_is_gone() {
        let mut tenants = Tenants::default();
        let (a, b) = (open(&mut tenants, "a"), open(&mut tenants, "b"));
        assert!(tenants.is_registered(a) && !tenants.drains(a));
        let hooks = tenants.unregister(a);
        assert!(hooks.is_some_and(|(hook, own)| hook.is_some() && own.is_none()));
        assert!(tenants.unregister(a).is_none(), "unregistered once");
        assert!(!tenants.is_registered(a) && tenants.drains(a));
        let hooks = |id| tenants.hooks_for(id).map(|(other, ..)| other);
        assert_eq!(hooks(TenantId::NONE).collect::<Vec<_>>(), [b]);
        assert_eq!(hooks(b).count(), 0, "its own");
        assert_eq!((tenants.find("a"), tenants.find("b")), (None, Some(b)));
        tenants.close(a);
        assert!(!tenants.drains(a) && tenants.name_of(a).is_empty());
        assert_ne!(open(&mut tenants, "c"), a, "a number is never used twice");
    }
}
