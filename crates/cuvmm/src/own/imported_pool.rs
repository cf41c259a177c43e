//! Memory pools of other processes.
//!
//! `unsafe` is used to import and to destroy. An imported pool is owned here and destroyed once,
//! after its last allocation.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cuvmm_driver::{Call, Exported, HandleTypes, ImportSource, MemPoolHandle, MemPoolTicket};

use super::pool_memory::PoolMemory;
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};

/// A memory pool of another process. Clones are the same pool. Nothing can be allocated from it.
///
/// It is destroyed when the last clone and the last [`ImportedAllocation`] are dropped, which does
/// not end the pool of the other process.
///
/// [`PoolImporter`](crate::share::PoolImporter) imports pools and their allocations for those that
/// get them through [`share`](crate::share).
#[derive(Clone)]
pub struct ImportedPool {
    shared: Arc<Shared>,
}

/// An imported pool that others own.
#[derive(Default)]
pub(crate) struct WeakPool(Weak<Shared>);

impl WeakPool {
    /// Returns the pool, or `None` if it was destroyed.
    pub(crate) fn upgrade(&self) -> Option<ImportedPool> {
        let shared = self.0.upgrade()?;
        Some(ImportedPool { shared })
    }
}

struct Shared {
    device: Device,
    handle: MemPoolHandle,
    live: Mutex<Live>,
}

impl ImportedPool {
    /// Imports a pool that another process, or this one, [exported](super::MemPool::export)
    /// (`cuMemPoolImportFromShareableHandle`). The handle may be closed afterwards.
    ///
    /// # Errors
    /// [`MemoryError`] when the driver is older than CUDA 11.2 or refuses the handle.
    #[doc(alias = "cuMemPoolImportFromShareableHandle")]
    pub fn import(device: &Device, handle: &Exported) -> Result<Self, MemoryError> {
        let (source, handle_type) = match handle {
            Exported::Fd(fd) => (ImportSource::Fd(fd.as_raw_fd()), HandleTypes::POSIX_FD),
            Exported::Fabric(name) => (ImportSource::Fabric(*name), HandleTypes::FABRIC),
            _ => return Err(ArgumentError::HandleType { bits: 0 }.into()),
        };
        let call = Call::MemPoolImportFromShareableHandle;
        let handle = device
            // SAFETY: the descriptor is borrowed, so it is open for the call.
            .call(call, |driver, device| unsafe {
                driver.mem_pool_import(device, source, handle_type, 0)
            })
            .map_err(|cause| MemoryError::ImportPool { cause })?;
        let device = device.clone();
        Ok(Self {
            shared: Arc::new(Shared {
                device,
                handle,
                live: Mutex::default(),
            }),
        })
    }

    /// Returns the device that the pool was imported for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns the driver's handle, which stays owned by this pool.
    #[must_use]
    pub fn as_raw(&self) -> MemPoolHandle {
        self.shared.handle
    }

    pub(crate) fn downgrade(&self) -> WeakPool {
        WeakPool(Arc::downgrade(&self.shared))
    }

    /// Returns what is imported from the pool, which does not change while it is locked.
    pub(super) fn live(&self) -> MutexGuard<'_, Live> {
        self.shared
            .live
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The allocations that are imported from a pool. The driver may give the same address for the same
/// allocation a second time, so each is imported once.
#[derive(Default)]
pub(super) struct Live(Vec<Entry>);

struct Entry {
    ticket: MemPoolTicket,
    memory: Weak<PoolMemory>,
    users: usize,
}

impl Live {
    /// Counts another user of an allocation and returns it, if it is imported.
    pub(super) fn join(&mut self, ticket: &MemPoolTicket) -> Option<Arc<PoolMemory>> {
        let mut entries = self.0.iter_mut();
        let found = entries.find(|entry| entry.ticket == *ticket)?;
        let memory = found.memory.upgrade()?;
        found.users += 1;
        Some(memory)
    }

    /// Adds an allocation with one user.
    pub(super) fn add(&mut self, ticket: MemPoolTicket, memory: &Arc<PoolMemory>) {
        self.0.push(Entry {
            ticket,
            memory: Arc::downgrade(memory),
            users: 1,
        });
    }

    /// Returns the number of users of an allocation.
    pub(super) fn users(&self, memory: &Arc<PoolMemory>) -> usize {
        let entry = self.0.iter().find(|entry| entry.is_of(memory));
        entry.map_or(0, |entry| entry.users)
    }

    /// Ends a use of an allocation, which is no longer found after its last one.
    pub(super) fn leave(&mut self, memory: &Arc<PoolMemory>) {
        self.0.retain_mut(|entry| {
            if entry.is_of(memory) {
                entry.users = entry.users.saturating_sub(1);
            }
            entry.users > 0
        });
    }
}

impl Entry {
    fn is_of(&self, memory: &Arc<PoolMemory>) -> bool {
        self.memory.as_ptr() == Arc::as_ptr(memory)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let handle = self.handle;
        let destroyed = self
            .device
            // SAFETY: the handle is owned here and is destroyed once, after all that was imported
            // from the pool.
            .give_back(Call::MemPoolDestroy, |driver, device| unsafe {
                driver.mem_pool_destroy(device, handle)
            });
        if let (Err(error), None) = (destroyed, self.device.lost()) {
            self.device.report_drop("imported memory pool", 0, error);
        }
    }
}

impl fmt::Debug for WeakPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakPool")
    }
}

impl fmt::Debug for ImportedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ImportedPool").field(&self.as_raw()).finish()
    }
}
