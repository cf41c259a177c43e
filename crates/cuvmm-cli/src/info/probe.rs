//! Probes of a device's capabilities: each tries an operation on one granule and undoes the
//! operation.
//!
//! If an attribute claims a capability and the call fails (measured for fabric handles), the report
//! shows both.
//!
//! `unsafe` is allowed here for driver calls. Each probe uses only objects that it has created,
//! leaves no queued work on them, and releases them.
#![allow(unsafe_code)]

use std::sync::Arc;

use cuvmm::driver::{
    AccessDesc, AccessFlags, DeviceAddress, DeviceAttribute, Driver, DriverError, EventFlags,
    GranularityKind, HandleTypes, Location, LocationKind, Ordinal, PhysicalHandle, PhysicalProps,
    StreamFlags,
};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(super) struct Capability {
    pub(super) name: String,
    pub(super) there: bool,
    /// Reason why the capability is missing, or a remark if it is present.
    pub(super) reason: Option<String>,
}

/// The export as a handle of the system: the capability's name, and the attribute that promises it.
const EXPORT: (&str, DeviceAttribute) = if cfg!(windows) {
    ("export as Win32 handle", DeviceAttribute::HANDLE_TYPE_WIN32)
} else {
    (
        "export as descriptor",
        DeviceAttribute::HANDLE_TYPE_POSIX_FD,
    )
};

/// Result of a probe, with the reason why the capability is missing.
type Tried = Result<(), String>;

/// Returns the host NUMA node nearest to a device; 0 if the driver does not name one.
pub(super) fn node(driver: &dyn Driver, device: Ordinal) -> i32 {
    let nearest = driver.device_attribute(device, DeviceAttribute::HOST_NUMA_ID);
    nearest.ok().filter(|node| *node >= 0).unwrap_or(0)
}

pub(super) fn all(driver: &Arc<dyn Driver>, device: Ordinal) -> Vec<Capability> {
    let with = |change: fn(&mut PhysicalProps)| {
        let mut props = PhysicalProps::device(device);
        change(&mut props);
        props
    };
    let plain = with(|_| ());
    let of_system = with(|props| props.handle_types = HandleTypes::OS);
    let fabric = with(|props| props.handle_types = HandleTypes::FABRIC);
    let rdma = with(|props| props.rdma_capable = true);
    let packed = with(|props| props.compression = 1);
    let host = PhysicalProps::at(Location::host_numa(node(&**driver, device)));
    let bench = Bench {
        driver: &**driver,
        device,
    };

    let mut found = vec![
        bench.judged(
            "virtual memory",
            Some(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT),
            || bench.mapped(&plain, |_| Ok(())),
        ),
        bench.judged(EXPORT.0, Some(EXPORT.1), || {
            bench.exported(&of_system, HandleTypes::OS)
        }),
        bench.judged(
            "export as fabric handle",
            Some(DeviceAttribute::HANDLE_TYPE_FABRIC),
            || bench.exported(&fabric, HandleTypes::FABRIC),
        ),
        bench.judged(
            "RDMA",
            Some(DeviceAttribute::GPU_DIRECT_RDMA_WITH_VMM),
            || bench.mapped(&rdma, |_| Ok(())),
        ),
        bench.judged("dma-buf", Some(DeviceAttribute::DMA_BUF), || {
            bench.dma_buf(&plain)
        }),
        bench.judged(
            "compression",
            Some(DeviceAttribute::GENERIC_COMPRESSION),
            || bench.compressed(&packed),
        ),
        bench.judged(
            "host memory by node",
            Some(DeviceAttribute::HOST_NUMA_VMM),
            || bench.mapped(&host, |_| Ok(())),
        ),
        bench.judged(
            "managed memory",
            Some(DeviceAttribute::MANAGED_MEMORY),
            || bench.managed(),
        ),
        bench.judged("memory pools", Some(DeviceAttribute::MEMORY_POOLS), || {
            bench.pool()
        }),
        bench.judged("one event for a whole context", None, || {
            bench.context_event()
        }),
    ];
    found.extend(NOT_TRIED.map(|(name, promise)| promised(&**driver, device, name, promise)));
    found
}

/// Tries to map memory at `place` with access for the device. The error is the reason of a failure.
pub(super) fn reaches(driver: &Arc<dyn Driver>, device: Ordinal, place: Location) -> Tried {
    let bench = Bench {
        driver: &**driver,
        device,
    };
    if place.kind == LocationKind::DEVICE {
        let peer = Ordinal(place.id);
        if peer != device && !said(driver.can_access_peer(device, peer))? {
            return Err("the driver says that it cannot be reached".to_owned());
        }
    }
    bench.mapped(&PhysicalProps::at(place), |_| Ok(()))
}

/// Capabilities read from the attribute alone. A probe of concurrent host access ends the program
/// on a device without support, and multicast can disturb other users of shared GPUs.
const NOT_TRIED: [(&str, DeviceAttribute); 4] = [
    (
        "managed memory beside the host",
        DeviceAttribute::CONCURRENT_MANAGED_ACCESS,
    ),
    (
        "managed memory in the host's reach",
        DeviceAttribute::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
    ),
    (
        "host memory by the host's page tables",
        DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
    ),
    ("multicast", DeviceAttribute::MULTICAST),
];

/// Returns a capability by its attribute, with the remark that it was not tried.
fn promised(
    driver: &dyn Driver,
    device: Ordinal,
    name: &str,
    promise: DeviceAttribute,
) -> Capability {
    let (there, reason) = match driver.device_attribute(device, promise) {
        Ok(0) => (false, "the attribute says no".to_owned()),
        Ok(_) => (true, "so the attribute says; not tried".to_owned()),
        Err(error) => (false, error.to_string()),
    };
    Capability {
        name: name.to_owned(),
        there,
        reason: Some(reason),
    }
}

