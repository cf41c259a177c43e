//! Access of devices and host nodes to a mapping.

use std::fmt;

use cuvmm_driver::{AccessDesc, AccessFlags, Location};

use super::place::Place;
use crate::device::Device;
use crate::error::ArgumentError;

/// The kinds of access to memory, from the least to the most.
///
/// The default is [`Read`](Self::Read), which builders of offers and attachments begin with.
///
/// ```
/// use cuvmm::Access;
///
/// assert_eq!(Access::default(), Access::Read);
/// assert_eq!(Access::ReadWrite.to_string(), "read and write");
/// ```
#[doc(alias = "AccessFlags")]
#[doc(alias = "Right")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Access {
    /// No access.
    None,
    /// Read-only access.
    #[default]
    Read,
    /// Read and write access.
    ReadWrite,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "no access",
            Self::Read => "read-only",
            Self::ReadWrite => "read and write",
        })
    }
}

impl Access {
    pub(crate) const fn flags(self) -> AccessFlags {
        match self {
            Self::None => AccessFlags::NONE,
            Self::Read => AccessFlags::READ,
            Self::ReadWrite => AccessFlags::READ_WRITE,
        }
    }

    /// Converts access that a driver reported. Each value that allows writing counts as read and
    /// write.
    pub(crate) const fn from_flags(flags: AccessFlags) -> Self {
        match flags {
            AccessFlags::NONE => Self::None,
            AccessFlags::READ => Self::Read,
            _ => Self::ReadWrite,
        }
    }
}

/// An access granted to a device or a host NUMA node.
#[doc(alias = "CUmemAccessDesc")]
#[doc(alias = "Access")]
#[derive(Clone, Debug)]
pub struct AccessGrant {
    device: Option<Device>,
    location: Location,
    access: Access,
}

impl AccessGrant {
    /// Grants access to a device (a `&Device` converts), or to the processors of a NUMA node
    /// ([`Place::HostNuma`]), which reach host memory only.
    #[doc(alias = "create_access_desc")]
    #[must_use]
    pub fn new(to: impl Into<Place>, access: Access) -> Self {
        let place = to.into();
        let location = place.location();
        let device = match place {
            Place::Device(device) => Some(device),
            Place::HostNuma(_) => None,
        };
        Self {
            device,
            location,
            access,
        }
    }

    pub(crate) const fn location(&self) -> Location {
        self.location
    }

    pub(crate) fn at_most(&self, most: Access) -> Self {
        Self {
            access: self.access.min(most),
            ..self.clone()
        }
    }

    pub(crate) const fn named(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    pub(crate) const fn access(&self) -> Access {
        self.access
    }

    /// Refuses a grant for a device of another driver than this device's.
    pub(crate) fn check_driver(&self, device: &Device) -> Result<(), ArgumentError> {
        self.named()
            .map_or(Ok(()), |named| named.check_driver(device))
    }

    /// Returns the grant for a driver call, with no more access than `most`.
    pub(crate) fn desc(&self, most: Access) -> AccessDesc {
        AccessDesc {
            location: self.location,
            flags: self.access.min(most).flags(),
        }
    }
}
