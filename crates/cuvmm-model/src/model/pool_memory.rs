//! The memory of memory pools: the bytes that an allocation uses, and the reuse and release of
//! freed bytes.
//!
//! Simplified: the bytes of a pool are interchangeable. An allocation may use bytes that were freed
//! in several places, and its address is new while the freed allocation's work is not done. Small
//! allocations share a step of their pool (see `slabs`); larger ones begin at granules.

use super::advice::Advised;
use super::allocation_table::{Allocation, Kind};
use super::answer::{Answer, INVALID_VALUE, OUT_OF_MEMORY, require};
use super::backing::{Backing, Change, MemoryKey, Part, Reach};
use super::device_state::Owner;
use super::pool_table::{Freed, Pool, PoolKey, STEP};
use super::slabs::{PIECE, Piece, Sharers};
use super::state::State;
use super::stream_table::{Mark, StreamKey};
use cuvmm_driver::{AllocationType, LocationKind};

struct Taken {
    /// Bytes that the pool must obtain.
    new: u64,
    after: Vec<Mark>,
}

impl<B: Backing> State<B> {
    /// Allocates from a pool in the order of a stream. Returns the address, and the work of other
    /// streams that the stream must wait for.
    pub(crate) fn allocate_from_pool(
        &mut self,
        key: PoolKey,
        size: u64,
        stream: StreamKey,
    ) -> Answer<(u64, Vec<Mark>)> {
        // An allocation of 0 bytes succeeds, as measured. Its address was not measured.
        let bytes = size
            .max(1)
            .checked_next_multiple_of(PIECE)
            .filter(|bytes| bytes.checked_next_multiple_of(STEP).is_some())
            .ok_or(OUT_OF_MEMORY)?;
        let pool = self.pools.by_key.get(&key).ok_or(INVALID_VALUE)?;
        // An imported pool has no memory of its own.
        let owner = pool.owner.ok_or(INVALID_VALUE)?;
        self.sweep();
        let (before, freed) = {
            let pool = self.pools.by_key.get(&key).ok_or(INVALID_VALUE)?;
            (pool.kept, pool.freed.clone())
        };
        let taken = self.take_bytes(key, owner, bytes, stream)?;
        let placed = self.place_in_pool(key, bytes);
        let Some(pool) = self.pools.by_key.get_mut(&key) else {
            return Err(INVALID_VALUE);
        };
        let Piece {
            address,
            slab,
            memory,
        } = match placed {
            Ok(placed) => placed,
            Err(code) => {
                (pool.kept, pool.freed) = (before, freed);
                self.refund(owner, taken.new);
                return Err(code);
            }
        };
        pool.reserved.add(taken.new);
        pool.used.add(size);
        pool.allocations += 1;
        let (kind, device) = kind_of(pool);
        if taken.new != 0 {
            self.clock.spend(self.rules.costs.alloc.at(taken.new));
        }
        let allocation = Allocation {
            size,
            kind,
            device,
            advised: Advised::new(address),
            owner: None,
            taken: bytes,
            slab,
            name: None,
            ending: false,
            pool: Some(key),
            memory,
        };
        self.allocations.by_address.insert(address, allocation);
        Ok((address, taken.after))
    }

    /// Takes kept bytes first, then freed bytes that the stream may use without waiting, then new
    /// bytes, and last freed bytes of other streams, behind their work.
    fn take_bytes(
        &mut self,
        key: PoolKey,
        owner: Owner,
        bytes: u64,
        stream: StreamKey,
    ) -> Answer<Taken> {
        let ordered = self.streams.awaited_by(stream);
        let done = |mark: Mark| self.streams.is_done(mark);
        let pool = self.pools.by_key.get(&key).ok_or(INVALID_VALUE)?;
        let at_once = |freed: &Freed| {
            let behind =
                |mark: &Mark| mark.stream == freed.mark.stream && mark.number >= freed.mark.number;
            freed.mark.stream == stream
                || (pool.reuse.follow_events && ordered.iter().any(behind))
                || (pool.reuse.opportunistic && done(freed.mark))
        };
        let (now, later): (Vec<_>, Vec<_>) = pool.freed.iter().copied().partition(at_once);
        let (mut kept, internal) = (pool.kept, pool.reuse.internal);
        let (reserved, maximum) = (pool.reserved.current, whole_steps(pool.props.maximum));
        let fits = |new: u64| maximum == 0 || reserved.saturating_add(new) <= maximum;

        let mut missing = bytes;
        take(&mut kept, &mut missing);
        let (mut rest, _) = draw(now, &mut missing);
        let mut new = whole_steps(missing);
        let mut after = Vec::new();
        if fits(new) && self.charge_new(owner, new).is_ok() {
            rest.extend(later);
        } else {
            require(internal, OUT_OF_MEMORY)?;
            let (left, waited) = draw(later, &mut missing);
            (new, after) = (whole_steps(missing), waited);
            require(fits(new), OUT_OF_MEMORY)?;
            self.charge_new(owner, new)?;
            rest.extend(left);
        }
        kept += new - missing;
        if let Some(pool) = self.pools.by_key.get_mut(&key) {
            (pool.kept, pool.freed) = (kept, rest);
        }
        Ok(Taken { new, after })
    }

