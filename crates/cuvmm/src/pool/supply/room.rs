//! The memory that `Limit::LeaveFree` leaves to other programs.
//!
//! Before a pool with that limit creates memory, it asks the driver how much is free
//! (`cuMemGetInfo`). An operation that creates many extents, or memory for many blocks, names the sum
//! and asks once: its [`Room`] are bytes that were free then, and that no other operation of the pool takes.
//! Another program may take them meanwhile, as it may between a question and a single creation, so
//! no operation keeps them while it copies or waits.
//!
//! Keeps I-10.

use crate::sync::atomic::{AtomicU64, Ordering};

/// The bytes that an operation may create without another question. A drop gives up the rest.
#[derive(Debug)]
pub(crate) struct Room<'a> {
    /// Free bytes that operations of the pool are about to create.
    claimed: &'a AtomicU64,
    bytes: u64,
    /// The bytes that the operation is still to create, if known.
    ahead: u64,
}

impl<'a> Room<'a> {
    /// Makes an empty room for an operation that is to create up to `ahead` bytes.
    #[inline]
    pub(in crate::pool) const fn new(claimed: &'a AtomicU64, ahead: u64) -> Self {
        Self {
            claimed,
            bytes: 0,
            ahead,
        }
    }

    /// Notes that the operation is to create up to `bytes`, if no more is known.
    pub(super) fn foresee(&mut self, bytes: u64) {
        self.ahead = self.ahead.max(bytes);
    }

    /// Moves the bytes here from another room of the same pool.
    pub(in crate::pool) fn take_from(&mut self, other: &mut Room<'_>) {
        debug_assert!(std::ptr::eq(self.claimed, other.claimed), "another pool's");
        self.bytes += std::mem::take(&mut other.bytes);
        self.ahead += std::mem::take(&mut other.ahead);
    }

    pub(super) const fn has(&self, size: u64) -> bool {
        self.bytes >= size
    }

    /// Takes from the `found` free bytes all that the operation is to create, or, if they do not
    /// fit, `size`.
    pub(super) fn take(&mut self, found: u64, size: u64) {
        self.give_up();
        self.bytes = match self.ahead.max(size) {
            all if all <= found => all,
            _ => size,
        };
        self.claimed.fetch_add(self.bytes, Ordering::SeqCst);
    }

    pub(super) fn use_up(&mut self, size: u64) {
        self.ahead = self.ahead.saturating_sub(size);
        let used = self.bytes.min(size);
        self.bytes -= used;
        self.claimed.fetch_sub(used, Ordering::SeqCst);
    }

    pub(super) fn give_up(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.claimed.fetch_sub(bytes, Ordering::SeqCst);
    }
}

