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
//! Keeps I-76 and I-102.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, PoisonError, Weak};

use cuvmm_driver::PhysicalHandle;

use crate::deferred::Section;
use crate::device::Device;
use crate::error::CallError;
use crate::extents::{Fence, Placed, Round, Space, Unmapped};
use crate::pool::{Given, Holder, HolderFigures};
use crate::sync::{Condvar, Mutex};

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
    pub(super) closed: AtomicBool,
    /// Set while withdrawn memory must be reported to the pool.
    pub(super) reports: AtomicBool,
    /// The owner that maps memory ahead of use.
    pub(super) worker: OnceLock<Weak<dyn WorksAhead>>,
    /// Set while the owner has such work left for the mapper.
    has_work: AtomicBool,
}

/// An owner of a region that maps memory ahead of use.
pub(crate) trait WorksAhead: Send + Sync {
    /// Maps memory ahead of use. Returns `true` if there is more to do later. Called on the mapper's
    /// thread, without the pool's lock.
    fn work_ahead(&self) -> bool;
}

/// The use of an extent before it was withdrawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// The tenant may have used it.
    Used,
    /// It was mapped ahead of use, and has zeros.
    Ahead,
    /// It may hold bytes of another tenant, which were to be zeroed. It is not committed again: the
    /// pool gets it as it was lent.
    Unclean,
}

/// An extent without a committed byte.
struct Withdrawn {
    /// `None` while it is leaving.
    placed: Option<Placed>,
    handle: PhysicalHandle,
    size: u64,
    fence: Fence,
    /// Its place in the order in which the pool takes extents: that of withdrawals, behind extents
    /// that were mapped ahead of use, whose numbers are negative, the last first.
    number: i64,
    known: Use,
}

impl Withdrawn {
    /// Returns the bytes that were mapped ahead of use.
    fn ahead(&self) -> u64 {
        match self.known {
            Use::Ahead => self.size,
            Use::Used | Use::Unclean => 0,
        }
    }
}

/// Figures of all withdrawn extents, those that are leaving included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) bytes: u64,
    /// Bytes of extents that were mapped ahead of use.
    pub(super) ahead: u64,
}

#[derive(Default)]
struct State {
    /// The bytes of all physicals, committed or withdrawn, each counted once.
    held: u64,
    /// By address.
    withdrawn: BTreeMap<u64, Withdrawn>,
    sums: Sums,
    /// The physicals that aliases or forks map several times, each with its number of mappings
    /// beside one.
    further: BTreeMap<PhysicalHandle, u64>,
    /// The physicals that were exported, each with its size.
    exported: BTreeMap<PhysicalHandle, u64>,
    /// The spaces of dropped regions.
    ended: Vec<Space>,
    withdrawals: i64,
    /// The bytes that a sleeping owner gets when it wakes.
    asleep: u64,
}

/// An extent that is being unmapped. A panic of the driver, after which it may be mapped still, gives its
/// memory to the pool, which quarantines it while it is mapped. The charge for its mapping then ends
/// with the regions.
struct Leaving<'a> {
    shared: &'a Shared,
    at: u64,
    given: &'a mut Given,
    /// The extent's memory; `None` once the driver has answered.
    memory: Option<Unmapped>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let physical = self.shared.with(|state| {
                state.remove(self.at);
                state.end(memory)
            });
            self.given.extents.extend(physical);
        }
        self.shared.settled.notify_all();
    }
}

/// The free memory of withdrawn extents.
#[derive(Default)]
struct Free {
    /// The sizes of physicals whose work is known to be complete, by the order in which they are
    /// taken.
    ready: BTreeMap<i64, u64>,
    /// The bytes of physicals whose work is not known to be complete.
    pending: u64,
    leaving: u64,
}

/// The withdrawn mappings of a physical.
struct Lying {
    mappings: u64,
    /// That of the last.
    number: i64,
    size: u64,
    is_leaving: bool,
    is_complete: bool,
}

impl Lying {
    fn merge(&mut self, others: &Self) {
        self.mappings += others.mappings;
        self.number = self.number.max(others.number);
        self.is_leaving |= others.is_leaving;
        self.is_complete &= others.is_complete;
    }
}

