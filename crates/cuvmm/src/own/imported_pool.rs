//! Memory pools of other processes.
//!
//! `unsafe` is used to import and to destroy. The pool is owned here and destroyed once, after its
//! last allocation.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cuvmm_driver::{Call, Exported, MemPoolHandle, MemPoolTicket};

use super::pool_memory::PoolMemory;
use super::processes::GivingProcess;
use crate::device::Device;
use crate::error::{CallError, MemoryError};

/// A memory pool of another process. Clones are the same pool. Nothing can be allocated from it.
///
/// The import ends when the last clone and the last
/// [`ImportedAllocation`](super::ImportedAllocation) are dropped; the other process's pool goes on.
///
/// [`PoolImporter`](crate::share::PoolImporter) imports pools and allocations that came through
/// [`share`](crate::share).
#[derive(Clone)]
pub struct ImportedPool {
    shared: Arc<Shared>,
}

/// An imported pool without ownership.
#[derive(Debug, Default)]
pub(crate) struct WeakPool(Weak<Shared>);

impl WeakPool {
    pub(crate) fn is(&self, pool: &ImportedPool) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&pool.shared))
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }

    pub(crate) fn upgrade(&self) -> Option<ImportedPool> {
        let shared = self.0.upgrade()?;
        Some(ImportedPool { shared })
    }
}

struct Shared {
    device: Device,
    handle: MemPoolHandle,
    live: Mutex<Live>,
    /// Notified when an allocation was freed, or its free failed.
    freed: Condvar,
}

impl ImportedPool {
    /// Imports a pool that another process, or this one, [exported](super::MemPool::export)
    /// (`cuMemPoolImportFromShareableHandle`). The handle may be closed afterwards.
    ///
    /// # Errors
    /// [`MemoryError`] when the driver is older than CUDA 11.2 or refuses the handle.
    #[doc(alias = "cuMemPoolImportFromShareableHandle")]
    pub fn import(device: &Device, handle: &Exported) -> Result<Self, MemoryError> {
        let source = handle.as_source();
        let call = Call::MemPoolImportFromShareableHandle;
        let handle = device
            // SAFETY: the handle is borrowed, so it is open for the call.
            .call(call, |driver, device| unsafe {
                driver.mem_pool_import(device, source, source.handle_type(), 0)
            })
            .map_err(MemoryError::ImportPool)?;
        let device = device.clone();
        Ok(Self {
            shared: Arc::new(Shared {
                device,
                handle,
                live: Mutex::default(),
                freed: Condvar::new(),
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

    fn live(&self) -> MutexGuard<'_, Live> {
        let live = self.shared.live.lock();
        live.unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts another user of an allocation, and calls `import` if it is not imported. If it is
    /// being freed, waits for that first, at most `patience`.
    pub(super) fn join(
        &self,
        ticket: &MemPoolTicket,
        giver: Option<&Arc<dyn GivingProcess>>,
        patience: Duration,
        import: impl FnOnce() -> Result<PoolMemory, MemoryError>,
    ) -> Result<Arc<PoolMemory>, MemoryError> {
        let mut live = self.await_freed(ticket, patience)?;
        if let Some(known) = live.iter_mut().find(|entry| entry.ticket == *ticket) {
            known.users += 1;
            return Ok(Arc::clone(&known.memory));
        }
        let memory = Arc::new(import()?);
        live.push(Entry {
            ticket: *ticket,
            memory: Arc::clone(&memory),
            giver: giver.cloned(),
            users: 1,
            kept: false,
        });
        Ok(memory)
    }

    /// Waits at most `patience` until an allocation is not being freed.
    fn await_freed(
        &self,
        ticket: &MemPoolTicket,
        patience: Duration,
    ) -> Result<MutexGuard<'_, Live>, MemoryError> {
        let is_freed = |live: &mut Live| live.iter().any(|e| e.ticket == *ticket && e.users == 0);
        let freed = &self.shared.freed;
        let waited = freed.wait_timeout_while(self.live(), patience, is_freed);
        let (mut live, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if is_freed(&mut live) {
            let cause = CallError::InUse;
            return Err(MemoryError::ImportPointer(cause));
        }
        Ok(live)
    }

    /// Waits at most `patience` until an allocation could be imported without waiting.
    pub(crate) fn await_importable(
        &self,
        ticket: &MemPoolTicket,
        patience: Duration,
    ) -> Result<(), MemoryError> {
        self.await_freed(ticket, patience).map(drop)
    }

    /// Ends a use of an allocation. Returns `true` if it was the last use: the caller frees the
    /// memory and calls [`freed`](Self::freed).
    pub(super) fn leave(&self, memory: &Arc<PoolMemory>) -> bool {
        let mut live = self.live();
        let mut entries = live.iter_mut();
        let Some(entry) = entries.find(|entry| entry.is_of(memory)) else {
            return true;
        };
        entry.users = entry.users.saturating_sub(1);
        entry.users == 0
    }

    /// Lets an allocation be imported again after its last use. Returns the process that gave it
    /// first, which keeps it while that value lives.
    pub(super) fn freed(&self, memory: &Arc<PoolMemory>) -> Option<Arc<dyn GivingProcess>> {
        let mut live = self.live();
        let place = live.iter().position(|entry| entry.is_of(memory));
        let entry = place.map(|place| live.swap_remove(place));
        drop(live);
        self.shared.freed.notify_all();
        entry?.giver
    }

    /// Keeps an allocation and its pool imported until the process ends, with the use that could
    /// not end. Returns `false` if it was kept before.
    pub(super) fn keep(&self, memory: &Arc<PoolMemory>) -> bool {
        let mut live = self.live();
        let Some(entry) = live.iter_mut().find(|entry| entry.is_of(memory)) else {
            return false;
        };
        if std::mem::replace(&mut entry.kept, true) {
            return false;
        }
        std::mem::forget(self.clone());
        true
    }

    /// Takes back the end of the last use of an allocation whose free failed.
    pub(super) fn stay(&self, memory: &Arc<PoolMemory>) {
        let mut live = self.live();
        if let Some(entry) = live.iter_mut().find(|entry| entry.is_of(memory)) {
            entry.users = 1;
        }
        drop(live);
        self.shared.freed.notify_all();
    }
}

/// The imported allocations of a pool. The driver may give two imports of an allocation one
/// address, so each is imported once.
type Live = Vec<Entry>;

struct Entry {
    ticket: MemPoolTicket,
    memory: Arc<PoolMemory>,
    /// The process that gave the allocation first. A later giver may not own it, and does not keep
    /// it.
    giver: Option<Arc<dyn GivingProcess>>,
    /// 0 while the allocation is being freed.
    users: usize,
    /// One of the users never ends.
    kept: bool,
}

impl Entry {
    fn is_of(&self, memory: &Arc<PoolMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let handle = self.handle;
        let destroyed = self
            .device
            // SAFETY: the handle is owned here and destroyed once, after all imported from the
            // pool.
            .give_back(Call::MemPoolDestroy, |driver, device| unsafe {
                driver.mem_pool_destroy(device, handle)
            });
        self.device.report_end("imported memory pool", 0, destroyed);
    }
}

impl fmt::Debug for ImportedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ImportedPool").field(&self.as_raw()).finish()
    }
}