    /// Charges bytes that a pool obtains. Obtaining no bytes is never refused.
    fn charge_new(&mut self, owner: Owner, bytes: u64) -> Answer {
        match bytes {
            0 => Ok(()),
            _ => self.charge(owner, bytes),
        }
    }

    fn place_in_pool(&mut self, key: PoolKey, bytes: u64) -> Answer<Piece> {
        let granularity = self.rules.granularity;
        if bytes > granularity / 2 {
            return self.granules_in_pool(key, bytes.next_multiple_of(granularity));
        }
        let (kind, device) = kind_of(self.pools.by_key.get(&key).ok_or(INVALID_VALUE)?);
        let pool = Some(key);
        let sharers = Sharers { kind, device, pool };
        self.take_piece(sharers, None, bytes, |state, bytes| {
            state.granules_in_pool(key, bytes)
        })
    }

    fn granules_in_pool(&mut self, key: PoolKey, bytes: u64) -> Answer<Piece> {
        let pool = self.pools.by_key.get_mut(&key).ok_or(INVALID_VALUE)?;
        let touchable = kind_of(pool).0.is_touchable();
        let slab = None;
        let Some(shared) = &mut pool.shared else {
            let address = self.backing.allocate(bytes, touchable)?;
            return Ok(Piece {
                address,
                slab,
                memory: None,
            });
        };
        let space = shared.space.as_mut().ok_or(INVALID_VALUE)?;
        let offset = space.allocate(bytes, 1).ok_or(OUT_OF_MEMORY)?;
        let placed = self.show(key, offset, bytes);
        if placed.is_err()
            && let Some(pool) = self.pools.by_key.get_mut(&key)
            && let Some(space) = pool
                .shared
                .as_mut()
                .and_then(|shared| shared.space.as_mut())
        {
            space.give_back(offset, bytes);
        }
        let (address, memory) = placed?;
        Ok(Piece {
            address,
            slab,
            memory: Some((memory, offset)),
        })
    }

    pub(crate) fn show(
        &mut self,
        key: PoolKey,
        offset: u64,
        bytes: u64,
    ) -> Answer<(u64, MemoryKey)> {
        let pool = self.pools.by_key.get(&key).ok_or(INVALID_VALUE)?;
        let memory = pool.shared.as_ref().ok_or(INVALID_VALUE)?.key;
        let reach = pool.rights.reach();
        let address = self.backing.reserve(bytes, self.rules.granularity, None)?;
        let part = Part {
            address,
            size: bytes,
            offset,
        };
        let change = Change {
            part,
            from: Reach::Nothing,
            to: reach,
        };
        if let Err(code) = self.backing.map(memory, &[part]) {
            let _ = self.backing.unreserve(address, bytes);
            return Err(code);
        }
        if let Err(code) = self.backing.protect(&[change]) {
            let _ = self.backing.unmap(&[part]);
            let _ = self.backing.unreserve(address, bytes);
            return Err(code);
        }
        Ok((address, memory))
    }

    /// Counts the bytes of an allocation as freed, once the work up to the mark is done.
    pub(crate) fn note_freed(&mut self, key: PoolKey, size: u64, freed: Freed) {
        if let Some(pool) = self.pools.by_key.get_mut(&key)
            && pool.owner.is_some()
        {
            pool.used.subtract(size);
            pool.freed.push(freed);
        }
    }

    /// Ends an allocation of a pool that is already out of the tables.
    pub(crate) fn end_in_pool(&mut self, key: PoolKey, address: u64, gone: &Allocation) {
        let used = gone.slab.is_some_and(|slab| {
            let last = self.slabs.give_back(slab, address, gone.taken);
            last.is_none()
        });
        if !used {
            self.give_back_granules(key, address, gone);
        }
        let Some(pool) = self.pools.by_key.get_mut(&key) else {
            return;
        };
        if !gone.ending && pool.owner.is_some() {
            // The allocation was not freed in stream order, so its bytes are not counted as freed
            // yet.
            pool.used.subtract(gone.size);
            pool.kept += gone.taken;
        }
        pool.allocations -= 1;
        self.end_pool_if_unused(key);
    }

    /// Frees the granules whose last user was this allocation.
    fn give_back_granules(&mut self, key: PoolKey, address: u64, gone: &Allocation) {
        let part = self.granules_of(address, gone);
        if gone.memory.is_none() {
            self.backing.deallocate(part.address, part.size);
            return;
        }
        // Nothing else is mapped there, so the addresses can be cleared. No caller could handle a
        // refusal, so the system is asked twice.
        let unmap = |backing: &mut B| backing.unmap(&[part]);
        let _ = unmap(&mut self.backing).or_else(|_| unmap(&mut self.backing));
        let _ = self.backing.unreserve(part.address, part.size);
        let pool = self.pools.by_key.get_mut(&key);
        let shared = pool.and_then(|pool| pool.shared.as_mut());
        if let Some(space) = shared.and_then(|shared| shared.space.as_mut()) {
            space.give_back(part.offset, part.size);
        }
    }

