//! The serialized description of shared memory: sizes, places and access, which the driver's
//! handles do not contain.
//!
//! All numbers are little-endian. Received bytes are used only after [`Description::from_bytes`]
//! has checked all of them. This module makes no call to the driver or the system.
//!
//! Keeps I-62.

use std::ops::Range;

use cuvmm_driver::{HandleTypes, LocationKind};
use zerocopy::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::DescriptionError;
use crate::own::Access;
use crate::size::{Granularity, range_within};

pub(super) const MAGIC: [u8; 8] = *b"cuvmm-sh";

/// The first bytes of a description of allocations.
pub(super) const ALLOCATIONS: [u8; 8] = *b"cuvmm-al";

/// The version of the whole wire format.
pub(super) const VERSION: u16 = 3;

/// The most mappings that a device can have.
const MOST_EXTENTS: usize = 524_288;

/// More devices and nodes than a machine has.
const MOST_PLACES: usize = 256;

/// In bytes.
pub(super) const MOST_DESCRIPTION: usize = size_of::<Head>()
    + MOST_PLACES * size_of::<PlaceRecord>()
    + MOST_EXTENTS * size_of::<ExtentRecord>();

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: U16,
    access: U16,
    handle_type: U32,
    granularity: U64,
    size: U64,
    elements: U64,
    element_size: U32,
    places: U32,
    extents: U32,
    reserved: U32,
    /// The ledger that counts the memory, and the memory's name in it; 0 if none does.
    ledger: U64,
    counted_as: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct PlaceRecord {
    kind: I32,
    id: I32,
    uuid: [u8; 16],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ExtentRecord {
    offset: U64,
    size: U64,
    place: U32,
    reserved: U32,
}

const READ: u16 = 1;
const READ_WRITE: u16 = 3;

/// The place of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The device with this UUID, which is the same in every process.
    Device([u8; 16]),
    /// A NUMA node of the host.
    HostNuma(i32),
}

/// One extent of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedExtent {
    /// The offset in the range, in bytes.
    pub offset: u64,
    /// The size in bytes.
    pub size: u64,
    /// The place.
    pub origin: Origin,
}

impl SharedExtent {
    pub(super) const fn new(offset: u64, size: u64, origin: Origin) -> Self {
        Self {
            offset,
            size,
            origin,
        }
    }

    const fn end(&self) -> u64 {
        self.offset + self.size
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elements {
    pub(super) count: u64,
    pub(super) size: u32,
}

impl Elements {
    const fn bytes(self) -> Option<u64> {
        self.count.checked_mul(self.size as u64)
    }
}

/// A description of shared memory: everything that its handles do not contain.
///
/// A description made [from bytes](Self::from_bytes) is consistent in itself: its extents are in
/// order, consist of whole granules and are within its size. Importing and mapping verify that it
/// matches the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub(super) access: Access,
    pub(super) handle_type: HandleTypes,
    granularity: u64,
    size: u64,
    elements: Option<Elements>,
    extents: Vec<SharedExtent>,
    /// The ledger that counts the memory, and the memory's name in it.
    pub(super) counted: Option<(u64, u64)>,
}

impl Description {
    /// Creates a description, with the same checks as for a received one.
    pub(super) fn new(
        access: Access,
        handle_type: HandleTypes,
        granularity: u64,
        size: u64,
        elements: Option<Elements>,
        extents: Vec<SharedExtent>,
    ) -> Result<Self, DescriptionError> {
        let new = Self {
            access,
            handle_type,
            granularity,
            size,
            elements,
            extents,
            counted: None,
        };
        new.check()?;
        Ok(new)
    }

    /// Returns the size of the range in bytes, including parts without memory.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the bytes of memory in the range.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.extents.iter().map(|extent| extent.size).sum()
    }

    /// Returns the access that the giver grants. The driver does not enforce it.
    #[doc(alias = "right")]
    #[must_use]
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Returns the type of the handles.
    #[must_use]
    pub const fn handle_type(&self) -> HandleTypes {
        self.handle_type
    }

    /// Returns the granule of the giver's device in bytes.
    #[must_use]
    pub const fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Returns the extents in order, one for each handle.
    #[must_use]
    pub fn extents(&self) -> &[SharedExtent] {
        &self.extents
    }

    /// Returns the number of elements and their size in bytes, if a vector was given.
    #[must_use]
    pub fn elements(&self) -> Option<(u64, u32)> {
        let Elements { count, size } = self.elements?;
        Some((count, size))
    }

    /// Returns the ranges that have memory, with adjacent extents joined.
    pub(super) fn runs(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = vec![];
        for extent in &self.extents {
            match runs.last_mut() {
                Some(run) if run.end == extent.offset => run.end = extent.end(),
                _ => runs.push(extent.offset..extent.end()),
            }
        }
        runs
    }

