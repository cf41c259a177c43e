//! Mappings unmapped only with proof.
//!
//! The public [`Mapping`] unmaps when it is dropped. Memory that a region or pool has placed may be
//! in use by work of the GPU at any time, so its extents are held as [`Mapped`]: an extent that is
//! dropped without proof that no work can use it stays mapped. So does one whose call of the driver
//! panicked, since it may be mapped. Its space keeps it as [stuck](StuckMappings), counts it, and
//! tries to unmap it later. At the end of the space, memory and addresses of stuck mappings are lost to
//! the process and counted ([`Device::leaked`](crate::Device::leaked)).
//!
//! Keeps I-25 and I-150.
//!
//! `unsafe` is used to take the mapping out of a type whose drop does not drop it.
#![allow(unsafe_code)]

use std::mem::{self, ManuallyDrop};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError, Weak};

use super::fence::Unused;
use crate::error::{CallError, MemoryError};
use crate::own::{Mapping, Physical, Reservation};
use crate::sync::{Mutex, MutexGuard};

/// The mappings of a space that are never used again and may be mapped, shared with its targets.
#[derive(Clone, Debug, Default)]
pub(super) struct StuckMappings(Arc<Mutex<Vec<Mapped>>>);

impl StuckMappings {
    /// Locks the list, under which no call of the driver is made.
    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Mapped>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mapping that stays mapped when it is dropped, and is stuck in its space then.
#[derive(Debug)]
pub(crate) struct Mapped {
    mapping: ManuallyDrop<Mapping>,
    space: Weak<Mutex<Vec<Self>>>,
}

impl Mapped {
    /// Maps a whole physical at an offset of the space with these stuck mappings (`cuMemMap`).
    pub(super) fn map(
        reservation: &Reservation,
        stuck: &StuckMappings,
        offset: u64,
        physical: &Physical,
    ) -> Result<Self, MemoryError> {
        let mut mapped = Self {
            mapping: ManuallyDrop::new(reservation.prepare(offset, physical)?),
            space: Arc::downgrade(&stuck.0),
        };
        match mapped.mapping.map() {
            Ok(()) => Ok(mapped),
            Err(error) => {
                drop(mapped.into_mapping());
                Err(error)
            }
        }
    }

    /// Unmaps (`cuMemUnmap`) and returns the physical; on failure, returns the mapping. If the driver
    /// panics, asks it once more before the panic goes on.
    pub(super) fn unmap(mut self, _proof: Unused) -> Result<Physical, (Self, CallError)> {
        let mut unmap = || catch_unwind(AssertUnwindSafe(|| self.mapping.unmap()));
        let first = unmap();
        let second = first.is_err().then(&mut unmap);
        match (first, second) {
            (Ok(Err(error)), _) => Err((self, error)),
            (Ok(Ok(())), _) => Ok(self.into_mapping().physical().clone()),
            (Err(panic), second) => {
                if let Some(Ok(Ok(()))) = second {
                    drop(self.into_mapping());
                }
                resume_unwind(panic)
            }
        }
    }

    fn into_mapping(self) -> Mapping {
        let mut this = ManuallyDrop::new(self);
        drop(mem::take(&mut this.space));
        // SAFETY: `this` is neither used nor dropped afterwards.
        unsafe { ManuallyDrop::take(&mut this.mapping) }
    }
}

impl Deref for Mapped {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let device = self.mapping.physical().device();
        // In a forked child another thread may have held the lock.
        if device.forked().is_some() {
            return;
        }
        let Some(stuck) = self.space.upgrade().map(StuckMappings) else {
            log!(debug, address = ?self.mapping.address(), "an extent stays mapped for good");
            return device.report_leak(self.mapping.size());
        };
        // SAFETY: the mapping is not used afterwards, and the drop of this value does not drop it.
        let mapping = unsafe { ManuallyDrop::take(&mut self.mapping) };
        let again = Self {
            mapping: ManuallyDrop::new(mapping),
            space: mem::take(&mut self.space),
        };
        stuck.lock().push(again);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use cuvmm_driver::Call;