    /// Counts bytes that `cuMemFree` has freed as still in use, as an H200 does.
    pub(crate) fn count_as_used(&mut self, key: PoolKey, size: u64) {
        if let Some(pool) = self.pools.by_key.get_mut(&key) {
            pool.used.add(size);
        }
    }

    /// Ends a destroyed pool without allocations, and releases its memory.
    pub(crate) fn end_pool_if_unused(&mut self, key: PoolKey) {
        let ends = |pool: &Pool| pool.handle.is_none() && pool.allocations == 0;
        if !self.pools.by_key.get(&key).is_some_and(ends) {
            return;
        }
        let Some(pool) = self.pools.by_key.remove(&key) else {
            return;
        };
        if let Some(shared) = pool.shared {
            self.backing.destroy(shared.key);
        }
        if let Some(owner) = pool.owner {
            self.give_up_pooled(owner, pool.reserved.current);
        }
    }

    /// Keeps the memory that a synchronization has shown to be free, up to the thresholds of the
    /// pools, and releases the rest. Pools of other devices are left alone.
    pub(crate) fn settle_pools(&mut self, device: usize) {
        for key in self.pools_of(device) {
            self.settle_pool(key);
            let threshold = self.pools.by_key.get(&key).map(|pool| pool.threshold);
            self.trim_pool(key, threshold.unwrap_or_default());
        }
    }

    /// Counts the memory freed by completed work as kept, in all pools.
    pub(crate) fn settle_all_pools(&mut self) {
        let keys: Vec<_> = self.pools.by_key.keys().copied().collect();
        keys.into_iter().for_each(|key| self.settle_pool(key));
    }

    pub(crate) fn empty_pools(&mut self, device: usize) {
        for key in self.pools_of(device) {
            self.settle_pool(key);
            self.trim_pool(key, 0);
        }
    }

    fn pools_of(&self, device: usize) -> Vec<PoolKey> {
        let here = |pool: &Pool| match pool.owner {
            Some(Owner::Device(owner)) => owner == device,
            Some(Owner::Host) => true,
            None => false,
        };
        let pools = self.pools.by_key.iter();
        pools
            .filter(|(_, pool)| here(pool))
            .map(|(&key, _)| key)
            .collect()
    }

    fn settle_pool(&mut self, key: PoolKey) {
        let Some(pool) = self.pools.by_key.get_mut(&key) else {
            return;
        };
        let done = pool
            .freed
            .extract_if(.., |freed| self.streams.is_done(freed.mark));
        let bytes: u64 = done.map(|freed| freed.bytes).sum();
        pool.kept += bytes;
    }

    /// Releases kept memory until the pool holds at most `keep` bytes, also in a shareable pool, as
    /// measured on an H200, against NVIDIA's documentation.
    pub(crate) fn trim_pool(&mut self, key: PoolKey, keep: u64) {
        let Some(pool) = self.pools.by_key.get_mut(&key) else {
            return;
        };
        let over = pool.reserved.current.saturating_sub(keep);
        // The memory is released in whole steps, and at least `keep` bytes stay.
        let most = pool.kept.min(over);
        let bytes = most - most % STEP;
        pool.kept -= bytes;
        pool.reserved.subtract(bytes);
        if let Some(owner) = pool.owner {
            self.give_up_pooled(owner, bytes);
        }
    }

    fn give_up_pooled(&mut self, owner: Owner, bytes: u64) {
        if bytes != 0 {
            self.refund(owner, bytes);
            self.clock.spend(self.rules.costs.release.at(bytes));
        }
    }
}

pub(crate) fn kind_of(pool: &Pool) -> (Kind, i32) {
    let location = pool.props.location;
    let (kind, device) = match location.kind {
        LocationKind::DEVICE => (Kind::Pool, location.id),
        _ => (Kind::HostPool, 0),
    };
    match pool.props.allocation_type {
        AllocationType::MANAGED => (Kind::Managed, device),
        _ => (kind, device),
    }
}

fn whole_steps(bytes: u64) -> u64 {
    bytes.div_ceil(STEP).saturating_mul(STEP)
}

/// Takes up to `missing` bytes of those `there`.
fn take(there: &mut u64, missing: &mut u64) -> u64 {
    let bytes = (*there).min(*missing);
    *there -= bytes;
    *missing -= bytes;
    bytes
}

/// Takes `missing` bytes of freed memory. Returns the rest, and the work of the taken memory.
fn draw(freed: Vec<Freed>, missing: &mut u64) -> (Vec<Freed>, Vec<Mark>) {
    let (mut left, mut marks) = (Vec::new(), Vec::new());
    for mut freed in freed {
        if take(&mut freed.bytes, missing) != 0 {
            marks.push(freed.mark);
        }
        if freed.bytes != 0 {
            left.push(freed);
        }
    }
    (left, marks)
}