struct Bench<'a> {
    driver: &'a dyn Driver,
    device: Ordinal,
}

fn said<T>(outcome: Result<T, DriverError>) -> Result<T, String> {
    outcome.map_err(|error| error.to_string())
}

impl Bench<'_> {
    /// Runs a probe and compares its result with the attribute that promises the capability.
    fn judged(
        &self,
        name: &str,
        promise: Option<DeviceAttribute>,
        attempt: impl FnOnce() -> Tried,
    ) -> Capability {
        let promised = promise.and_then(|promise| {
            self.driver
                .device_attribute(self.device, promise)
                .ok()
                .map(|value| value != 0)
        });
        let tried = attempt();
        let there = tried.is_ok();
        let reason = match (tried, promised) {
            (Ok(()), Some(false)) => Some("though the attribute says no".to_owned()),
            (Ok(()), _) => None,
            (Err(reason), Some(true)) => Some(format!("{reason}, though the attribute says yes")),
            (Err(reason), _) => Some(reason),
        };
        Capability {
            name: name.to_owned(),
            there,
            reason,
        }
    }

    /// Creates one granule, runs `act` on it, and releases it.
    fn created(
        &self,
        props: &PhysicalProps,
        act: impl FnOnce(PhysicalHandle, u64) -> Tried,
    ) -> Tried {
        let kind = GranularityKind::MINIMUM;
        let size = said(self.driver.allocation_granularity(props, kind))?;
        let handle = said(self.driver.create(size, props, 0))?;
        let acted = act(handle, size);
        // SAFETY: the handle was created above and is released once; `act` has unmapped it.
        let released = said(unsafe { self.driver.release(handle) });
        acted.and(released)
    }

    /// Maps one granule for the device, runs `act`, and unmaps the granule.
    fn mapped(
        &self,
        props: &PhysicalProps,
        act: impl FnOnce((DeviceAddress, u64)) -> Tried,
    ) -> Tried {
        self.created(props, |handle, size| {
            let address = said(self.driver.reserve(size, 0, DeviceAddress::NULL, 0))?;
            let acted = self.placed(handle, address, size, act);
            // SAFETY: the range was reserved above, and nothing is mapped in it any more.
            let freed = said(unsafe { self.driver.free_reservation(address, size) });
            acted.and(freed)
        })
    }

    fn placed(
        &self,
        handle: PhysicalHandle,
        address: DeviceAddress,
        size: u64,
        act: impl FnOnce((DeviceAddress, u64)) -> Tried,
    ) -> Tried {
        // SAFETY: the handle is live, and the range is a whole reservation made by `mapped`.
        said(unsafe { self.driver.map(address, size, 0, handle, 0) })?;
        let access = [AccessDesc {
            location: Location::device(self.device),
            flags: AccessFlags::READ_WRITE,
        }];
        // SAFETY: nothing uses the range yet.
        let granted = said(unsafe { self.driver.set_access(address, size, &access) });
        let acted = granted.and_then(|()| act((address, size)));
        // SAFETY: nothing uses the range any more.
        let unmapped = said(unsafe { self.driver.unmap(address, size) });
        acted.and(unmapped)
    }

    fn exported(&self, props: &PhysicalProps, handle_type: HandleTypes) -> Tried {
        self.created(props, |handle, _| {
            // SAFETY: the handle is live; the exported handle is dropped at once.
            said(unsafe { self.driver.export(handle, handle_type, 0) }).map(drop)
        })
    }

    fn dma_buf(&self, props: &PhysicalProps) -> Tried {
        self.mapped(props, |(address, size)| {
            // SAFETY: the range is mapped; the descriptor is dropped at once.
            said(unsafe { self.driver.dma_buf(self.device, address, size) }).map(drop)
        })
    }

    fn compressed(&self, props: &PhysicalProps) -> Tried {
        self.created(props, |handle, _| {
            // SAFETY: the handle is live.
            let granted = said(unsafe { self.driver.physical_props(handle) })?;
            if granted.compression == props.compression {
                Ok(())
            } else {
                Err("asked for and not granted".to_owned())
            }
        })
    }

    fn managed(&self) -> Tried {
        const GLOBAL: u32 = 1;
        let address = said(self.driver.managed_alloc(self.device, 1 << 20, GLOBAL))?;
        // SAFETY: the memory was allocated above and is not in use.
        said(unsafe { self.driver.free(self.device, address) })
    }

    fn pool(&self) -> Tried {
        let stream = said(
            self.driver
                .stream_create(self.device, StreamFlags::NON_BLOCKING),
        )?;
        // SAFETY: the stream is live, and the memory allocated on it is freed on it.
        let tried = unsafe {
            said(self.driver.alloc_async(self.device, 1 << 20, stream))
                .and_then(|address| said(self.driver.free_async(self.device, address, stream)))
                .and_then(|()| said(self.driver.stream_synchronize(self.device, stream)))
        };
        // SAFETY: the stream was created above and is not used after this call. Work still queued
        // on it after a failed call runs to completion.
        let destroyed = said(unsafe { self.driver.stream_destroy(self.device, stream) });
        tried.and(destroyed)
    }

    fn context_event(&self) -> Tried {
        let event = said(
            self.driver
                .event_create(self.device, EventFlags::DISABLE_TIMING),
        )?;
        // SAFETY: the event is live.
        let tried = said(unsafe { self.driver.context_record_event(self.device, event) });
        // SAFETY: the event was created above; no stream waits for it.
        let destroyed = said(unsafe { self.driver.event_destroy(self.device, event) });
        tried.and(destroyed)
    }
}
