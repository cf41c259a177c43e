//! The accounts of a pool and its tenants: bytes, mappings and addresses, charged against limits, and
//! the terms on which tenants were registered.
//!
//! This module makes no driver calls. An operation charges before its first
//! driver call and refunds after its last. Guarantees: no tenant is charged beyond the limit minus
//! the sum, over all other tenants, of the bytes missing to their guarantees.
//!
//! Keeps I-2 and I-5.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Weak;

use crate::error::PoolError;
use crate::pool::line::PressureHook;

/// A tenant's number, never used twice in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::pool) struct TenantId(pub(crate) u64);

impl TenantId {
    /// Names no tenant.
    pub(crate) const NONE: Self = Self(u64::MAX);
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::pool) struct Amount {
    pub(crate) bytes: u64,
    pub(crate) mappings: u64,
    pub(crate) addresses: u64,
}

impl Amount {
    pub(in crate::pool) const fn of(bytes: u64, mappings: u64, addresses: u64) -> Self {
        Self {
            bytes,
            mappings,
            addresses,
        }
    }

    pub(crate) const fn bytes(bytes: u64) -> Self {
        Self::of(bytes, 0, 0)
    }

    pub(crate) const fn mappings(mappings: u64) -> Self {
        Self::of(0, mappings, 0)
    }
}

/// An amount charged for resources that do not exist yet. It is [kept](Budget::keep) once they are
/// counted where they are, or [refunded](Budget::refund). Until then its bytes are in flight.
#[must_use = "a charge that is neither kept nor refunded stays for ever"]
#[derive(Debug)]
pub(crate) struct Charge {
    tenant: Option<TenantId>,
    of: Amount,
}

impl Charge {
    /// Returns the charge for the first `bytes`, and leaves the rest here.
    pub(crate) const fn split(&mut self, bytes: u64) -> Self {
        self.of.bytes -= bytes;
        Self {
            tenant: self.tenant,
            of: Amount::bytes(bytes),
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.of != Amount::default() && !std::thread::panicking() {
            debug_assert!(false, "a charge is lost: {self:?}");
            log!(error, charge = ?self, "a charge is lost: it stays for ever");
        }
    }
}

/// The hooks of a tenant: the one that other tenants' requests call, and the one that its own do.
pub(crate) type Hooks = (Option<PressureHook>, Option<PressureHook>);

/// The users' handle of a tenant.
pub(crate) type Handle = Weak<dyn Any + Send + Sync>;

/// A tenant's figures and terms. A tenant that is gone has none.
#[derive(Default)]
pub(crate) struct Account {
    pub(crate) name: String,
    pub(crate) priority: i32,
    pub(in crate::pool) hooks: Hooks,
    pub(in crate::pool) registered: bool,
    /// `true` if the tenant is unregistered and some of its memory is left.
    pub(in crate::pool) drains: bool,
    /// `true` if the tenant exceeds its own lowered limit. Updated when a limit changes and when
    /// memory beyond a limit was reclaimed.
    pub(in crate::pool) beyond: bool,
    pub(in crate::pool) refusals: u64,
    /// While a handle lives.
    pub(in crate::pool) handle: Option<Handle>,
    pub(crate) guarantee: u64,
    pub(crate) limit: u64,
    pub(crate) held: u64,
    /// The held bytes that are on their way: their charges are neither kept nor refunded yet.
    pub(in crate::pool) in_flight: u64,
    pub(crate) mappings: u64,
    pub(crate) addresses: u64,
    pub(crate) peak: u64,
}

impl Account {
    /// Returns the rank by which memory is taken from the tenant, the lowest first: whether it is
    /// registered, and its priority.
    pub(in crate::pool) const fn rank(&self) -> (bool, i32) {
        (self.registered, self.priority)
    }

    fn claim(&self) -> u64 {
        self.guarantee.max(self.held)
    }

