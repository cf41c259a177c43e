//! The memory that regions in a tenant have withdrawn, and that their pool may take.
//!
//! A region works on committed memory without a lock: only its owner changes that memory, and the
//! pool takes none of it. An extent without a committed byte leaves the region's space and lies
//! here with its fence. Its owner takes it back to commit it again, or the pool takes it once the
//! fence is complete.
//!
//! The lock is taken under the pool's lock, when the pool asks for figures, and never the other way
//! round. Page tables are changed without either: an extent is *leaving* while it is unmapped, and
//! a commit of its range waits for the end of that.
//!
//! Keeps I-76.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use cuvmm_driver::PhysicalHandle;

use crate::deferred::Section;
use crate::device::Device;
use crate::error::CallError;
use crate::extents::{Fence, Placed, Round, Space, Unmapped};
use crate::pool::{Given, Holder, HolderFigures};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// All addresses.
pub(super) const ANYWHERE: Range<u64> = 0..u64::MAX;

/// The parts of regions that their pool uses too.
pub(super) struct Shared {
    device: Device,
    /// The tenant's number as a last writer.
    writer: u64,
    state: Mutex<State>,
    /// Notified when an extent that was leaving has left, or stays.
    settled: Condvar,
    /// Set when the tenant is unregistered.
    closed: AtomicBool,
    /// Set while withdrawn memory must be reported to the pool.
    reports: AtomicBool,
}

/// An extent without a committed byte.
struct Withdrawn {
    placed: Placed,
    fence: Fence,
    /// Its place in the order of withdrawals.
    number: u64,
}

struct Leaving {
    addresses: Range<u64>,
    handle: PhysicalHandle,
}

#[derive(Default)]
struct State {
    /// The bytes of all physicals, committed or withdrawn, each counted once.
    held: u64,
    /// By address.
    withdrawn: BTreeMap<u64, Withdrawn>,
    leaving: Vec<Leaving>,
    /// The physicals that aliases or forks map several times, each with its number of mappings
    /// beside one.
    further: BTreeMap<PhysicalHandle, u64>,
    /// The spaces of dropped regions.
    ended: Vec<Space>,
    withdrawals: u64,
}

/// The lock. User code dropped under it runs after its end.
struct Locked<'a> {
    state: MutexGuard<'a, State>,
    _section: Section,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// The free memory of withdrawn extents.
struct Free {
    /// The sizes of physicals whose work is known to be complete, the first withdrawn first.
    ready: Vec<u64>,
    /// The bytes of the other physicals.
    pending: u64,
}

impl State {
    /// Returns the addresses of the withdrawn extents that overlap a range.
    fn meeting(&self, range: &Range<u64>) -> Vec<u64> {
        let before = self.withdrawn.range(..range.start).next_back();
        let before = before.filter(|(at, one)| **at + one.placed.size() > range.start);
        let within = self.withdrawn.range(range.clone());
        before
            .into_iter()
            .chain(within)
            .map(|(&at, _)| at)
            .collect()
    }

    fn is_leaving(&self, range: &Range<u64>) -> bool {
        let meets = |it: &Range<u64>| it.start < range.end && range.start < it.end;
        self.leaving.iter().any(|leaving| meets(&leaving.addresses))
    }

    /// Polls the fences of all withdrawn extents. Returns the first error.
    fn poll(&mut self, device: &Device) -> Result<(), CallError> {
        let round = Round::begin(device);
        let mut outcome = Ok(());
        for one in self.withdrawn.values_mut() {
            if !one.fence.is_complete() {
                outcome = outcome.and(one.fence.poll_in(&round).map(drop));
            }
        }
        outcome
    }

    /// A physical with several mappings is free when all of them are withdrawn.
    fn free(&self) -> Free {
        let mut ready = Vec::new();
        let mut pending = 0;
        let mut several: BTreeMap<PhysicalHandle, Vec<&Withdrawn>> = BTreeMap::new();
        let mut add = |size: u64, number: u64, is_ready: bool| match is_ready {
            true => ready.push((number, size)),
            false => pending += size,
        };
        for one in self.withdrawn.values() {
            let handle = one.placed.handle();
            match self.further.contains_key(&handle) {
                true => several.entry(handle).or_default().push(one),
                false => add(one.placed.size(), one.number, one.fence.is_complete()),
            }
        }
        for (handle, all) in several {
            let further = self.further.get(&handle).copied().unwrap_or(0);
            if let [.., last] = *all
                && all.len() as u64 > further
            {
                let is_ready = all.iter().all(|one| one.fence.is_complete());
                add(last.placed.size(), last.number, is_ready);
            }
        }
        ready.sort_unstable();
        let ready = ready.into_iter().map(|(_, size)| size).collect();
        Free { ready, pending }
    }

