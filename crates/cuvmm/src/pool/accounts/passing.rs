//! Charges that pass from one tenant to another with the memory, so that no third tenant gets it in
//! between.

use super::budget::{Amount, Budget, TenantId};

/// The bytes that a tenant lacks to be charged for memory of which others pass some on to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) struct Missing {
    /// The bytes by which the tenant's own limit is short.
    pub(in crate::pool) own: u64,
    /// The bytes by which any limit is short.
    pub(in crate::pool) all: u64,
    /// The bytes that the tenant needs beside those that others pass on to it.
    pub(in crate::pool) beside: u64,
}

impl Budget {
    /// Passes bytes that tenants are charged on to another tenant, without a moment in which they
    /// are charged to none.
    pub(in crate::pool) fn pass_on(&mut self, from: &[(TenantId, u64)], to: TenantId) {
        for &(tenant, bytes) in from {
            self.give_up(tenant, Amount::bytes(bytes));
            self.hold(to, Amount::bytes(bytes));
        }
    }

    /// Returns what a tenant is [missing](Self::missing) for `bytes` of its own limit once others
    /// have passed their bytes on to it, in all, and the bytes that it has to be charged beside
    /// those to need as much.
    pub(in crate::pool) fn missing_beside(
        &mut self,
        from: &[(TenantId, u64)],
        tenant: TenantId,
        bytes: u64,
    ) -> Missing {
        let passed: u64 = from.iter().map(|(_, bytes)| bytes).sum();
        let before = self.unavailable_to(tenant);
        for &(from, bytes) in from {
            self.give_up(from, Amount::bytes(bytes));
        }
        let (own, all) = self.missing(tenant, bytes);
        // A giver may fall below its guarantee, which is then kept for it.
        let kept = (self.unavailable_to(tenant) + passed).saturating_sub(before);
        for &(from, bytes) in from {
            self.hold(from, Amount::bytes(bytes));
        }
        let beside = (bytes + kept).saturating_sub(passed);
        Missing { own, all, beside }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(0);
    const B: TenantId = TenantId(1);

    /// A of 60 bytes, 30 of them guaranteed, and B, which may have 60, in a pool of 100.
    fn budget() -> Budget {
        let mut budget = Budget::new(Amount {
            bytes: 100,
            mappings: 10,
            addresses: 1000,
        });
        for (name, limits) in [("a", (30, 100)), ("b", (0, 60))] {
            let terms = (name.to_owned(), 0, (None, None));
            budget.open(terms, limits).unwrap();
        }
        let charge = budget.charge(Some(A), Amount::bytes(60));
        budget.keep(charge);
        budget
    }

    #[test]
    fn a_charge_passes_within_the_limits() {
        let mut budget = budget();
        let missing = budget.missing_beside(&[(A, 30)], B, 60);
        assert_eq!((missing.own, missing.all, missing.beside), (0, 0, 30));
        assert_eq!(budget.account(A).held, 60, "nothing has passed yet");
        budget.pass_on(&[(A, 30)], B);
        assert_eq!((budget.account(A).held, budget.account(B).held), (30, 30));
        assert_eq!((budget.totals().held, budget.totals().peak), (60, 60));
        budget.pass_on(&[(B, 30)], A);
        assert_eq!((budget.account(A).held, budget.account(B).held), (60, 0));
    }

    #[test]
    fn a_giver_keeps_its_guarantee() {
        let mut budget = budget();
        // A would have 10, and 20 more are kept for it.
        let missing = budget.missing_beside(&[(A, 50)], B, 50);
        assert_eq!((missing.own, missing.all, missing.beside), (0, 0, 20));
        budget.change(A, |it| it.guarantee = 60);
        let missing = budget.missing_beside(&[(A, 50)], B, 50);
        assert_eq!((missing.own, missing.all, missing.beside), (0, 10, 50));
    }

    #[test]
    fn the_limit_of_the_one_that_gets_it_counts() {
        let mut budget = budget();
        budget.change(B, |it| it.limit = 40);
        let missing = budget.missing_beside(&[(A, 60)], B, 60);
        assert_eq!((missing.own, missing.all), (20, 20));
    }
}
