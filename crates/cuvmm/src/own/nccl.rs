//! What memory has to be made for so that NCCL takes it as its own.
//!
//! NCCL itself is not known here, and nothing is registered: these are the properties that its
//! allocator asks for, which are fixed when memory is created.

use cuvmm_driver::HandleTypes;

use super::physical::{Physical, PhysicalBuilder};
use crate::device::Device;
use crate::error::{CallError, MemoryError};

/// The handle types, and whether RDMA devices are to reach the memory.
///
/// A descriptor is the least: processes of one machine share memory by it. A name across nodes is
/// asked for where the call gives one, since an attribute may say yes where the call says no.
pub(crate) fn wishes(device: &Device) -> Result<(HandleTypes, bool), MemoryError> {
    Physical::probe_export(device, HandleTypes::POSIX_FD)?;
    let fabric = match Physical::probe_export(device, HandleTypes::FABRIC) {
        Ok(()) => HandleTypes::FABRIC,
        Err(refused) => match lost(&refused) {
            Some(_) => return Err(refused),
            None => {
                tracing::debug!(%refused, "no fabric handles for NCCL");
                HandleTypes::empty()
            }
        },
    };
    Ok((HandleTypes::POSIX_FD | fabric, device.has_rdma()?))
}

/// Why nothing more can be had from the device, if that is what a refusal says.
fn lost(refused: &MemoryError) -> Option<&CallError> {
    refused
        .call()
        .filter(|cause| !matches!(cause, CallError::Driver(error) if !error.is_sticky()))
}

impl PhysicalBuilder<'_> {
    /// As NCCL's own allocator (`ncclMemAlloc`) asks for memory, so that it can be registered there:
    /// to be exported as a descriptor, and across nodes and reachable for RDMA where the device can.
    /// Tries [exporting](Physical::probe_export) on a granule for each.
    ///
    /// # Errors
    /// [`MemoryError`] when memory cannot even be exported as a descriptor, or the device does not
    /// answer.
    pub fn for_nccl(self) -> Result<Self, MemoryError> {
        let (types, rdma) = wishes(self.device())?;
        Ok(self.shareable(types).rdma_capable(rdma))
    }
}
