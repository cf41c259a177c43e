//! The registrations of a region: registered memory does not change, and stays mapped if the region
//! is dropped first.
//!
//! This module keeps the records, and the extents that a dropped region left registered. The region
//! checks the records before it changes anything. Ending a registration does not wait while the
//! region lives, since nothing is unmapped then.
//!
//! Keeps I-63.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use cuvmm_driver::PhysicalHandle;
use rangemap::RangeMap;

use super::Region;
use super::family::{Ending, Family};
use super::holder::Use;
use super::noted::Noted;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::extents::{Fence, Placed, Registration, RegistrationOwner, unmap_drained};
use crate::own::Access::ReadWrite;
use crate::own::Stream;
use crate::sync::{Mutex, MutexGuard};

/// The registrations of a region, which they may outlive.
pub(super) struct Register {
    device: Device,
    books: Mutex<Books>,
    /// The records of a forked child, since another thread of the parent may have held the lock.
    after_fork: Mutex<Books>,
    noted: Noted,
    /// The pool's holder that the memory is charged to, if the region is in a tenant.
    family: Option<Arc<Family>>,
}

#[derive(Default)]
struct Books {
    /// Registrations made so far, which numbers them.
    numbered: u64,
    /// The range that each registration keeps, in whole extents.
    kept: BTreeMap<u64, Range<u64>>,
    /// The number of registrations that keep each byte, where any do: changing a range does not
    /// search the other registrations.
    claims: RangeMap<u64, u64>,
    /// Extents whose region was dropped, by offset.
    left: BTreeMap<u64, Placed>,
    /// The devices that may be using `left`.
    users: Vec<Device>,
    /// The space of a dropped region in a tenant, which the pool gets after `left`.
    space: Option<Arc<Ending>>,
}

