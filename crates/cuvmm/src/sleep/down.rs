//! Putting blocks to sleep.
//!
//! Keeps I-89 and I-97.

use super::Blocks;
use super::prepared::{PreparedSleep, undo};
use crate::error::{ArgumentError, SleepError};
use crate::pool::{ToSleep, TransitioningBlock};
use crate::store::{Copies, Direction, Done, Growth, HostStore, Job, Ranges, Saved, copy};

pub(super) fn discard(blocks: &Blocks<'_>) -> Result<PreparedSleep, SleepError> {
    let to_sleep = blocks
        .tenant
        .begin_sleep(blocks.choice(), blocks.until(), &|| blocks.is_wanted())?;
    let marked = to_sleep.iter().map(|one| one.marked().bytes());
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
    let total = to_sleep.iter().map(ToSleep::bytes).sum();
    let mut done = 0;
    let withdrawn = to_sleep.iter().try_for_each(|one| {
        one.withdraw()?;
        done += one.bytes();
        go_on(blocks, done, total)
    });
    match withdrawn {
        Ok(()) => Ok(PreparedSleep::new(blocks, to_sleep, 0)),
        Err(cause) => Err(undo(to_sleep, cause)),
    }
}

/// Keeps the contents of the blocks that `kept` returns.
pub(super) fn keep(
    blocks: &Blocks<'_>,
    store: &HostStore,
    kept: impl Fn(&ToSleep) -> Ranges,
) -> Result<PreparedSleep, SleepError> {
    if !store.device().is_same(blocks.tenant.device()) {
        return Err(ArgumentError::WrongDevice("the store").into());
    }
    let mut to_sleep = blocks
        .tenant
        .begin_sleep(blocks.choice(), blocks.until(), &|| blocks.is_wanted())?;
    // Takes space for all blocks at once, so that a refusal reports the total.
    let contents: Vec<Ranges> = to_sleep.iter().map(kept).collect();
    let bytes = contents.iter().map(Ranges::bytes).sum();
    let (rooms, growth) = match store.rooms(contents) {
        Ok(taken) => taken,
        Err(cause) => return Err(undo(to_sleep, cause)),
    };
    for (one, room) in to_sleep.iter_mut().zip(rooms) {
        one.keep_in(room);
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
    to_sleep: &mut [ToSleep],
) -> Result<(), SleepError> {
    let contents = to_sleep.iter_mut().filter_map(ToSleep::contents);
    let (moving, saved): (Vec<&TransitioningBlock>, Vec<&mut Saved>) = contents.unzip();
    let left: Vec<u64> = saved.iter().map(|saved| saved.bytes()).collect();
    let jobs = moving.iter().zip(saved).enumerate();
    let mut jobs = jobs
        .flat_map(|(index, (moving, saved))| {
            Job::all((index, Direction::Out), moving.span(), saved)
        })
        .peekable();
    let mut copied = Copied {
        blocks,
        moving: &moving,
        total: left.iter().sum(),
        left,
        bytes: 0,
    };
    copy(store, |copies| {
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
        copied.withdraw()?;
        while let Some(done) = copies.next_done() {
            if let Some(block) = copied.count(copies, done)? {
                block.withdraw_copied()?;
            }
        }
        grown.keep();
        Ok(())
    })
}

/// The progress of copying blocks out.
struct Copied<'a> {
    blocks: &'a Blocks<'a>,
    moving: &'a [&'a TransitioningBlock],
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
    ) -> Result<Option<&'a TransitioningBlock>, SleepError> {
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

    /// Takes out the memory of all blocks that have been copied.
    fn withdraw(&self) -> Result<(), SleepError> {
        let blocks = self.moving.iter().zip(&self.left);
        let mut copied = blocks.filter(|&(_, &left)| left == 0);
        copied.try_for_each(|(block, _)| block.withdraw_copied())
    }
}

fn go_on(blocks: &Blocks<'_>, done: u64, total: u64) -> Result<(), SleepError> {
    match blocks.goes_on(done, total) {
        true => Ok(()),
        false => Err(SleepError::Cancelled),
    }
}
