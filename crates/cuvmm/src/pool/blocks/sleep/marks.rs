//! Ranges of blocks that are marked: a sleep that keeps only marked contents keeps theirs.
//!
//! The marks are a block's own. They end with it, and stay when it sleeps and wakes.
//!
//! No driver call is made here.

use std::ops::Range;

use super::ToSleep;
use crate::error::{ArgumentError, MemoryError};
use crate::pool::blocks::Block;
use crate::pool::blocks::slots::Slot;
use crate::store::Ranges;

impl Block {
    /// Marks ranges of bytes, whose contents a sleep with
    /// [`Contents::KeepMarked`](crate::Contents::KeepMarked) keeps, in place of those that were
    /// marked before. Without ranges no byte is marked, as in a new block. Ranges may overlap, and
    /// empty ones have no effect.
    ///
    /// A block with marked bytes does not sleep with
    /// [`Contents::Discard`](crate::Contents::Discard). The marks end with the block. A
    /// [fork](Self::fork) has none at first.
    ///
    /// ```
    /// # use cuvmm::driver::host::{HostDriver, HostOptions};
    /// # use cuvmm::{Contents, Device, HostStore, Pool};
    /// # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
    /// # let device = Device::open(driver, 0)?;
    /// # let tenant = Pool::builder(&device).build()?.tenant("model").register()?;
    /// let store = HostStore::builder(&device).limit(64 << 20).build()?;
    /// let layer = tenant.allocate(64 << 20)?; // loaded again after waking, except a table
    /// layer.write(4096, b"table")?;
    /// layer.set_kept([4096..8192])?;
    ///
    /// let slept = tenant.blocks().sleep(Contents::KeepMarked(&store))?;
    /// assert_eq!((slept.given, slept.kept), (64 << 20, 4096));
    /// tenant.blocks().wake()?;
    /// let mut bytes = [0; 5];
    /// layer.read(4096, &mut bytes)?;
    /// assert_eq!(&bytes, b"table");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] when a range exceeds the block, when the block sleeps or is moving, when the
    /// context is lost, and in a forked child. The marks are as before.
    pub fn set_kept(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<(), MemoryError> {
        let (core, id, size) = (self.core(), self.place().slot, self.size());
        let ranges = Ranges::of(ranges);
        if let Some(range) = ranges.as_slice().last().filter(|range| range.end > size) {
            let bytes = range.end - range.start;
            return Err(ArgumentError::bytes(range.start, bytes, size).into());
        }
        core.device.usable()?;
        let mut state = core.lock_with(id);
        let Some(slot) = state.blocks.slots.get_mut(id) else {
            return Ok(());
        };
        slot.check_awake()?;
        if let Some(block) = &mut slot.block {
            block.kept = ranges;
        }
        // The next block at this place has no marks.
        self.goes_in_no_cache();
        Ok(())
    }

    /// Returns the marked ranges, in order and joined where they touch. A range that a shrink has cut
    /// off is left out, and is marked again when the block grows over it. Empty in a forked child.
    #[must_use]
    pub fn kept(&self) -> Vec<Range<u64>> {
        let (core, id) = (self.core(), self.place().slot);
        if core.device.forked().is_some() {
            return Vec::new();
        }
        let state = core.lock_with(id);
        let slot = state.blocks.slots.get(id);
        slot.map_or_else(Vec::new, |slot| slot.marked().as_slice().to_vec())
    }
}

impl Slot {
    fn marked(&self) -> Ranges {
        let block = self.block.as_ref();
        block.map_or_else(Ranges::default, |block| block.kept.before(block.requested))
    }
}

impl ToSleep {
    /// Returns the marked ranges of the block.
    pub(crate) fn marked(&self) -> Ranges {
        let Some(moving) = &self.moving else {
            return Ranges::default();
        };
        let state = moving.lock();
        let slot = state.blocks.slots.get(moving.place().slot);
        slot.map(Slot::marked).unwrap_or_default()
    }
}