impl Register {
    pub(super) fn new(device: &Device, family: Option<Arc<Family>>) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            books: Mutex::default(),
            after_fork: Mutex::default(),
            noted: Noted::none(),
            family,
        })
    }

    /// The work that uses the region's memory besides that of the streams that its owner names.
    pub(super) const fn noted(&self) -> &Noted {
        &self.noted
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        let books = match self.device.is_forked() {
            false => &self.books,
            true => &self.after_fork,
        };
        books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(
        self: &Arc<Self>,
        range: Range<u64>,
        read_only: Vec<Range<u64>>,
        memory: Vec<(Range<u64>, PhysicalHandle)>,
    ) -> Kept {
        let mut books = self.books();
        books.numbered += 1;
        let number = books.numbered;
        books.keep(number, range);
        drop(books);
        Kept {
            register: Arc::clone(self),
            number,
            read_only,
            memory,
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.books().kept.len() as u64
    }

    pub(super) fn end(&self) -> u64 {
        let books = self.books();
        let last = books.claims.last_range_value();
        last.map_or(0, |(range, _)| range.end)
    }

    /// Refuses a change of a range that is registered.
    pub(super) fn check(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        let books = self.books();
        if !books.claims.overlaps(range) {
            return Ok(());
        }
        let mut meeting = books.kept.values().filter(|kept| meet(kept, range));
        match meeting.next() {
            None => Ok(()),
            Some(first) => Err(MemoryError::Registered {
                range: range.clone(),
                first: first.start,
                registrations: 1 + meeting.count() as u64,
            }),
        }
    }

    /// Takes over the registered extents of a region that is being dropped, and its space for as
    /// long as one of them is left.
    fn take_over(
        &self,
        users: Vec<Device>,
        space: Option<&Arc<Ending>>,
        mut take: impl FnMut(&Range<u64>) -> Vec<(u64, Placed)>,
    ) {
        let mut books = self.books();
        let kept: Vec<Range<u64>> = books.kept.values().cloned().collect();
        for range in kept {
            books.left.extend(take(&range));
        }
        books.users = users;
        if !books.left.is_empty() {
            books.space = space.map(Arc::clone);
        }
    }

    /// Unmaps extents of a dropped region that nothing registers any more. In a tenant they go to
    /// its pool instead, and nothing is waited for.
    fn let_go(
        &self,
        users: Vec<Device>,
        going: &mut BTreeMap<u64, Placed>,
    ) -> Result<(), CallError> {
        let Some(family) = &self.family else {
            return unmap_drained(&users, going);
        };
        let going: Vec<Placed> = std::mem::take(going).into_values().collect();
        let fence = Fence::devices(users);
        let going = going.into_iter().map(|placed| (placed, fence.clone()));
        family.withdraw(going.collect(), Use::Used);
        Ok(())
    }
}

impl Books {
    fn keep(&mut self, number: u64, range: Range<u64>) {
        self.claim(&range, |claims| claims + 1);
        self.kept.insert(number, range);
    }

    fn forget(&mut self, number: u64) -> Option<Range<u64>> {
        let range = self.kept.remove(&number)?;
        self.claim(&range, |claims| claims - 1);
        Some(range)
    }

    fn claim(&mut self, range: &Range<u64>, change: impl Fn(u64) -> u64) {
        if range.is_empty() {
            return;
        }
        let unclaimed = self.claims.gaps(range).map(|gap| (gap, 0));
        let claimed = self.claims.overlapping(range);
        let claimed = claimed.map(|(part, &claims)| {
            let part = part.start.max(range.start)..part.end.min(range.end);
            (part, claims)
        });
        let parts: Vec<(Range<u64>, u64)> = unclaimed.chain(claimed).collect();
        for (part, claims) in parts {
            match change(claims) {
                0 => self.claims.remove(part),
                claims => self.claims.insert(part, claims),
            }
        }
    }
}

/// One registration of a range, which ends when it is dropped.
struct Kept {
    register: Arc<Register>,
    number: u64,
    /// Extents that were read-only when the registration began, since a fork shared their memory.
    /// Registered memory is not capped later, so none are added.
    read_only: Vec<Range<u64>>,
    /// The memory, which stays the same.
    memory: Vec<(Range<u64>, PhysicalHandle)>,
}

impl Kept {
    /// Ends the registration. Extents of a dropped region that no other registration keeps are
    /// unmapped behind all work of the devices that had access. On failure the registration goes
    /// on, except for extents that were unmapped.
    fn end(&self) -> Result<(), CallError> {
        let mut books = self.register.books();
        let Some(range) = books.forget(self.number) else {
            return Ok(());
        };
        let Books { claims, left, .. } = &mut *books;
        let mut going: BTreeMap<u64, Placed> = BTreeMap::new();
        let here: Vec<u64> = left.range(range.clone()).map(|(&at, _)| at).collect();
        for at in here {
            if !claims.contains_key(&at) {
                going.extend(left.remove(&at).map(|placed| (at, placed)));
            }
        }
        let users = books.users.clone();
        let space = match books.left.is_empty() {
            true => books.space.take(),
            // Another registration may end the books' hold on the space before this one's extents
            // are withdrawn.
            false => books.space.clone(),
        };
        drop(books);
        let ended = self.register.let_go(users, &mut going);
        drop(space);
        if ended.is_err() {
            let mut books = self.register.books();
            books.left.append(&mut going);
            books.keep(self.number, range);
        }
        ended
    }
}

impl RegistrationOwner for Kept {
    fn close(&self) -> Result<(), CallError> {
        self.end()
    }

    fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        let Register { device, noted, .. } = &*self.register;
        stream.check_driver(device)?;
        device.own_process()?;
        noted.record(stream);
        Ok(())
    }

    fn may_export(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        match self.read_only.iter().any(|closed| meet(closed, range)) {
            true => Err(MemoryError::ReadOnly(range.clone())),
            false => Ok(()),
        }
    }

    fn exported(&self, range: &Range<u64>) {
        // The region reads the mark of each physical.
        if let Some(family) = &self.register.family {
            let here = self.memory.iter().filter(|(part, _)| meet(part, range));
            let here = here.map(|(part, handle)| (*handle, part.end - part.start));
            family.shared.add_exported(here);
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Another thread may have held the lock at the fork: a child never gets it.
        if self.register.device.forked().is_some() {
            return;
        }
        if let Err(error) = self.end() {
            let books = self.register.books();
            let bytes = books.left.values().map(|placed| placed.size());
            let bytes = bytes.sum();
            drop(books);
            self.register
                .device
                .report_drop("registration", bytes, error);
        }
    }
}

const fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Region {
    /// Registers the extents of a committed range, so that the memory can be registered with a NIC
    /// or with NCCL. Returns the exact list of the extents, none of which changes while the
    /// registration lives. Extents that the range cuts are included whole, since mappings can only
    /// be registered whole. Makes no driver call.
    ///
    /// Operations on registered extents are refused meanwhile: decommitting, relocating or
    /// unsharing them, forking the region (which would make memory read-only under a writer),
    /// revoking a device's access, and closing the region. Committing and decommitting elsewhere,
    /// granting access, aliases, copies and fills are allowed. If the region is dropped first,
    /// registered extents stay mapped at their addresses until their last registration ends, which
    /// then waits for the devices.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, the context is lost, or the process is a
    /// forked child.
    pub fn register(&self, range: Range<u64>) -> Result<Registration, MemoryError> {
        self.check_committed(&range)?;
        let (start, end) = (range.start, range.end);
        self.device().usable()?;
        let extents: Vec<_> = self.space.marked_in(start, end).collect();
        let kept = extents.iter().fold(start..end, |kept, (extent, _)| {
            kept.start.min(extent.offset)..kept.end.max(extent.end())
        });
        let read_only = self.space.extents_in(start, end);
        let read_only = read_only.filter(|extent| self.space.most_at(extent.offset) != ReadWrite);
        let read_only = read_only.map(|extent| extent.offset..extent.end());
        let memory = self.space.parts_in(start, end);
        let memory = memory.map(|(it, physical)| (it.offset..it.end(), physical.as_raw()));
        let keeper = self
            .register
            .keep(kept, read_only.collect(), memory.collect());
        let keeper = Arc::new(keeper);
        Ok(Registration::new(self.device().clone(), extents, keeper))
    }

    /// Returns the number of [registrations](Self::register).
    #[must_use]
    pub fn registrations(&self) -> u64 {
        self.register.count()
    }

    /// The streams that registrations have recorded; `None` if all work of a device counts as
    /// recorded, and in a forked child.
    pub(crate) fn recorded(&self) -> Option<Vec<Stream>> {
        // As in `drop` of a registration.
        match self.device().is_forked() {
            true => None,
            false => self.register.noted().recorded(),
        }
    }

    /// Records that work of a stream of the region's device uses the memory, now and later.
    pub(crate) fn record_use(&self, stream: &Stream) {
        self.register.noted().record(stream);
    }

    pub(super) fn unregistered(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        self.register.check(range)
    }

    pub(super) fn all_unregistered(&self) -> Result<(), MemoryError> {
        self.register.check(&(0..self.size()))
    }

    /// The end of the last registered byte; 0 if nothing is registered.
    pub(crate) fn registered_end(&self) -> u64 {
        self.register.end()
    }

    pub(super) fn leave_registered(&mut self) {
        if self.device().forked().is_some() {
            return;
        }
        if let (None, Some(family)) = (&self.ending, self.supply.family()) {
            self.ending = Some(Ending::new(family, self.space.hand_on()));
        }
        let users = self.space.users().cloned().collect();
        let (space, ending) = (&mut self.space, self.ending.as_ref());
        self.register
            .take_over(users, ending, |range| space.hand_over(range));
    }
}

#[cfg(test)]
mod tests {
    use super::Books;

    #[test]
    fn what_is_claimed_is_what_somebody_keeps() {
        let mut books = Books::default();
        let mut random = fastrand::Rng::with_seed(7);
        for number in 0..500 {
            let start = random.u64(0..60);
            books.keep(number, start..random.u64(start..64) + 1);
            if random.u8(0..3) > 0 {
                books.forget(random.u64(0..=number));
            }
            for byte in 0..65 {
                let keep = books.kept.values().filter(|range| range.contains(&byte));
                let claims = books.claims.get(&byte).copied().unwrap_or(0);
                assert_eq!(claims, keep.count() as u64, "byte {byte}");
            }
        }
        for number in 0..500 {
            books.forget(number);
        }
        assert!(books.claims.is_empty());
    }
}
