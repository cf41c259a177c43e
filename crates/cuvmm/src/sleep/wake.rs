//! Waking blocks and holders.

use std::sync::Arc;

use super::prepared::PreparedWake;
use super::units::Waker;
use super::{Blocks, Progress};
use crate::error::SleepError;
use crate::pool::{CanSleep, Choice, HolderToWake, Lending, Offers, Room, Wait};
use crate::store::{Direction, Job, copy};

pub(super) fn wake(blocks: &Blocks<'_>, choice: Choice<'_>) -> Result<PreparedWake, SleepError> {
    let to_wake = begin(blocks, choice)?;
    let mut waking = Waking {
        blocks,
        done: 0,
        total: to_wake.iter().map(moved).sum(),
        used: to_wake.iter().map(Waker::used).sum(),
    };
    let store = |one: &Waker| one.kept_in().map(|store| store.identity());
    let (mut kept, mut bare): (Vec<Waker>, Vec<Waker>) =
        to_wake.into_iter().partition(|one| one.kept() > 0);
    // Contents in the same store are copied together.
    kept.sort_by_key(store);
    let mut room = blocks.tenant.room(bare.iter().map(Waker::to_create).sum());
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

/// Returns the bytes of a block or holder that waking counts: those that are copied, or all that are
/// mapped.
fn moved(one: &Waker) -> u64 {
    match one.kept() {
        0 => one.bytes(),
        kept => kept,
    }
}

/// Marks all that is selected as moving, and charges for it.
fn begin(blocks: &Blocks<'_>, choice: Choice<'_>) -> Result<Vec<Waker>, SleepError> {
    blocks.check()?;
    let mut holders: Vec<(Arc<dyn CanSleep>, HolderToWake)> = Vec::new();
    for owner in &blocks.holders {
        let waking = Arc::clone(owner).begin_wake()?;
        holders.extend(waking.map(|waking| (Arc::clone(owner), waking)));
    }
    let lendings = holders.iter().filter_map(|(_, holder)| holder.lending());
    let lendings: Vec<Lending<'_>> = lendings.collect();
    let wanted = || blocks.is_wanted();
    let wait = blocks.until().map_or(Wait::Hooks, Wait::Until);
    let memory = (&Offers::default(), lendings.as_slice());
    let (to_wake, lent) = (blocks.tenant).begin_wake(choice, memory, wait, &wanted)?;
    for ((_, holder), lent) in holders.iter_mut().zip(lent) {
        holder.take(lent);
    }
    let mut all: Vec<Waker> = to_wake.into_iter().map(Waker::Block).collect();
    let holders = holders.into_iter();
    all.extend(holders.map(|(owner, holder)| Waker::Holder(owner, holder)));
    Ok(all)
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
        let (done, total) = (self.done, self.total);
        match self.blocks.goes_on(&Progress { done, total }) {
            true => Ok(()),
            false => Err(SleepError::Cancelled),
        }
    }

    /// Gives memory to a block or holder without kept contents.
    fn place_memory(&mut self, one: &mut Waker, room: &mut Room<'_>) -> Result<(), SleepError> {
        let bytes = self.used;
        one.place_memory(room)
            .map_err(|cause| SleepError::Block { bytes, cause })?;
        self.has_done(one.bytes())
    }

    /// Gives memory to blocks and holders with contents in one store, and restores them: an extent is mapped
    /// while those before it are copied to.
    fn restore(&mut self, group: &mut [Waker]) -> Result<(), SleepError> {
        let Some(store) = group.iter().find_map(Waker::kept_in) else {
            return Ok(());
        };
        let bytes = self.used;
        let contents = group.iter_mut().flat_map(Waker::contents);
        copy(&store, |copies| {
            for (index, (place, span, saved)) in contents.enumerate() {
                let mut jobs = Job::all((index, Direction::In), span, saved).peekable();
                let mut end = 0;
                while end < place.used() {
                    // Runs user code: reclaiming memory for it may drop a value of the user.
                    let furnished = copies.aside(|| place.furnish_next());
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