    fn missing_to_guarantee(&self) -> u64 {
        self.guarantee.saturating_sub(self.held)
    }
}

/// The figures of a whole pool: bytes, mappings, and bytes of addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::pool) struct Totals {
    pub(crate) limits: Amount,
    /// The bytes of the limit that a ledger has granted. Only these can be charged. Without a
    /// ledger, `u64::MAX`.
    pub(crate) granted: u64,
    /// The bytes that a ledger can still grant within the limit.
    pub(crate) ungranted: u64,
    pub(crate) held: u64,
    /// The highest value that `held` ever had.
    pub(crate) peak: u64,
    pub(crate) mappings: u64,
    pub(crate) addresses: u64,
    /// The bytes that may still be created, and what is left of the limits of mappings and
    /// addresses.
    pub(crate) left: Amount,
    /// Bytes obtained from the driver: held by tenants, in the free list, in flight, or
    /// quarantined.
    pub(crate) obtained: u64,
    /// Bytes obtained beyond a lowered limit.
    pub(crate) excess: u64,
    /// Bytes given back to the driver so far.
    pub(crate) given_back: u64,
    /// Bytes out of use for good, which are charged to no tenant and reduce what each tenant can
    /// have.
    pub(crate) quarantined: u64,
    /// `true` if more is claimed than the pool may hold: a guarantee can be given while other
    /// tenants hold idle memory beyond what it leaves them. That memory is reclaimed when it is
    /// needed.
    pub(crate) overdrawn: bool,
}

/// All accounts of a pool, and their totals, so that charges and the usual queries do not iterate
/// over the accounts.
pub(in crate::pool) struct Budget {
    accounts: BTreeMap<TenantId, Account>,
    /// The account of tenants that are gone.
    none: Account,
    next: u64,
    /// The sum, over all tenants, of the guarantee or the held bytes, whichever is more.
    claimed: u64,
    /// Without the figures that [`totals`](Self::totals) derives from these.
    all: Totals,
}

impl Budget {
    pub(crate) fn new(limits: Amount) -> Self {
        Self {
            accounts: BTreeMap::new(),
            none: Account::default(),
            next: 0,
            claimed: 0,
            all: Totals {
                limits,
                granted: u64::MAX,
                ..Totals::default()
            },
        }
    }

    /// Lets only bytes that a ledger grants be charged; none at first.
    pub(super) const fn needs_grants(&mut self) {
        self.all.granted = 0;
    }

    pub(super) const fn grant(&mut self, bytes: u64) {
        self.all.granted = self.all.granted.saturating_add(bytes);
    }

    pub(super) const fn return_grant(&mut self, bytes: u64) {
        self.all.granted = self.all.granted.saturating_sub(bytes);
    }

    /// Returns the granted bytes that are neither obtained nor claimed after tenants have given up
    /// `reclaimed` bytes beyond their guarantees and the pool has released `released` bytes.
    pub(super) fn unneeded_after(&self, reclaimed: u64, released: u64) -> u64 {
        let spoken_for = self.spoken_for().saturating_sub(reclaimed);
        let obtained = self.all.obtained.saturating_sub(released);
        self.all.granted.saturating_sub(spoken_for.max(obtained))
    }

    pub(super) const fn spoken_for(&self) -> u64 {
        self.claimed + self.all.quarantined
    }

    /// Returns the bytes that can be held now: the limit, or its granted part.
    fn usable(&self) -> u64 {
        self.usable_with(0)
    }

    /// Returns the bytes that can be held when a ledger has granted `more`.
    fn usable_with(&self, more: u64) -> u64 {
        let granted = self.all.granted.saturating_add(more);
        granted.min(self.all.limits.bytes)
    }

    /// Returns the bytes that a ledger has to grant before a tenant can be charged `bytes` more
    /// without a reclaim.
    pub(in crate::pool) fn lacks_grant(&self, tenant: TenantId, bytes: u64) -> u64 {
        let unavailable = self.unavailable_to(tenant);
        let all = unavailable.saturating_add(bytes).min(self.all.limits.bytes);
        all.saturating_sub(self.all.granted)
    }

    /// Returns the figures of the whole pool.
    #[inline]
    pub(in crate::pool) fn totals(&self) -> Totals {
        let Totals {
            limits, obtained, ..
        } = self.all;
        Totals {
            ungranted: limits.bytes.saturating_sub(self.all.granted),
            left: Amount {
                bytes: self.usable().saturating_sub(obtained),
                mappings: limits.mappings.saturating_sub(self.all.mappings),
                addresses: limits.addresses.saturating_sub(self.all.addresses),
            },
            excess: obtained.saturating_sub(limits.bytes),
            overdrawn: self.spoken_for() > self.usable(),
            ..self.all
        }
    }

    pub(crate) fn account(&self, tenant: TenantId) -> &Account {
        self.accounts.get(&tenant).unwrap_or(&self.none)
    }