    fn check(&self) -> Result<(), DescriptionError> {
        if self.access == Access::None {
            return Err(wrong("access", 0_u32));
        }
        if !matches!(
            self.handle_type,
            HandleTypes::POSIX_FD | HandleTypes::FABRIC
        ) {
            return Err(wrong("handle type", self.handle_type.bits()));
        }
        let Some(granule) = Granularity::new(self.granularity) else {
            return Err(wrong("granularity", self.granularity));
        };
        if self.extents.is_empty() || self.extents.len() > MOST_EXTENTS {
            return Err(wrong("number of extents", self.extents.len() as u64));
        }
        let mut at = 0;
        for extent in &self.extents {
            let wrong = DescriptionError::Extent {
                offset: extent.offset,
                size: extent.size,
                within: self.size,
                granularity: self.granularity,
            };
            let whole = granule.divides(extent.offset) && granule.divides(extent.size);
            match range_within(extent.offset, extent.size, self.size) {
                Some(range) if whole && range.start >= at => at = range.end,
                _ => return Err(wrong),
            }
        }
        self.check_elements()
    }

    fn check_elements(&self) -> Result<(), DescriptionError> {
        let Some(elements) = self.elements else {
            return Ok(());
        };
        let there = self
            .runs()
            .first()
            .filter(|run| run.start == 0)
            .map_or(0, |run| run.end);
        if elements.size == 0 || elements.bytes().is_none_or(|bytes| bytes > there) {
            return Err(wrong("number of elements", elements.count));
        }
        Ok(())
    }

    /// Serializes the description.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut places: Vec<Origin> = vec![];
        let mut records = Vec::with_capacity(self.extents.len());
        for extent in &self.extents {
            let known = places.iter().position(|place| *place == extent.origin);
            let place = known.unwrap_or(places.len());
            if known.is_none() {
                places.push(extent.origin);
            }
            records.push(ExtentRecord {
                offset: extent.offset.into(),
                size: extent.size.into(),
                place: count(place),
                reserved: U32::ZERO,
            });
        }
        let elements = self.elements.unwrap_or(Elements { count: 0, size: 0 });
        let head = Head {
            magic: MAGIC,
            version: VERSION.into(),
            access: access_word(self.access),
            handle_type: self.handle_type.bits().into(),
            granularity: self.granularity.into(),
            size: self.size.into(),
            elements: elements.count.into(),
            element_size: elements.size.into(),
            places: count(places.len()),
            extents: count(records.len()),
            reserved: U32::ZERO,
            ledger: self.counted.map_or(0, |(ledger, _)| ledger).into(),
            counted_as: self.counted.map_or(0, |(_, name)| name).into(),
        };
        let mut bytes = head.as_bytes().to_vec();
        for place in places {
            bytes.extend_from_slice(PlaceRecord::of(place).as_bytes());
        }
        for record in records {
            bytes.extend_from_slice(record.as_bytes());
        }
        bytes
    }

    /// Reads a serialized description and checks everything that can be checked without the driver.
    ///
    /// # Errors
    /// [`DescriptionError`] with the first field that is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptionError> {
        let short = |wanted: u64| DescriptionError::Length {
            length: bytes.len() as u64,
            wanted,
        };
        let Ok((head, rest)) = Head::ref_from_prefix(bytes) else {
            return Err(short(size_of::<Head>() as u64));
        };
        let (places, extents) = head.counts()?;
        let wanted = head.length()?;
        if bytes.len() as u64 != wanted {
            return Err(short(wanted));
        }
        let tables = <[PlaceRecord]>::ref_from_prefix_with_elems(rest, places);
        let Ok((places, rest)) = tables else {
            return Err(short(wanted));
        };
        let Ok(records) = <[ExtentRecord]>::ref_from_bytes_with_elems(rest, extents) else {
            return Err(short(wanted));
        };
        let read = extents_in(places, records)?;
        let access = read_access(head.access)?;
        let elements = Elements {
            count: head.elements.get(),
            size: head.element_size.get(),
        };
        let (ledger, counted_as) = (head.ledger.get(), head.counted_as.get());
        let counted = (counted_as != 0).then_some((ledger, counted_as));
        if counted.is_none() && ledger != 0 {
            return Err(wrong("number of a ledger", ledger));
        }
        let mut new = Self::new(
            access,
            HandleTypes::from_bits_retain(head.handle_type.get()),
            head.granularity.get(),
            head.size.get(),
            (elements.size > 0 || elements.count > 0).then_some(elements),
            read,
        )?;
        new.counted = counted;
        Ok(new)
    }
}

