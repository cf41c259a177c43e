//! Host memory prepared in advance for relocations.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};

use cuvmm_driver::{Location, PhysicalProps};

use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
use crate::own::Physical;
use crate::sync::{Mutex, MutexGuard};

/// Extents of host memory that are created, pinned and cleared in advance, for regions that
/// [relocate](super::Region::relocate) memory to the host. On the host of an H200, preparing 1 GiB
/// takes 200 to 340 ms, and copying it 20 ms.
///
/// Clones share the same extents, and regions of one driver can share them: an extent that one
/// region has left can be used by another. The extents keep their contents meanwhile. Each is
/// overwritten whole when memory moves there, so no region shows old contents, unless a
/// [relocation](super::Region::relocate) fails and the state of its copy is unknown.
#[derive(Clone)]
pub struct HostExtents {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    props: PhysicalProps,
    most: u64,
    ready: Mutex<Ready>,
}

#[derive(Default)]
struct Ready {
    by_size: BTreeMap<u64, Vec<Physical>>,
    bytes: u64,
}

impl HostExtents {
    /// Creates an empty store for at most `most` bytes of host memory of one NUMA node, created
    /// through a device. No extent exists before [`prepare`](Self::prepare).
    #[must_use]
    pub fn new(device: &Device, node: i32, most: u64) -> Self {
        let shared = Shared {
            device: device.clone(),
            props: PhysicalProps::at(Location::host_numa(node)),
            most,
            ready: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Creates extents of `size` bytes (`cuMemCreate`) until `count` of that size are ready: one
    /// for each extent to move. Can be called on another thread while regions relocate memory.
    ///
    /// # Errors
    /// [`MemoryError`] when the size is not a power of two granules, the extents would exceed the
    /// limit, the node does not exist, or the driver has no such memory. Extents created until then
    /// stay ready.
    pub fn prepare(&self, size: u64, count: u64) -> Result<(), MemoryError> {
        let shared = &*self.shared;
        ArgumentError::extent(size, shared.device.granularity())?;
        let missing = {
            let ready = shared.lock();
            let there = ready.by_size.get(&size).map_or(0, Vec::len);
            let missing = count.saturating_sub(there as u64);
            let bytes = missing.saturating_mul(size).saturating_add(ready.bytes);
            ArgumentError::at_most("bytes of host extents", bytes, shared.most)?;
            missing
        };
        for _ in 0..missing {
            let physical = Physical::builder(&shared.device, size);
            let physical = physical.with_props(shared.props).create()?;
            self.keep(physical, &shared.props);
        }
        Ok(())
    }

    /// Returns the bytes that are ready.
    #[must_use]
    pub fn ready(&self) -> u64 {
        self.shared.lock().bytes
    }

    /// Releases extents (`cuMemRelease`), the largest first, until at most `keep` bytes are ready.
    /// Returns the bytes released.
    pub fn trim(&self, keep: u64) -> u64 {
        let mut given = vec![];
        let mut ready = self.shared.lock();
        while ready.bytes > keep {
            let Some(size) = ready.by_size.last_key_value().map(|(&size, _)| size) else {
                break;
            };
            given.extend(ready.take(size));
        }
        drop(ready);
        given.iter().map(Physical::size).sum()
    }

    pub(super) fn take(&self, size: u64, props: &PhysicalProps) -> Option<Physical> {
        if *props != self.shared.props {
            return None;
        }
        self.shared.lock().take(size)
    }

    /// Keeps an unmapped extent if it has these properties, fits within the limit, and is neither
    /// shared nor exported.
    pub(super) fn keep(&self, physical: Physical, props: &PhysicalProps) {
        let shared = &*self.shared;
        if *props != shared.props || physical.is_shared() || physical.is_exported() {
            return;
        }
        let mut ready = self.shared.lock();
        let size = physical.size();
        if ready.bytes.saturating_add(size) <= shared.most {
            ready.bytes += size;
            ready.by_size.entry(size).or_default().push(physical);
            return;
        }
        // The physical is released without the lock.
        drop(ready);
    }

    /// Checks that a device can map memory created through this store's device.
    pub(super) fn check(&self, device: &Device) -> Result<(), ArgumentError> {
        self.shared.device.check_driver(device)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ready {
    fn take(&mut self, size: u64) -> Option<Physical> {
        let of_size = self.by_size.get_mut(&size)?;
        let physical = of_size.pop();
        if of_size.is_empty() {
            self.by_size.remove(&size);
        }
        self.bytes -= physical.as_ref().map_or(0, Physical::size);
        physical
    }
}

impl fmt::Debug for HostExtents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostExtents")
            .field("location", &self.shared.props.location)
            .field("most", &self.shared.most)
            .field("ready", &self.ready())
            .finish_non_exhaustive()
    }
}