    /// Takes out withdrawn extents of a range whose fences are known to be complete, the first
    /// withdrawn first, until they have `wanted` bytes. They are leaving from here on.
    fn choose(
        &mut self,
        range: &Range<u64>,
        wanted: u64,
        which: impl Fn(&Placed) -> bool,
    ) -> Vec<Withdrawn> {
        let here = self.meeting(range).into_iter();
        let ready = here.filter_map(|at| {
            let one = self.withdrawn.get(&at)?;
            (one.fence.is_complete() && which(&one.placed)).then_some((one.number, at))
        });
        let mut ready: Vec<(u64, u64)> = ready.collect();
        ready.sort_unstable();
        let (mut chosen, mut bytes) = (Vec::new(), 0);
        for (_, at) in ready {
            if bytes >= wanted {
                break;
            }
            let Some(one) = self.withdrawn.remove(&at) else {
                continue;
            };
            let (handle, size) = (one.placed.handle(), one.placed.size());
            if !self.further.contains_key(&handle) {
                bytes += size;
            }
            let addresses = at..at + size;
            self.leaving.push(Leaving { addresses, handle });
            chosen.push(one);
        }
        chosen
    }

    /// Ends the count of a physical that was unmapped, or whose mapping is stuck. Returns it if no
    /// other mapping of a region shows it.
    fn end(&mut self, unmapped: Unmapped) -> Option<Unmapped> {
        let handle = unmapped.physical.as_raw();
        if let Some(further) = self.further.get_mut(&handle) {
            *further -= 1;
            if *further == 0 {
                self.further.remove(&handle);
            }
            return None;
        }
        self.held -= unmapped.size();
        Some(unmapped)
    }
}

impl Shared {
    pub(super) fn new(device: Device, writer: u64) -> Self {
        Self {
            device,
            writer,
            state: Mutex::default(),
            settled: Condvar::new(),
            closed: AtomicBool::new(false),
            reports: AtomicBool::new(false),
        }
    }

