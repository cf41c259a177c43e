//! Memory of another process, mapped at addresses of this process.
//!
//! The whole description is checked before any handle is imported, and the driver's reports about
//! the handles before any is mapped. The caller does not see the mapped range before it is
//! complete. The driver checks sizes when it maps: a handle fits its extent exactly, or mapping
//! fails.

use std::fmt;
use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::{DeviceAddress, Exported, HandleTypes};

use super::arriving::Arriving;
use super::parcel::Parcel;
use super::wire::{Description, Origin, SharedExtent, is_within};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError, ShareError};
use crate::extents::{Extent, PlaceError, Space, Unmapped};
use crate::ledger::{Ledger, NamedExport};
use crate::own::{Access, AccessGrant, CloseError, Physical, Place, Stream};
use crate::size::range_within;
use crate::users::Users;
use crate::view::{View, ViewMut};

/// The name of the counted items in errors.
const HANDLES: &str = "handles, one for each extent";

/// Settings for attaching memory of another process.
#[derive(Clone, Debug)]
pub struct AttachmentBuilder<'a> {
    home: &'a Device,
    others: Vec<&'a Device>,
    stream: Option<&'a Stream>,
    access: Access,
    ledger: Option<&'a Ledger>,
}

impl<'a> AttachmentBuilder<'a> {
    /// Adds another device of this process. The memory may be on it, and it gets access too.
    #[must_use]
    pub fn also(mut self, device: &'a Device) -> Self {
        self.others.push(device);
        self
    }

    /// Sets the stream that views of the memory name as their home stream. The default is the
    /// device's legacy default stream.
    #[must_use]
    pub const fn home_stream(mut self, stream: &'a Stream) -> Self {
        self.stream = Some(stream);
        self
    }

    /// Requests write access. Attaching then fails if the giver allows only reading.
    #[must_use]
    pub const fn read_write(mut self) -> Self {
        self.access = Access::ReadWrite;
        self
    }

    /// Names the ledger that this process has joined. If the giver's pool is in the same ledger,
    /// the memory stays charged to the giver until the attachment is dropped, even if the giver
    /// frees the memory or ends. Without this the memory then counts as [foreign](crate::ledger).
    #[must_use]
    pub const fn ledger(mut self, ledger: &'a Ledger) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Attaches memory whose description and handles came over a transport of the caller.
    ///
    /// For each extent, this calls `cuMemImportFromShareableHandle`,
    /// `cuMemGetAllocationPropertiesFromHandle`, `cuMemMap` and `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`ShareError`]; nothing stays imported or mapped.
    pub fn open(&self, parcel: &Parcel) -> Result<Attachment, ShareError> {
        let mut arriving = self.agree(&parcel.description)?;
        arriving.import_all(&parcel.handles)?;
        arriving.finish()
    }

    pub(super) fn agree(&self, description: &Description) -> Result<PendingAttachment, ShareError> {
        if self.access > description.access() {
            return Err(MemoryError::ReadOnly(0..description.size()).into());
        }
        for other in &self.others {
            other.check_driver(self.home)?;
        }
        let stream = self.stream.cloned();
        let stream = stream.unwrap_or_else(|| Stream::legacy(self.home));
        stream.check_on(self.home)?;
        let granule = self.home.granule();
        let fits = |bytes: u64| granule.divides(bytes);
        let extents = description.extents();
        if !extents
            .iter()
            .all(|extent| fits(extent.offset) && fits(extent.size))
        {
            return Err(ArgumentError::Misaligned {
                what: "bytes of an extent",
                value: description.granularity(),
                multiple: granule.bytes(),
            }
            .into());
        }
        let places = extents.iter().map(|extent| self.place(extent.origin));
        let places = places.collect::<Result<_, _>>()?;
        Ok(PendingAttachment {
            description: description.clone(),
            access: self.access,
            home: self.home.clone(),
            stream,
            others: self.others.iter().map(|&other| other.clone()).collect(),
            places,
            physicals: vec![],
            named: self.name(description)?,
        })
    }

    /// Names the memory in its ledger, if this process has joined that ledger.
    fn name(&self, description: &Description) -> Result<Option<NamedExport>, ShareError> {
        let (Some(ledger), Some((number, block))) = (self.ledger, description.counted) else {
            return Ok(None);
        };
        let member = ledger.member();
        if member.ledger_number() != number {
            return Ok(None);
        }
        match member.name(block) {
            Some(named) => Ok(Some(named)),
            None => Err(ShareError::GivenBack),
        }
    }

    fn place(&self, origin: Origin) -> Result<Place, ShareError> {
        match origin {
            Origin::HostNuma(node) => Ok(Place::HostNuma(node)),
            Origin::Device(uuid) => std::iter::once(&self.home)
                .chain(&self.others)
                .find(|device| device.uuid() == uuid)
                .map(|&device| Place::from(device))
                .ok_or(ShareError::NoSuchDevice(uuid)),
        }
    }
}

/// Memory whose description was accepted and whose handles are being received.
#[derive(Debug)]
pub(super) struct PendingAttachment {
    description: Description,
    access: Access,
    home: Device,
    stream: Stream,
    others: Vec<Device>,
    places: Vec<Place>,
    /// The imported physicals of the first extents, in order.
    physicals: Vec<Unmapped>,
    /// Dropped after the physicals.
    named: Option<NamedExport>,
}

impl PendingAttachment {
    fn arrived(&self) -> usize {
        self.physicals.len()
    }

