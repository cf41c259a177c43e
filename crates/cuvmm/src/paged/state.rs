//! The blocks in use of a cache, the extents under them, and the blocks that wait for a step.
//!
//! Keeps I-98 and I-99.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::numbers::no_such;
use super::planes::Planes;
use super::requests::Requests;
use super::rest::Rest;
use crate::deferred::Checked;
use crate::error::{ArgumentError, BlockError, MemoryError, PagedKvError, SleepError};
use crate::extents::Fence;
use crate::ledger::InLine;
use crate::own::Stream;
use crate::region::Region;

/// The state of a block number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// No use, or only the use that a step ends.
    Free,
    /// An operation is obtaining its memory.
    Entering,
    /// An operation is ending its use.
    Leaving,
    /// It has memory for a later use.
    Reserved,
    Backed,
    /// It always has memory.
    Pinned,
}

/// The changing part of a cache, behind its lock.
pub(super) struct State {
    pub(super) region: Region,
    uses: Vec<Use>,
    /// Numbers below it are in use.
    floor: u32,
    /// The blocks to map memory for ahead of use.
    precommit: u32,
    pub(super) planes: Planes,
    /// The reserved numbers: the lowest of those that are free or reserved.
    reserved: BTreeSet<u32>,
    /// By its number, the blocks that each step being prepared has released. They count as uses of
    /// their extents.
    steps: BTreeMap<u64, Vec<u32>>,
    begun: u64,
    pub(super) requests: Requests,
    backed: u32,
    pinned: Vec<u32>,
    pub(super) rest: Rest,
}

impl Checked for State {
    #[cfg(debug_assertions)]
    fn check(&mut self) {
        debug_assert_eq!(self.planes.in_use(), self.region.committed());
    }
}

/// Blocks that an operation is obtaining memory for. Its end, also by a panic of the driver, gives
/// them their use, or leaves all as they were.
struct Entering<'a> {
    state: &'a mut State,
    numbers: &'a [u32],
    /// Their use once they have memory.
    to: Option<Use>,
}

impl Entering<'_> {
    /// Counts the blocks without a use in their extents. Returns the ranges of extents that had none.
    fn enter(&mut self) -> Vec<Range<u64>> {
        let mut entered = Vec::new();
        for &number in self.numbers {
            if let Some(one) = self.state.uses.get_mut(number as usize)
                && *one == Use::Free
            {
                *one = Use::Entering;
                self.state.planes.enter(number, &mut entered);
            }
        }
        entered
    }
}

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        for &number in self.numbers {
            match (self.state.use_of(number), self.to) {
                (Ok(Use::Entering), Some(to)) => self.state.begin(number, to),
                (Ok(Use::Entering), None) => {
                    self.state.set(number, Use::Free);
                    self.state.planes.leave(number, &mut Vec::new());
                }
                (Ok(Use::Reserved), Some(to)) if to != Use::Reserved => {
                    self.state.reserved.remove(&number);
                    self.state.begin(number, to);
                }
                _ => {}
            }
        }
    }
}

impl State {
    pub(super) fn new(region: Region, planes: Planes, blocks: u32, precommit: u32) -> Self {
        Self {
            region,
            uses: vec![Use::Free; blocks as usize],
            floor: 0,
            precommit,
            planes,
            reserved: BTreeSet::new(),
            steps: BTreeMap::new(),
            begun: 0,
            requests: Requests::default(),
            backed: 0,
            pinned: Vec::new(),
            rest: Rest::Awake,
        }
    }

    pub(super) fn blocks(&self) -> u32 {
        self.uses.len() as u32
    }

    pub(super) fn use_of(&self, number: u32) -> Result<Use, ArgumentError> {
        let found = self.uses.get(number as usize).copied();
        found.ok_or_else(|| no_such("block", number))
    }

    fn set(&mut self, number: u32, to: Use) {
        if let Some(one) = self.uses.get_mut(number as usize) {
            *one = to;
        }
        if to == Use::Free {
            self.floor = self.floor.min(number);
        }
    }

    /// Refuses an operation on a cache that is not awake.
    pub(super) fn check_awake(&self) -> Result<(), MemoryError> {
        match self.rest.is_awake() {
            true => Ok(()),
            false => Err(MemoryError::CacheAsleep(self.planes.in_use())),
        }
    }

    pub(super) const fn busy(&self) -> SleepError {
        SleepError::CacheBusy {
            bytes: self.planes.in_use(),
        }
    }

    /// Refuses to put the cache to sleep while a step is being prepared, or a request has memory that
    /// it has not taken.
    pub(super) fn check_no_step(&self) -> Result<(), SleepError> {
        match self.steps.is_empty() && !self.requests.have_memory() {
            true => Ok(()),
            false => Err(self.busy()),
        }
    }

