//! Places of physical memory.

use cuvmm_driver::Location;

use crate::device::Device;

/// A place that physical memory can be created at.
#[doc(alias = "CUmemLocation")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The memory of a device.
    Device(Device),
    /// Host memory of one NUMA node, which every device and the host's processors can reach.
    HostNuma(i32),
}

impl Place {
    /// Returns the location by which the driver names the place.
    #[must_use]
    pub fn location(&self) -> Location {
        match self {
            Self::Device(device) => device.location(),
            Self::HostNuma(node) => Location::host_numa(*node),
        }
    }

    /// Returns the device through which memory of this place is created: `home` for the host.
    pub(crate) const fn through<'a>(&'a self, home: &'a Device) -> &'a Device {
        match self {
            Self::Device(device) => device,
            Self::HostNuma(_) => home,
        }
    }
}

impl From<&Device> for Place {
    fn from(device: &Device) -> Self {
        Self::Device(device.clone())
    }
}