    /// Returns all accounts, in the order of their tenants' numbers.
    pub(in crate::pool) fn accounts(&self) -> impl Iterator<Item = (TenantId, &Account)> {
        self.accounts.iter().map(|(&id, account)| (id, account))
    }

    pub(in crate::pool) fn ids(&self) -> impl Iterator<Item = TenantId> {
        self.accounts.keys().copied()
    }

    /// Returns the registered tenant with a name.
    pub(super) fn find(&self, name: &str) -> Option<TenantId> {
        let mut all = self.accounts();
        let found = all.find(|(_, account)| account.registered && account.name == name);
        found.map(|(id, _)| id)
    }

    /// Returns the bytes that a tenant, new or registered, can be guaranteed: the limit less, for
    /// each other tenant, its guarantee or the bytes that it cannot give back (`kept`), whichever
    /// is more. With `now`, only granted bytes count.
    pub(in crate::pool) fn guaranteeable(
        &self,
        tenant: Option<TenantId>,
        now: bool,
        kept: impl Fn(TenantId) -> u64,
    ) -> u64 {
        let others = self.accounts.iter();
        let claimed: u64 = others
            .filter(|&(&other, _)| Some(other) != tenant)
            .map(|(&tenant, account)| account.guarantee.max(kept(tenant)))
            .sum();
        let most = match now {
            true => self.usable(),
            false => self.all.limits.bytes,
        };
        most.saturating_sub(self.all.quarantined)
            .saturating_sub(claimed)
    }

    /// Opens the account of a new tenant, unless its name is taken.
    pub(in crate::pool) fn open(
        &mut self,
        (name, priority, hooks): (String, i32, Hooks),
        (guarantee, limit): (u64, u64),
    ) -> Result<TenantId, PoolError> {
        if self.find(&name).is_some() {
            return Err(PoolError::NameTaken(name));
        }
        let id = TenantId(self.next);
        self.next += 1;
        let account = Account {
            name,
            priority,
            hooks,
            registered: true,
            limit,
            ..Account::default()
        };
        self.accounts.insert(id, account);
        self.change(id, |account| account.guarantee = guarantee);
        Ok(id)
    }

    /// Ends a tenant's registration and guarantee; returns its hooks, which are user code to be
    /// dropped without the lock. Returns `None` if the tenant is not registered.
    pub(in crate::pool) fn unregister(&mut self, id: TenantId) -> Option<Hooks> {
        if !self.account(id).registered {
            return None;
        }
        self.change(id, |account| {
            account.guarantee = 0;
            account.registered = false;
            account.drains = true;
            std::mem::take(&mut account.hooks)
        })
    }

    pub(in crate::pool) fn set_handle(&mut self, id: TenantId, handle: Handle) {
        self.change(id, |account| account.handle = Some(handle));
    }

    pub(in crate::pool) fn count_refusal(&mut self, id: TenantId) {
        self.change(id, |account| account.refusals += 1);
    }

    pub(super) const fn set_limit(&mut self, bytes: u64) {
        self.all.limits.bytes = bytes;
    }

    pub(super) fn guaranteed(&self) -> u64 {
        let accounts = self.accounts.values();
        accounts.map(|account| account.guarantee).sum()
    }

    pub(in crate::pool) fn limit_of(&self, tenant: TenantId) -> u64 {
        self.account(tenant).limit.min(self.all.limits.bytes)
    }

    /// Changes an account, and the figures that follow from it.
    pub(super) fn change<T>(
        &mut self,
        tenant: TenantId,
        change: impl FnOnce(&mut Account) -> T,
    ) -> Option<T> {
        let account = self.accounts.get_mut(&tenant)?;
        let before = (account.claim(), account.held);
        let changed = change(account);
        account.peak = account.peak.max(account.held);
        let after = (account.claim(), account.held);
        self.claimed = self.claimed - before.0 + after.0;
        self.all.held = self.all.held - before.1 + after.1;
        self.all.peak = self.all.peak.max(self.all.held);
        Some(changed)
    }

    /// Removes the account of a tenant that holds nothing. Charges left are forgotten.
    pub(crate) fn close(&mut self, tenant: TenantId) {
        self.change(tenant, |account| {
            account.guarantee = 0;
            account.held = 0;
        });
        self.accounts.remove(&tenant);
    }

