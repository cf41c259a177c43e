//! Memory properties that NCCL requires to register memory like its own.
//!
//! This module neither calls NCCL nor registers anything. It provides the properties that NCCL's
//! allocator uses, which are fixed when memory is created.

use cuvmm_driver::HandleTypes;

use super::physical::{Physical, PhysicalBuilder};
use crate::device::Device;
use crate::error::{CallError, MemoryError};

/// Returns the handle types, and `true` if RDMA devices have to reach the memory.
///
/// A descriptor is the minimum: processes of one machine share memory through it. A fabric handle
/// is added if exporting one succeeds, since the driver may refuse a type that it reports as
/// supported.
pub(crate) fn nccl_properties(device: &Device) -> Result<(HandleTypes, bool), MemoryError> {
    Physical::probe_export(device, HandleTypes::POSIX_FD)?;
    let fabric = match Physical::probe_export(device, HandleTypes::FABRIC) {
        Ok(()) => HandleTypes::FABRIC,
        Err(refused) => match lost(&refused) {
            Some(_) => return Err(refused),
            None => {
                log!(debug, %refused, "no fabric handles for NCCL");
                HandleTypes::empty()
            }
        },
    };
    Ok((HandleTypes::POSIX_FD | fabric, device.has_rdma()?))
}

/// Returns the call error, if it means that the device is of no further use.
fn lost(refused: &MemoryError) -> Option<&CallError> {
    refused
        .call()
        .filter(|cause| !matches!(cause, CallError::Driver(error) if !error.is_sticky()))
}

impl PhysicalBuilder<'_> {
    /// Requests memory with the properties of NCCL's allocator (`ncclMemAlloc`), so that NCCL can
    /// register it: exportable as a descriptor, and across nodes and reachable by RDMA where the
    /// device supports it. Tries [exporting](Physical::probe_export) a granule as each type.
    ///
    /// # Errors
    /// [`MemoryError`] when memory cannot be exported as a descriptor, or the driver refuses a
    /// query.
    pub fn for_nccl(self) -> Result<Self, MemoryError> {
        let (types, rdma) = nccl_properties(self.device())?;
        Ok(self.shareable(types).rdma_capable(rdma))
    }
}
