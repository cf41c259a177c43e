//! The driver's view of the processes' memory. The ledger is right if it charges no less than that,
//! and no more than the limit.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::time::Duration;

use crate::ledger::charge::Count;

/// How long the driver still has the memory of a process that has ended.
pub(super) const LINGERS: Duration = Duration::from_millis(100);

/// Sizes in granules.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Ghost {
    pub(super) members: Vec<Member>,
    pub(super) exports: Vec<Export>,
}

#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Member {
    pub(super) slot: Option<usize>,
    /// Memory created and not exported.
    pub(super) has: u64,
    pub(super) guarantee: u64,
    /// The limit under which a member has joined.
    pub(super) limit: Option<u64>,
    /// When a killed process's memory is free again.
    gone: Option<Duration>,
}

#[derive(Clone, Debug, Hash)]
pub(super) struct Export {
    pub(super) owner: usize,
    /// The owner's slot at the export.
    pub(super) slot: usize,
    pub(super) granules: u64,
    pub(super) id: u64,
    /// `true` until the owner has released the block.
    pub(super) is_owned: bool,
    /// `true` once the ledger has said that no process has the block.
    pub(super) is_free: bool,
    /// The processes that have imported the block.
    pub(super) holders: Vec<usize>,
}

impl Ghost {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            // The last member is the test's own.
            members: vec![Member::default(); threads + 1],
            exports: Vec::new(),
        }
    }

    pub(super) fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    pub(super) fn killed(&mut self, thread: usize, at: Duration) {
        let member = &self.members[thread];
        let mut exports = self.exports.iter();
        let owns = member.has > 0 || exports.any(|it| it.owner == thread && it.is_owned);
        let lingers = if owns { LINGERS } else { Duration::ZERO };
        self.members[thread].gone = Some(at + lingers);
    }

    fn is_gone(&self, thread: usize, now: Duration) -> bool {
        self.members[thread].gone.is_some_and(|at| at <= now)
    }

    /// Returns `true` if a process other than the owner has a block.
    fn is_held(&self, export: &Export, now: Duration) -> bool {
        export.holders.iter().any(|&it| !self.is_gone(it, now))
    }

    fn exists(&self, export: &Export, now: Duration) -> bool {
        let is_owned = export.is_owned && !self.is_gone(export.owner, now);
        is_owned || self.is_held(export, now)
    }

    pub(super) fn fault(&self, charges: &[u64], limit: u64, now: Duration) -> Option<String> {
        let charged: u64 = charges.iter().map(|&it| Count::of(it).charged()).sum();
        if charged > limit {
            return Some(format!("{charged} granules are charged of {limit}"));
        }
        let existing = self.exports.iter().filter(|it| self.exists(it, now));
        let exported = existing.clone().map(|it| it.granules).sum::<u64>();
        let alive = || {
            self.members
                .iter()
                .enumerate()
                .filter(|&(it, _)| !self.is_gone(it, now))
        };
        let created: u64 = alive().map(|(_, it)| it.has).sum();
        if created + exported > limit {
            return Some(format!(
                "{created} granules and {exported} exported ones exist"
            ));
        }
        let of_slot = |slot: usize| {
            let exports = existing.clone().filter(|it| it.slot == slot);
            exports.map(|it| it.granules).sum::<u64>()
        };
        for (index, member) in alive() {
            if let Some(joined) = member.limit.filter(|&joined| joined != limit) {
                return Some(format!(
                    "{index} joined under a limit of {joined}, which is {limit}"
                ));
            }
            let Some(slot) = member.slot else { continue };
            let needs = (member.has + of_slot(slot)).max(member.guarantee);
            let found = Count::of(charges[slot]).charged();
            if found < needs {
                return Some(format!(
                    "{index} is charged {found} granules and needs {needs}"
                ));
            }
        }
        for export in existing.clone() {
            let (found, needs) = (
                Count::of(charges[export.slot]).charged(),
                of_slot(export.slot),
            );
            if found < needs {
                return Some(format!(
                    "slot {} is charged {found} of {needs}",
                    export.slot
                ));
            }
            if export.is_free {
                return Some(format!(
                    "a block that still exists counts as free: {export:?}"
                ));
            }
        }
        None
    }
}
