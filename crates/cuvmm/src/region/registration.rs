//! Proof that memory stays as it is for whoever has registered it: the same for a region's range and
//! a pool's block.
//!
//! Nothing is registered here: with whom, and how, is up to the holder.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cuvmm_driver::DeviceAddress;

use super::space::Extent;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::own::{CloseError, CloseRefusal, ExportMark, Stream};

/// Whoever keeps the memory of a registration where it is, until dropped.
pub(crate) trait Keeper: Send + Sync {
    /// Lets go of it and says what could not be given back.
    fn close(&self) -> Result<(), CallError>;

    /// Notes that a stream uses the memory.
    fn record_use(&self, stream: &Stream) -> Result<(), CallError>;

    /// Whether others may be given the memory of a range for good. From then on, as long as this
    /// lives, it is as good as exported.
    fn may_export(&self, range: &Range<u64>) -> Result<(), MemoryError>;

    /// Notes that some of the memory has been marked as exported.
    fn exported(&self);
}

/// Extents that others may have registered: while it lives, each is mapped where it was, shows the
/// same memory, and nobody who had access to it has lost any.
///
/// It comes from [`Region::register`](crate::Region::register),
/// [`Block::register`](crate::Block::register) or a container's `register`, and outlives all of
/// them. Clones are the same registration, which ends with the last. End it after what was registered has been
/// deregistered there.
///
/// Ending it calls the driver only where it is the last to keep memory of a region that has gone:
/// that is unmapped then, behind all work of the devices that had access.
#[derive(Clone)]
pub struct Registration {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    extents: Vec<Extent>,
    /// What others are given of an extent marks it.
    marks: Vec<ExportMark>,
    keeper: Arc<dyn Keeper>,
}

impl Registration {
    pub(crate) fn new(
        device: Device,
        extents: Vec<(Extent, ExportMark)>,
        keeper: Arc<dyn Keeper>,
    ) -> Self {
        let (extents, marks) = extents.into_iter().unzip();
        Self {
            shared: Arc::new(Shared {
                device,
                extents,
                marks,
                keeper,
            }),
        }
    }

    /// The device that the memory was reserved on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Every extent, whole and in order, side by side: what to register where only one mapping can
    /// be registered at a time.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.shared.extents
    }

    /// What of the region or block is registered, in bytes: from where the first extent begins to
    /// where the last one ends.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        let extents = self.extents();
        let start = extents.first().map_or(0, |extent| extent.offset);
        start..extents.last().map_or(start, Extent::end)
    }

    /// Its size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        let range = self.range();
        range.end - range.start
    }

    /// The first extent's address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        let first = self.extents().first();
        first.map_or(DeviceAddress(0), |extent| extent.address)
    }

    /// Whether others were ever given some of its memory, by a [`DmaBuf`](super::DmaBuf) or a handle:
    /// that memory is released in the end, and not handed to anybody else before.
    #[must_use]
    pub fn is_exported(&self) -> bool {
        self.shared.marks.iter().any(ExportMark::is_set)
    }

    /// Notes that a stream uses the memory, for a block that is freed before that work has passed.
    /// For a region it need not be said: its owner names streams when memory is withdrawn.
    ///
    /// # Errors
    /// [`CallError::WrongDriver`] when the stream is another driver's.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.shared.keeper.record_use(stream)
    }

    /// Ends it, or hands it back and says why not. (`cuCtxSynchronize` and `cuMemUnmap` where the
    /// region has gone and nobody else keeps its memory.)
    ///
    /// # Errors
    /// [`CloseError`] with the registration in it while a clone or a [`DmaBuf`](super::DmaBuf)
    /// lives, or when the driver refuses.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let reason = match Arc::strong_count(&self.shared) {
            1 => match self.shared.keeper.close() {
                Ok(()) => return Ok(()),
                Err(cause) => CloseRefusal::Call(cause),
            },
            _ => CloseRefusal::InUse,
        };
        Err(CloseError {
            owner: self,
            reason,
        })
    }

    /// The extents that meet a range.
    pub(super) fn extents_in(&self, range: &Range<u64>) -> impl Iterator<Item = &Extent> {
        self.extents()
            .iter()
            .filter(|extent| extent.offset < range.end && range.start < extent.end())
    }

    /// Whether others may be given the memory of a range for good.
    pub(super) fn may_export(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        self.shared.keeper.may_export(range)
    }

    /// Notes that others may have the memory of the extents that meet a range from now on, for good.
    pub(super) fn mark_exported(&self, range: &Range<u64>) {
        let marked = self.extents().iter().zip(&self.shared.marks);
        marked
            .filter(|(extent, _)| extent.offset < range.end && range.start < extent.end())
            .for_each(|(_, mark)| mark.set());
        self.shared.keeper.exported();
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("address", &self.address())
            .field("range", &self.range())
            .field("extents", &self.extents().len())
            .finish_non_exhaustive()
    }
}
