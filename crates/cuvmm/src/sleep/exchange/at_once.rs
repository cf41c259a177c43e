//! An exchange at once: memory of the blocks that fall asleep is mapped at the addresses of the
//! blocks that wake, saved there piece by piece, and each piece is overwritten when it is saved.
//!
//! All that can fail but the copies and unmapping comes before the first copy: host memory, charges
//! and mappings. The contents of the blocks that wake stay in their store to the end. After a
//! failure what was overwritten is copied back. First all that is not saved is saved, so that a
//! block which cannot be put back sleeps with its contents.
//!
//! Keeps I-93.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::pieces::{Ends, Piece};
use super::{Exchange, Exchanged, Sleeping};
use crate::error::SleepError;
use crate::extents::wait_for;
use crate::own::Stream;
use crate::pool::{Offers, ToSleep, ToWake, Wait, settle_exchange};
use crate::sleep::prepared::{PreparedSleep, PreparedWake};
use crate::sleep::units::{Sleeper, Waker};
use crate::sleep::{Blocks, Slept, Woken};
use crate::store::{Grown, Growth, HostStore, Job, PART, Ranges, copy};

/// How often a copy back is tried, so that one refusal of the driver changes nothing.
const TRIES: usize = 2;

/// Exchanges the memory of blocks whose contents are all kept. Copies with the lanes of a store.
///
/// # Errors
/// [`SleepError::Block`] if there is no memory beside that of the blocks that fall asleep, and the
/// errors of sleep and wake.
pub(super) fn exchange(
    exchange: &Exchange<'_>,
    store: &HostStore,
) -> Result<Option<Exchanged>, SleepError> {
    let mut moving = Moving {
        exchange,
        store,
        to_sleep: Vec::new(),
        counts: Vec::new(),
        growths: Vec::new(),
        grown: Vec::new(),
        to_wake: Vec::new(),
        pieces: Vec::new(),
    };
    match moving.run() {
        Ok(true) => Ok(Some(moving.finish())),
        Ok(false) => {
            moving.undo();
            Ok(None)
        }
        Err(cause) => Err(moving.undo().into_error(cause)),
    }
}

/// Blocks that change places. Dropping the value undoes the exchange.
struct Moving<'a, 'b> {
    exchange: &'a Exchange<'b>,
    store: &'a HostStore,
    to_sleep: Vec<ToSleep>,
    /// The number of blocks of each selection that falls asleep.
    counts: Vec<usize>,
    /// Host memory that is not there yet.
    growths: Vec<Growth>,
    grown: Vec<Grown>,
    to_wake: Vec<ToWake>,
    /// The pieces to copy, once memory may have been taken from blocks that fall asleep.
    pieces: Vec<Piece>,
}

/// The blocks that sleep although the exchange was undone.
#[derive(Default)]
struct Undone {
    stayed: (u64, u64),
    lost: (u64, u64),
}

impl Undone {
    fn into_error(self, cause: SleepError) -> SleepError {
        let stayed = match self.stayed {
            (0, _) => cause,
            (blocks, bytes) => SleepError::Stayed {
                blocks,
                bytes,
                cause: Box::new(cause),
            },
        };
        match self.lost {
            (0, _) => stayed,
            (blocks, bytes) => SleepError::Lost {
                blocks,
                bytes,
                cause: Box::new(stayed),
            },
        }
    }
}

