//! The blocks in use of a cache, the extents under them, and the blocks that wait for a step.
//!
//! Keeps I-98 and I-99.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::numbers::no_such;
use super::planes::Planes;
use crate::error::{ArgumentError, BlockError, PagedKvError};
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
    pub(super) planes: Planes,
    /// The reserved numbers: the lowest of those that are free or reserved.
    reserved: BTreeSet<u32>,
    /// By its number, the blocks that each step being prepared has released. They count as uses of
    /// their extents.
    steps: BTreeMap<u64, Vec<u32>>,
    begun: u64,
    backed: u32,
    pinned: u32,
}

impl State {
    pub(super) fn new(region: Region, planes: Planes, blocks: u32) -> Self {
        Self {
            region,
            uses: vec![Use::Free; blocks as usize],
            planes,
            reserved: BTreeSet::new(),
            steps: BTreeMap::new(),
            begun: 0,
            backed: 0,
            pinned: 0,
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
    }

    /// Blocks backed, reserved, pinned, and released by steps being prepared.
    pub(super) fn counts(&self) -> [u32; 4] {
        let leaving: usize = self.steps.values().map(Vec::len).sum();
        [
            self.backed,
            self.reserved.len() as u32,
            self.pinned,
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
        if let Some(&last) = numbers.iter().max() {
            self.use_of(last)?;
        }
        let mut entered = Vec::new();
        for &number in numbers {
            if let Some(one) = self.uses.get_mut(number as usize)
                && *one == Use::Free
            {
                *one = Use::Entering;
                self.planes.enter(number, &mut entered);
            }
        }
        let obtained = match entered.is_empty() {
            true => Ok(()),
            false => self.region.attempt_all(&entered, place),
        };
        for &number in numbers {
            match self.use_of(number)? {
                Use::Entering if obtained.is_ok() => self.begin(number, to),
                Use::Entering => {
                    self.set(number, Use::Free);
                    self.planes.leave(number, &mut entered);
                }
                Use::Reserved if obtained.is_ok() && to != Use::Reserved => {
                    self.reserved.remove(&number);
                    self.begin(number, to);
                }
                _ => {}
            }
        }
        obtained
    }

    fn begin(&mut self, number: u32, to: Use) {
        self.set(number, to);
        match to {
            Use::Backed => self.backed += 1,
            Use::Pinned => self.pinned += 1,
            Use::Reserved => drop(self.reserved.insert(number)),
            Use::Free | Use::Entering => {}
        }
    }

    /// Ends the use of blocks, all or none. They leave their extents at once, or at the end of the
    /// step that is being prepared.
    pub(super) fn release(&mut self, numbers: &[u32], home: &Stream) -> Result<(), PagedKvError> {
        for (at, &number) in numbers.iter().enumerate() {
            let refused = match self.uses.get_mut(number as usize) {
                Some(one @ Use::Backed) => {
                    *one = Use::Free;
                    continue;
                }
                Some(Use::Pinned) => PagedKvError::Pinned(number),
                Some(_) => PagedKvError::NotInUse(number),
                None => no_such("block", number).into(),
            };
            for &number in numbers.iter().take(at) {
                self.set(number, Use::Backed);
            }
            return Err(refused);
        }
        self.backed -= numbers.len() as u32;
        match self.steps.last_entry() {
            Some(mut step) => step.get_mut().extend(numbers),
            None => self.leave(numbers, home),
        }
        Ok(())
    }

    /// Ends a use of blocks in their extents. Extents without a use are withdrawn behind the work of
    /// the home stream and of the recorded streams, which is queued by now.
    fn leave(&mut self, numbers: &[u32], home: &Stream) {
        let mut emptied = Vec::new();
        for &number in numbers {
            let leaves = self.exchange_reserved(number);
            self.planes.leave(leaves, &mut emptied);
        }
        if !emptied.is_empty() {
            let fence = Fence::stream(home.clone());
            self.withdraw(emptied, &fence);
        }
    }

    fn withdraw(&mut self, emptied: Vec<Range<u64>>, fence: &Fence) {
        for range in emptied {
            if let Err(error) = self.region.decommit_behind(range, fence.clone()) {
                log!(error, %error, "an extent without a block in use stays in its cache");
            }
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
        let unused = self.blocks() - self.backed - self.pinned;
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
        let numbered = (0..).zip(&self.uses);
        let unused = numbered.filter(|(_, one)| matches!(one, Use::Free | Use::Reserved));
        unused.map(|(at, _)| at).take(count as usize).collect()
    }

    /// The bytes of extents that are not in use, and are needed to back these blocks. Numbers that do
    /// not exist count nothing.
    pub(super) fn missing(&self, numbers: &[u32]) -> u64 {
        let blocks = self.blocks();
        let known = numbers.iter().copied().filter(move |&it| it < blocks);
        self.planes.missing(known)
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