    /// Locks the state. A forked child must not: another thread may have held the lock.
    fn lock(&self) -> Locked<'_> {
        let _section = Section::enter();
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Locked { state, _section }
    }

    /// Locks the state once no extent that overlaps a range is leaving.
    fn lock_settled(&self, range: &Range<u64>) -> Locked<'_> {
        let mut locked = self.lock();
        while locked.is_leaving(range) {
            let waited = self.settled.wait(locked.state);
            locked.state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        locked
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    pub(super) fn reports(&self) -> bool {
        self.reports.load(Ordering::Relaxed)
    }

    /// Counts memory that the pool has lent.
    pub(super) fn add(&self, lent: &[Unmapped]) {
        self.lock().held += lent.iter().map(Unmapped::size).sum::<u64>();
    }

    /// Notes another mapping of a physical.
    pub(super) fn add_mapping(&self, handle: PhysicalHandle) {
        *self.lock().further.entry(handle).or_default() += 1;
    }

    /// Ends the count of unmapped physicals. Returns those that no other mapping shows.
    pub(super) fn end(&self, unmapped: Vec<Unmapped>) -> Vec<Unmapped> {
        let mut state = self.lock();
        unmapped
            .into_iter()
            .filter_map(|it| state.end(it))
            .collect()
    }

    pub(super) fn withdraw(&self, extents: impl Iterator<Item = (Placed, Fence)>) {
        let mut state = self.lock();
        for (mut placed, fence) in extents {
            placed.used_by(self.writer);
            state.withdrawals += 1;
            let number = state.withdrawals;
            let at = placed.address().0;
            let one = Withdrawn {
                placed,
                fence,
                number,
            };
            state.withdrawn.insert(at, one);
        }
    }

    /// Takes those withdrawn extents that overlap a range, and that `which` names, back from the
    /// pool. Waits for the end of a removal.
    pub(super) fn take_back(
        &self,
        range: &Range<u64>,
        which: impl Fn(&Placed) -> bool,
    ) -> Vec<(Placed, Fence)> {
        let mut state = self.lock_settled(range);
        let here = state.meeting(range).into_iter();
        let mut taken = Vec::new();
        for at in here {
            if state
                .withdrawn
                .get(&at)
                .is_some_and(|one| which(&one.placed))
            {
                let one = state.withdrawn.remove(&at);
                taken.extend(one.map(|one| (one.placed, one.fence)));
            }
        }
        taken
    }

    /// Returns the physicals of withdrawn extents that overlap a range, each with its bytes. Waits
    /// for the end of a removal. Nothing in a forked child.
    pub(super) fn withdrawn_in(
        &self,
        range: &Range<u64>,
        which: impl Fn(&Placed) -> bool,
    ) -> Vec<(PhysicalHandle, u64)> {
        if self.device.is_forked() {
            return Vec::new();
        }
        let state = self.lock_settled(range);
        let here = state.meeting(range).into_iter();
        let here = here.filter_map(|at| state.withdrawn.get(&at));
        here.filter(|one| which(&one.placed))
            .map(|one| (one.placed.handle(), one.placed.size()))
            .collect()
    }

    pub(super) fn poll(&self) -> Result<(), CallError> {
        self.lock().poll(&self.device)
    }

    /// Unmaps withdrawn extents that overlap a range and whose fences are known to be complete
    /// (`cuMemUnmap`), until they have `wanted` bytes.
    pub(super) fn give_in(
        &self,
        range: &Range<u64>,
        wanted: u64,
        which: impl Fn(&Placed) -> bool,
    ) -> Given {
        let chosen = self.lock().choose(range, wanted, which);
        let mut given = Given::default();
        for one in chosen {
            let Withdrawn {
                placed,
                fence,
                number,
            } = one;
            let at = placed.address().0;
            let unmapped = match given.error {
                Some(_) => Err(placed),
                None => placed.unmap_after(&fence).map_err(|(placed, error)| {
                    given.error = Some(error);
                    placed
                }),
            };
            let mut state = self.lock();
            state.leaving.retain(|it| it.addresses.start != at);
            match unmapped {
                Ok(unmapped) => {
                    given.mappings += 1;
                    given.extents.extend(state.end(unmapped));
                }
                Err(placed) => {
                    let one = Withdrawn {
                        placed,
                        fence,
                        number,
                    };
                    state.withdrawn.insert(at, one);
                }
            }
            drop(state);
            self.settled.notify_all();
        }
        given
    }

    /// Takes the space of a dropped region over. Its addresses are freed once nothing is mapped
    /// there.
    pub(super) fn end_space(&self, space: Space) {
        if !self.device.is_forked() {
            self.lock().ended.push(space);
        }
    }
}

impl Holder for Shared {
    fn figures(&self) -> HolderFigures {
        let state = self.lock();
        let leaving = state.leaving.iter();
        let leaving = leaving.filter(|it| !state.further.contains_key(&it.handle));
        let leaving: u64 = leaving
            .map(|it| it.addresses.end - it.addresses.start)
            .sum();
        let Free { ready, pending } = state.free();
        let idle = ready.iter().sum::<u64>() + pending;
        let held = state.held - leaving;
        HolderFigures {
            held,
            in_use: held - idle,
            pending_free: pending,
            idle,
            ..HolderFigures::default()
        }
    }

    fn reclaimable(&self, polls: bool) -> Vec<u64> {
        let mut state = self.lock();
        if polls && let Err(error) = state.poll(&self.device) {
            log!(debug, %error, "a fence could not be polled: it counts as pending");
        }
        state.free().ready
    }

    fn give(&self, wanted: u64) -> Given {
        self.give_in(&ANYWHERE, wanted, |_| true)
    }

    fn tidy(&self) -> Given {
        Given::default()
    }

    fn settle(&self) -> Result<(), CallError> {
        let mut all = Fence::complete();
        for one in self.lock().withdrawn.values() {
            all.merge(one.fence.clone());
        }
        all.wait()?;
        self.poll()
    }