    pub(crate) fn guaranteed_to_others(&self, tenant: TenantId) -> u64 {
        self.claimed - self.all.held - self.account(tenant).missing_to_guarantee()
    }

    /// Returns the bytes held beyond a tenant's lowered limit.
    pub(super) fn excess_of(&self, tenant: TenantId) -> u64 {
        let account = self.account(tenant);
        account.held.saturating_sub(account.limit)
    }

    /// Returns the bytes that other tenants must give back before a tenant may use `kept` bytes
    /// that it is charged for already. Returns 0 up to the tenant's guarantee.
    pub(in crate::pool) fn overdrawn_by(&self, tenant: TenantId, kept: u64) -> u64 {
        let account = self.account(tenant);
        if kept <= account.guarantee {
            return 0;
        }
        let others = self.claimed - account.claim();
        (others + self.all.quarantined)
            .saturating_add(kept)
            .saturating_sub(self.usable())
    }

    /// Returns the bytes that a tenant can be charged now without a reclaim.
    pub(in crate::pool) fn available_to(&self, tenant: TenantId) -> u64 {
        self.available_after(tenant, 0, 0, 0)
    }

    /// Returns the bytes that a tenant can be charged after it has given back `own` bytes and other
    /// tenants `theirs`, and a ledger has granted `granted`.
    pub(in crate::pool) fn available_after(
        &self,
        tenant: TenantId,
        own: u64,
        theirs: u64,
        granted: u64,
    ) -> u64 {
        let account = self.account(tenant);
        let gained = own.saturating_add(theirs);
        let unavailable_to = self.unavailable_to(tenant).saturating_sub(gained);
        let pool = self.usable_with(granted).saturating_sub(unavailable_to);
        let limit = account.limit.saturating_add(own);
        pool.min(limit.saturating_sub(account.held))
    }

    /// Returns the bytes that must be reclaimed before a tenant can be charged `bytes` more: from
    /// the tenant itself, for its own limit, and in all.
    pub(crate) fn missing(&self, tenant: TenantId, bytes: u64) -> (u64, u64) {
        let account = self.account(tenant);
        let held = account.held.saturating_add(bytes);
        let own = held.saturating_sub(account.limit);
        let all = self.unavailable_to(tenant).saturating_add(bytes);
        let all = all.saturating_sub(self.usable());
        (own, all.max(own))
    }

    /// Returns the most bytes that a tenant could be charged if every other tenant held no more
    /// than its guarantee, or, with `alone`, if the pool had no other tenant.
    pub(in crate::pool) fn most_for(&self, tenant: TenantId, alone: bool) -> u64 {
        let account = self.account(tenant);
        let guarantees = match alone {
            true => 0,
            false => self.guaranteed() - account.guarantee,
        };
        let pool = self.all.limits.bytes.saturating_sub(self.all.quarantined);
        pool.saturating_sub(guarantees).min(account.limit)
    }

    /// Returns the bytes held by tenants, kept for other tenants' guarantees, or quarantined.
    pub(super) fn unavailable_to(&self, tenant: TenantId) -> u64 {
        self.all.held + self.all.quarantined + self.guaranteed_to_others(tenant)
    }

    /// Charges a tenant, at most what [`Self::available_to`] allows. Without a tenant, counts
    /// mappings and addresses of an operation itself against the limits.
    pub(crate) fn charge(&mut self, tenant: Option<TenantId>, of: Amount) -> Charge {
        if let Some(tenant) = tenant {
            debug_assert!(
                of.bytes <= self.available_to(tenant),
                "charged beyond the limits"
            );
            self.change(tenant, |account| {
                account.held += of.bytes;
                account.in_flight += of.bytes;
                account.mappings += of.mappings;
                account.addresses += of.addresses;
            });
        }
        self.all.mappings += of.mappings;
        self.all.addresses += of.addresses;
        Charge { tenant, of }
    }

    /// Charges a tenant for what exists already, even beyond the limits.
    pub(in crate::pool) fn hold(&mut self, tenant: TenantId, of: Amount) {
        self.change(tenant, |account| {
            account.held += of.bytes;
            account.mappings += of.mappings;
        });
        self.all.mappings += of.mappings;
    }

    /// Keeps a charge: from here on the bytes are counted where they are.
    pub(crate) fn keep(&mut self, charge: Charge) {
        self.land(charge);
    }

