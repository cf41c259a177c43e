//! Tags on their way to sleep or awake, which no allocation enters.

use std::sync::{Arc, Mutex, PoisonError};

use super::lock;
use super::members::Members;
use crate::live;
use crate::table::PoolId;

/// Held while tags are put to sleep or woken.
pub(super) static MOVING: Mutex<()> = Mutex::new(());

/// Tags on their way to sleep or awake. They count as asleep: no allocation under them begins, earlier
/// ones have ended, and no paged cache is added.
///
/// An error or a panic drops the value. A tag is then asleep if it was before, or if the driver
/// refused to restore some of its memory: waking the tag wakes only that.
pub(super) struct Moving<'a> {
    chosen: &'a [usize],
    /// Which of the tags slept before.
    slept: Vec<bool>,
}

impl<'a> Moving<'a> {
    /// Waits until allocations under the tags have ended.
    pub(super) fn begin(chosen: &'a [usize]) -> Self {
        let mut state = lock();
        let slept = chosen.iter().map(|&index| state.tags[index].is_asleep);
        let slept = slept.collect();
        let still = chosen.iter().map(|&index| {
            state.set_asleep(index, true);
            Arc::clone(&state.tags[index].still)
        });
        let still: Vec<_> = still.collect();
        drop(state);
        let moving = Self { chosen, slept };
        // An allocation that begins from here on finds the tag asleep, so the lock is not kept.
        for still in &still {
            drop(still.write().unwrap_or_else(PoisonError::into_inner));
        }
        moving
    }

    /// Sets which tags are asleep, by their index in `chosen`.
    pub(super) fn end(mut self, is_asleep: impl Fn(usize) -> bool) {
        for (at, &index) in std::mem::take(&mut self.chosen).iter().enumerate() {
            settle(index, is_asleep(at));
        }
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        for (&index, &slept) in self.chosen.iter().zip(&self.slept) {
            let tenant = Members::of(index).tenant;
            settle(index, slept || tenant.stats().asleep > 0);
        }
    }
}

/// Counts a tag as asleep or as awake.
fn settle(index: usize, is_asleep: bool) {
    let mut state = lock();
    state.set_asleep(index, is_asleep);
    let of = state.tags[index].of;
    drop(state);
    let heaps = Members::of(index).heaps;
    let heaps: Vec<PoolId> = heaps.into_iter().map(|it| it.id).collect();
    live::set_asleep(of, &heaps, is_asleep);
}
