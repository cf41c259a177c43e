//! PyTorch's native allocator: segments of `cudaMalloc`, split into blocks.

use super::blocks::{Id, Pool, State};
use super::{Allocator, LARGE, MIB, SMALL};

/// Smaller requests have segments of `LARGE`.
const OWN_SEGMENT: u64 = 10 * MIB;

impl Allocator<'_> {
    /// Returns the smallest free block that fits, else that of a new segment.
    pub(super) fn native(&mut self, pool: Pool, size: u64) -> Option<Id> {
        let fitting = self.blocks.fitting(pool, size).next();
        fitting.or_else(|| self.segment(pool, size))
    }

    /// Returns the free block of a new segment. If the driver refuses at first, gives all free
    /// segments back.
    fn segment(&mut self, pool: Pool, size: u64) -> Option<Id> {
        let bytes = match size {
            _ if pool.small => SMALL,
            size if size < OWN_SEGMENT => LARGE,
            size => size.checked_next_multiple_of(SMALL)?,
        };
        if !self.meter.allocate(bytes) {
            self.give_segments_back();
            if !self.meter.allocate(bytes) {
                return None;
            }
        }
        self.blocks.segment(pool, bytes, State::Free)
    }

    /// Frees the segments that are one free block each.
    fn give_segments_back(&mut self) {
        self.meter.synchronize();
        for id in self.blocks.free() {
            let block = self.blocks.get(id);
            if block.before.is_none() && block.after.is_none() {
                self.meter.free(block.size);
                self.blocks.remove(id);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Kind;
    use super::super::meter::Meter;
    use super::*;
    use cuvmm::driver::model::Costs;

    fn held(native: &Allocator<'_>) -> u64 {
        native.meter.held / MIB
    }

    #[test]
    fn segments_have_the_sizes_of_the_pools() {
        let costs = Costs::default();
        let mut native = Allocator::new(Kind::Native, Meter::new(&costs, u64::MAX, 1 << 40));
        for (size, total) in [
            (1, 2),
            (MIB, 2),
            // 512 bytes and 1 MiB are used, so another MiB does not fit.
            (MIB, 4),
            (MIB + 1, 24),
            (10 * MIB - 512, 24),
            (10 * MIB, 34),
            (10 * MIB + 1, 46),
        ] {
            native.allocate(size, 0).unwrap();
            assert_eq!(held(&native), total, "{size}");
        }
        assert_eq!(native.meter.calls, 5);
        native.allocate(1, 7).unwrap();
        assert_eq!(held(&native), 48, "another stream has segments of its own");
    }

    #[test]
    fn a_large_block_is_split_if_more_than_a_mebibyte_is_left() {
        let costs = Costs::default();
        let mut native = Allocator::new(Kind::Native, Meter::new(&costs, u64::MAX, 1 << 40));
        let whole = native.allocate(32 * MIB, 0).unwrap();
        native.free(whole);
        let most = native.allocate(31 * MIB, 0).unwrap();
        assert_eq!(native.blocks.get(most).size, 32 * MIB);
        native.free(most);
        let less = native.allocate(31 * MIB - 512, 0).unwrap();
        assert_eq!(native.blocks.get(less).size, 31 * MIB - 512);
        native.free(less);
        assert_eq!(
            native.blocks.free().len(),
            1,
            "blocks side by side are joined"
        );
        assert_eq!(held(&native), 32);
    }

    #[test]
    fn out_of_memory_gives_back_what_is_wholly_free() {
        let costs = Costs::default();
        let mut native = Allocator::new(Kind::Native, Meter::new(&costs, 100 * MIB, 1 << 40));
        let (a, b) = (
            native.allocate(40 * MIB, 0).unwrap(),
            native.allocate(40 * MIB, 0).unwrap(),
        );
        native.free(a);
        native.free(b);
        let c = native.allocate(20 * MIB, 0).unwrap();
        assert!(
            native.allocate(70 * MIB, 0).is_none(),
            "one segment is partly used"
        );
        assert_eq!(held(&native), 40);
        assert!(native.allocate(60 * MIB, 1).is_some());
        native.free(c);
        assert_eq!(held(&native), 100);
    }
}
