//! Putting blocks and holders to sleep.
//!
//! Keeps I-89 and I-97.

use std::sync::Arc;

use super::prepared::{PreparedSleep, undo};
use super::units::{Moving, Parts, Sleeper};
use super::{Blocks, Progress};
use crate::error::{ArgumentError, SleepError};
use crate::store::{Copies, Direction, Done, Grown, Growth, HostStore, Job, Ranges, copy};

pub(super) fn discard(blocks: &Blocks<'_>) -> Result<PreparedSleep, SleepError> {
    let to_sleep = begin(blocks)?;
    let marked = to_sleep.iter().map(Sleeper::marked);
    let (count, bytes) = marked
        .filter(|&bytes| bytes > 0)
        .fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes));
    if count > 0 {
        return Err(undo(
            to_sleep,
            SleepError::Marked {
                blocks: count,
                bytes,
            },
        ));
    }
    let total = to_sleep.iter().map(Sleeper::bytes).sum();
    let mut done = 0;
    let withdrawn = to_sleep.iter().try_for_each(|one| {
        one.withdraw(&|| blocks.is_wanted())?;
        done += one.bytes();
        go_on(blocks, done, total)
    });
    match withdrawn {
        Ok(()) => Ok(PreparedSleep::new(blocks, to_sleep, 0)),
        Err(cause) => Err(undo(to_sleep, cause)),
    }
}

/// Marks all that is selected as moving.
fn begin(blocks: &Blocks<'_>) -> Result<Vec<Sleeper>, SleepError> {
    blocks.check()?;
    let (until, wanted) = (blocks.until(), || blocks.is_wanted());
    let chosen = blocks.tenant.begin_sleep(blocks.choice(), until, &wanted)?;
    let mut to_sleep: Vec<Sleeper> = chosen.into_iter().map(Sleeper::Block).collect();
    for owner in &blocks.holders {
        match owner.begin_sleep(until, &wanted) {
            Ok(one) => to_sleep.extend(one.map(|one| Sleeper::Holder(Arc::clone(owner), one))),
            Err(cause) => return Err(undo(to_sleep, cause)),
        }
    }
    Ok(to_sleep)
}

/// Keeps the contents of everything, or of what is marked in blocks.
pub(super) fn keep(
    blocks: &Blocks<'_>,
    store: &HostStore,
    all: bool,
) -> Result<PreparedSleep, SleepError> {
    if !store.device().is_same(blocks.tenant.device()) {
        return Err(ArgumentError::WrongDevice("the store").into());
    }
    let mut to_sleep = begin(blocks)?;
    // Takes space for all blocks at once, so that a refusal reports the total.
    let kept = to_sleep.iter().flat_map(|one| one.kept(all));
    let kept: Vec<Ranges> = kept.collect();
    let bytes = kept.iter().map(Ranges::bytes).sum();
    let (rooms, growth) = match store.rooms(kept) {
        Ok(taken) => taken,
        Err(cause) => return Err(undo(to_sleep, cause)),
    };
    let mut rooms = rooms.into_iter();
    for one in &mut to_sleep {
        one.keep_in(&mut rooms, all);
    }
    match copy_out(blocks, store, growth, &mut to_sleep) {
        Ok(()) => Ok(PreparedSleep::new(blocks, to_sleep, bytes)),
        Err(cause) => Err(undo(to_sleep, cause)),
    }
}

/// Copies all contents, and takes each block's memory out once its own contents have been copied
/// and the store has all its memory.
fn copy_out(
    blocks: &Blocks<'_>,
    store: &HostStore,
    growth: Growth,
    to_sleep: &mut [Sleeper],
) -> Result<(), SleepError> {
    let contents = to_sleep.iter_mut().filter_map(Sleeper::contents);
    let contents = contents.map(|(moving, bytes, parts)| ((moving, bytes), parts));
    let (units, parts): (Vec<(Moving<'_>, u64)>, Vec<Parts<'_>>) = contents.unzip();
    let (moving, left): (Vec<Moving<'_>>, Vec<u64>) = units.into_iter().unzip();
    let parts = parts.into_iter().enumerate();
    let parts = parts.flat_map(|(index, parts)| parts.map(move |part| (index, part)));
    let mut jobs = parts
        .flat_map(|(index, (span, saved))| Job::all((index, Direction::Out), span, saved))
        .peekable();
    let mut copied = Copied {
        blocks,
        moving: &moving,
        total: left.iter().sum(),
        left,
        bytes: 0,
    };
    let grown: Result<Grown, SleepError> = copy(store, |copies| {
        copies.add_ready(&mut jobs);
        let grown = growth.finish(|| {
            copies.add_ready(&mut jobs);
            while let Some(done) = copies.try_next_done() {
                copied.count(copies, done)?;
            }
            copies.aside(|| go_on(blocks, copied.bytes, copied.total))
        })?;
        // No refusal of host memory finds a block emptied: from here on none is taken. Blocks of
        // which no byte is kept count as copied. They may have memory.
        copied.withdraw(false)?;
        while let Some(done) = copies.next_done() {
            if let Some(unit) = copied.count(copies, done)?
                && !unit.withdraws_last()
            {
                unit.withdraw_copied(&|| blocks.is_wanted())?;
            }
        }
        Ok(grown)
    });
    let grown = grown?;
    // These may wait for work, and others can copy with the store meanwhile.
    copied.withdraw(true)?;
    grown.keep();
    Ok(())
}

/// The progress of copying blocks out.
struct Copied<'a> {
    blocks: &'a Blocks<'a>,
    moving: &'a [Moving<'a>],
    /// The bytes of each block that have not been copied.
    left: Vec<u64>,
    bytes: u64,
    total: u64,
}

impl<'a> Copied<'a> {
    /// Counts a copy, and returns its block if that was the last of its contents.
    fn count(
        &mut self,
        copies: &Copies<'_, '_>,
        done: Done,
    ) -> Result<Option<Moving<'a>>, SleepError> {
        let bytes = done.copied?;
        self.bytes += bytes;
        copies.aside(|| go_on(self.blocks, self.bytes, self.total))?;
        let (block, left) = (self.moving.get(done.index), self.left.get_mut(done.index));
        let Some((block, left)) = block.zip(left) else {
            return Ok(None);
        };
        *left = left.saturating_sub(bytes);
        Ok((*left == 0).then_some(*block))
    }

    /// Takes out the memory of all units that have been copied: of those that may go while others are
    /// being copied, or of the `last` ones.
    fn withdraw(&self, last: bool) -> Result<(), SleepError> {
        let units = self.moving.iter().zip(&self.left);
        let mut copied = units.filter(|&(unit, &left)| left == 0 && unit.withdraws_last() == last);
        copied.try_for_each(|(unit, _)| unit.withdraw_copied(&|| self.blocks.is_wanted()))
    }
}

fn go_on(blocks: &Blocks<'_>, done: u64, total: u64) -> Result<(), SleepError> {
    match blocks.goes_on(&Progress { done, total }) {
        true => Ok(()),
        false => Err(SleepError::Cancelled),
    }
}
