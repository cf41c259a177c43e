//! Import of allocations of other processes' memory pools.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuvmm_driver::Exported;

use super::allocation_offer::AllocationParcel;
use super::allocation_wire::AllocationDescription;
use super::channel::DEFAULT_TIMEOUT;
use super::grant::Held;
use super::wait::Deadline;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, ChannelError, MemoryError, ShareError};
use crate::own::{Access, GivingProcess, ImportedAllocation, ImportedPool, Stream, WeakPool};

/// Imports allocations that other processes offer, and each pool of them once.
///
/// A pool stays imported while an allocation of it lives. Importers of a `Device` and its clones
/// share their imports; handles that were [opened](Device::open) separately do not. Open a device
/// once: the driver may give one address to an allocation imported through two handles, and the
/// first of these would free it.
#[derive(Debug)]
pub struct PoolImporter {
    device: Device,
    stream: Stream,
    access: Access,
    pools: Arc<Pools>,
}

impl PoolImporter {
    /// Creates an importer for a device. Imported memory is freed on `stream`.
    ///
    /// # Errors
    /// [`ArgumentError`] when the stream belongs to another device.
    pub fn new(device: &Device, stream: &Stream) -> Result<Self, ArgumentError> {
        stream.check_on(device)?;
        Ok(Self {
            device: device.clone(),
            stream: stream.clone(),
            access: Access::Read,
            pools: device.imports(),
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
        let deadline = Deadline::after(DEFAULT_TIMEOUT);
        self.import(&parcel.description, parcel.pool, parcel.held, deadline)
    }

    pub(super) fn agree(&self, description: &AllocationDescription) -> Result<(), ShareError> {
        if self.access > description.access {
            let most = description.sizes().max().unwrap_or(0);
            return Err(MemoryError::ReadOnly(0..most).into());
        }
        let uuid = description.uuid;
        if self.device.uuid() != uuid {
            return Err(ShareError::NoSuchDevice(uuid));
        }
        Ok(())
    }

    pub(super) fn import(
        &self,
        description: &AllocationDescription,
        pool: OwnedFd,
        held: OwnedFd,
        deadline: Deadline,
    ) -> Result<Vec<ImportedAllocation>, ShareError> {
        self.device.usable()?;
        let held = Held::greet(held).map_err(|error| match error {
            ChannelError::Closed => MemoryError::GiverGone.into(),
            error => ShareError::from(error),
        })?;
        let held: Arc<dyn GivingProcess> = Arc::new(held);
        if !held.keeps() {
            return Err(MemoryError::GiverGone.into());
        }
        let handle = Exported::Fd(pool);
        let mut refused = vec![];
        loop {
            let (pool, is_new) = self.pool(description.pool, &handle, &refused)?;
            match self.import_from(&pool, description, &held, deadline) {
                // Another pool may have this identity: nothing was imported from it.
                Err((0, MemoryError::ImportPointer(CallError::Driver(_)))) if !is_new => {
                    refused.push(pool);
                }
                outcome => return outcome.map_err(|(_, error)| error.into()),
            }
        }
    }

    /// Returns a pool of this identity that has not refused, and whether this call imported it.
    fn pool(
        &self,
        identity: Identity,
        handle: &Exported,
        refused: &[ImportedPool],
    ) -> Result<(ImportedPool, bool), MemoryError> {
        // Locked for the import, so that no pool is imported twice.
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|(_, pool)| pool.is_alive());
        let mut known = pools.iter().filter(|(known, pool)| {
            *known == identity && !refused.iter().any(|refused| pool.is(refused))
        });
        if let Some(known) = known.find_map(|(_, pool)| pool.upgrade()) {
            return Ok((known, false));
        }
        let fresh = ImportedPool::import(&self.device, handle)?;
        pools.push((identity, fresh.downgrade()));
        Ok((fresh, true))
    }

    /// Imports all parts, or returns the number of the first that cannot be imported.
    fn import_from(
        &self,
        pool: &ImportedPool,
        description: &AllocationDescription,
        held: &Arc<dyn GivingProcess>,
        deadline: Deadline,
    ) -> Result<Vec<ImportedAllocation>, (usize, MemoryError)> {
        // Leaves time to answer the peer.
        let patience = || deadline.left() - (deadline.left() / 4).min(Duration::from_secs(1));
        // All are awaited before any is imported: a refusal frees the imported ones, and would wait
        // for their work.
        for (number, part) in description.parts.iter().enumerate() {
            let awaited = pool.await_importable(&part.ticket, patience());
            awaited.map_err(|error| (number, error))?;
        }
        let import = |(number, part)| {
            let giver = Some(Arc::clone(held));
            let imported = pool.import_part(&self.stream, part, self.access, giver, patience());
            imported.map_err(|error| (number, error))
        };
        description.parts.iter().enumerate().map(import).collect()
    }
}

type Identity = [u8; 16];

/// The imported pools of a device, by the identities that their givers chose.
type Pools = Mutex<Vec<(Identity, WeakPool)>>;