    /// Refuses numbers of which there is no block.
    pub(super) fn check_numbers(&self, numbers: &[u32]) -> Result<(), ArgumentError> {
        let last = numbers.iter().max();
        last.map_or(Ok(()), |&last| self.use_of(last).map(drop))
    }

    /// The number of steps that were prepared so far, or are being prepared.
    pub(super) const fn begun(&self) -> u64 {
        self.begun
    }

    /// Ends a move of a cache that has its memory.
    pub(super) fn set_awake(&mut self) {
        self.rest = Rest::Awake;
        if self.precommits() {
            self.region.call_worker();
        }
    }

    /// Blocks backed, reserved, pinned, and released by steps being prepared.
    pub(super) fn counts(&self) -> [u32; 4] {
        let leaving: usize = self.steps.values().map(Vec::len).sum();
        [
            self.backed,
            self.reserved.len() as u32,
            self.pinned.len() as u32,
            leaving as u32,
        ]
    }

    /// Makes one attempt to back blocks, all or none, and gives them a use. Blocks that have one
    /// stay as they are, except that reserved ones are used.
    pub(super) fn attempt(
        &mut self,
        numbers: &[u32],
        to: Use,
        place: Option<InLine>,
    ) -> Result<(), BlockError> {
        self.check_numbers(numbers)?;
        self.check_awake()?;
        let mut entering = Entering {
            state: self,
            numbers,
            to: None,
        };
        let entered = entering.enter();
        if !entered.is_empty() {
            entering.state.region.attempt_all(&entered, place)?;
        }
        entering.to = Some(to);
        drop(entering);
        if !entered.is_empty() && to == Use::Backed {
            self.region.call_worker();
        }
        Ok(())
    }

    pub(super) const fn precommits(&self) -> bool {
        self.precommit > 0
    }

    /// Maps memory ahead of use at the first place where it lacks. Returns `false` if it lacks at no
    /// other place, or no memory is to be had without reclaiming any: the mapper does not take the lock
    /// again then, for which a step of the engine would wait.
    pub(super) fn map_ahead(&mut self) -> Result<bool, BlockError> {
        if !self.rest.is_awake() {
            return Ok(false);
        }
        let next = self.lowest(self.precommit);
        if let Some(&first) = next.first() {
            self.floor = first;
        }
        let places = self.planes.unused(&next).into_iter();
        let mut lacking = places.filter_map(|ranges| {
            let bare = ranges.into_iter().filter(|it| self.region.is_bare(it));
            let bare: Vec<Range<u64>> = bare.collect();
            (!bare.is_empty()).then_some(bare)
        });
        let Some(bare) = lacking.next() else {
            return Ok(false);
        };
        let more = lacking.next().is_some();
        drop(lacking);
        Ok(self.region.map_ahead(&bare)? && more)
    }

    fn begin(&mut self, number: u32, to: Use) {
        self.set(number, to);
        match to {
            Use::Backed => self.backed += 1,
            Use::Pinned => self.pinned.push(number),
            Use::Reserved => drop(self.reserved.insert(number)),
            Use::Free | Use::Entering | Use::Leaving => {}
        }
    }

    /// Ends the use of blocks, all or none, each once. They leave their extents at once, or at the
    /// end of the step that is being prepared.
    pub(super) fn release(&mut self, numbers: &[u32], home: &Stream) -> Result<(), PagedKvError> {
        self.check_awake()?;
        for &number in numbers {
            match self.uses.get_mut(number as usize) {
                Some(one @ (Use::Backed | Use::Leaving)) => *one = Use::Leaving,
                _ => return Err(self.stay(numbers, number)),
            }
        }
        let mut emptied = Vec::new();
        let mut released = 0;
        if self.steps.is_empty() {
            for &number in numbers {
                if self.end_leaving(number) {
                    released += 1;
                    self.leave_one(number, &mut emptied);
                }
            }
        } else {
            let ended = numbers.iter().filter(|&&it| self.end_leaving(it));
            let ended: Vec<u32> = ended.copied().collect();
            released = ended.len() as u32;
            if let Some(mut step) = self.steps.last_entry() {
                step.get_mut().extend(ended);
            }
        }
        self.backed -= released;
        self.withdraw(&emptied, home);
        Ok(())
    }

    /// Undoes the begin of a release. Returns why `refused` cannot be released.
    #[cold]
    fn stay(&mut self, numbers: &[u32], refused: u32) -> PagedKvError {
        for &number in numbers {
            if self.use_of(number) == Ok(Use::Leaving) {
                self.set(number, Use::Backed);
            }
        }
        match self.use_of(refused) {
            Ok(Use::Pinned) => PagedKvError::Pinned(refused),
            Ok(_) => PagedKvError::NotInUse(refused),
            Err(error) => error.into(),
        }
    }