fn extents_in(
    places: &[PlaceRecord],
    records: &[ExtentRecord],
) -> Result<Vec<SharedExtent>, DescriptionError> {
    let origins: Vec<Origin> = places.iter().map(Origin::read).collect::<Result<_, _>>()?;
    // The table names each place once, in the order in which extents first refer to it, and no
    // unused place: each description has exactly one serialized form.
    let unlike = |(index, origin): (usize, &Origin)| {
        origins.iter().take(index).all(|before| before != origin)
    };
    let mut named = 0;
    let mut read = Vec::with_capacity(records.len());
    for record in records {
        let place = record.place.get();
        let index = place as usize;
        let origin = origins
            .get(index)
            .filter(|_| index <= named && record.reserved == U32::ZERO);
        let &origin = origin.ok_or(wrong("place of an extent", place))?;
        named = named.max(index + 1);
        let (offset, size) = (record.offset.get(), record.size.get());
        read.push(SharedExtent::new(offset, size, origin));
    }
    if named != origins.len() || !origins.iter().enumerate().all(unlike) {
        return Err(wrong("place of an extent", count(named).get()));
    }
    Ok(read)
}

impl Head {
    /// Returns the numbers of places and extents, after checking the rest of the head.
    fn counts(&self) -> Result<(usize, usize), DescriptionError> {
        check_kind(self.magic, self.version, MAGIC)?;
        if self.reserved != U32::ZERO {
            return Err(wrong("reserved field", self.reserved.get()));
        }
        let places = bounded("number of places", self.places, MOST_PLACES)?;
        let extents = bounded("number of extents", self.extents, MOST_EXTENTS)?;
        Ok((places, extents))
    }

    /// Returns the size of the description with its tables, in bytes.
    fn length(&self) -> Result<u64, DescriptionError> {
        let (places, extents) = self.counts()?;
        let tables = places * size_of::<PlaceRecord>() + extents * size_of::<ExtentRecord>();
        Ok((size_of::<Self>() + tables) as u64)
    }
}

/// Checks that a description begins with `wanted` and is of this version.
pub(super) fn check_kind(
    magic: [u8; 8],
    version: U16,
    wanted: [u8; 8],
) -> Result<(), DescriptionError> {
    let (found, call) = match magic {
        MAGIC => ("extents", "Channel::recv"),
        ALLOCATIONS => ("allocations of a memory pool", "Channel::recv_allocations"),
        other => return Err(wrong("first bytes", u64::from_le_bytes(other))),
    };
    if magic != wanted {
        return Err(DescriptionError::Kind { found, call });
    }
    match version.get() {
        VERSION => Ok(()),
        version => Err(DescriptionError::Version {
            version,
            known: VERSION,
        }),
    }
}

pub(super) fn read_access(word: U16) -> Result<Access, DescriptionError> {
    match word.get() {
        READ => Ok(Access::Read),
        READ_WRITE => Ok(Access::ReadWrite),
        other => Err(wrong("access", other)),
    }
}

pub(super) fn access_word(access: Access) -> U16 {
    match access {
        Access::ReadWrite => READ_WRITE.into(),
        Access::None | Access::Read => READ.into(),
    }
}

pub(super) fn bounded(
    what: &'static str,
    count: U32,
    most: usize,
) -> Result<usize, DescriptionError> {
    let count = count.get() as usize;
    if count == 0 || count > most {
        return Err(wrong(what, count as u64));
    }
    Ok(count)
}

/// Converts a count that a check has bounded far below `u32::MAX`.
fn count(value: usize) -> U32 {
    u32::try_from(value).unwrap_or(u32::MAX).into()
}

/// Returns `true` if at least one byte is given and all are within one of the `runs`, which are in
/// order.
pub(super) fn is_within(runs: &[Range<u64>], offset: u64, size: u64) -> bool {
    let after = runs.partition_point(|run| run.start <= offset);
    let run = after.checked_sub(1).and_then(|index| runs.get(index));
    run.is_some_and(|run| range_within(offset, size, run.end).is_some())
}

impl PlaceRecord {
    fn of(origin: Origin) -> Self {
        let (kind, id, uuid) = match origin {
            Origin::Device(uuid) => (LocationKind::DEVICE, 0, uuid),
            Origin::HostNuma(node) => (LocationKind::HOST_NUMA, node, [0; 16]),
        };
        Self {
            kind: kind.0.into(),
            id: id.into(),
            uuid,
        }
    }
}

impl Origin {
    fn read(record: &PlaceRecord) -> Result<Self, DescriptionError> {
        let (kind, id) = (record.kind.get(), record.id.get());
        match LocationKind(kind) {
            LocationKind::DEVICE if id == 0 => Ok(Self::Device(record.uuid)),
            LocationKind::HOST_NUMA if id >= 0 && record.uuid == [0; 16] => Ok(Self::HostNuma(id)),
            LocationKind::DEVICE | LocationKind::HOST_NUMA => {
                Err(wrong("number or identity of a place", id.unsigned_abs()))
            }
            _ => Err(wrong("kind of a place", kind.unsigned_abs())),
        }
    }
}

pub(super) fn wrong(what: &'static str, value: impl Into<u64>) -> DescriptionError {
    let value = value.into();
    DescriptionError::Field { what, value }
}
