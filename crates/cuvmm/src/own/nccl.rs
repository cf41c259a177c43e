//! Memory properties that NCCL requires to register memory like its own.
//!
//! This module neither calls NCCL nor registers anything. It provides the properties that NCCL's
//! allocator uses, which are fixed when memory is created.

use cuvmm_driver::HandleTypes;

use super::physical::{Physical, PhysicalBuilder};
use super::probe::is_supported;
use crate::device::Device;
use crate::error::MemoryError;

/// Returns the handle types, and `true` if RDMA devices have to reach the memory.
///
/// A descriptor is the minimum: processes of one machine share memory through it. A fabric handle
/// is added if exporting one succeeds, since the driver may refuse a type that it reports as
/// supported.
pub(crate) fn nccl_properties(device: &Device) -> Result<(HandleTypes, bool), MemoryError> {
    Physical::probe_export(device, HandleTypes::POSIX_FD)?;
    let fabric = Physical::probe_export(device, HandleTypes::FABRIC);
    let fabric = match is_supported(fabric, "fabric handles")? {
        true => HandleTypes::FABRIC,
        false => HandleTypes::empty(),
    };
    Ok((HandleTypes::POSIX_FD | fabric, has_rdma(device)?))
}

/// Returns `true` if RDMA devices can reach memory of the device. Fails if the device is of no
/// further use.
pub(crate) fn has_rdma(device: &Device) -> Result<bool, MemoryError> {
    is_supported(Physical::probe_rdma(device), "memory for RDMA")
}

impl PhysicalBuilder<'_> {
    /// Requests memory with the properties of NCCL's allocator (`ncclMemAlloc`), so that NCCL can
    /// register it: exportable as a descriptor, and across nodes and reachable by RDMA where the
    /// device supports it. Tries [exporting](Physical::probe_export) a granule as each type, and
    /// [mapping](Physical::probe_rdma) one for RDMA.
    ///
    /// # Errors
    /// [`MemoryError`] when memory cannot be exported as a descriptor, or the driver refuses a
    /// query.
    pub fn for_nccl(self) -> Result<Self, MemoryError> {
        let (types, rdma) = nccl_properties(self.device())?;
        Ok(self.shareable(types).rdma_capable(rdma))
    }
}