impl Free {
    fn count(&mut self, lying: &Lying) {
        if lying.is_leaving {
            self.leaving += lying.size;
        } else if lying.is_complete {
            self.ready.insert(lying.number, lying.size);
        } else {
            self.pending += lying.size;
        }
    }
}

impl State {
    fn insert(&mut self, at: u64, one: Withdrawn) {
        self.sums.bytes += one.size;
        self.sums.ahead += one.ahead();
        self.withdrawn.insert(at, one);
    }

    fn remove(&mut self, at: u64) -> Option<Withdrawn> {
        let one = self.withdrawn.remove(&at)?;
        self.sums.bytes -= one.size;
        self.sums.ahead -= one.ahead();
        Some(one)
    }

    fn meeting(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Withdrawn)> {
        let start = range.start;
        let before = self.withdrawn.range(..start).next_back();
        let before = before.filter(|(at, one)| **at + one.size > start);
        let within = self.withdrawn.range(range.clone());
        before.into_iter().chain(within).map(|(&at, one)| (at, one))
    }

    fn is_leaving(&self, range: &Range<u64>) -> bool {
        let mut here = self.meeting(range);
        here.any(|(_, one)| one.placed.is_none())
    }

    /// Polls the fences of all withdrawn extents. Returns the first error.
    fn poll(&mut self, device: &Device) -> Result<(), CallError> {
        let round = Round::begin(device);
        let mut outcome = Ok(());
        for one in self.withdrawn.values_mut() {
            outcome = outcome.and(one.fence.poll_in(&round).map(drop));
        }
        outcome
    }

    fn free(&self) -> Free {
        let mut free = Free::default();
        // A physical with several mappings is free when all of them are withdrawn, and counts with
        // the last.
        let mut shared: BTreeMap<PhysicalHandle, Lying> = BTreeMap::new();
        for one in self.withdrawn.values() {
            let mut lying = Lying {
                mappings: 1,
                number: one.number,
                size: one.size,
                is_leaving: one.placed.is_none(),
                is_complete: one.fence.is_complete(),
            };
            if self.further.contains_key(&one.handle) {
                if let Some(others) = shared.get(&one.handle) {
                    lying.merge(others);
                }
                shared.insert(one.handle, lying);
            } else {
                free.count(&lying);
            }
        }
        for (handle, lying) in shared {
            if self
                .further
                .get(&handle)
                .is_some_and(|&it| lying.mappings > it)
            {
                free.count(&lying);
            }
        }
        free
    }

