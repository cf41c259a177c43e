//! The resources that a plan holds: after a step, and at most.

/// The resources held at one moment.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(super) struct Held {
    /// Bytes that steps requested.
    pub(super) asked: u64,
    /// Bytes beyond `asked` because memory comes in whole granules.
    pub(super) padding: u64,
    /// Bytes committed ahead of growth.
    pub(super) precommitted: u64,
    /// Bytes decommitted but still there, because the rest of their extent is in use.
    pub(super) kept: u64,
    /// The sum of these four.
    pub(super) memory: u64,
    pub(super) mappings: u64,
    pub(super) addresses: u64,
}

impl Held {
    /// Returns the sum after one part of it has changed from `before` to `after`.
    pub(super) const fn changed(self, before: &Self, after: &Self) -> Self {
        Self {
            asked: self.asked - before.asked + after.asked,
            padding: self.padding - before.padding + after.padding,
            precommitted: self.precommitted - before.precommitted + after.precommitted,
            kept: self.kept - before.kept + after.kept,
            memory: self.memory - before.memory + after.memory,
            mappings: self.mappings - before.mappings + after.mappings,
            addresses: self.addresses - before.addresses + after.addresses,
        }
    }
}

/// The maximum of each figure at the end of any step.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(super) struct Peak {
    pub(super) memory: u64,
    /// The peak of memory that no step had requested.
    pub(super) waste: u64,
    pub(super) mappings: u64,
    pub(super) addresses: u64,
}

impl Peak {
    pub(super) fn note(&mut self, held: &Held) {
        self.memory = self.memory.max(held.memory);
        self.waste = self.waste.max(held.memory - held.asked);
        self.mappings = self.mappings.max(held.mappings);
        self.addresses = self.addresses.max(held.addresses);
    }
}
