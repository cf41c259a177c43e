//! Probe for memory that RDMA devices reach.
//!
//! The device's attribute is no proof. Where it is wrong, as on WSL2, memory is created, and access to
//! it is refused.

use super::access::{Access, AccessGrant};
use super::physical::Physical;
use super::reservation::Reservation;
use crate::device::Device;
use crate::error::{CallError, MemoryError};

impl Physical {
    /// Tries to create, map and access one granule of a device's memory that RDMA devices can reach,
    /// since the driver may refuse it even if attribute 110 reports it as supported.
    ///
    /// Makes `cuDeviceGetAttribute`, `cuMemCreate`, `cuMemAddressReserve`, `cuMemMap` and
    /// `cuMemSetAccess`, and undoes them. The outcome is kept with the device: later calls make no
    /// driver call. It is tried again after a shortage of memory.
    ///
    /// # Errors
    /// [`MemoryError::NotSupported`] by the attribute, [`MemoryError::NoRdma`] by the driver's
    /// refusal, or another error that says nothing about the device, such as a shortage.
    pub fn probe_rdma(device: &Device) -> Result<(), MemoryError> {
        if let Some(found) = device.rdma_probe().get() {
            return found.clone();
        }
        let found = match attempt(device) {
            Ok(()) => Ok(()),
            Err(refused) if !is_refusal(&refused) || refused.is_out_of_memory() => {
                return Err(refused);
            }
            Err(refused) => Err(match refused.call() {
                Some(&cause) => MemoryError::NoRdma {
                    device: device.location(),
                    cause,
                },
                None => refused,
            }),
        };
        device.rdma_probe().get_or_init(|| found).clone()
    }
}

/// Makes a granule for RDMA accessible to its device. Undoing it counts as a drop.
fn attempt(device: &Device) -> Result<(), MemoryError> {
    let size = device.granularity();
    let granule = Physical::builder(device, size)
        .rdma_capable(true)
        .create()?;
    let addresses = Reservation::new(device, size)?;
    let mapping = addresses.map(0, &granule)?;
    mapping.set_access(&[AccessGrant::new(device, Access::ReadWrite)])
}

/// Returns `true` if a probe succeeded, and `false` if it was refused. Fails if the device is of no
/// further use.
pub(crate) fn is_supported(
    probed: Result<(), MemoryError>,
    what: &'static str,
) -> Result<bool, MemoryError> {
    match probed {
        Ok(()) => Ok(true),
        Err(refused) if is_refusal(&refused) => {
            log!(debug, %refused, what, "not supported");
            Ok(false)
        }
        Err(refused) => Err(refused),
    }
}

/// Returns `false` if an error means that the device is of no further use.
fn is_refusal(error: &MemoryError) -> bool {
    match error.call() {
        Some(CallError::Driver(error)) => !error.is_sticky(),
        Some(_) => false,
        None => true,
    }
}
