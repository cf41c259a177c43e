//! Putting blocks to sleep.

use super::{Blocks, Slept};
use crate::error::SleepError;
use crate::pool::{Bed, Falling};
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
        Ok(()) => Ok(finish(blocks, falling)),
        Err(cause) => Err(undo(falling, cause)),
    }
}

pub(super) fn keep(blocks: &Blocks<'_>, store: &HostStore) -> Result<Slept, SleepError> {
    if !store.device().is_same(blocks.tenant.device()) {
        return Err(SleepError::WrongDevice);
    }
    let mut falling = blocks.tenant.fall(blocks.choice(), blocks.until())?;
    // Room for all of them at once, so that the refusal says what is missing.
    let wanted = falling.iter().map(Falling::bytes).sum();
    let rooms = match store.rooms(falling.iter().map(Falling::bytes), wanted) {
        Ok(rooms) => rooms,
        Err(cause) => return Err(undo(falling, cause)),
    };
    for (one, room) in falling.iter_mut().zip(rooms) {
        one.keep_in(room);
    }
    match copy_out(blocks, store, &mut falling) {
        Ok(()) => Ok(Slept {
            kept: wanted,
            ..finish(blocks, falling)
        }),
        Err(cause) => Err(undo(falling, cause)),
    }
}

/// Copies all contents, and takes each block's memory out when all of its own have been.
fn copy_out(
    blocks: &Blocks<'_>,
    store: &HostStore,
    falling: &mut [Falling],
) -> Result<(), SleepError> {
    let mut left: Vec<u64> = falling.iter().map(Falling::bytes).collect();
    let total = left.iter().sum();
    let contents = falling.iter_mut().filter_map(Falling::contents);
    let (beds, saved): (Vec<&Bed>, Vec<&mut Saved>) = contents.unzip();
    copy(store, Direction::Out, |copies| {
        for (index, (bed, saved)) in beds.iter().zip(saved).enumerate() {
            Job::all(index, bed.span(), saved).for_each(|job| copies.add(job));
        }
        let mut copied = 0;
        while let Some(done) = copies.next_done() {
            let bytes = done.copied?;
            copied += bytes;
            copies.aside(|| go_on(blocks, copied, total))?;
            let (Some(bed), Some(left)) = (beds.get(done.index), left.get_mut(done.index)) else {
                continue;
            };
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                bed.withdraw()?;
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
fn finish(blocks: &Blocks<'_>, falling: Vec<Falling>) -> Slept {
    let mut slept = Slept::default();
    for one in falling {
        slept.blocks += 1;
        slept.given += one.sleep(blocks.release);
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
fn undo(falling: Vec<Falling>, cause: SleepError) -> SleepError {
    let (mut stayed, mut lost) = (0, 0);
    for one in falling {
        let bytes = one.bytes();
        if !one.stay() {
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
