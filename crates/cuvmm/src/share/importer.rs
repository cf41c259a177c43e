//! Import of allocations of other processes' memory pools.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use cuvmm_driver::Exported;

use super::allocation_offer::AllocationParcel;
use super::allocation_wire::AllocationDescription;
use super::grant::Held;
use crate::device::Device;
use crate::error::{ArgumentError, ChannelError, MemoryError, ShareError};
use crate::own::{Access, Giver, ImportedAllocation, ImportedPool, Stream, WeakPool};

/// Imports allocations that other processes offer, and each pool of them once.
///
/// A pool stays imported while an allocation of it lives. A process usually has one importer for
/// each device.
#[derive(Debug)]
pub struct PoolImporter {
    device: Device,
    stream: Stream,
    access: Access,
    /// The pools that were imported, by the identities that their givers chose.
    pools: Mutex<Vec<([u8; 16], WeakPool)>>,
}

impl PoolImporter {
    /// Creates an importer for a device. What it imports is freed on `stream`.
    ///
    /// # Errors
    /// [`ArgumentError`] when the stream belongs to another device.
    pub fn new(device: &Device, stream: &Stream) -> Result<Self, ArgumentError> {
        if !stream.device().is_same(device) {
            return Err(ArgumentError::STREAM);
        }
        Ok(Self {
            device: device.clone(),
            stream: stream.clone(),
            access: Access::Read,
            pools: Mutex::default(),
        })
    }

    /// Requests write access. Importing then fails if the giver allows only reading.
    #[must_use]
    pub const fn read_write(mut self) -> Self {
        self.access = Access::ReadWrite;
        self
    }

    /// Imports allocations whose description and descriptors came over a transport of the caller.
    ///
    /// Calls `cuMemPoolImportFromShareableHandle` unless the pool is imported already, and for each
    /// allocation `cuMemPoolImportPointer` and three times `cuPointerGetAttribute`.
    ///
    /// # Errors
    /// [`ShareError`]; nothing stays imported, and the giver knows that.
    pub fn open(&self, parcel: AllocationParcel) -> Result<Vec<ImportedAllocation>, ShareError> {
        self.agree(&parcel.description)?;
        self.import(&parcel.description, parcel.pool, parcel.held)
    }

    /// Checks a description before its handle is requested.
    pub(super) fn agree(&self, description: &AllocationDescription) -> Result<(), ShareError> {
        if self.access > description.access {
            let most = description.sizes().max().unwrap_or(0);
            return Err(MemoryError::read_only(&(0..most)).into());
        }
        let uuid = description.uuid;
        if self.device.uuid() != uuid {
            return Err(ShareError::NoSuchDevice { uuid });
        }
        Ok(())
    }

    pub(super) fn import(
        &self,
        description: &AllocationDescription,
        pool: OwnedFd,
        held: OwnedFd,
    ) -> Result<Vec<ImportedAllocation>, ShareError> {
        self.device.usable()?;
        let held = Held::greet(held).map_err(|error| match error {
            ChannelError::Closed => MemoryError::GiverGone.into(),
            error => ShareError::from(error),
        })?;
        let held: Arc<dyn Giver> = Arc::new(held);
        if !held.keeps() {
            return Err(MemoryError::GiverGone.into());
        }
        let handle = Exported::Fd(pool);
        // Held for the whole import, so that no pool is imported twice.
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|(_, pool)| pool.upgrade().is_some());
        let known = pools.iter().find(|(known, _)| *known == description.pool);
        if let Some(known) = known.and_then(|(_, pool)| pool.upgrade()) {
            match self.import_from(&known, description, &held) {
                // Another pool has that identity: a giver has chosen one that it was told.
                Err(MemoryError::ImportPointer { .. }) => {}
                outcome => return Ok(outcome?),
            }
        }
        let fresh = ImportedPool::import(&self.device, &handle)?;
        let imported = self.import_from(&fresh, description, &held)?;
        pools.retain(|(known, _)| *known != description.pool);
        pools.push((description.pool, fresh.downgrade()));
        Ok(imported)
    }

    fn import_from(
        &self,
        pool: &ImportedPool,
        description: &AllocationDescription,
        held: &Arc<dyn Giver>,
    ) -> Result<Vec<ImportedAllocation>, MemoryError> {
        let import = |part| {
            let giver = Some(Arc::clone(held));
            pool.import_part(&self.stream, part, self.access, giver)
        };
        description.parts.iter().map(import).collect()
    }
}
