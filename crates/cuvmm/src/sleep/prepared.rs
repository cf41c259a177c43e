//! Sleep and wake up to the point from which nothing can fail.
//!
//! Keeps I-53.

use std::fmt;
use std::sync::Arc;

use cuvmm_driver::DeviceAddress;

use super::units::{Sleeper, Waker};
use super::{Blocks, Slept, Woken};
use crate::error::SleepError;
use crate::pool::{CanSleep, GivenUp, Tenant};

/// Blocks, heaps and paged caches ready to sleep: their contents are kept or may be lost, and their
/// memory is put aside. Made by [`Blocks::prepare_sleep`].
///
/// The memory is still charged to the tenant. No operation but dropping them takes the blocks until
/// this value is gone. Dropping it returns the memory to them, as [`cancel`](Self::cancel) does.
#[must_use = "dropping it leaves the blocks awake"]
pub struct PreparedSleep {
    tenant: Tenant,
    release: bool,
    /// `true` if all blocks of the tenant were chosen.
    is_whole: bool,
    to_sleep: Vec<Sleeper>,
    kept: u64,
}

impl PreparedSleep {
    pub(super) fn new(blocks: &Blocks<'_>, to_sleep: Vec<Sleeper>, kept: u64) -> Self {
        Self {
            tenant: blocks.tenant.clone(),
            release: blocks.release,
            is_whole: blocks.is_whole(),
            to_sleep,
            kept,
        }
    }

    /// Gives the memory of the blocks up. They sleep from here on. What the driver does not take back
    /// is [quarantined](Slept::quarantined).
    pub fn finish(self) -> Slept {
        let mut slept = Slept {
            kept: self.kept,
            ..Slept::default()
        };
        let before = self.tenant.refused_releases();
        for one in self.to_sleep {
            match one.owner().map(|owner| owner.is_heap()) {
                None => slept.blocks += 1,
                Some(true) => slept.heaps += 1,
                Some(false) => slept.caches += 1,
            }
            slept.add(one.sleep(self.release));
        }
        if self.is_whole {
            let (given, outcome) = self.tenant.give_up_cached(self.release);
            slept.add(given);
            // It stays charged, and is reclaimed when another tenant needs it.
            if let Err(error) = outcome {
                log!(warn, %error, "cached memory of a sleeping tenant stays mapped");
            }
        }
        if self.release || slept.quarantined > 0 {
            slept.quarantined = slept.quarantined.min(self.tenant.retry_releases(&before));
        }
        slept.awake = self.tenant.used_by_holders();
        slept
    }

    /// Returns what falls asleep.
    pub(super) fn chosen(&self) -> Chosen {
        let owners = self.to_sleep.iter().filter_map(Sleeper::owner);
        Chosen {
            blocks: self.to_sleep.iter().filter_map(Sleeper::address).collect(),
            holders: owners.cloned().collect(),
            bytes: self.to_sleep.iter().map(Sleeper::bytes).sum(),
        }
    }

    /// Returns their memory to the blocks, which are as before.
    ///
    /// # Errors
    /// [`SleepError::Stayed`] if the driver refused twice to map the memory of some: they sleep, and
    /// can be woken.
    pub fn cancel(self) -> Result<(), SleepError> {
        match undo(self.to_sleep, SleepError::Cancelled) {
            SleepError::Cancelled => Ok(()),
            stayed => Err(stayed),
        }
    }
}

/// Blocks and holders of one selection that fall asleep.
pub(super) struct Chosen {
    /// The addresses of the blocks.
    pub(super) blocks: Vec<DeviceAddress>,
    pub(super) holders: Vec<Arc<dyn CanSleep>>,
    /// The bytes of contents.
    pub(super) bytes: u64,
}

impl Slept {
    const fn add(&mut self, given: GivenUp) {
        self.given += given.bytes;
        self.quarantined += given.refused;
    }

    /// Adds the outcome for other blocks.
    pub(super) const fn add_all(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.heaps += other.heaps;
        self.caches += other.caches;
        self.given += other.given;
        self.quarantined += other.quarantined;
        self.kept += other.kept;
        self.awake += other.awake;
    }
}

impl fmt::Debug for PreparedSleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedSleep")
            .field("tenant", &self.tenant)
            .field("blocks", &self.to_sleep.len())
            .finish_non_exhaustive()
    }
}

/// Blocks, heaps and paged caches ready to be awake: they have memory, with their contents. Made by
/// [`Blocks::prepare_wake`].
///
/// No operation but dropping them takes the blocks until this value is gone. Dropping it takes the
/// memory away again, and the blocks sleep with the contents that were kept.
#[must_use = "dropping it leaves the blocks asleep"]
pub struct PreparedWake {
    to_wake: Vec<Waker>,
}

impl PreparedWake {
    pub(super) const fn new(to_wake: Vec<Waker>) -> Self {
        Self { to_wake }
    }

    /// Ends the sleep of the blocks. Contents that were kept are removed from the store.
    pub fn finish(self) -> Woken {
        let mut woken = Woken::default();
        for one in self.to_wake {
            match one.owner().map(|owner| owner.is_heap()) {
                None => woken.blocks += 1,
                Some(true) => woken.heaps += 1,
                Some(false) => woken.caches += 1,
            }
            woken.mapped += one.used();
            woken.restored += one.kept();
            one.wake();
        }
        woken
    }
}

impl fmt::Debug for PreparedWake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedWake")
            .field("blocks", &self.to_wake.len())
            .finish()
    }
}

impl Woken {
    /// Adds the outcome for other blocks.
    pub(super) const fn add_all(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.heaps += other.heaps;
        self.caches += other.caches;
        self.mapped += other.mapped;
        self.restored += other.restored;
    }
}

/// Returns to every block the memory that was taken out.
pub(super) fn undo(to_sleep: Vec<Sleeper>, cause: SleepError) -> SleepError {
    let (mut stayed, mut lost) = (0, 0);
    for one in to_sleep {
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
