//! Memory of another process under addresses of our own.
//!
//! Everything that its description says is checked before a handle is imported, everything that the
//! driver says of the handles before one is mapped; and what is mapped is seen by nobody before all of
//! it is. Sizes the driver checks as it maps: a handle fits its extent exactly or not at all.

use std::fmt;
use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::{DeviceAddress, Exported, HandleTypes};

use super::parcel::Parcel;
use super::wire::{Description, Origin, is_within};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError, ShareError};
use crate::own::{Access, AccessGrant, CloseError, CloseRefusal, Physical, Place, Stream};
use crate::region::{Extent, PlaceError, Space, Unmapped};
use crate::size::range_within;
use crate::users::Users;
use crate::view::{View, ViewMut};

/// What is counted of what came.
const HANDLES: &str = "handles, one for each extent";

/// How memory of another process is to be attached.
#[derive(Clone, Debug)]
pub struct AttachmentBuilder<'a> {
    home: &'a Device,
    others: Vec<&'a Device>,
    stream: Option<&'a Stream>,
    access: Access,
}

impl<'a> AttachmentBuilder<'a> {
    /// Names another device of this process: memory may lie on it, and it has access too.
    #[must_use]
    pub fn also(mut self, device: &'a Device) -> Self {
        self.others.push(device);
        self
    }

    /// The stream that views of it name as the one it is used on; by default the device's legacy
    /// default stream.
    #[must_use]
    pub const fn home_stream(mut self, stream: &'a Stream) -> Self {
        self.stream = Some(stream);
        self
    }

    /// Wants to write as well, which is an error where the giver lets others only read.
    #[must_use]
    pub const fn read_write(mut self) -> Self {
        self.access = Access::ReadWrite;
        self
    }

    /// Attaches what came over a transport of the caller's own.
    ///
    /// Per extent: `cuMemImportFromShareableHandle`, `cuMemGetAllocationPropertiesFromHandle`,
    /// `cuMemMap`, `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`ShareError`]; nothing of it is held then.
    pub fn open(&self, parcel: &Parcel) -> Result<Attachment, ShareError> {
        let mut arriving = self.agree(&parcel.description)?;
        arriving.add(&parcel.handles)?;
        arriving.map()
    }

    /// Looks at a description before any handle of it is asked for.
    pub(super) fn agree(&self, description: &Description) -> Result<Arriving, ShareError> {
        if self.access > description.access() {
            return Err(MemoryError::read_only(&(0..description.size())).into());
        }
        if self
            .others
            .iter()
            .any(|other| !other.same_driver(self.home))
        {
            return Err(ArgumentError::OTHER_DRIVER.into());
        }
        let stream = self.stream.cloned();
        let stream = stream.unwrap_or_else(|| Stream::legacy(self.home));
        if !stream.device().is_same(self.home) {
            return Err(ArgumentError::STREAM.into());
        }
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
        Ok(Arriving {
            description: description.clone(),
            access: self.access,
            home: self.home.clone(),
            stream,
            others: self.others.iter().map(|&other| other.clone()).collect(),
            places: places.collect::<Result<_, _>>()?,
            physicals: vec![],
        })
    }

    fn place(&self, origin: Origin) -> Result<Place, ShareError> {
        match origin {
            Origin::HostNuma(node) => Ok(Place::HostNuma(node)),
            Origin::Device(uuid) => std::iter::once(&self.home)
                .chain(&self.others)
                .find(|device| device.uuid() == uuid)
                .map(|&device| Place::from(device))
                .ok_or(ShareError::NoSuchDevice { uuid }),
        }
    }
}

/// Memory of which the description was found good, and whose handles are coming.
#[derive(Debug)]
pub(super) struct Arriving {
    description: Description,
    access: Access,
    home: Device,
    stream: Stream,
    others: Vec<Device>,
    /// One for each extent.
    places: Vec<Place>,
    /// What has come, from the first extent on.
    physicals: Vec<Unmapped>,
}

impl Arriving {
    /// How many handles have come.
    pub(super) fn arrived(&self) -> usize {
        self.physicals.len()
    }

    /// Whether all have.
    pub(super) fn is_complete(&self) -> bool {
        self.physicals.len() == self.places.len()
    }

    /// Imports the next handles. They may be closed afterwards.
    pub(super) fn add(&mut self, handles: &[Exported]) -> Result<(), ShareError> {
        let all = self.arrived() + handles.len();
        ArgumentError::at_most(HANDLES, all as u64, self.places.len() as u64)?;
        for handle in handles {
            let unmapped = self.import(self.arrived(), handle)?;
            self.physicals.push(unmapped);
        }
        Ok(())
    }

