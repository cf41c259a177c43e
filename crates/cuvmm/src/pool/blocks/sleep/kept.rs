//! Reading the kept contents of a sleeping block, without waking it.
//!
//! The contents are taken out of the slot for the time of the copy, so that no byte is copied under
//! the pool's lock. Meanwhile the block counts as moving: no other operation uses its host memory
//! for other contents.
//!
//! No driver call is made here.
//!
//! Keeps I-96.

use super::moving::TransitioningBlock;
use crate::error::{ArgumentError, SleepError};
use crate::pool::blocks::Block;
use crate::pool::blocks::slots::SleepState;
use crate::store::Saved;

/// The kept contents of a sleeping block, until it is dropped. The block then has them again.
struct Kept {
    moving: TransitioningBlock,
    saved: Option<Box<Saved>>,
}

impl Block {
    /// Reads bytes at `offset` of the contents that were [kept](crate::Contents::Keep) when the block
    /// fell asleep, all or those that were [marked](crate::Contents::KeepMarked). The block stays
    /// asleep, and no driver call is made.
    ///
    /// While the bytes are copied, sleeping, waking and other reads of the block on other threads
    /// fail with [`SleepError::Busy`]. A sleep just after it may find the block leased, unless it
    /// [waits](crate::sleep::Blocks::timeout).
    ///
    /// ```
    /// # use cuvmm::driver::host::{HostDriver, HostOptions};
    /// # use cuvmm::{Contents, Device, HostStore, Pool};
    /// # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
    /// # let device = Device::open(driver, 0)?;
    /// # let tenant = Pool::builder(&device).build()?.tenant("model").register()?;
    /// let store = HostStore::builder(&device).pinned(2 << 20).build()?;
    /// let weights = tenant.allocate(2 << 20)?;
    /// weights.write(1000, b"bias")?;
    /// tenant.blocks().sleep(Contents::Keep(&store))?;
    ///
    /// let mut bytes = [0; 4];
    /// weights.read_kept(1000, &mut bytes)?;
    /// assert_eq!(&bytes, b"bias");
    /// assert!(weights.is_asleep());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`SleepError::Argument`] when the range exceeds the block, [`SleepError::Awake`] when the block
    /// does not sleep, [`SleepError::NotKept`] when some of the bytes were discarded,
    /// [`SleepError::Busy`] when another thread moves or reads it, and [`SleepError::Memory`] when the
    /// context is lost, and in a forked child.
    pub fn read_kept(&self, offset: u64, bytes: &mut [u8]) -> Result<(), SleepError> {
        let (size, asked) = (self.size(), bytes.len() as u64);
        let end = offset.checked_add(asked).filter(|&end| end <= size);
        end.ok_or(ArgumentError::bytes(offset, asked, size))?;
        self.core().device.usable()?;
        let kept = self.take_kept()?;
        let saved = kept.saved.as_deref();
        match saved.is_some_and(|saved| saved.read(offset, bytes)) {
            true => Ok(()),
            false => Err(SleepError::NotKept { bytes: size }),
        }
    }

    fn take_kept(&self) -> Result<Kept, SleepError> {
        let (core, id, bytes) = (self.core(), self.place().slot, self.size());
        let mut state = core.lock_with(id);
        let slot = state.blocks.slots.get_mut(id);
        let saved = match slot.map(|slot| &mut slot.sleep_state) {
            Some(SleepState::Asleep { saved }) => saved.take(),
            Some(SleepState::Moving { .. }) => return Err(SleepError::Busy { blocks: 1, bytes }),
            Some(SleepState::Awake) | None => return Err(SleepError::Awake { bytes }),
        };
        let saved = saved.ok_or(SleepError::NotKept { bytes })?;
        let chosen = state.blocks.mark(id, SleepState::moving(0));
        drop(state);
        let chosen = chosen.ok_or(SleepError::Awake { bytes })?;
        let moving = TransitioningBlock::of(core, chosen);
        Ok(Kept {
            moving,
            saved: Some(saved),
        })
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let mut state = self.moving.lock();
        let saved = self.saved.take();
        let place = self.moving.place().slot;
        state.blocks.with_slot(place, |slot| slot.set_asleep(saved));
        drop(state);
        self.moving.lease.core().announce();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::extents::rig::{G, rig};
    use crate::pool::{Limit, Pool};
    use crate::{Contents, HostStore};

    // I-96
    #[test]
    fn contents_that_are_read_are_taken_by_no_other_operation() {
        let rig = rig();
        let builder = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = builder.build().unwrap();
        let (me, other) = (pool.tenant("me"), pool.tenant("other"));
        let (me, other) = (me.register().unwrap(), other.register().unwrap());
        let store = HostStore::builder(&rig.device).pinned(G).build().unwrap();
        let block = me.allocate(G).unwrap();
        let awake = other.allocate(G).unwrap();
        block.read_kept(0, &mut []).unwrap_err();
        me.blocks().sleep(Contents::Keep(&store)).unwrap();

        let kept = block.take_kept().unwrap();
        let busy = |outcome: Result<(), SleepError>| match outcome {
            Err(SleepError::Busy {
                blocks: 1,
                bytes: G,
            }) => {}
            outcome => panic!("{outcome:?}"),
        };
        busy(me.blocks().wake().map(drop));
        busy(me.blocks().sleep(Contents::Discard).map(drop));
        busy(block.read_kept(0, &mut [0]));
        assert!(block.is_asleep());
        // Its host memory has no room for the contents of another block.
        let full = other.blocks().sleep(Contents::Keep(&store)).unwrap_err();
        assert!(
            matches!(full, SleepError::StoreFull { free: 0, .. }),
            "{full}"
        );
        assert_eq!((pool.stats().committed, store.free()), (G, 0));

        drop(kept);
        assert!(block.is_asleep() && !awake.is_asleep());
        block.read_kept(G - 1, &mut [0]).unwrap();
        assert_eq!(me.blocks().wake().unwrap().restored, G);
        assert_eq!(store.free(), G);
    }
}
