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

pub(crate) struct Terms {
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

impl Terms {
    pub(crate) const fn new(name: String, priority: i32, hooks: Hooks) -> Self {
        Self {
            name,
            priority,
            hooks,
            registered: true,
            beyond: false,
            refusals: 0,
            handle: None,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) const fn priority(&self) -> i32 {
        self.priority
    }

    pub(super) const fn set_priority(&mut self, priority: i32) {
        self.priority = priority;
    }

    pub(in crate::pool) const fn is_beyond(&self) -> bool {
        self.beyond
    }

    pub(super) const fn set_beyond(&mut self, yes: bool) {
        self.beyond = yes;
    }

    /// Returns how many requests were refused.
    pub(crate) const fn refusals(&self) -> u64 {
        self.refusals
    }

    pub(in crate::pool) const fn count_refusal(&mut self) {
        self.refusals += 1;
    }

    pub(crate) const fn handle(&self) -> Option<&Handle> {
        self.handle.as_ref()
    }

    pub(in crate::pool) fn set_handle(&mut self, handle: Handle) {
        self.handle = Some(handle);
    }

    pub(in crate::pool) const fn is_registered(&self) -> bool {
        self.registered
    }

    /// Returns `true` if the tenant's blocks may grow within their memory.
    pub(crate) const fn may_grow(&self) -> bool {
        self.registered && !self.beyond
    }

    /// Replaces the hooks. Returns the old ones, which are user code to be dropped without the lock.
    pub(super) const fn replace_hooks(&mut self, hooks: Hooks) -> Hooks {
        std::mem::replace(&mut self.hooks, hooks)
    }

    /// Returns the hook that requests of other tenants call.
    pub(crate) const fn hook(&self) -> Option<&PressureHook> {
        self.hooks.0.as_ref()
    }

    /// Returns the hook that the tenant's own requests call.
    pub(in crate::pool) const fn shortage_hook(&self) -> Option<&PressureHook> {
        self.hooks.1.as_ref()
    }
}

/// The tenants of a pool that are registered or draining.
#[derive(Default)]
pub(in crate::pool) struct Tenants {
    terms: BTreeMap<TenantId, Terms>,
    next: u64,
}

impl Tenants {
    pub(crate) fn open(&mut self, terms: Terms) -> TenantId {
        let id = TenantId(self.next);
        self.next += 1;
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

    pub(crate) fn close(&mut self, id: TenantId) {
        self.terms.remove(&id);
    }

    pub(crate) fn get(&self, id: TenantId) -> Option<&Terms> {
        self.terms.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: TenantId) -> Option<&mut Terms> {
        self.terms.get_mut(&id)
    }

    pub(in crate::pool) fn is_registered(&self, id: TenantId) -> bool {
        self.get(id).is_some_and(Terms::is_registered)
    }

    /// Returns `true` if the tenant is unregistered and some of its memory is left.
    pub(crate) fn drains(&self, id: TenantId) -> bool {
        self.get(id).is_some_and(|terms| !terms.registered)
    }

    /// Returns a tenant's name; an empty name if the tenant is gone.
    pub(crate) fn name_of(&self, id: TenantId) -> String {
        self.get(id).map_or_else(String::new, |it| it.name.clone())
    }

    /// Returns the registered tenants.
    pub(crate) fn registered(&self) -> impl Iterator<Item = (TenantId, &Terms)> {
        self.iter().filter(|(_, terms)| terms.registered)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (TenantId, &Terms)> {
        self.terms.iter().map(|(&id, terms)| (id, terms))
    }

    /// Returns the registered tenant with a name.
    pub(in crate::pool) fn find(&self, name: &str) -> Option<TenantId> {
        let mut registered = self.registered();
        registered.find_map(|(id, terms)| (terms.name == name).then_some(id))
    }

    pub(in crate::pool) fn ids(&self) -> impl Iterator<Item = TenantId> {
        self.terms.keys().copied()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (TenantId, &mut Terms)> {
        self.terms.iter_mut().map(|(&id, terms)| (id, terms))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn terms(name: &str) -> Terms {
        Terms::new(name.to_owned(), 0, (Some(Arc::new(|_| ())), None))
    }

    #[test]
    fn a_tenant_is_registered_then_drains_then_is_gone() {
        let mut tenants = Tenants::default();
        let (a, b) = (tenants.open(terms("a")), tenants.open(terms("b")));
        assert!(tenants.is_registered(a) && !tenants.drains(a));
        let hooks = tenants.unregister(a);
        assert!(hooks.is_some_and(|(hook, own)| hook.is_some() && own.is_none()));
        assert!(tenants.unregister(a).is_none(), "unregistered once");
        assert!(!tenants.is_registered(a) && tenants.drains(a));
        assert!(
            tenants
                .get(a)
                .is_some_and(|it| it.hook().is_none() && !it.may_grow())
        );
        let names: Vec<_> = tenants
            .registered()
            .map(|(id, it)| (id, it.name()))
            .collect();
        assert_eq!(names, [(b, "b")]);
        tenants.close(a);
        assert!(!tenants.drains(a) && tenants.name_of(a).is_empty());
        assert_ne!(tenants.open(terms("c")), a, "a number is never used twice");
    }
}