impl Drop for Room<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.give_up();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::{Call, Ordinal};

    use super::*;
    use crate::error::{BlockError, MemoryError};
    use crate::extents::rig::{G, Rig, rig};
    use crate::pool::{Block, Limit, Pool};
    use crate::sleep::Contents;

    /// Returns a pool that may create `granules`, and a function that counts the pool's questions
    /// for free memory since its last call.
    fn pool(rig: &Rig, granules: u64) -> (Pool, impl FnMut() -> u64) {
        let left = rig.device.total_memory() - granules * G;
        let pool = Pool::builder(&rig.device).limit(Limit::LeaveFree(left));
        let pool = pool.build().unwrap();
        let mut before = rig.count(Call::MemGetInfo);
        let asked = move || {
            let all = rig.count(Call::MemGetInfo);
            all - std::mem::replace(&mut before, all)
        };
        (pool, asked)
    }

    #[test]
    fn waking_many_blocks_asks_once_and_a_part_of_them_if_not_all_fit_each_time() {
        let rig = rig();
        let (pool, mut asked) = pool(&rig, 64);
        let tenant = pool.tenant("a").register().unwrap();
        let blocks: Vec<Block> = (0..8).map(|_| tenant.allocate(4 * G).unwrap()).collect();
        let sleep = || {
            let selected = tenant.blocks().release(true);
            selected.sleep(Contents::Discard).unwrap();
            assert_eq!(pool.stats().committed, 0);
        };
        assert_eq!(asked(), 8);
        sleep();
        tenant.blocks().wake().unwrap();
        assert_eq!((pool.stats().committed, asked()), (32 * G, 1));
        assert_eq!(tenant.core().claimed.load(Ordering::SeqCst), 0);
        sleep();
        // Three blocks fit: each asks, and the fourth is refused.
        rig.machine.set_used_elsewhere(Ordinal(0), 50 * G);
        let refused = tenant.blocks().wake().unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        assert!(asked() >= 4);
        assert_eq!(tenant.core().claimed.load(Ordering::SeqCst), 0);
        rig.machine.set_used_elsewhere(Ordinal(0), 0);
        tenant.blocks().wake().unwrap();
        drop(blocks);
    }

    #[test]
    fn a_container_that_commits_many_extents_asks_once() {
        let rig = rig();
        let (pool, mut asked) = pool(&rig, 16);
        let tenant = pool.tenant("a").register().unwrap();
        let mut region = tenant.region(16 * G).largest_extent(G).reserve().unwrap();
        let created = rig.count(Call::MemCreate);
        region.commit(0..8 * G).unwrap();
        assert_eq!((asked(), rig.count(Call::MemCreate) - created), (1, 8));
        // What another program takes between two commits is seen.
        rig.machine.set_used_elsewhere(Ordinal(0), 8 * G);
        assert!(region.commit(8 * G..9 * G).is_err());
        assert!(asked() > 0);
        assert_eq!(tenant.core().claimed.load(Ordering::SeqCst), 0);
    }

    // I-10
    #[test]
    fn room_of_one_operation_is_none_of_another_until_it_is_used_or_given_up() {
        let rig = rig();
        let (pool, mut asked) = pool(&rig, 8);
        let tenant = pool.tenant("a").register().unwrap();
        let core = tenant.core();
        let policy = core.lock().memory.policy;
        let mut room = core.room(6 * G);
        let first = core.create(&policy, 2 * G, &mut room).unwrap();
        assert_eq!((room.bytes, asked()), (4 * G, 1));
        let refused = tenant.try_allocate(3 * G);
        assert!(matches!(refused, Err(BlockError::DriverOutOfMemory { .. })));
        let fits = tenant.try_allocate(2 * G).unwrap();
        asked();
        let second = core.create(&policy, 4 * G, &mut room).unwrap();
        assert_eq!((room.bytes, asked()), (0, 0));
        // The operation has created all that it expected: from here on it asks, and nothing is
        // left.
        let refused = core.create(&policy, G, &mut room).unwrap_err();
        assert!(matches!(refused, MemoryError::Create { cause, .. } if cause.is_out_of_memory()));
        drop((first, second, fits));
        pool.trim(0).unwrap();
        let mut room = core.room(8 * G);
        drop(core.create(&policy, G, &mut room).unwrap());
        assert!(core.check_left(&policy).is_ok());
        assert!(tenant.try_allocate(2 * G).is_err());
        drop(room);
        assert_eq!(tenant.try_allocate(8 * G).unwrap().size(), 8 * G);
    }

    #[test]
    fn a_creation_that_fails_gives_its_room_up() {
        let rig = rig();
        let (pool, _) = pool(&rig, 8);
        let tenant = pool.tenant("a").register().unwrap();
        rig.fail(Call::MemCreate, 1);
        assert!(tenant.try_allocate(8 * G).is_err());
        let core = tenant.core();
        let policy = core.lock().memory.policy;
        let mut room = core.room(8 * G);
        drop(core.create(&policy, G, &mut room).unwrap());
        assert_eq!(room.bytes, 7 * G);
        rig.fail(Call::MemCreate, 1);
        assert!(core.create(&policy, G, &mut room).is_err());
        assert_eq!(room.bytes, 0);
        // Memory that another program has taken since is seen before the next creation.
        rig.machine.set_used_elsewhere(Ordinal(0), 8 * G);
        let refused = core.create(&policy, G, &mut room).unwrap_err();
        assert!(matches!(refused, MemoryError::Create { cause, .. } if cause.is_out_of_memory()));
        rig.machine.set_used_elsewhere(Ordinal(0), 0);
        assert_eq!(tenant.core().claimed.load(Ordering::SeqCst), 0);
        assert_eq!(tenant.try_allocate(8 * G).unwrap().size(), 8 * G);
    }
}