    fn import(&self, index: usize, handle: &Exported) -> Result<Unmapped, ShareError> {
        let handle_type = match handle {
            Exported::Fabric(_) => HandleTypes::FABRIC,
            _ => HandleTypes::POSIX_FD,
        };
        let wanted = self.description.handle_type();
        if handle_type != wanted {
            let shareable = wanted;
            return Err(MemoryError::NotShareable {
                handle_type,
                shareable,
            }
            .into());
        }
        let (Some(extent), Some(place)) = (
            self.description.extents().get(index),
            self.places.get(index),
        ) else {
            return Err(ArgumentError::TooLarge {
                what: HANDLES,
                value: index as u64 + 1,
                most: self.places.len() as u64,
            }
            .into());
        };
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

    /// Maps all that came: whole, or not at all.
    pub(super) fn map(self) -> Result<Attachment, ShareError> {
        let (came, wanted) = (self.arrived() as u64, self.places.len() as u64);
        ArgumentError::at_least(HANDLES, came, wanted)?;
        let guests = self
            .others
            .iter()
            .map(|other| AccessGrant::device(other, self.access));
        let mut space = Space::reserve(&self.home, self.description.size())?.open_to(guests);
        for (extent, unmapped) in self.description.extents().iter().zip(self.physicals) {
            let placed = space.place_for(extent.offset, vec![unmapped], self.access);
            if let Err(PlaceError { error, .. }) = placed {
                // The addresses were shown to nothing that could use them.
                if let Err(error) = space.never_used(0).retry_all() {
                    tracing::error!(%error, "what could not be attached stays mapped");
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
        })
    }
}

/// Memory of another process, mapped here. Not a copy: what the other writes is seen here.
///
/// It lives on when the process that gave it has gone, and the other way round. It is unmapped when
/// this is dropped, after waiting for the devices that have access.
///
/// Whoever has it can write to it, whatever right was given, and at any time: so bytes come by
/// copies, and a kernel that reads while another process writes sees what it sees. A
/// [publication](super::Publication) is not written to any more.
pub struct Attachment {
    space: Space,
    /// Where there is memory.
    runs: Vec<Range<u64>>,
    access: Access,
    users: Users,
    description: Description,
}

impl Attachment {
    /// Sets out to attach memory for a device of this process. It will be read only.
    #[must_use]
    pub const fn builder(device: &Device) -> AttachmentBuilder<'_> {
        AttachmentBuilder {
            home: device,
            others: Vec::new(),
            stream: None,
            access: Access::Read,
        }
    }

    /// The first address here; the giver has another.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.space.address()
    }

    /// The size of the range in bytes, memory or not.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.space.size()
    }

    /// Bytes of memory in it. The device has them once, however many attach them.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.space.bytes()
    }

    /// The device it was attached for.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.space.device()
    }

    /// What may be done with it here.
    #[doc(alias = "right")]
    #[must_use]
    pub const fn access(&self) -> Access {
        self.access
    }

    /// What its giver said of it.
    #[must_use]
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Every extent in order: what whoever registers memory must register.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.space.extents().collect()
    }

    /// Where there is memory, in order.
    #[must_use]
    pub fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }

    /// Reads bytes behind what `stream` has queued.
    ///
    /// # Errors
    /// [`MemoryError`] when they are not all there, or the stream is another device's.
    pub fn read(&self, stream: &Stream, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.read(stream, offset, bytes)
    }

    /// Writes bytes behind what `stream` has queued, and returns when they are there.
    ///
    /// # Errors
    /// [`MemoryError`] when it may only be read, they do not all fit, or the stream is another
    /// device's.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        if self.access != Access::ReadWrite {
            return Err(MemoryError::read_only(&(0..self.size())));
        }
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.write(stream, offset, bytes)
    }

    /// All elements, where it was given as such: a vector.
    ///
    /// # Errors
    /// [`ShareError`] when it was given otherwise, or elements have another size.
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

    /// A range of bytes as elements, for a kernel to read.
    ///
    /// # Errors
    /// [`ShareError`] when it is not all there, or is no whole elements.
    pub fn view_of<T: Pod>(&self, range: Range<u64>) -> Result<View<'_, T>, ShareError> {
        let (offset, size) = (range.start, range.end.saturating_sub(range.start));
        if !self.is_there(offset, size) {
            return Err(MemoryError::not_committed(&range).into());
        }
        let address = self
            .address()
            .checked_add(offset)
            .unwrap_or(DeviceAddress::NULL);
        let len = ArgumentError::elements_at::<T>(address.0, size)?;
        Ok(View::new(address, len, &self.users))
    }

    /// The same for a kernel to write; other processes see it.
    ///
    /// # Errors
    /// [`ShareError`] besides when the memory may only be read.
    pub fn view_mut_of<T: Pod>(&mut self, range: Range<u64>) -> Result<ViewMut<'_, T>, ShareError> {
        if self.access != Access::ReadWrite {
            return Err(MemoryError::read_only(&range).into());
        }
        let (address, len) = {
            let view = self.view_of::<T>(range)?;
            (view.address(), view.len())
        };
        Ok(ViewMut::new(address, len, &self.users))
    }

    /// Waits for the devices that have access and unmaps everything. On failure it is handed back
    /// with what could not be unmapped.
    ///
    /// # Errors
    /// [`CloseError`] with the attachment in it.
    #[expect(
        clippy::result_large_err,
        reason = "the attachment itself is handed back"
    )]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        match self.empty() {
            Ok(()) => Ok(()),
            Err(cause) => Err(CloseError {
                owner: self,
                reason: CloseRefusal::Call(cause),
            }),
        }
    }

    fn empty(&mut self) -> Result<(), CallError> {
        if let Some(forked) = self.device().forked() {
            return Err(forked);
        }
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
            Some(range) => Err(MemoryError::not_committed(&range)),
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let held = self.held();
        if let Err(error) = self.empty() {
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