    /// Ends the count of a mapping. Returns its physical if no other mapping shows it.
    fn end(&mut self, unmapped: Unmapped) -> Option<Unmapped> {
        let handle = unmapped.physical.as_raw();
        match self.further.remove(&handle) {
            Some(1) => return None,
            Some(further) => {
                self.further.insert(handle, further - 1);
                return None;
            }
            None => self.held -= unmapped.size(),
        }
        self.exported.remove(&handle);
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
            worker: OnceLock::new(),
            has_work: AtomicBool::new(false),
        }
    }

    /// Works on the state under the lock. A forked child must not: another thread may have held the
    /// lock. User code that is dropped meanwhile runs afterwards.
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        let _section = Section::enter();
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Works on the state once no extent that overlaps some ranges is leaving.
    fn with_settled<T>(&self, ranges: &[Range<u64>], work: impl FnOnce(&mut State) -> T) -> T {
        let _section = Section::enter();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while ranges.iter().any(|range| state.is_leaving(range)) {
            let waited = self.settled.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        work(&mut state)
    }

    /// Counts memory that the pool has lent.
    pub(super) fn add(&self, lent: &[Unmapped]) {
        self.with(|state| state.held += lent.iter().map(Unmapped::size).sum::<u64>());
    }

    pub(super) fn set_asleep(&self, bytes: u64) {
        self.with(|state| state.asleep = bytes);
    }

    /// Notes another mapping of a physical.
    pub(super) fn add_mapping(&self, handle: PhysicalHandle) {
        self.with(|state| *state.further.entry(handle).or_default() += 1);
    }

    /// Notes that physicals were exported, each with its size.
    pub(super) fn add_exported(&self, physicals: impl Iterator<Item = (PhysicalHandle, u64)>) {
        if !self.device.is_forked() {
            self.with(|state| state.exported.extend(physicals));
        }
    }

    /// Ends the count of mappings. Returns the physicals that no other mapping shows.
    pub(super) fn end(&self, unmapped: Vec<Unmapped>) -> Vec<Unmapped> {
        let unmapped = unmapped.into_iter();
        self.with(|state| unmapped.filter_map(|it| state.end(it)).collect())
    }

    /// Takes over extents, each with the fence of its work.
    pub(super) fn withdraw(&self, extents: impl Iterator<Item = (Placed, Fence)>, known: Use) {
        self.with(|state| {
            for (mut placed, fence) in extents {
                // Kernels can reach what was mapped ahead, too.
                if known != Use::Unclean {
                    placed.used_by(self.writer);
                }
                state.withdrawals += 1;
                let one = Withdrawn {
                    handle: placed.handle(),
                    size: placed.size(),
                    fence,
                    number: match known {
                        Use::Ahead => -state.withdrawals,
                        Use::Used | Use::Unclean => state.withdrawals,
                    },
                    known,
                    placed: Some(placed),
                };
                let at = one.placed.as_ref().map_or(0, |placed| placed.address().0);
                state.insert(at, one);
            }
        });
    }

    /// Returns figures of all withdrawn extents, and their number.
    pub(super) fn sums(&self) -> (Sums, u64) {
        self.with(|state| (state.sums, state.withdrawn.len() as u64))
    }

    /// Takes the withdrawn extents that overlap some ranges back from the pool, all under one lock.
    /// Waits for the end of a removal. Also returns `true` if some extents there are left to the pool.
    pub(super) fn take_back(&self, ranges: &[Range<u64>]) -> (Vec<(Placed, Fence)>, bool) {
        self.with_settled(ranges, |state| {
            let here = ranges.iter().flat_map(|range| state.meeting(range));
            let here = here.map(|(at, one)| (at, one.known != Use::Unclean));
            let here: Vec<(u64, bool)> = here.collect();
            let left = here.iter().any(|&(_, taken)| !taken);
            let taken = here.into_iter().filter(|&(_, taken)| taken);
            let taken = taken.filter_map(|(at, _)| state.remove(at));
            let taken = taken.filter_map(|one| Some((one.placed?, one.fence)));
            (taken.collect(), left)
        })
    }

    /// Returns the physicals of withdrawn extents that overlap a range, each with its bytes. Waits
    /// for the end of a removal. Nothing in a forked child.
    pub(super) fn withdrawn_in(&self, range: &Range<u64>) -> Vec<(PhysicalHandle, u64)> {
        if self.device.is_forked() {
            return Vec::new();
        }
        self.with_settled(std::slice::from_ref(range), |state| {
            let here = state.meeting(range).map(|(_, one)| (one.handle, one.size));
            here.collect()
        })
    }

    pub(super) fn poll(&self) -> Result<(), CallError> {
        self.with(|state| state.poll(&self.device))
    }

    /// Unmaps withdrawn extents that overlap a range and whose fences are known to be complete
    /// (`cuMemUnmap`), the first withdrawn first, until they have `wanted` bytes.
    pub(super) fn give_in(&self, range: &Range<u64>, wanted: u64, given: &mut Given) {
        let ready: BTreeMap<i64, u64> = self.with(|state| {
            let here = state.meeting(range);
            let ready = here.filter(|(_, one)| one.fence.is_complete());
            ready.map(|(at, one)| (one.number, at)).collect()
        });
        let mut bytes = 0;
        for (number, at) in ready {
            if bytes >= wanted || given.error.is_some() {
                break;
            }
            // Its owner may have taken it back, or another thread may be unmapping it.
            let leaves = |state: &mut State| {
                let one = state
                    .withdrawn
                    .get_mut(&at)
                    .filter(|one| one.number == number)?;
                Some((one.placed.take()?, one.fence.clone()))
            };
            let Some((placed, fence)) = self.with(leaves) else {
                continue;
            };
            let mut leaving = Leaving {
                shared: self,
                at,
                given,
                memory: Some(placed.memory()),
            };
            let unmapped = placed.unmap_after(&fence);
            leaving.memory = None;
            let given = &mut *leaving.given;
            self.with(|state| match unmapped {
                Ok(unmapped) => {
                    state.remove(at);
                    given.mappings += 1;
                    let physical = state.end(unmapped);
                    bytes += physical.as_ref().map_or(0, Unmapped::size);
                    given.extents.extend(physical);
                }
                Err((placed, error)) => {
                    given.error = Some(error);
                    if let Some(one) = state.withdrawn.get_mut(&at) {
                        one.placed = Some(placed);
                    }
                }
            });
        }
    }

    /// The addresses of dropped regions.
    pub(super) fn ended(&self) -> Vec<Range<u64>> {
        let addresses = |space: &Space| space.address().0..space.address().0 + space.size();
        self.with(|state| state.ended.iter().map(addresses).collect())
    }

    /// Takes the space of a dropped region over. Its addresses are freed once nothing is mapped
    /// there.
    pub(super) fn end_space(&self, space: Space) {
        if !self.device.is_forked() {
            self.with(|state| state.ended.push(space));
        }
    }
}

