//! Shared memory on its way, with no channel of ours: a description and its handles, to be sent by
//! whatever transport there is.

use cuvmm_driver::Exported;

use super::wire::Description;
use crate::error::DescriptionError;

/// A description of shared memory and the handles for it, in the order of its extents.
///
/// Send [`Description::to_bytes`] and the handles as you like: descriptors over a Unix socket (at most
/// 253 in one message), by `pidfd_getfd`, or inherited; fabric handles, which are 64 bytes each, over
/// anything. On the other side [`Description::from_bytes`] reads it, and
/// [`AttachmentBuilder::open`](super::AttachmentBuilder::open) checks and maps it.
///
/// The memory lives for as long as a descriptor is open, whatever becomes of giver and taker.
#[derive(Debug)]
pub struct Parcel {
    pub(super) description: Description,
    pub(super) handles: Vec<Exported>,
}

impl Parcel {
    /// What came over a transport of the caller's own.
    #[must_use]
    pub const fn new(description: Description, handles: Vec<Exported>) -> Self {
        Self {
            description,
            handles,
        }
    }

    /// The same from a description as it travels.
    ///
    /// # Errors
    /// [`DescriptionError`] when it is none.
    pub fn from_bytes(
        description: &[u8],
        handles: Vec<Exported>,
    ) -> Result<Self, DescriptionError> {
        Ok(Self::new(Description::from_bytes(description)?, handles))
    }

    /// What the memory is like.
    #[must_use]
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// The handles, one for each extent in order.
    #[must_use]
    pub fn handles(&self) -> &[Exported] {
        &self.handles
    }

    /// Both, to be sent.
    #[must_use]
    pub fn into_parts(self) -> (Description, Vec<Exported>) {
        (self.description, self.handles)
    }
}
