//! Shared memory for transports other than a channel: a description and its handles.

use cuvmm_driver::Exported;

use super::wire::Description;
use crate::error::DescriptionError;

/// A description of shared memory and the handles for it, in the order of its extents.
///
/// Send [`Description::to_bytes`] and the handles over any transport: descriptors over a Unix
/// socket (at most 253 in one message), by `pidfd_getfd`, or by inheritance; fabric handles, which
/// are 64 bytes each, over any connection. On the other side [`Description::from_bytes`] reads the
/// description, and [`AttachmentBuilder::open`](super::AttachmentBuilder::open) checks and maps the
/// memory.
///
/// The memory lives while a descriptor is open, even after giver and taker have ended.
#[derive(Debug)]
pub struct Parcel {
    pub(super) description: Description,
    pub(super) handles: Vec<Exported>,
}

impl Parcel {
    /// Creates a parcel from a received description and its handles.
    #[must_use]
    pub const fn new(description: Description, handles: Vec<Exported>) -> Self {
        Self {
            description,
            handles,
        }
    }

    /// Creates a parcel from a received serialized description and its handles.
    ///
    /// # Errors
    /// [`DescriptionError`] if the bytes are not a valid description.
    pub fn from_bytes(
        description: &[u8],
        handles: Vec<Exported>,
    ) -> Result<Self, DescriptionError> {
        Ok(Self::new(Description::from_bytes(description)?, handles))
    }

    /// Returns the description of the memory.
    #[must_use]
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the handles, one for each extent in order.
    #[must_use]
    pub fn handles(&self) -> &[Exported] {
        &self.handles
    }

    /// Splits the parcel into description and handles.
    #[must_use]
    pub fn into_parts(self) -> (Description, Vec<Exported>) {
        (self.description, self.handles)
    }
}
