//! Who may touch a mapping, and how.

use cuvmm_driver::{AccessDesc, AccessFlags, Location};

use crate::device::Device;

/// How memory may be accessed.
#[doc(alias = "Right")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Access {
    /// None.
    None,
    /// Read only.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Access {
    pub(crate) const fn flags(self) -> AccessFlags {
        match self {
            Self::None => AccessFlags::NONE,
            Self::Read => AccessFlags::READ,
            Self::ReadWrite => AccessFlags::READ_WRITE,
        }
    }

    /// The access that a driver reported; whatever grants writing counts as read and write.
    pub(crate) const fn from_flags(flags: AccessFlags) -> Self {
        match flags {
            AccessFlags::NONE => Self::None,
            AccessFlags::READ => Self::Read,
            _ => Self::ReadWrite,
        }
    }
}

/// Access given to a device or a host NUMA node.
#[doc(alias = "Access")]
#[derive(Clone, Debug)]
pub struct AccessGrant {
    device: Option<Device>,
    location: Location,
    access: Access,
}

impl AccessGrant {
    /// Access for a device.
    #[must_use]
    pub fn device(device: &Device, access: Access) -> Self {
        Self {
            device: Some(device.clone()),
            location: device.location(),
            access,
        }
    }

    /// Access for the processors of a host NUMA node; only host memory can be opened to them.
    #[must_use]
    pub const fn host_numa(node: i32, access: Access) -> Self {
        Self {
            device: None,
            location: Location::host_numa(node),
            access,
        }
    }

    pub(crate) const fn location(&self) -> Location {
        self.location
    }

    /// The same with no more than `most`.
    pub(crate) fn at_most(&self, most: Access) -> Self {
        Self {
            access: self.access.min(most),
            ..self.clone()
        }
    }

    /// The device that is named, if it is one.
    pub(crate) const fn named(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    pub(crate) const fn access(&self) -> Access {
        self.access
    }

    /// Whether the one named belongs to the driver of `device`.
    pub(crate) fn same_driver(&self, device: &Device) -> bool {
        self.device
            .as_ref()
            .is_none_or(|named| named.same_driver(device))
    }

    pub(crate) const fn desc(&self) -> AccessDesc {
        AccessDesc {
            location: self.location,
            flags: self.access.flags(),
        }
    }
}
