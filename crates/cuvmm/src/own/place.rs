//! Where physical memory lies.

use cuvmm_driver::Location;

use crate::device::Device;

/// A place for physical memory.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Place {
    /// The memory of a device.
    Device(Device),
    /// Host memory of one NUMA node, which every device and the host's processors reach.
    HostNuma(i32),
}

impl Place {
    /// The place as the driver names it.
    #[must_use]
    pub fn location(&self) -> Location {
        match self {
            Self::Device(device) => device.location(),
            Self::HostNuma(node) => Location::host_numa(*node),
        }
    }

    /// The device that memory here is created through: its own, or else `home`.
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
