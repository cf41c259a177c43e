//! Waking blocks.

use super::{Blocks, Woken};
use crate::error::{AllocateError, WakeError};
use crate::pool::Rising;
use crate::store::{Direction, HostStore, Job, Saved, copy};

/// A block that is being woken, and what was kept of it.
type One = (Rising, Option<Saved>);

pub(super) fn wake(blocks: &Blocks<'_>) -> Result<Woken, WakeError> {
    let rising = blocks.tenant.rise(blocks.choice(), blocks.until())?;
    let total = rising.iter().map(Rising::bytes).sum();
    let mut waking = Waking {
        blocks,
        done: 0,
        total,
    };
    let with_saved = |mut one: Rising| {
        let saved = one.take_saved();
        (one, saved)
    };
    let (mut kept, mut bare): (Vec<One>, Vec<One>) = rising
        .into_iter()
        .map(with_saved)
        .partition(|(_, saved)| saved.is_some());
    // Those of one store are copied together.
    kept.sort_by_key(|(_, saved)| saved.as_ref().map(|saved| saved.store().identity()));
    let woken = bare
        .iter_mut()
        .try_for_each(|(one, _)| waking.furnish(one))
        .and_then(|()| {
            let store = |one: &One| one.1.as_ref().map(|saved| saved.store().identity());
            kept.chunk_by_mut(|one, other| store(one) == store(other))
                .try_for_each(|group| waking.restore(group))
        });
    let all = bare.into_iter().chain(kept);
    match woken {
        Ok(()) => Ok(finish(all)),
        Err(error) => {
            all.for_each(|(one, saved)| one.sleep_on(saved));
            Err(error)
        }
    }
}

/// A waking that is going on.
struct Waking<'a, 'b> {
    blocks: &'a Blocks<'b>,
    done: u64,
    total: u64,
}

impl Waking<'_, '_> {
    fn has_done(&mut self, bytes: u64) -> Result<(), WakeError> {
        self.done += bytes;
        match self.blocks.goes_on(self.done, self.total) {
            true => Ok(()),
            false => Err(WakeError::Cancelled),
        }
    }

    /// Gives a block memory of which nothing was kept.
    fn furnish(&mut self, one: &mut Rising) -> Result<(), WakeError> {
        one.furnish().map_err(|cause| refused(one, cause))?;
        self.has_done(one.bytes())
    }

    /// Gives blocks memory and what was kept of them, in one store: an extent is mapped while those
    /// before it are copied to.
    fn restore(&mut self, group: &mut [One]) -> Result<(), WakeError> {
        let Some(store) = group
            .iter()
            .find_map(|(_, saved)| Some(saved.as_ref()?.store()))
        else {
            return Ok(());
        };
        let (rising, kept): (Vec<&Rising>, Vec<&mut Saved>) = group
            .iter_mut()
            .filter_map(|(one, saved)| Some((&*one, saved.as_mut()?)))
            .unzip();
        self.copy_in(&store, &rising, kept)
    }

    fn copy_in(
        &mut self,
        store: &HostStore,
        rising: &[&Rising],
        kept: Vec<&mut Saved>,
    ) -> Result<(), WakeError> {
        let spans: Vec<_> = rising.iter().filter_map(|one| one.span()).collect();
        copy(store, Direction::In, |copies| {
            for (index, ((one, span), saved)) in rising.iter().zip(&spans).zip(kept).enumerate() {
                let mut jobs = Job::all(index, span, saved).peekable();
                let mut end = 0;
                while end < one.used() {
                    end = one.furnish_next().map_err(|cause| refused(one, cause))?;
                    while let Some(job) = jobs.next_if(|job| job.end() <= end) {
                        copies.add(job);
                    }
                }
            }
            while let Some(done) = copies.next_done() {
                self.has_done(done.copied?)?;
            }
            Ok(())
        })
    }
}

fn refused(one: &Rising, cause: AllocateError) -> WakeError {
    let bytes = one.used();
    WakeError::Memory { bytes, cause }
}

/// All memory is there, and shows what was kept.
fn finish(all: impl Iterator<Item = One>) -> Woken {
    let mut woken = Woken::default();
    for (one, saved) in all {
        woken.blocks += 1;
        woken.mapped += one.used();
        woken.restored += saved.as_ref().map_or(0, Saved::bytes);
        one.wake(saved.is_some());
    }
    woken
}