    pub(crate) fn refund(&mut self, charge: impl Into<Option<Charge>>) {
        if let Some(charge) = charge.into() {
            let tenant = charge.tenant;
            let of = self.land(charge);
            self.give_up(tenant, of);
        }
    }

    fn land(&mut self, mut charge: Charge) -> Amount {
        let of = std::mem::take(&mut charge.of);
        let account = charge.tenant.and_then(|it| self.accounts.get_mut(&it));
        if let Some(account) = account {
            account.in_flight -= of.bytes;
        }
        of
    }

    /// Ends a charge that was kept: a tenant's, or, without one, for addresses that were disowned.
    pub(crate) fn give_up(&mut self, tenant: impl Into<Option<TenantId>>, of: Amount) {
        if let Some(tenant) = tenant.into() {
            self.change(tenant, |account| {
                account.held -= of.bytes;
                account.mappings -= of.mappings;
                account.addresses -= of.addresses;
            });
        }
        self.all.mappings -= of.mappings;
        self.all.addresses -= of.addresses;
    }

    /// Ends a tenant's charge for addresses that stay reserved and become no tenant's.
    pub(in crate::pool) fn disown_addresses(&mut self, tenant: TenantId, bytes: u64) {
        self.change(tenant, |account| account.addresses -= bytes);
    }

    /// Counts bytes that came from the driver, or are about to.
    pub(crate) const fn created(&mut self, bytes: u64) {
        self.all.obtained += bytes;
    }

    pub(super) const fn released(&mut self, bytes: u64) {
        self.all.obtained -= bytes;
        self.all.given_back += bytes;
    }

    /// Subtracts bytes counted as [created](Self::created) that could not be created.
    pub(in crate::pool) const fn not_created(&mut self, bytes: u64) {
        self.all.obtained -= bytes;
    }

    /// Counts bytes and mappings as quarantined. The bytes, mapped or not, stay obtained.
    pub(crate) const fn quarantine(&mut self, bytes: u64, mappings: u64) {
        self.all.quarantined += bytes;
        self.all.mappings += mappings;
    }

