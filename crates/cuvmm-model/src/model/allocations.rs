//! Allocations outside virtual memory management: plain, from a memory pool, pinned, managed.
//!
//! An allocation takes whole granules; small ones share them (see `slabs`).

use super::advice::Advised;
use super::allocation_table::{Allocation, Kind};
use super::answer::{Answer, INVALID_VALUE, NOT_SUPPORTED, require};
use super::backing::Backing;
use super::device_state::Owner;
use super::losses::{Loss, Taken};
use super::slabs::{PIECE, Piece, Sharers};
use super::state::State;
use cuvmm_driver::{Call, DeviceAddress, DeviceAttribute, Ordinal};

/// The kinds of allocations that `cuMemFree` frees.
const FREEABLE: &[Kind] = &[Kind::Plain, Kind::Pool, Kind::HostPool, Kind::Managed];

impl<B: Backing> State<B> {
    pub(crate) fn allocate(&mut self, device: Ordinal, size: u64, kind: Kind) -> Answer<u64> {
        let index = self.context(device)?;
        // A pinned allocation of 0 bytes succeeds, as measured. Its address was not measured.
        require(size != 0 || kind == Kind::Pinned, INVALID_VALUE)?;
        let granularity = self.rules.granularity;
        let too_large = super::answer::OUT_OF_MEMORY;
        let taken = size
            .max(1)
            .checked_next_multiple_of(granularity)
            .ok_or(too_large)?;
        // Managed pages are charged to no device, because they are where they were last accessed.
        let owner = match kind {
            Kind::Plain => Some(Owner::Device(index)),
            Kind::Pinned => Some(Owner::Host),
            Kind::Managed | Kind::Pool | Kind::HostPool | Kind::Opened => None,
        };
        self.sweep();
        let small = matches!(kind, Kind::Plain | Kind::Pinned) && size <= granularity / 2;
        let device = device.0;
        let (piece, taken) = if small {
            let taken = size.max(1).next_multiple_of(PIECE);
            let sharers = Sharers {
                kind,
                device,
                pool: None,
            };
            let granules = |state: &mut Self, bytes| state.take_granules(kind, owner, bytes);
            (self.take_piece(sharers, owner, taken, granules)?, taken)
        } else {
            (self.take_granules(kind, owner, taken)?, taken)
        };
        let Piece { address, slab, .. } = piece;
        let advised = Advised::new(address);
        let allocation = Allocation {
            size,
            kind,
            device,
            advised,
            owner,
            taken,
            slab,
            pool: None,
            memory: None,
            name: None,
            ending: false,
        };
        self.allocations.by_address.insert(address, allocation);
        Ok(address)
    }

    fn take_granules(&mut self, kind: Kind, owner: Option<Owner>, taken: u64) -> Answer<Piece> {
        if let Some(owner) = owner {
            self.charge(owner, taken)?;
        }
        let address = self.backing.allocate(taken, kind.is_touchable());
        if address.is_err() {
            owner
                .into_iter()
                .for_each(|owner| self.refund(owner, taken));
        }
        Ok(Piece {
            address: address?,
            slab: None,
            memory: None,
        })
    }

    fn give_back(&mut self, address: u64, gone: &Allocation) {
        if let Some(name) = &gone.name {
            self.backing.end_name(name);
        }
        let (start, taken, owner) = match gone.slab {
            None => (address, gone.taken, gone.owner),
            Some(slab) => match self.slabs.give_back(slab, address, gone.taken) {
                Some(last) => (slab, self.rules.granularity, last.owner),
                None => return,
            },
        };
        self.backing.deallocate(start, taken);
        if let Some(owner) = owner {
            self.refund(owner, taken);
        }
    }

    pub(crate) fn end_allocation(&mut self, call: Call, address: u64) {
        let Some(gone) = self.allocations.by_address.remove(&address) else {
            return;
        };
        let touchable = gone.kind.is_touchable();
        let taken = Taken {
            start: address,
            size: gone.size,
            loss: Loss::Allocation { touchable },
        };
        self.note_hazards(call, &[taken]);
        if let Some(shadow) = &mut self.shadow {
            shadow.end_allocation(address, gone.size);
        }
        if let Some(pool) = gone.pool {
            self.end_in_pool(pool, address, &gone);
            return;
        }
        self.give_back(address, &gone);
    }

    /// Releases memory that the device's pools keep beyond their thresholds, after a stream, an
    /// event or a context was synchronized.
    pub(crate) fn synchronized(&mut self, device: Ordinal) -> Answer {
        let index = self.device(device)?;
        self.settle_pools(index);
        Ok(())
    }

    /// Finds an allocation that begins at this address, is of one of these kinds and is not being
    /// freed.
    pub(crate) fn allocation(&mut self, address: u64, kinds: &[Kind]) -> Answer<&mut Allocation> {
        let found = self
            .allocations
            .by_address
            .get_mut(&address)
            .ok_or(INVALID_VALUE)?;
        require(kinds.contains(&found.kind) && !found.ending, INVALID_VALUE)?;
        Ok(found)
    }

    pub(crate) fn alloc(&mut self, device: Ordinal, size: u64) -> Answer<DeviceAddress> {
        self.context(device)?;
        self.refuse_in_capture(None)?;
        let address = self.allocate(device, size, Kind::Plain)?;
        self.clock.spend(self.rules.costs.alloc.at(size));
        Ok(DeviceAddress(address))
    }

    /// Makes the checks of `free`, before it waits for the device.
    pub(crate) fn check_free(&mut self, device: Ordinal, address: DeviceAddress) -> Answer {
        self.context(device)?;
        self.refuse_in_capture(None)?;
        self.allocation(address.0, FREEABLE).map(drop)
    }

    pub(crate) fn free(&mut self, device: Ordinal, address: DeviceAddress) -> Answer {
        // Another thread may have freed the memory while this call waited.
        let freed = self.allocation(address.0, FREEABLE)?;
        let (size, pool) = (freed.size, freed.pool);
        self.end_allocation(Call::MemFree, address.0);
        match pool {
            // The call has waited for the device.
            Some(pool) => {
                self.count_as_used(pool, size);
                self.synchronized(device)?;
            }
            None => self.clock.spend(self.rules.costs.free.at(size)),
        }
        Ok(())
    }

    pub(crate) fn host_alloc(&mut self, device: Ordinal, size: u64, flags: u32) -> Answer<u64> {
        self.context(device)?;
        // The flags are portable, mapped into the device, and write-combined.
        require(flags & !0x7 == 0, INVALID_VALUE)?;
        self.refuse_in_capture(None)?;
        self.allocate(device, size, Kind::Pinned)
    }

    pub(crate) fn host_free(&mut self, device: Ordinal, address: u64) -> Answer {
        self.context(device)?;
        self.refuse_in_capture(None)?;
        self.allocation(address, &[Kind::Pinned])?;
        self.end_allocation(Call::MemFreeHost, address);
        Ok(())
    }

    pub(crate) fn managed_alloc(
        &mut self,
        device: Ordinal,
        size: u64,
        flags: u32,
    ) -> Answer<DeviceAddress> {
        self.context(device)?;
        self.can(device, DeviceAttribute::MANAGED_MEMORY, NOT_SUPPORTED)?;
        require(flags == 1 || flags == 2, INVALID_VALUE)?;
        self.refuse_in_capture(None)?;
        self.allocate(device, size, Kind::Managed)
            .map(DeviceAddress)
    }
}
