//! Putting blocks to sleep.

use super::Blocks;
use super::prepared::{PreparedSleep, undo};
use crate::error::{ArgumentError, SleepError};
use crate::pool::{ToSleep, TransitioningBlock};
use crate::store::{Direction, HostStore, Job, Saved, copy};

pub(super) fn discard(blocks: &Blocks<'_>) -> Result<PreparedSleep, SleepError> {
    let to_sleep = blocks
        .tenant
        .begin_sleep(blocks.choice(), blocks.until(), &|| blocks.is_wanted())?;
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

pub(super) fn keep(blocks: &Blocks<'_>, store: &HostStore) -> Result<PreparedSleep, SleepError> {
    if !store.device().is_same(blocks.tenant.device()) {
        return Err(ArgumentError::WrongDevice("the store").into());
    }
    let mut to_sleep = blocks
        .tenant
        .begin_sleep(blocks.choice(), blocks.until(), &|| blocks.is_wanted())?;
    // Takes space for all blocks at once, so that a refusal reports the total.
    let wanted = to_sleep.iter().map(ToSleep::bytes).sum();
    let rooms = match store.rooms(to_sleep.iter().map(ToSleep::bytes), wanted) {
        Ok(rooms) => rooms,
        Err(cause) => return Err(undo(to_sleep, cause)),
    };
    for (one, room) in to_sleep.iter_mut().zip(rooms) {
        one.keep_in(room);
    }
    match copy_out(blocks, store, &mut to_sleep) {
        Ok(()) => Ok(PreparedSleep::new(blocks, to_sleep, wanted)),
        Err(cause) => Err(undo(to_sleep, cause)),
    }
}

/// Copies all contents, and takes each block's memory out once its own contents have been copied.
fn copy_out(
    blocks: &Blocks<'_>,
    store: &HostStore,
    to_sleep: &mut [ToSleep],
) -> Result<(), SleepError> {
    let mut left: Vec<u64> = to_sleep.iter().map(ToSleep::bytes).collect();
    let total = left.iter().sum();
    let contents = to_sleep.iter_mut().filter_map(ToSleep::contents);
    let (moving_blocks, saved): (Vec<&TransitioningBlock>, Vec<&mut Saved>) = contents.unzip();
    copy(store, Direction::Out, |copies| {
        for (index, (moving, saved)) in moving_blocks.iter().zip(saved).enumerate() {
            Job::all(index, moving.span(), saved).for_each(|job| copies.add(job));
        }
        let mut copied = 0;
        while let Some(done) = copies.next_done() {
            let bytes = done.copied?;
            copied += bytes;
            copies.aside(|| go_on(blocks, copied, total))?;
            let (Some(moving), Some(left)) =
                (moving_blocks.get(done.index), left.get_mut(done.index))
            else {
                continue;
            };
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                moving.withdraw()?;
            }
        }
        Ok(())
    })
}

fn go_on(blocks: &Blocks<'_>, done: u64, total: u64) -> Result<(), SleepError> {
    match blocks.goes_on(done, total) {
        true => Ok(()),
        false => Err(SleepError::Cancelled),
    }
}
