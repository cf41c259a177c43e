//! The kinds of memory that are compared: who allocated it, its number of extents, and how it is
//! registered.

use super::memory::{Bench, Buffer, By};

/// The allocator of a buffer, and how it was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Allocated by `ncclMemAlloc`.
    Nccl,
    /// A region committed in one step, in extents as large as possible.
    Ours,
    /// A region committed in steps that double its committed size.
    Grown,
}

/// One side of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) whose: Whose,
    pub(super) registered: Option<By>,
}

impl Kind {
    const fn new(whose: Whose, registered: Option<By>) -> Self {
        Self { whose, registered }
    }

    /// Returns all kinds, NCCL's own first. `whole` adds the grown region registered in one range,
    /// which not every NCCL supports.
    pub(super) fn all(whole: bool) -> Vec<Self> {
        let each = [Whose::Nccl, Whose::Ours, Whose::Grown];
        let mut all: Vec<Self> = each
            .into_iter()
            .flat_map(|whose| [None, Some(By::Extent)].map(|by| Self::new(whose, by)))
            .collect();
        all.extend(whole.then_some(Self::new(Whose::Grown, Some(By::Whole))));
        all
    }

    /// Returns the kind that this kind is compared with.
    pub(super) fn rival(self) -> Self {
        let registered = self.registered.map(|_| By::Extent);
        Self::new(Whose::Nccl, registered)
    }

    pub(super) const fn memory(self) -> &'static str {
        match self.whose {
            Whose::Nccl => "ncclMemAlloc",
            Whose::Ours => "region",
            Whose::Grown => "grown region",
        }
    }

    pub(super) const fn how(self) -> &'static str {
        match self.registered {
            None => "no",
            Some(By::Extent) => "by extent",
            Some(By::Whole) => "whole",
        }
    }

    /// Allocates a buffer of this kind on each rank, of at least `bytes` bytes.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn buffers<'a>(
        self,
        bench: &'a Bench<'a>,
        bytes: u64,
        granule: u64,
    ) -> anyhow::Result<Vec<Buffer<'a>>> {
        let bytes = bytes.next_multiple_of(granule);
        let one = |rank| match self.whose {
            Whose::Nccl => bench.theirs(rank, bytes),
            Whose::Ours => bench.ours(rank, &[bytes]),
            Whose::Grown => bench.ours(rank, &doubling(bytes, granule)),
        };
        (0..bench.ranks()).map(one).collect()
    }
}

/// Returns the end of each step of growth from one granule to `bytes`, doubling in each step.
pub(super) fn doubling(bytes: u64, granule: u64) -> Vec<u64> {
    let mut ends = vec![];
    let mut at = 0;
    while at < bytes {
        at = (2 * at).max(granule).min(bytes);
        ends.push(at);
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_doubles() {
        assert_eq!(doubling(2, 2), [2]);
        assert_eq!(doubling(20, 2), [2, 4, 8, 16, 20]);
    }

    #[test]
    fn each_is_held_against_nccls_own_in_the_same_state() {
        let all = Kind::all(true);
        assert_eq!(all.len(), 7);
        for kind in &all {
            let rival = kind.rival();
            assert!(all.contains(&rival) && rival.whose == Whose::Nccl);
            assert_eq!(rival.registered.is_some(), kind.registered.is_some());
        }
        assert!(!Kind::all(false).iter().any(|kind| kind.how() == "whole"));
    }
}