impl Holder for Shared {
    fn figures(&self) -> HolderFigures {
        self.with(|state| {
            let free = state.free();
            let idle = free.ready.values().sum::<u64>() + free.pending;
            let held = state.held - free.leaving;
            HolderFigures {
                held,
                in_use: held - idle,
                pending_free: free.pending,
                idle,
                exported: state.exported.values().sum(),
                asleep: state.asleep,
                ..HolderFigures::default()
            }
        })
    }

    fn reclaimable(&self, polls: bool) -> Vec<u64> {
        if polls && let Err(error) = self.poll() {
            log!(debug, %error, "a fence could not be polled: it counts as pending");
        }
        self.with(|state| state.free().ready.into_values().collect())
    }

    fn give(&self, wanted: u64, given: &mut Given) {
        self.give_in(&ANYWHERE, wanted, given);
    }

    fn tidy(&self) -> Given {
        let worker = self.worker.get().and_then(Weak::upgrade);
        let has_work = worker.is_some_and(|worker| worker.work_ahead());
        self.has_work.store(has_work, Ordering::Relaxed);
        Given::default()
    }

    fn is_untidy(&self) -> bool {
        self.has_work.load(Ordering::Relaxed)
    }

    fn settle(&self) -> Result<(), CallError> {
        let mut all = Fence::complete();
        self.with(|state| {
            let fences = state.withdrawn.values().map(|one| one.fence.clone());
            fences.for_each(|fence| all.merge(fence));
        });
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
        self.with(|state| {
            let ended = std::mem::take(&mut state.ended);
            let is_free = |space: &Space| {
                let start = space.address().0;
                let range = start..start + space.size();
                state.meeting(&range).next().is_none() && space.stuck_count() == 0
            };
            let (free, kept) = ended.into_iter().partition(is_free);
            state.ended = kept;
            free
        })
    }