    /// Imports the next handles, which the caller may close afterwards.
    fn import_all(&mut self, handles: &[Exported]) -> Result<(), ShareError> {
        let all = self.arrived() + handles.len();
        ArgumentError::at_most(HANDLES, all as u64, self.places.len() as u64)?;
        let wanted = self.description.extents().iter().zip(&self.places);
        for ((extent, place), handle) in wanted.skip(self.arrived()).zip(handles) {
            let unmapped = self.import(extent, place, handle)?;
            self.physicals.push(unmapped);
        }
        Ok(())
    }

    fn import(
        &self,
        extent: &SharedExtent,
        place: &Place,
        handle: &Exported,
    ) -> Result<Unmapped, ShareError> {
        let handle_type = match handle {
            Exported::Fabric(_) => HandleTypes::FABRIC,
            _ => HandleTypes::POSIX_FD,
        };
        let wanted = self.description.handle_type();
        if handle_type != wanted {
            return Err(MemoryError::NotShareable {
                what: "the memory",
                handle_type,
                shareable: wanted,
            }
            .into());
        }
        let offset = extent.offset;
        let imported = Physical::import(place.through(&self.home), handle, extent.size);
        let physical = imported.map_err(|error| match error {
            MemoryError::Elsewhere { found, wanted, .. } => MemoryError::Elsewhere {
                offset,
                found,
                wanted,
            },
            MemoryError::Call(cause) => MemoryError::range(offset, extent.size, cause),
            error => error,
        })?;
        if physical.location() != place.location() {
            let (found, wanted) = (physical.location(), place.location());
            return Err(MemoryError::Elsewhere {
                offset,
                found,
                wanted,
            }
            .into());
        }
        Ok(Unmapped::fresh(physical))
    }
}

impl Arriving for PendingAttachment {
    type Whole = Attachment;

    fn add(&mut self, handles: Vec<Exported>) -> Result<(), ShareError> {
        self.import_all(&handles)
    }

    fn is_complete(&self) -> bool {
        self.physicals.len() == self.places.len()
    }

