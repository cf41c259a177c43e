//! Registrations: they keep the memory of a region's range or a pool's block unchanged while
//! another library has it registered.
//!
//! Nothing is registered here; that is up to the holder of the [`Registration`].

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cuvmm_driver::DeviceAddress;

use super::space::Extent;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::own::{CloseError, CloseRefusal, ExportMark, Stream};

pub(crate) trait RegistrationOwner: Send + Sync {
    fn close(&self) -> Result<(), CallError>;

    fn record_use(&self, stream: &Stream) -> Result<(), CallError>;

    /// Checks that the memory of a range may be exported. From then on, while the owner lives, the
    /// range counts as exported.
    fn may_export(&self, range: &Range<u64>) -> Result<(), MemoryError>;

    /// Notes that the memory of a range was exported.
    fn exported(&self, range: &Range<u64>);
}

/// A guarantee that extents stay in place, so that they can be registered with another library:
/// while it lives, each is mapped at its address, shows the same memory, and no device loses access
/// to it.
///
/// It is created by [`Region::register`](crate::Region::register),
/// [`Block::register`](crate::Block::register) or a container's `register`, and may outlive the
/// owner. Clones are handles to one registration, which ends with the last clone. End it after the
/// memory has been deregistered with the other library.
///
/// The end calls the driver only if the registration is the last owner of the memory of a dropped
/// region: that memory is then unmapped behind all work of the devices that had access.
#[derive(Clone)]
#[doc(alias = "pin")]
pub struct Registration {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    extents: Vec<Extent>,
    marks: Vec<ExportMark>,
    keeper: Arc<dyn RegistrationOwner>,
}

impl Registration {
    pub(crate) fn new(
        device: Device,
        extents: Vec<(Extent, ExportMark)>,
        keeper: Arc<dyn RegistrationOwner>,
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

    /// Returns the device that the memory was reserved on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns every extent, whole, in order and adjacent. Register each by itself where only one
    /// mapping can be registered at a time.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.shared.extents
    }

    /// Returns the registered range of the region or block in bytes, from the start of the first
    /// extent to the end of the last.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        let extents = self.extents();
        let start = extents.first().map_or(0, |extent| extent.offset);
        start..extents.last().map_or(start, Extent::end)
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        let range = self.range();
        range.end - range.start
    }

    /// Returns the address of the first extent.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        let first = self.extents().first();
        first.map_or(DeviceAddress(0), |extent| extent.address)
    }

    /// Returns `true` if some of the memory was ever exported, by a
    /// [`DmaBuf`](crate::region::DmaBuf) or a handle. That memory is never reused: it is released
    /// in the end.
    #[must_use]
    pub fn is_exported(&self) -> bool {
        self.shared.marks.iter().any(ExportMark::is_set)
    }

    /// Notes that work of a stream uses the memory. The block, region or container waits for that
    /// stream's work too before it gives memory up, even after the registration has ended.
    ///
    /// A region keeps at most 64 recorded streams that have other owners. With more, it waits for
    /// all work of their devices.
    ///
    /// # Errors
    /// [`CallError::WrongDriver`] when the stream belongs to another driver, and [`CallError`] in a
    /// forked child.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.shared.keeper.record_use(stream)
    }

    /// Ends the registration, or returns it with the reason. Makes `cuCtxSynchronize` and
    /// `cuMemUnmap` if it is the last owner of the memory of a dropped region.
    ///
    /// # Errors
    /// [`CloseError`] with the registration in it while a clone or a
    /// [`DmaBuf`](crate::region::DmaBuf) lives, or when the driver refuses.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let closed = match Arc::strong_count(&self.shared) {
            1 => self.shared.keeper.close().map_err(CloseRefusal::Call),
            _ => Err(CloseRefusal::InUse),
        };
        CloseError::of(self, closed)
    }

    pub(crate) fn extents_in(&self, range: &Range<u64>) -> impl Iterator<Item = &Extent> {
        self.extents()
            .iter()
            .filter(|extent| extent.offset < range.end && range.start < extent.end())
    }

    pub(crate) fn may_export(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        self.shared.keeper.may_export(range)
    }

    /// Marks the extents that overlap a range as exported, permanently.
    pub(crate) fn mark_exported(&self, range: &Range<u64>) {
        let marked = self.extents().iter().zip(&self.shared.marks);
        marked
            .filter(|(extent, _)| extent.offset < range.end && range.start < extent.end())
            .for_each(|(_, mark)| mark.set());
        self.shared.keeper.exported(range);
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