    /// Returns `true` if a block was leaving, and not for a number that a call names again.
    #[inline]
    fn end_leaving(&mut self, number: u32) -> bool {
        let Some(one @ Use::Leaving) = self.uses.get_mut(number as usize) else {
            return false;
        };
        *one = Use::Free;
        self.floor = self.floor.min(number);
        true
    }

    /// Ends a use of blocks in their extents.
    pub(super) fn leave(&mut self, numbers: &[u32], home: &Stream) {
        let mut emptied = Vec::new();
        for &number in numbers {
            self.leave_one(number, &mut emptied);
        }
        self.withdraw(&emptied, home);
    }

    /// Ends a use of a block. Adds the ranges of extents that have none any more.
    #[inline]
    fn leave_one(&mut self, number: u32, emptied: &mut Vec<Range<u64>>) {
        let leaves = self.exchange_reserved(number);
        self.planes.leave(leaves, emptied);
    }

    /// Withdraws extents without a use behind the work of the home stream and of the recorded
    /// streams, which is queued by now.
    fn withdraw(&mut self, emptied: &[Range<u64>], home: &Stream) {
        if emptied.is_empty() {
            return;
        }
        let fence = Fence::stream(home.clone());
        if let Err(error) = self.region.decommit_behind(emptied, fence) {
            log!(error, %error, "extents without a block in use stay in their cache");
        }
    }

    /// Reserves a block that becomes free, if it is below a reserved one, in place of the highest of
    /// these. Returns the block whose use ends.
    fn exchange_reserved(&mut self, number: u32) -> u32 {
        let free = self.use_of(number) == Ok(Use::Free);
        match self.reserved.last() {
            Some(&last) if free && number < last => {
                self.reserved.remove(&last);
                self.set(last, Use::Free);
                self.begin(number, Use::Reserved);
                last
            }
            _ => number,
        }
    }

    /// Makes one attempt to reserve exactly `count` blocks: the lowest that are not in use.
    pub(super) fn reserve(
        &mut self,
        count: u32,
        home: &Stream,
        place: Option<InLine>,
    ) -> Result<(), BlockError> {
        let unused = self.blocks() - self.backed - self.pinned.len() as u32;
        ArgumentError::at_most("blocks to be reserved", count.into(), unused.into())?;
        let wanted = self.lowest(count);
        self.attempt(&wanted, Use::Reserved, place)?;
        while self.reserved.len() > count as usize {
            if let Some(last) = self.reserved.pop_last() {
                self.set(last, Use::Free);
                self.leave(&[last], home);
            }
        }
        Ok(())
    }

    /// The lowest numbers that are not in use, reserved ones among them.
    pub(super) fn lowest(&self, count: u32) -> Vec<u32> {
        let numbered = (0..).zip(&self.uses).skip(self.floor as usize);
        let unused = numbered.filter(|(_, one)| matches!(one, Use::Free | Use::Reserved));
        unused.map(|(at, _)| at).take(count as usize).collect()
    }

    /// The bytes of extents that are not in use, and are needed to back these blocks.
    pub(super) fn missing(&self, numbers: &[u32]) -> u64 {
        self.planes.missing(numbers.iter().copied())
    }

    /// Returns what is missing to back these blocks, and the bytes that the cache holds at least while it
    /// has them: those of the extents under them and under the pinned ones.
    pub(super) fn needs(&self, numbers: &[u32]) -> (u64, u64) {
        let blocks = numbers.iter().chain(&self.pinned);
        (self.missing(numbers), self.planes.under(blocks.copied()))
    }

    /// Returns what is missing for a reserve, and the bytes that the cache holds at least with it: those
    /// under the lowest numbers, of which the reserve has those that are not in use.
    pub(super) fn needs_of_reserve(&self, count: u32) -> (u64, u64) {
        let lowest = (0..self.blocks()).filter(|it| self.use_of(*it) != Ok(Use::Pinned));
        let lowest: Vec<u32> = lowest.take(count as usize).collect();
        (self.missing(&self.lowest(count)), self.needs(&lowest).1)
    }

    /// Begins a step, and returns its number.
    pub(super) fn begin_step(&mut self) -> u64 {
        self.begun += 1;
        self.steps.insert(self.begun, Vec::new());
        self.begun
    }

    /// Ends a step. Its blocks wait for the steps that began before it and are still being prepared.
    pub(super) fn end_step(&mut self, step: u64, home: &Stream) {
        let Some(released) = self.steps.remove(&step) else {
            return;
        };
        match self.steps.range_mut(..step).next_back() {
            Some((_, earlier)) => earlier.extend(released),
            None => self.leave(&released, home),
        }
    }
}