    use crate::extents::Space;
    use crate::extents::rig::{G, rig};

    // I-150
    #[test]
    fn what_a_panic_may_have_left_mapped_is_stuck_and_unmapped_later() {
        for call in [Call::MemMap, Call::MemSetAccess] {
            for apart in [false, true] {
                let rig = rig();
                let mut space = Space::reserve(&rig.device, 2 * G).unwrap();
                rig.panic_at(call, 2);
                let target = space.target();
                let place = || match apart {
                    false => drop(space.place(0, vec![rig.memory(1), rig.memory(1)])),
                    true => {
                        let _first = target.place(0, rig.memory(1));
                        drop(target.place(G, rig.memory(1)));
                    }
                };
                assert!(catch_unwind(AssertUnwindSafe(place)).is_err());
                let stuck = (space.stuck_count(), space.stuck_bytes(), space.count());
                assert_eq!(stuck, (2, 2 * G, 0), "{call:?}");
                space.promised().retry_stuck().unwrap();
                assert_eq!((space.stuck_count(), rig.machine.live().mappings), (0, 0));
                drop((space, target));
                assert_eq!(
                    (rig.device.leaked(), rig.machine.live().reserved_bytes),
                    (0, 0)
                );
            }
        }
    }

    #[test]
    fn what_is_dropped_behind_its_space_is_leaked_once() {
        let rig = rig();
        for keeps_target in [true, false] {
            let before = rig.device.leaked();
            let mut space = rig.space(3);
            let target = keeps_target.then(|| space.target());
            let placed = [0, G].map(|at| space.remove(at).unwrap());
            let [first, second] = placed;
            drop(first);
            assert_eq!((space.stuck_bytes(), rig.device.leaked()), (G, before));
            drop(space);
            drop(second);
            // A target may be what another thread has, which may still place in it.
            let lost = if keeps_target { 0 } else { 3 * G };
            assert_eq!(rig.device.leaked(), before + lost);
            drop(target);
            assert_eq!(rig.device.leaked(), before + 3 * G);
        }
        assert_eq!(rig.machine.live().mappings, 6);
    }

    #[test]
    fn what_the_driver_unmaps_when_it_is_asked_again_after_a_panic_is_not_stuck() {
        let rig = rig();
        let mut space = rig.space(2);
        rig.panic_at(Call::MemUnmap, 1);
        let withdraw = || drop(space.promised().withdraw(0));
        assert!(catch_unwind(AssertUnwindSafe(withdraw)).is_err());
        assert_eq!((space.stuck_count(), space.count()), (0, 1));
        assert_eq!(rig.machine.live().mappings, 1);
    }

    // I-151
    #[test]
    fn addresses_are_freed_once_and_counted_when_they_are() {
        let rig = rig();
        rig.panic_at(Call::MemAddressFree, 1);
        let space = Space::reserve(&rig.device, G).unwrap();
        let free = || space.give_back();
        assert!(catch_unwind(AssertUnwindSafe(free)).is_err());
        // The call that panicked may have freed them, and others may have them by now.
        assert_eq!(rig.count(Call::MemAddressFree), 0);
        for (refusals, freed) in [(1, G), (2, 0)] {
            (1..=refusals).for_each(|nth| rig.fail(Call::MemAddressFree, nth));
            let space = Space::reserve(&rig.device, G).unwrap();
            let before = rig.count(Call::MemAddressFree);
            assert_eq!(space.give_back(), freed, "{refusals} refusals");
            assert_eq!(rig.count(Call::MemAddressFree) - before, 2);
            rig.heal();
        }
        let space = Space::reserve(&rig.device, G).unwrap();
        assert_eq!(space.give_back(), G);
    }
}
