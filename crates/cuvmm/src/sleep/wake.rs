//! Waking blocks.

use super::Blocks;
use super::prepared::PreparedWake;
use crate::error::SleepError;
use crate::pool::{Choice, Offers, Room, ToWake, Wait};
use crate::store::{Direction, Job, copy};

pub(super) fn wake(blocks: &Blocks<'_>, choice: Choice<'_>) -> Result<PreparedWake, SleepError> {
    let wait = blocks.until().map_or(Wait::Hooks, Wait::Until);
    let to_wake = blocks
        .tenant
        .begin_wake(choice, &Offers::default(), wait, &|| blocks.is_wanted())?;
    let mut waking = Waking {
        blocks,
        done: 0,
        total: to_wake.iter().map(moved).sum(),
        used: to_wake.iter().map(ToWake::used).sum(),
    };
    let store = |one: &ToWake| one.kept_in().map(|store| store.identity());
    let (mut kept, mut bare): (Vec<ToWake>, Vec<ToWake>) =
        to_wake.into_iter().partition(|one| one.kept() > 0);
    // Contents in the same store are copied together.
    kept.sort_by_key(store);
    let mut room = blocks.tenant.room(bare.iter().map(ToWake::used).sum());
    for one in &mut bare {
        waking.place_memory(one, &mut room)?;
    }
    // Copying takes long: what is free is asked anew for each extent of the others.
    drop(room);
    for group in kept.chunk_by_mut(|one, other| store(one) == store(other)) {
        waking.restore(group)?;
    }
    bare.append(&mut kept);
    Ok(PreparedWake::new(bare))
}

/// Returns the bytes of a block that waking counts: those that are copied, or all that are mapped.
fn moved(one: &ToWake) -> u64 {
    match one.kept() {
        0 => one.bytes(),
        kept => kept,
    }
}

/// A wake in progress.
struct Waking<'a, 'b> {
    blocks: &'a Blocks<'b>,
    done: u64,
    total: u64,
    /// The memory of all blocks in whole granules, in bytes.
    used: u64,
}

impl Waking<'_, '_> {
    fn has_done(&mut self, bytes: u64) -> Result<(), SleepError> {
        self.done += bytes;
        match self.blocks.goes_on(self.done, self.total) {
            true => Ok(()),
            false => Err(SleepError::Cancelled),
        }
    }

    /// Gives memory to a block without kept contents.
    fn place_memory(&mut self, one: &mut ToWake, room: &mut Room<'_>) -> Result<(), SleepError> {
        let bytes = self.used;
        one.place_memory(room)
            .map_err(|cause| SleepError::Block { bytes, cause })?;
        self.has_done(one.bytes())
    }

    /// Gives memory to blocks with contents in one store, and restores them: an extent is mapped
    /// while those before it are copied to.
    fn restore(&mut self, group: &mut [ToWake]) -> Result<(), SleepError> {
        let Some(store) = group.iter().find_map(ToWake::kept_in) else {
            return Ok(());
        };
        let bytes = self.used;
        let contents = group.iter_mut().filter_map(ToWake::contents);
        copy(&store, |copies| {
            for (index, (moving, saved, zeroed)) in contents.enumerate() {
                let mut jobs = Job::all((index, Direction::In), moving.span(), saved).peekable();
                let mut end = 0;
                while end < moving.used() {
                    // Runs user code: reclaiming memory for it may drop a value of the user.
                    let furnished = copies.aside(|| moving.furnish_next(zeroed));
                    end = furnished.map_err(|cause| SleepError::Block { bytes, cause })?;
                    while let Some(job) = jobs.next_if(|job| job.end() <= end) {
                        copies.add(job);
                    }
                }
            }
            while let Some(done) = copies.next_done() {
                let bytes = done.copied?;
                copies.aside(|| self.has_done(bytes))?;
            }
            Ok(())
        })
    }
}