impl Moving<'_, '_> {
    /// Returns `false` before anything has changed if the blocks have to go in turn.
    fn run(&mut self) -> Result<bool, SleepError> {
        for Sleeping { blocks, store } in self.exchange.sleeping() {
            self.prepare(blocks, store)?;
        }
        let mut offers = Offers::default();
        // The parts of contents must end where memory does.
        for one in &self.to_sleep {
            let granule = self.exchange.granule();
            if granule.is_some_and(|granule| granule.is_multiple_of(PART as u64)) {
                one.offer_to(&mut offers);
            }
        }
        for blocks in &self.exchange.wake {
            let wanted = || blocks.is_wanted();
            let choice = blocks.choice();
            let (woken, _) =
                blocks
                    .tenant
                    .begin_wake(choice, (&offers, &[]), Wait::Never, &wanted)?;
            woken.iter().for_each(|one| offers.remove(one.arrivals()));
            self.to_wake.extend(woken);
        }
        if self.to_wake.iter().any(ToWake::is_kept_in_part) {
            return Ok(false);
        }
        let total = self.total();
        for growth in std::mem::take(&mut self.growths) {
            let grown = growth.finish(|| self.exchange.go_on(0, total))?;
            self.grown.push(grown);
        }
        let bytes = self.to_wake.iter().map(ToWake::used).sum();
        let refused = |cause| SleepError::Block { bytes, cause };
        for one in &mut self.to_wake {
            one.place_all().map_err(refused)?;
        }
        for one in &mut self.to_wake {
            one.keep_nothing_in(self.store);
        }
        self.pieces = Piece::all(&self.to_sleep, &self.to_wake);
        let arrivals = || self.to_wake.iter().flat_map(ToWake::arrivals);
        for one in &self.to_sleep {
            let here = arrivals().filter(|arrival| one.gives(arrival));
            let offsets = here.map(|arrival| arrival.from_offset).collect();
            one.withdraw_at(Some(offsets), false)?;
        }
        self.copy()?;
        let mut all = self.to_sleep.iter();
        all.try_for_each(|one| one.withdraw_at(None, true))?;
        Ok(true)
    }

    /// Marks blocks that fall asleep, and takes room in their store for them.
    fn prepare(&mut self, blocks: &Blocks<'_>, store: &HostStore) -> Result<(), SleepError> {
        let wanted = || blocks.is_wanted();
        let begun = blocks
            .tenant
            .begin_sleep(blocks.choice(), blocks.until(), &wanted)?;
        self.counts.push(begun.len());
        let first = self.to_sleep.len();
        self.to_sleep.extend(begun);
        let begun = self.to_sleep.get_mut(first..).unwrap_or_default();
        let contents = begun.iter().map(|one| Ranges::all(one.bytes()));
        let (rooms, growth) = store.rooms(contents.collect())?;
        for (one, room) in begun.iter_mut().zip(rooms) {
            one.keep_in(room);
        }
        self.growths.push(growth);
        Ok(())
    }

    /// Returns the bytes to be copied in both directions.
    fn total(&self) -> u64 {
        let out: u64 = self.to_sleep.iter().map(ToSleep::bytes).sum();
        out + self.to_wake.iter().map(ToWake::kept).sum::<u64>()
    }

    fn copy(&mut self) -> Result<(), SleepError> {
        let total = self.total();
        let ends = Ends::of(&mut self.to_sleep, &mut self.to_wake);
        let jobs = ends.exchange(&self.pieces);
        let exchange = self.exchange;
        copy(self.store, |copies| {
            jobs.into_iter().for_each(|job| copies.add(job));
            let mut done = 0;
            while let Some(next) = copies.next_done() {
                done += next.copied?;
                copies.aside(|| exchange.go_on(done, total))?;
            }
            Ok(())
        })
    }

    /// Gives the memory to the blocks that wake. Nothing can fail any more.
    fn finish(mut self) -> Exchanged {
        self.pieces.clear();
        std::mem::take(&mut self.grown)
            .into_iter()
            .for_each(Grown::keep);
        let mut exchanged = Exchanged {
            slept: Slept::default(),
            woken: Woken::default(),
            passed: self.to_wake.iter().map(ToWake::arriving).sum(),
        };
        settle_exchange(&mut self.to_sleep, &mut self.to_wake);
        let mut left = std::mem::take(&mut self.to_sleep).into_iter();
        for (selected, count) in self.exchange.sleep.iter().zip(&self.counts) {
            let to_sleep: Vec<ToSleep> = left.by_ref().take(*count).collect();
            let kept = to_sleep.iter().map(ToSleep::bytes).sum();
            let all = to_sleep.into_iter().map(Sleeper::Block).collect();
            let prepared = PreparedSleep::new(&selected.0, all, kept);
            exchanged.slept.add_all(prepared.finish());
        }
        exchanged.slept.given += exchanged.passed;
        let to_wake = std::mem::take(&mut self.to_wake).into_iter();
        let to_wake = to_wake.map(Waker::Block).collect();
        exchanged.woken = PreparedWake::new(to_wake).finish();
        exchanged
    }

