//! The memory that a replacement puts in the place of other memory: created before, or physical by
//! physical while copies run.

use std::fmt;
use std::ops::Range;
use std::vec::IntoIter;

use super::place::Unmapped;
use crate::error::MemoryError;

/// Physicals, each with the offset to map it at, in ascending order.
pub(crate) type New = Vec<(u64, Unmapped)>;

/// Creates a physical of a size in bytes.
type Create = Box<dyn Fn(u64) -> Result<Unmapped, MemoryError>>;

/// New memory, each physical with the offset to map it at, in ascending order.
pub(crate) enum NewMemory {
    Created(IntoIter<(u64, Unmapped)>),
    /// Device memory in the place of host memory. The ranges say where each physical comes.
    OneByOne(IntoIter<Range<u64>>, Create),
}

impl NewMemory {
    /// Device memory for ranges of host memory, each created right before it is copied to. If one
    /// cannot be created, the replacement is undone.
    pub(crate) fn one_by_one(
        ranges: Vec<Range<u64>>,
        create: impl Fn(u64) -> Result<Unmapped, MemoryError> + 'static,
    ) -> Self {
        Self::OneByOne(ranges.into_iter(), Box::new(create))
    }

    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        match self {
            Self::Created(new) => {
                let new = new.as_slice().iter();
                new.map(|(offset, unmapped)| *offset..offset + unmapped.size())
                    .collect()
            }
            Self::OneByOne(ranges, _) => ranges.as_slice().to_vec(),
        }
    }

    /// The physicals that exist and were not taken.
    pub(crate) fn created(&self) -> impl Iterator<Item = &Unmapped> {
        let created = match self {
            Self::Created(new) => new.as_slice(),
            Self::OneByOne(..) => &[],
        };
        created.iter().map(|(_, unmapped)| unmapped)
    }

    pub(super) fn into_created(self) -> Vec<Unmapped> {
        match self {
            Self::Created(new) => new.map(|(_, unmapped)| unmapped).collect(),
            Self::OneByOne(..) => vec![],
        }
    }
}

impl Iterator for NewMemory {
    type Item = Result<(u64, Unmapped), MemoryError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Created(new) => new.next().map(Ok),
            Self::OneByOne(ranges, create) => {
                let Range { start, end } = ranges.next()?;
                Some(create(end - start).map(|unmapped| (start, unmapped)))
            }
        }
    }
}

impl From<New> for NewMemory {
    fn from(new: New) -> Self {
        Self::Created(new.into_iter())
    }
}

impl fmt::Debug for NewMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ranges()).finish()
    }
}
