//! Putting blocks to sleep.

use super::{Blocks, Slept};
use crate::error::SleepError;
use crate::pool::Falling;
use crate::store::{Direction, HostStore, Job, Saved, copy};

pub(super) fn discard(blocks: &Blocks<'_>) -> Result<Slept, SleepError> {
    let falling = blocks.tenant.fall(blocks.choice(), blocks.until())?;
    let total = falling.iter().map(Falling::bytes).sum();
    let mut done = 0;
    let withdrawn = falling.iter().try_for_each(|one| {
        one.withdraw()?;
        done += one.bytes();
        go_on(blocks, done, total)
    });
    match withdrawn {
        Ok(()) => {
            let falling = falling.into_iter().map(|one| (one, None));
            Ok(finish(blocks, falling.collect()))
        }
        Err(cause) => Err(undo(falling.into_iter().map(|one| (one, None)), cause)),
    }
}

pub(super) fn keep(blocks: &Blocks<'_>, store: &HostStore) -> Result<Slept, SleepError> {
    if !store.device().is_same(blocks.tenant.device()) {
        return Err(SleepError::WrongDevice);
    }
    let falling = blocks.tenant.fall(blocks.choice(), blocks.until())?;
    // Room for all of them at once, so that the refusal says what is missing.
    let wanted = falling.iter().map(Falling::bytes).sum();
    let kept = store.rooms(falling.iter().map(Falling::bytes), wanted);
    let mut kept = match kept {
        Ok(kept) => kept,
        Err(cause) => return Err(undo(falling.into_iter().map(|one| (one, None)), cause)),
    };
    let copied = copy_out(blocks, store, &falling, &mut kept);
    let both = falling.into_iter().zip(kept.into_iter().map(Some));
    match copied {
        Ok(()) => {
            let slept = finish(blocks, both.collect());
            Ok(Slept {
                kept: wanted,
                ..slept
            })
        }
        Err(cause) => Err(undo(both, cause)),
    }
}

/// Copies all contents, and takes each block's memory out when all of its own have been.
fn copy_out(
    blocks: &Blocks<'_>,
    store: &HostStore,
    falling: &[Falling],
    kept: &mut [Saved],
) -> Result<(), SleepError> {
    let spans: Vec<_> = falling.iter().filter_map(Falling::span).collect();
    let mut left: Vec<u64> = falling.iter().map(Falling::bytes).collect();
    let total = left.iter().sum();
    copy(store, Direction::Out, |copies| {
        for (index, (span, saved)) in spans.iter().zip(kept).enumerate() {
            Job::all(index, span, saved).for_each(|job| copies.add(job));
        }
        let mut copied = 0;
        while let Some(done) = copies.next_done() {
            let bytes = done.copied?;
            copied += bytes;
            go_on(blocks, copied, total)?;
            let (Some(one), Some(left)) = (falling.get(done.index), left.get_mut(done.index))
            else {
                continue;
            };
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                one.withdraw()?;
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

/// All memory has been taken out: it is the pool's.
fn finish(blocks: &Blocks<'_>, falling: Vec<(Falling, Option<Saved>)>) -> Slept {
    let mut slept = Slept::default();
    for (one, saved) in falling {
        slept.blocks += 1;
        slept.given += one.sleep(saved, blocks.release);
    }
    if blocks.tags.is_empty() {
        match blocks.tenant.give_up_idle(blocks.release) {
            Ok(given) => slept.given += given,
            // It stays charged, and is taken back when somebody wants it.
            Err(error) => {
                tracing::warn!(%error, "idle memory of a tenant that sleeps stays mapped")
            }
        }
    }
    slept
}

/// Gives everybody back what was taken out.
fn undo(falling: impl Iterator<Item = (Falling, Option<Saved>)>, cause: SleepError) -> SleepError {
    let (mut stayed, mut lost) = (0, 0);
    for (one, saved) in falling {
        let bytes = one.bytes();
        if !one.stay(saved) {
            stayed += 1;
            lost += bytes;
        }
    }
    match stayed {
        0 => cause,
        blocks => SleepError::Stayed {
            blocks,
            bytes: lost,
            cause: Box::new(cause),
        },
    }
}
