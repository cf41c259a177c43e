//! The serialized description of allocations of a memory pool, which travels beside the pool's
//! handle.
//!
//! All numbers are little-endian. Received bytes are used only after
//! [`AllocationDescription::from_bytes`] has checked all of them. This module makes no call to the
//! driver or the system.

use cuvmm_driver::MemPoolTicket;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::wire::{ALLOCATIONS, VERSION, access_word, bounded, check_kind, read_access};
use crate::error::DescriptionError;
use crate::own::{Access, AllocationPart};
use crate::size::range_within;

/// The most allocations of one description.
pub(super) const MOST: usize = 4096;

/// In bytes.
pub(super) const MOST_BYTES: usize = size_of::<Head>() + MOST * size_of::<Record>();

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: U16,
    access: U16,
    count: U32,
    uuid: [u8; 16],
    /// The identity of the pool: a random number that its giver chose.
    pool: [u8; 16],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Record {
    size: U64,
    offset: U64,
    length: U64,
    ticket: [u8; 64],
}

/// A description of allocations of one memory pool: everything that the pool's handle does not
/// contain.
///
/// A description made [from bytes](Self::from_bytes) is consistent in itself. The import verifies
/// that it matches the memory.
#[derive(Clone, Debug)]
pub struct AllocationDescription {
    pub(super) access: Access,
    pub(super) uuid: [u8; 16],
    pub(super) pool: [u8; 16],
    pub(super) parts: Vec<AllocationPart>,
}

impl AllocationDescription {
    /// Returns the number of allocations, which is not 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.parts.len()
    }

    /// Returns the size in bytes of each allocation's given part, in order.
    pub fn sizes(&self) -> impl Iterator<Item = u64> {
        self.parts
            .iter()
            .map(|part| part.range.end.saturating_sub(part.range.start))
    }

    /// Returns the access that the giver grants. The driver does not enforce it.
    #[must_use]
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Returns the identity of the device that has the memory.
    #[must_use]
    pub const fn device_uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Serializes the description.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let head = Head {
            magic: ALLOCATIONS,
            version: VERSION.into(),
            access: access_word(self.access),
            count: u32::try_from(self.parts.len()).unwrap_or(u32::MAX).into(),
            uuid: self.uuid,
            pool: self.pool,
        };
        let mut bytes = head.as_bytes().to_vec();
        for AllocationPart {
            ticket,
            size,
            range,
        } in &self.parts
        {
            let record = Record {
                size: (*size).into(),
                offset: range.start.into(),
                length: range.end.saturating_sub(range.start).into(),
                ticket: ticket.0,
            };
            bytes.extend_from_slice(record.as_bytes());
        }
        bytes
    }

    /// Reads a serialized description and checks everything that can be checked without the driver.
    ///
    /// # Errors
    /// [`DescriptionError`] with the first field that is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptionError> {
        let length = |wanted: usize| DescriptionError::Length {
            length: bytes.len() as u64,
            wanted: wanted as u64,
        };
        let Ok((head, rest)) = Head::ref_from_prefix(bytes) else {
            return Err(length(size_of::<Head>()));
        };
        check_kind(head.magic, head.version, ALLOCATIONS)?;
        let access = read_access(head.access)?;
        let count = bounded("number of allocations", head.count, MOST)?;
        let Ok(records) = <[Record]>::ref_from_bytes_with_elems(rest, count) else {
            return Err(length(size_of::<Head>() + count * size_of::<Record>()));
        };
        Ok(Self {
            access,
            uuid: head.uuid,
            pool: head.pool,
            parts: records.iter().map(Record::read).collect::<Result<_, _>>()?,
        })
    }
}

impl Record {
    fn read(&self) -> Result<AllocationPart, DescriptionError> {
        let (size, offset, length) = (self.size.get(), self.offset.get(), self.length.get());
        match range_within(offset, length, size) {
            Some(range) if length != 0 => Ok(AllocationPart {
                ticket: MemPoolTicket(self.ticket),
                size,
                range,
            }),
            _ => Err(DescriptionError::Allocation {
                offset,
                length,
                size,
            }),
        }
    }
}