    pub(in crate::pool) const fn end_quarantine(&mut self, bytes: u64) {
        self.all.quarantined -= bytes;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const A: TenantId = TenantId(0);
    const B: TenantId = TenantId(1);

    fn open(budget: &mut Budget, name: &str, limits: (u64, u64)) -> TenantId {
        let hooks: Hooks = (Some(Arc::new(|_| ())), None);
        budget.open((name.to_owned(), 0, hooks), limits).unwrap()
    }

    fn budget() -> Budget {
        let mut budget = Budget::new(Amount {
            bytes: 100,
            mappings: 10,
            addresses: 1000,
        });
        open(&mut budget, "a", (30, 100));
        open(&mut budget, "b", (20, 60));
        budget
    }

    fn charge(budget: &mut Budget, tenant: TenantId, bytes: u64) {
        let charge = budget.charge(Some(tenant), Amount::bytes(bytes));
        budget.keep(charge);
    }

    #[test]
    fn others_leave_what_is_missing_to_a_guarantee() {
        let mut budget = budget();
        assert_eq!(budget.available_to(A), 80, "B's 20 are kept");
        assert_eq!(
            budget.available_to(B),
            60,
            "B's own limit is tighter than A's guarantee"
        );
        charge(&mut budget, A, 10);
        assert_eq!(
            budget.available_to(B),
            60,
            "A holds 10 of its 30: 20 are kept, 90 are left"
        );
        charge(&mut budget, B, 60);
        assert_eq!(budget.available_to(A), 30, "with 10 held, all that B left");
        charge(&mut budget, A, 20);
        assert_eq!(budget.available_to(B), 0);
        budget.give_up(B, Amount::bytes(50));
        assert_eq!(
            budget.available_to(A),
            50,
            "B holds 10 of its 20: 10 are kept"
        );
    }

    #[test]
    fn quarantined_bytes_are_nobodys() {
        let mut budget = budget();
        budget.quarantine(70, 2);
        assert_eq!(budget.available_to(A), 10);
        assert_eq!(
            budget.available_to(B),
            0,
            "what is left is A's by guarantee"
        );
        assert_eq!(budget.totals().left.mappings, 8);
    }

    #[test]
    fn a_draining_tenant_keeps_its_charges_and_loses_its_guarantee() {
        let mut budget = budget();
        charge(&mut budget, A, 10);
        budget.change(A, |it| it.guarantee = 0);
        assert_eq!(budget.guaranteeable(None, false, |_| 0), 80);
        assert_eq!(
            budget.guaranteeable(None, false, |tenant| budget.account(tenant).held),
            70
        );
        assert_eq!(budget.available_to(B), 60);
        assert_eq!(budget.totals().held, 10);
    }

    #[test]
    fn a_guarantee_given_over_idle_memory_overdraws_until_that_is_given_back() {
        let mut budget = budget();
        charge(&mut budget, B, 60);
        assert!(!budget.totals().overdrawn);
        // B uses 5 of its 60: with A's 30 kept, 50 can be promised.
        let late = open(&mut budget, "late", (50, 100));
        assert!(budget.totals().overdrawn);
        assert_eq!(budget.overdrawn_by(B, 20), 0, "as far as it is guaranteed");
        assert_eq!(budget.overdrawn_by(B, 25), 5, "beyond, others come first");
        assert_eq!(budget.available_to(late), 10);
        budget.give_up(B, Amount::bytes(40));
        assert!(!budget.totals().overdrawn);
        assert_eq!(budget.available_to(late), 50);
    }

    #[test]
    fn addresses_are_charged_to_a_tenant_and_counted_for_the_pool() {
        let mut budget = budget();
        let charge = budget.charge(Some(A), Amount::of(0, 0, 300));
        budget.keep(charge);
        let charge = budget.charge(Some(B), Amount::of(0, 0, 200));
        budget.keep(charge);
        budget.give_up(A, Amount::of(0, 0, 100));
        assert_eq!(budget.account(A).addresses, 200);
        assert_eq!(
            (budget.totals().addresses, budget.totals().left.addresses),
            (400, 600)
        );
        // Addresses out of use belong to no tenant, and are still reserved.
        budget.disown_addresses(B, 150);
        assert_eq!(
            (budget.account(B).addresses, budget.totals().addresses),
            (50, 400)
        );
        budget.give_up(None, Amount::of(0, 0, 100));
        assert_eq!(
            (budget.account(B).addresses, budget.totals().addresses),
            (50, 300)
        );
    }

    #[test]
    fn a_closed_tenant_is_forgotten() {
        let mut budget = budget();
        budget.close(A);
        assert_eq!(
            (budget.account(A).guarantee, budget.account(A).limit),
            (0, 0)
        );
        assert_eq!(budget.available_to(B), 60);
        assert_eq!(budget.guaranteeable(None, false, |_| 0), 80);
        assert_eq!(budget.guaranteed_to_others(B), 0);
        charge(&mut budget, B, 10);
        budget.close(B);
        assert_eq!(budget.totals().held, 0, "what it held goes with it");
    }

    #[test]
    fn within_its_guarantee_a_tenant_asks_no_other_to_give() {
        let mut budget = budget();
        budget.change(A, |it| it.guarantee = 0);
        budget.change(B, |it| it.guarantee = 0);
        charge(&mut budget, A, 90);
        let late = open(&mut budget, "late", (20, 100));
        assert_eq!(budget.overdrawn_by(late, 20), 0);
        assert_eq!(budget.overdrawn_by(late, 21), 11);
    }

    #[test]
    fn peaks_stay() {
        let mut budget = budget();
        charge(&mut budget, A, 50);
        budget.give_up(A, Amount::bytes(40));
        charge(&mut budget, B, 20);
        assert_eq!(
            (
                budget.totals().peak,
                budget.account(A).peak,
                budget.account(B).peak
            ),
            (50, 50, 20)
        );
    }

    #[test]
    fn a_charge_is_refunded_or_kept() {
        let mut budget = budget();
        let of = Amount {
            bytes: 10,
            mappings: 2,
            addresses: 300,
        };
        let charge = budget.charge(Some(A), of);
        let account = budget.account(A);
        assert_eq!(
            (account.held, account.mappings, account.addresses),
            (10, 2, 300)
        );
        budget.refund(charge);
        let account = budget.account(A);
        assert_eq!(
            (account.held, account.mappings, account.addresses),
            (0, 0, 0)
        );
        assert_eq!((account.in_flight, account.peak), (0, 10));
        assert_eq!(
            (
                budget.totals().held,
                budget.totals().mappings,
                budget.totals().addresses
            ),
            (0, 0, 0)
        );
        let charge = budget.charge(Some(A), of);
        budget.keep(charge);
        assert_eq!(
            (
                budget.totals().held,
                budget.totals().mappings,
                budget.totals().addresses
            ),
            (10, 2, 300)
        );
        budget.give_up(A, of);
        assert_eq!(
            (
                budget.totals().held,
                budget.totals().mappings,
                budget.totals().addresses
            ),
            (0, 0, 0)
        );
    }

    #[test]
    fn a_charge_is_in_flight_until_it_is_kept_or_refunded() {
        let mut budget = budget();
        let mut charge = budget.charge(Some(A), Amount::bytes(10));
        let part = charge.split(4);
        assert_eq!(budget.account(A).in_flight, 10);
        budget.keep(part);
        assert_eq!(
            (budget.account(A).in_flight, budget.account(A).held),
            (6, 10)
        );
        budget.refund(charge);
        assert_eq!(
            (budget.account(A).in_flight, budget.account(A).held),
            (0, 4)
        );
    }

    #[test]
    fn what_an_operation_uses_itself_counts_against_the_limits_and_is_nobodys() {
        let mut budget = budget();
        let own = Amount {
            mappings: 3,
            addresses: 100,
            ..Amount::default()
        };
        let charge = budget.charge(None, own);
        assert_eq!(
            (
                budget.totals().left.mappings,
                budget.totals().left.addresses
            ),
            (7, 900)
        );
        assert_eq!(budget.account(A).mappings + budget.account(B).mappings, 0);
        budget.refund(charge);
        assert_eq!(
            (
                budget.totals().left.mappings,
                budget.totals().left.addresses
            ),
            (10, 1000)
        );
    }

    // I-5
    #[test]
    #[cfg(debug_assertions)]
    #[should_panic = "a charge is lost"]
    fn a_charge_is_not_lost() {
        let mut budget = budget();
        drop(budget.charge(Some(A), Amount::mappings(1)));
    }

    #[test]
    fn a_lowered_limit_is_kept_to_and_what_is_beyond_it_is_known() {
        let mut budget = budget();
        budget.created(70);
        charge(&mut budget, A, 40);
        charge(&mut budget, B, 30);
        budget.set_limit(60);
        assert_eq!(
            (budget.totals().excess, budget.totals().left.bytes),
            (10, 0)
        );
        assert_eq!((budget.available_to(A), budget.available_to(B)), (0, 0));
        assert_eq!(budget.missing(A, 5), (0, 15), "held beyond the limit too");
        assert!(budget.totals().overdrawn);
        budget.give_up(A, Amount::bytes(15));
        budget.released(15);
        assert_eq!((budget.totals().excess, budget.totals().left.bytes), (0, 5));
        assert_eq!(budget.available_to(A), 5);
        budget.set_limit(100);
        assert_eq!(
            (budget.totals().left.bytes, budget.available_to(A)),
            (45, 45)
        );
    }

    #[test]
    fn limits_and_guarantees_of_a_tenant_change() {
        let mut budget = budget();
        charge(&mut budget, A, 20);
        assert_eq!(budget.guaranteed(), 50);
        budget.change(B, |it| it.guarantee = 10);
        assert_eq!((budget.guaranteed(), budget.available_to(A)), (40, 70));
        budget.change(A, |it| it.guarantee = 0);
        assert_eq!(budget.available_to(B), 60, "A holds 20");
        budget.change(B, |it| it.limit = 15);
        assert_eq!((budget.available_to(B), budget.limit_of(B)), (15, 15));
        budget.change(A, |it| it.limit = 15);
        assert_eq!(budget.available_to(A), 0, "it holds more already");
        assert_eq!((budget.missing(A, 5).0, budget.excess_of(A)), (10, 5));
        budget.change(A, |it| it.limit = u64::MAX);
        assert_eq!(
            (budget.limit_of(A), budget.available_after(A, 20, 0, 0)),
            (100, 90)
        );
        assert_eq!(
            budget.guaranteeable(Some(A), false, |_| 0),
            90,
            "without its own"
        );
        assert_eq!(budget.guaranteeable(None, false, |_| 0), 90);
    }

    #[test]
    fn what_was_given_back_can_be_charged_as_far_as_the_own_limit_goes() {
        let mut budget = budget();
        charge(&mut budget, A, 50);
        charge(&mut budget, B, 50);
        assert_eq!(budget.available_after(A, 0, 0, 0), 0);
        assert_eq!(budget.available_after(A, 10, 0, 0), 10);
        assert_eq!(budget.available_after(A, 10, 20, 0), 30);
        assert_eq!(budget.available_after(B, 0, 40, 0), 10, "its own limit");
        assert_eq!(budget.available_after(B, 5, 40, 0), 15);
        // A ledger has granted what is held, and could grant more.
        budget.needs_grants();
        budget.grant(100);
        budget.return_grant(30);
        assert_eq!(budget.available_after(A, 40, 0, 0), 10);
        assert_eq!(budget.available_after(A, 40, 0, 20), 30);
        assert_eq!(budget.available_after(A, 40, 0, u64::MAX), 40);
    }

    #[test]
    fn what_is_missing_is_said_for_the_own_limit_and_in_all() {
        let mut budget = budget();
        assert_eq!(budget.missing(B, 60), (0, 0));
        assert_eq!(budget.missing(B, 70), (10, 10), "its own limit");
        charge(&mut budget, A, 50);
        charge(&mut budget, B, 45);
        assert_eq!(budget.missing(A, 5), (0, 0));
        assert_eq!(budget.missing(A, 15), (0, 10));
        assert_eq!(budget.missing(B, 20), (5, 15));
    }

    #[test]
    fn the_most_that_a_tenant_can_have_is_what_the_guarantees_of_others_leave() {
        let mut budget = budget();
        charge(&mut budget, B, 60);
        assert_eq!(
            (budget.most_for(A, false), budget.most_for(A, true)),
            (80, 100)
        );
        assert_eq!(
            (budget.most_for(B, false), budget.most_for(B, true)),
            (60, 60)
        );
        budget.quarantine(45, 0);
        assert_eq!(
            (budget.most_for(A, false), budget.most_for(A, true)),
            (35, 55)
        );
        assert_eq!(
            (budget.most_for(B, false), budget.most_for(B, true)),
            (25, 55)
        );
    }

    #[test]
    fn what_is_quarantined_overdraws_as_what_is_claimed_does() {
        let mut budget = budget();
        budget.quarantine(50, 0);
        assert!(!budget.totals().overdrawn);
        budget.quarantine(5, 0);
        assert!(budget.totals().overdrawn);
        assert_eq!(budget.totals().quarantined, 55);
        assert_eq!(budget.overdrawn_by(A, 40), 15, "B's 20 are kept too");
    }

    #[test]
    fn bytes_of_the_driver_are_obtained_until_they_go_back() {
        let mut budget = budget();
        budget.created(60);
        budget.created(10);
        assert_eq!(
            (budget.totals().obtained, budget.totals().left.bytes),
            (70, 30)
        );
        budget.not_created(10);
        assert_eq!(
            (budget.totals().obtained, budget.totals().given_back),
            (60, 0)
        );
        budget.released(20);
        budget.released(15);
        assert_eq!(
            (budget.totals().obtained, budget.totals().given_back),
            (25, 35)
        );
        budget.quarantine(25, 0);
        assert_eq!(
            (budget.totals().obtained, budget.totals().left.bytes),
            (25, 75)
        );
    }

    #[test]
    fn a_tenant_is_registered_then_drains_then_is_gone() {
        let mut budget = budget();
        assert!(budget.account(A).registered && !budget.account(A).drains);
        let taken = budget.open(("a".to_owned(), 0, (None, None)), (0, 1));
        assert!(matches!(taken, Err(PoolError::NameTaken(_))));
        let hooks = budget.unregister(A);
        assert!(hooks.is_some_and(|(hook, own)| hook.is_some() && own.is_none()));
        assert!(budget.unregister(A).is_none(), "unregistered once");
        assert!(!budget.account(A).registered && budget.account(A).drains);
        assert_eq!((budget.account(A).guarantee, budget.guaranteed()), (0, 20));
        assert!(budget.account(A).hooks.0.is_none() && budget.account(B).hooks.0.is_some());
        assert_eq!((budget.find("a"), budget.find("b")), (None, Some(B)));
        assert!(budget.ids().eq([A, B]));
        budget.close(A);
        assert!(!budget.account(A).drains && budget.account(A).name.is_empty());
        assert!(budget.accounts().all(|(id, _)| id == B));
        let c = open(&mut budget, "a", (0, 1));
        assert_eq!(c, TenantId(2), "a number is never used twice");
    }
}
