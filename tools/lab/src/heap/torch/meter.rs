//! The memory that a modelled allocator holds, and the driver calls that it would make, with their
//! costs.

use std::collections::BTreeMap;

use cuvmm::driver::model::Costs;

#[derive(Debug)]
pub(super) struct Meter<'a> {
    costs: &'a Costs,
    /// The most bytes held.
    limit: u64,
    /// Memory of the device in bytes.
    pub(super) memory: u64,
    pub(super) held: u64,
    pub(super) peak_held: u64,
    pub(super) calls: u64,
    pub(super) microseconds: f64,
    /// Sizes of released physicals, and for each the number that are cheap to create again.
    warm: BTreeMap<u64, u64>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(costs: &'a Costs, limit: u64, memory: u64) -> Self {
        Self {
            costs,
            limit,
            memory,
            held: 0,
            peak_held: 0,
            calls: 0,
            microseconds: 0.0,
            warm: BTreeMap::new(),
        }
    }

    /// Notes `cuMemAlloc`. Returns `false` if it is refused.
    #[must_use]
    pub(super) fn allocate(&mut self, bytes: u64) -> bool {
        let costs = self.costs;
        self.take(bytes, |_| costs.alloc.at(bytes))
    }

    /// Notes `cuMemFree`.
    pub(super) fn free(&mut self, bytes: u64) {
        self.spend(self.costs.free.at(bytes));
        self.held -= bytes;
    }

    /// Notes `cuMemCreate`. Returns the cost of the first `cuMemSetAccess` on the memory, or `None`
    /// if the call is refused.
    pub(super) fn create(&mut self, bytes: u64) -> Option<f64> {
        let costs = self.costs;
        let mut access = 0.0;
        let created = self.take(bytes, |warm| {
            let cheap = warm.get_mut(&bytes).filter(|count| **count > 0);
            let is_warm = cheap.map(|count| *count -= 1).is_some();
            let (create, first) = match is_warm {
                true => (&costs.create_warm, &costs.set_access),
                false => (&costs.create_cold, &costs.set_access_cold),
            };
            access = first.at(bytes);
            create.at(bytes)
        });
        created.then_some(access)
    }

    /// Notes `cuMemRelease`.
    pub(super) fn release(&mut self, bytes: u64) {
        self.spend(self.costs.release.at(bytes));
        *self.warm.entry(bytes).or_default() += 1;
        self.held -= bytes;
    }

    /// Notes `cuMemMap`.
    pub(super) fn map(&mut self, bytes: u64) {
        self.spend(self.costs.map.at(bytes));
    }

    /// Notes `cuMemUnmap`.
    pub(super) fn unmap(&mut self, bytes: u64) {
        self.spend(self.costs.unmap.at(bytes));
    }

    /// Notes `cuMemSetAccess`, which costs the sum over the mappings.
    pub(super) fn set_access(&mut self, microseconds: f64) {
        self.spend(microseconds);
    }

    /// Notes `cuMemAddressReserve`.
    pub(super) fn reserve(&mut self, bytes: u64) {
        self.spend(self.costs.reserve.at(bytes));
    }

    /// Notes `cuMemAddressFree`.
    pub(super) fn unreserve(&mut self, bytes: u64) {
        self.spend(self.costs.address_free.at(bytes));
    }

    /// Notes a wait for the device.
    pub(super) fn synchronize(&mut self) {
        self.spend(self.costs.synchronize);
    }

    /// Takes memory. A refused call counts and takes no time.
    fn take(&mut self, bytes: u64, cost: impl FnOnce(&mut BTreeMap<u64, u64>) -> f64) -> bool {
        if self.held.saturating_add(bytes) > self.limit.min(self.memory) {
            self.calls += 1;
            return false;
        }
        let cost = cost(&mut self.warm);
        self.spend(cost);
        self.held += bytes;
        self.peak_held = self.peak_held.max(self.held);
        true
    }

    fn spend(&mut self, microseconds: f64) {
        self.calls += 1;
        self.microseconds += microseconds;
    }
}