    fn report_freed(&self, yes: bool) {
        self.reports.store(yes, Ordering::Relaxed);
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    fn take_free_spaces(&self) -> Vec<Space> {
        let mut state = self.lock();
        let ended = std::mem::take(&mut state.ended);
        let is_free = |space: &Space| {
            let start = space.address().0;
            let range = start..start + space.size();
            let is_empty = state.meeting(&range).is_empty() && !state.is_leaving(&range);
            is_empty && space.stuck_count() == 0
        };
        let (free, kept) = ended.into_iter().partition(is_free);
        state.ended = kept;
        free
    }

    fn take_spaces(&self) -> Vec<Space> {
        std::mem::take(&mut self.lock().ended)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::Call;

    use super::*;
    use crate::extents::rig::{G, Rig, rig};
    use crate::own::Stream;

    /// The extents of a space of some granules, withdrawn one by one behind some streams.
    fn withdrawn(rig: &Rig, streams: &[Option<&Stream>]) -> Shared {
        let shared = Shared::new(rig.device.clone(), 7);
        let mut space = rig.space(streams.len() as u64);
        for (at, stream) in (0..).step_by(G as usize).zip(streams) {
            let placed = space.remove(at).unwrap();
            shared.lock().held += placed.size();
            let fence = stream.map_or_else(Fence::complete, |it| Fence::stream(it.clone()));
            shared.withdraw(std::iter::once((placed, fence)));
        }
        shared
    }

    /// The bytes held, in use, pending free and idle, in granules.
    fn figures(shared: &Shared) -> [u64; 4] {
        let all = shared.figures();
        [all.held, all.in_use, all.pending_free, all.idle].map(|bytes| bytes / G)
    }

    #[test]
    fn what_is_complete_is_given_in_the_order_of_withdrawal() {
        let rig = rig();
        let busy = rig.busy_stream();
        let shared = withdrawn(&rig, &[None, Some(&busy), None, None]);
        assert_eq!(figures(&shared), [4, 0, 1, 4]);
        let first = shared.lock().withdrawn.keys().next().copied().unwrap();
        let given = shared.give(G);
        assert_eq!((given.bytes(), given.mappings), (G, 1));
        assert_eq!(given.extents[0].last_writer.unwrap().by, 7);
        assert!(!shared.lock().withdrawn.contains_key(&first));
        // Taken back and withdrawn again, it is the last.
        let again = shared.take_back(&(first + 2 * G..first + 3 * G), |_| true);
        assert_eq!(again.len(), 1);
        assert_eq!(figures(&shared), [3, 1, 1, 2]);
        shared.withdraw(again.into_iter());
        assert_eq!(shared.give(G).bytes(), G);
        assert_eq!(
            shared
                .withdrawn_in(&(first + 2 * G..first + 3 * G), |_| true)
                .len(),
            1
        );
        rig.finish(&busy);
        assert_eq!(shared.reclaimable(false), [G]);
        assert_eq!(shared.reclaimable(true), [G; 2]);
        assert_eq!(shared.give(u64::MAX).bytes(), 2 * G);
        assert_eq!(figures(&shared), [0; 4]);
    }

    #[test]
    fn what_the_driver_does_not_unmap_stays_withdrawn() {
        let rig = rig();
        let shared = withdrawn(&rig, &[None; 3]);
        rig.fail(Call::MemUnmap, 2);
        let given = shared.give(u64::MAX);
        assert!(given.error.is_some());
        assert_eq!((given.bytes(), figures(&shared)), (G, [2, 0, 0, 2]));
        assert_eq!(shared.give(u64::MAX).bytes(), 2 * G);
    }

    #[test]
    fn a_physical_with_several_mappings_is_free_when_all_are_withdrawn() {
        let rig = rig();
        let shared = Shared::new(rig.device.clone(), 7);
        let mut space = Space::reserve(&rig.device, 2 * G).unwrap();
        let memory = rig.memory(1);
        let (handle, other) = (memory.physical.as_raw(), memory.physical.clone());
        shared.add(std::slice::from_ref(&memory));
        space.place(0, vec![memory]).unwrap();
        space.place(G, vec![Unmapped::fresh(other)]).unwrap();
        shared.add_mapping(handle);
        let mut withdraw = |at| {
            let placed = space.remove(at).unwrap();
            shared.withdraw(std::iter::once((placed, Fence::complete())));
        };
        withdraw(0);
        assert_eq!(figures(&shared), [1, 1, 0, 0]);
        assert!(shared.reclaimable(true).is_empty());
        withdraw(G);
        assert_eq!(
            (figures(&shared), shared.reclaimable(true)),
            ([1, 0, 0, 1], vec![G])
        );
        let given = shared.give(G);
        assert_eq!((given.bytes(), given.mappings), (G, 2));
        assert_eq!(figures(&shared), [0; 4]);
    }
}