    fn take_spaces(&self) -> Vec<Space> {
        self.with(|state| std::mem::take(&mut state.ended))
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
            shared.with(|state| state.held += placed.size());
            let fence = stream.map_or_else(Fence::complete, |it| Fence::stream(it.clone()));
            shared.withdraw(std::iter::once((placed, fence)), Use::Used);
        }
        shared
    }

    fn give(shared: &Shared, wanted: u64) -> Given {
        let mut given = Given::default();
        shared.give(wanted, &mut given);
        given
    }

    /// The bytes held, in use, pending free and idle, in granules.
    fn figures(shared: &Shared) -> [u64; 4] {
        shared.with(|state| {
            let walked = state.withdrawn.values();
            let walked = walked.fold(Sums::default(), |sums, one| Sums {
                bytes: sums.bytes + one.size,
                ahead: sums.ahead + one.ahead(),
            });
            assert_eq!(state.sums, walked);
        });
        let all = shared.figures();
        [all.held, all.in_use, all.pending_free, all.idle].map(|bytes| bytes / G)
    }

    #[test]
    fn what_is_complete_is_given_in_the_order_of_withdrawal() {
        let rig = rig();
        let busy = rig.busy_stream();
        let shared = withdrawn(&rig, &[None, Some(&busy), None, None]);
        assert_eq!(figures(&shared), [4, 0, 1, 4]);
        let first = shared.with(|state| *state.withdrawn.keys().next().unwrap());
        let given = give(&shared, G);
        assert_eq!((given.bytes(), given.mappings), (G, 1));
        assert_eq!(given.extents[0].last_writer.unwrap().by, 7);
        assert!(shared.with(|state| !state.withdrawn.contains_key(&first)));
        // Taken back and withdrawn again, it is the last.
        let range = first + 2 * G..first + 3 * G;
        let (again, left) = shared.take_back(std::slice::from_ref(&range));
        assert_eq!((again.len(), left), (1, false));
        assert_eq!(figures(&shared), [3, 1, 1, 2]);
        shared.withdraw(again.into_iter(), Use::Used);
        assert_eq!(give(&shared, G).bytes(), G);
        assert_eq!(
            shared.withdrawn_in(&(first + 2 * G..first + 3 * G)).len(),
            1
        );
        rig.finish(&busy);
        assert_eq!(shared.reclaimable(false), [G]);
        assert_eq!(shared.reclaimable(true), [G; 2]);
        assert_eq!(give(&shared, u64::MAX).bytes(), 2 * G);
        assert_eq!(figures(&shared), [0; 4]);
    }

    #[test]
    fn what_was_mapped_ahead_is_given_first_and_the_last_of_it_before() {
        let rig = rig();
        let shared = withdrawn(&rig, &[None; 4]);
        let ends = |at: u64| shared.with(|state| *state.withdrawn.keys().nth(at as usize).unwrap());
        let at = [0, 1, 2, 3].map(ends);
        let (ahead, left) = shared.take_back(&[at[1]..at[1] + G, at[2]..at[2] + G]);
        assert_eq!((ahead.len(), left), (2, false));
        shared.withdraw(ahead.into_iter(), Use::Ahead);
        assert_eq!(
            (shared.sums().0.ahead, figures(&shared)),
            (2 * G, [4, 0, 0, 4])
        );
        let mut order = Vec::new();
        for _ in at {
            give(&shared, G);
            let left = |at: &u64| shared.withdrawn_in(&(*at..*at + G)).is_empty();
            order.extend(
                (0..4)
                    .filter(|&it| left(&at[it]) && !order.contains(&it))
                    .collect::<Vec<_>>(),
            );
        }
        assert_eq!((order, shared.sums().0.ahead), (vec![2, 1, 0, 3], 0));
    }

    #[test]
    fn what_the_driver_does_not_unmap_stays_withdrawn() {
        let rig = rig();
        let shared = withdrawn(&rig, &[None; 3]);
        rig.fail(Call::MemUnmap, 2);
        let given = give(&shared, u64::MAX);
        assert!(given.error.is_some());
        assert_eq!((given.bytes(), figures(&shared)), (G, [2, 0, 0, 2]));
        assert_eq!(give(&shared, u64::MAX).bytes(), 2 * G);
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
            shared.withdraw(std::iter::once((placed, Fence::complete())), Use::Used);
        };
        withdraw(0);
        assert_eq!(figures(&shared), [1, 1, 0, 0]);
        assert!(shared.reclaimable(true).is_empty());
        withdraw(G);
        assert_eq!(
            (figures(&shared), shared.reclaimable(true)),
            ([1, 0, 0, 1], vec![G])
        );
        let given = give(&shared, G);
        assert_eq!((given.bytes(), given.mappings), (G, 2));
        assert_eq!(figures(&shared), [0; 4]);
    }
}