    /// Returns the blocks to where they were, as far as the driver allows.
    fn undo(&mut self) -> Undone {
        let mut running = self.settle();
        if !self.pieces.is_empty() {
            self.copy_back(running.is_empty());
            // Copies back may be running too.
            running = self.settle();
        }
        for one in &mut self.to_wake {
            one.is_used_on(&running);
        }
        // Memory is unmapped at the addresses of these before it is put back.
        self.to_wake.clear();
        let mut undone = Undone::default();
        for (index, one) in std::mem::take(&mut self.to_sleep).into_iter().enumerate() {
            let bytes = one.bytes();
            let kept = Piece::has_saved(&self.pieces, index);
            let stays = match Piece::has_overwritten(&self.pieces, index) {
                true => {
                    one.give_up(kept);
                    false
                }
                false => one.stay(),
            };
            let count = match kept {
                _ if stays => continue,
                true => &mut undone.stayed,
                false => &mut undone.lost,
            };
            *count = (count.0 + 1, count.1 + bytes);
        }
        undone
    }

    /// Waits for copies that may still be running. Returns the streams of those that may go on.
    fn settle(&mut self) -> Vec<Stream> {
        let out = self.to_sleep.iter_mut().filter_map(ToSleep::contents);
        let into = self.to_wake.iter_mut().filter_map(ToWake::contents);
        let into = into.map(|(moving, saved, _)| (moving, saved));
        let mut all: Vec<_> = out.chain(into).map(|(_, saved)| saved).collect();
        let mut streams: Vec<Stream> = Vec::new();
        for saved in &mut all {
            for stream in saved.unfinished() {
                if !streams.contains(stream) {
                    streams.push(stream.clone());
                }
            }
        }
        streams.retain(|stream| {
            let waited = catch_unwind(AssertUnwindSafe(|| wait_for(stream)));
            !matches!(waited, Ok(Ok(()))) && !waited.is_ok_and(|it| it.is_err_and(|it| it.ended))
        });
        if streams.is_empty() {
            all.iter_mut().for_each(|saved| saved.copies_ended());
        }
        streams
    }

    /// Saves what is not saved, and then restores what was overwritten. While copies may be running
    /// that overwrite memory, saves only the rest of blocks that have to sleep, and restores none.
    fn copy_back(&mut self, ended: bool) {
        for _ in 0..TRIES {
            let ends = Ends::of(&mut self.to_sleep, &mut self.to_wake);
            let jobs = ends.save_rest(&self.pieces, |from| {
                ended || Piece::has_overwritten(&self.pieces, from)
            });
            copy_all(self.store, jobs, |_| ());
        }
        for _ in 0..if ended { TRIES } else { 0 } {
            // A copy that may go on would overwrite what is written once another has ended.
            if !self.settle().is_empty() {
                return;
            }
            let ends = Ends::of(&mut self.to_sleep, &mut self.to_wake);
            let jobs = ends.restore(&self.pieces);
            copy_all(self.store, jobs, |index| {
                self.pieces.get(index).into_iter().for_each(Piece::restored);
            });
        }
    }
}

impl Drop for Moving<'_, '_> {
    /// Undoes the exchange after a panic.
    fn drop(&mut self) {
        if !self.to_sleep.is_empty() || !self.to_wake.is_empty() {
            let undone = self.undo();
            let (stayed, lost) = (undone.stayed.0, undone.lost.0);
            log!(warn, stayed, lost, "an exchange was undone after a panic");
        }
    }
}

/// Carries out all jobs, and calls a function with the indices of those that succeed.
fn copy_all(store: &HostStore, jobs: Vec<Job<'_>>, mut ended: impl FnMut(usize)) {
    if jobs.is_empty() {
        return;
    }
    let copied: Result<(), SleepError> = copy(store, |copies| {
        jobs.into_iter().for_each(|job| copies.add(job));
        while let Some(done) = copies.next_done() {
            match done.copied {
                Ok(_) => ended(done.index),
                Err(error) => log!(warn, %error, "contents could not be copied back"),
            }
        }
        Ok(())
    });
    if let Err(error) = copied {
        log!(warn, %error, "contents could not be copied back");
    }
}