    /// Maps all imported memory, or nothing.
    fn finish(self) -> Result<Attachment, ShareError> {
        let (came, wanted) = (self.arrived() as u64, self.places.len() as u64);
        ArgumentError::at_least(HANDLES, came, wanted)?;
        let guests = self
            .others
            .iter()
            .map(|other| AccessGrant::new(other, self.access));
        let mut space = Space::reserve(&self.home, self.description.size())?.open_to(guests);
        for (extent, unmapped) in self.description.extents().iter().zip(self.physicals) {
            let placed = space.place_for(extent.offset, vec![unmapped], self.access);
            if let Err(PlaceError { error, .. }) = placed {
                // The caller knows no address of this space, so no work can use it.
                if let Err(error) = space.never_used(0).retry_all() {
                    log!(error, %error, "memory that could not be attached stays mapped");
                }
                return Err(error.into());
            }
        }
        Ok(Attachment {
            space,
            runs: self.description.runs(),
            access: self.access,
            users: Users::at(&self.stream),
            description: self.description,
            named: self.named,
        })
    }

    fn discard(whole: Attachment) {
        whole.discard();
    }
}

/// Memory of another process, mapped in this one without a copy: writes of the other process are
/// visible here.
///
/// The memory stays valid in each of the two processes when the other one ends. The drop of an
/// attachment waits for the devices that have access, and unmaps the memory.
///
/// Every process that holds the memory can write to it at any time, whatever access was granted.
/// Bytes are therefore read and written by copies only, and a kernel that reads while another
/// process writes may see a mix of old and new bytes. A [publication](super::Publication) is no
/// longer written to.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let stream = cuvmm::Stream::new(&device)?;
/// # let shareable = cuvmm::driver::HandleTypes::POSIX_FD;
/// # let mut region = cuvmm::Region::builder(&device, 4 << 20).shareable(shareable).reserve()?;
/// # region.commit(0..region.size())?;
/// # region.write(&stream, 0, b"weights")?;
/// # let parcel = cuvmm::Offer::region(&region, 0..region.size())?.parcel()?;
/// use cuvmm::Attachment;
///
/// // `parcel` came from another process.
/// let attached = Attachment::builder(&device).home_stream(&stream).open(&parcel)?;
/// let mut bytes = [0; 7];
/// attached.read(&stream, 0, &mut bytes)?;
/// assert_eq!(&bytes, b"weights");
/// assert!(attached.write(&stream, 0, b"x").is_err()); // it was given for reading
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Attachment {
    space: Space,
    runs: Vec<Range<u64>>,
    access: Access,
    users: Users,
    description: Description,
    /// Dropped after the memory was unmapped and released.
    named: Option<NamedExport>,
}

impl Attachment {
    /// Returns a builder that attaches memory for a device of this process, read-only by default.
    #[must_use]
    pub const fn builder(device: &Device) -> AttachmentBuilder<'_> {
        AttachmentBuilder {
            home: device,
            others: Vec::new(),
            stream: None,
            access: Access::Read,
            ledger: None,
        }
    }

    /// Returns the first address in this process. The giver uses another address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.space.address()
    }

    /// Returns the size of the range in bytes, including parts without memory.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.space.size()
    }

    /// Returns the bytes of memory in the range, which the device holds once for all processes.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.space.bytes()
    }

    /// Returns the device that the memory was attached for.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.space.device()
    }

    /// Returns the access that devices have to the memory in this process.
    #[doc(alias = "right")]
    #[must_use]
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Returns the description that the giver sent.
    #[must_use]
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Returns all extents in order. Libraries such as NCCL register memory by the extent.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.space.extents().collect()
    }

    /// Returns the ranges that have memory, in order.
    #[must_use]
    pub fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }

    /// Copies bytes to the host, after the work queued on `stream`.
    ///
    /// # Errors
    /// [`MemoryError`] if part of the range has no memory, or the stream belongs to another device.
    pub fn read(&self, stream: &Stream, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.read(stream, offset, bytes)
    }

    /// Writes bytes after the work queued on `stream`, and returns when they are written.
    ///
    /// # Errors
    /// [`MemoryError`] if the memory is read-only, part of the range has no memory, or the stream
    /// belongs to another device.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        if self.access != Access::ReadWrite {
            return Err(MemoryError::ReadOnly(0..self.size()));
        }
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.write(stream, offset, bytes)
    }

    /// Returns a view of all elements, if a vector was given.
    ///
    /// # Errors
    /// [`ShareError`] if something else was given, or its elements have another size.
    pub fn view<T: Pod>(&self) -> Result<View<'_, T>, ShareError> {
        let given = self.description.elements();
        match given {
            Some((count, size)) if size as usize == size_of::<T>() => {
                let len = usize::try_from(count).unwrap_or(usize::MAX);
                Ok(View::new(self.address(), len, &self.users))
            }
            _ => Err(ShareError::ElementSize {
                wanted: size_of::<T>(),
                given: given.map(|(_, size)| size),
            }),
        }
    }

    /// Returns a view of a range of bytes as elements, for a kernel to read.
    ///
    /// # Errors
    /// [`ShareError`] if part of the range has no memory, or it does not consist of whole elements.
    pub fn view_of<T: Pod>(&self, range: Range<u64>) -> Result<View<'_, T>, ShareError> {
        let (offset, size) = (range.start, range.end.saturating_sub(range.start));
        if !self.is_there(offset, size) {
            return Err(MemoryError::NotCommitted(range.clone()).into());
        }
        let address = self
            .address()
            .checked_add(offset)
            .unwrap_or(DeviceAddress::NULL);
        let len = ArgumentError::elements_at::<T>(address.0, size)?;
        Ok(View::new(address, len, &self.users))
    }

    /// Returns a mutable view of a range of bytes as elements, for a kernel to write. Other
    /// processes see the writes.
    ///
    /// # Errors
    /// [`ShareError`] if the memory is read-only, part of the range has no memory, or it does not
    /// consist of whole elements.
    pub fn view_mut_of<T: Pod>(&mut self, range: Range<u64>) -> Result<ViewMut<'_, T>, ShareError> {
        if self.access != Access::ReadWrite {
            return Err(MemoryError::ReadOnly(range.clone()).into());
        }
        let (address, len) = {
            let view = self.view_of::<T>(range)?;
            (view.address(), view.len())
        };
        Ok(ViewMut::new(address, len, &self.users))
    }

    /// Waits for the devices that have access, and unmaps everything. On failure returns the
    /// attachment with the extents that could not be unmapped.
    ///
    /// # Errors
    /// [`CloseError`] with the attachment in it.
    #[doc(alias = "close_imported_handle")]
    #[expect(
        clippy::result_large_err,
        reason = "the attachment itself is handed back"
    )]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let emptied = self.empty();
        CloseError::of(self, emptied)
    }

    fn empty(&mut self) -> Result<(), CallError> {
        self.device().own_process()?;
        let offsets: Vec<u64> = self.space.extents().map(|extent| extent.offset).collect();
        if !offsets.is_empty() {
            let mut drained = self.space.drained()?;
            for offset in offsets {
                drained.withdraw_back(offset)?;
            }
        }
        self.runs.clear();
        Ok(())
    }

    /// Unmaps everything at once. No work can use the memory, because the caller has passed its
    /// address on to nothing.
    fn discard(mut self) {
        if let Err(error) = self.space.never_used(0).retry_all() {
            log!(error, %error, "memory that was refused stays mapped");
        }
    }

    fn is_there(&self, offset: u64, size: u64) -> bool {
        if size == 0 {
            return offset <= self.size();
        }
        is_within(&self.runs, offset, size)
    }

    fn check_copy(&self, offset: u64, size: u64) -> Result<(), MemoryError> {
        if self.is_there(offset, size) {
            return Ok(());
        }
        match range_within(offset, size, self.size()) {
            None => Err(ArgumentError::bytes(offset, size, self.size()).into()),
            Some(range) => Err(MemoryError::NotCommitted(range.clone())),
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let held = self.held();
        if let Err(error) = self.empty() {
            // The memory stays with the process, so it stays named.
            std::mem::forget(self.named.take());
            self.device().report_drop("attachment", held, error);
        }
    }
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachment")
            .field("address", &self.address())
            .field("size", &self.size())
            .field("held", &self.held())
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}
