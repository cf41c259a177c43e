//! Making memory pools of the driver.

use cuvmm_driver::{
    Call, CudaVersion, DeviceAttribute, HandleTypes, Location, LocationKind, MemPoolProps,
};

use super::MemPool;
use super::kept_pool;
use super::mem_pool::Kind;
use super::physical::creatable_as;
use crate::device::{Device, KeptPool};
use crate::error::{ArgumentError, CallError, MemoryError};

/// The version that introduced the maximum of a memory pool.
const MAXIMUM_SINCE: CudaVersion = CudaVersion::new(12, 2);

/// Options of a [`MemPool`].
#[derive(Debug)]
pub struct MemPoolBuilder<'a> {
    device: &'a Device,
    props: MemPoolProps,
}

impl MemPoolBuilder<'_> {
    /// Sets the maximum of the bytes that the pool holds (CUDA 12.2). By default the driver
    /// chooses. The driver rounds it up: on an H200 to whole steps of 32 MiB.
    ///
    /// An allocation beyond the maximum fails as if the device had no more memory.
    #[must_use]
    pub const fn maximum(mut self, bytes: u64) -> Self {
        self.props.maximum = bytes;
        self
    }

    /// Sets the handle types that the pool may be shared as; none by default, and fixed at
    /// creation. See [`AllocationOffer`](crate::share::AllocationOffer). A process that was given
    /// one allocation can read and write the whole pool, later allocations included. By NVIDIA's
    /// documentation the driver releases no memory of such a pool before the pool ends; on an H200
    /// it does, as with other pools.
    #[must_use]
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.props.handle_types = types;
        self
    }

    /// Places the memory on the host instead of the device (CUDA 13). At first only the host's
    /// processors have access.
    #[must_use]
    pub const fn on_host(mut self) -> Self {
        self.props.location = Location::HOST;
        self
    }

    /// Places the memory on a host NUMA node instead of the device (CUDA 12.2). At first only the
    /// host's processors have access.
    #[must_use]
    pub const fn on_host_numa(mut self, node: i32) -> Self {
        self.props.location = Location::host_numa(node);
        self
    }

    /// Creates the pool (`cuMemPoolCreate`; before it `cuDeviceGetAttribute`, and
    /// `cuDriverGetVersion` if there is a maximum). Takes a pool that is
    /// [kept](Device::kept_memory_pools) instead, if one has the same options.
    ///
    /// # Errors
    /// [`MemoryError`] when the device has no memory pools, the driver is older than CUDA 11.2 (or
    /// 12.2, if there is a maximum), or the driver refuses.
    #[doc(alias = "cuMemPoolCreate")]
    pub fn create(self) -> Result<MemPool, MemoryError> {
        let Self { device, props } = self;
        let location = props.location;
        if location.kind == LocationKind::HOST_NUMA && location.id < 0 {
            return Err(ArgumentError::NoSuch {
                what: "NUMA node",
                number: location.id.into(),
            }
            .into());
        }
        creatable_as(props.handle_types)?;
        let attribute = DeviceAttribute::MEMORY_POOLS;
        let supported = device.call(Call::DeviceGetAttribute, |driver, device| {
            driver.device_attribute(device, attribute)
        })?;
        if supported == 0 {
            return Err(unsupported(device, "memory pools (attribute 115)"));
        }
        if props.maximum != 0 {
            let version = device.call(Call::DriverGetVersion, |driver, _| driver.version())?;
            if version < MAXIMUM_SINCE {
                let what = "memory pools with a maximum, which need CUDA 12.2";
                return Err(unsupported(device, what));
            }
        }
        if let Some(kept) = MemPool::of_kept(device, props)? {
            return Ok(kept);
        }
        let handle = device
            .call(Call::MemPoolCreate, |driver, device| {
                driver.mem_pool_create(device, &props)
            })
            .map_err(|cause| MemoryError::CreatePool { location, cause })?;
        Ok(MemPool::with_handle(device, handle, props, Kind::Own))
    }
}

fn unsupported(device: &Device, what: &'static str) -> MemoryError {
    let device = device.location();
    MemoryError::NotSupported { device, what }
}

impl MemPool {
    /// Creates a pool of a device's memory with default settings.
    ///
    /// # Errors
    /// Those of [`MemPoolBuilder::create`].
    pub fn new(device: &Device) -> Result<Self, MemoryError> {
        Self::builder(device).create()
    }

    /// Returns a builder for a pool.
    #[must_use]
    pub fn builder(device: &Device) -> MemPoolBuilder<'_> {
        MemPoolBuilder {
            device,
            props: MemPoolProps::device(device.ordinal()),
        }
    }

    /// Makes a new pool of an empty kept one, if any (`cuMemPoolGetAttribute`,
    /// `cuMemPoolSetAttribute`, and `cuMemPoolSetAccess` if other devices had access).
    fn of_kept(device: &Device, props: MemPoolProps) -> Result<Option<Self>, CallError> {
        let taken = device.take_kept_pool(&props, |handle| {
            // If the driver does not say, a pool is created instead. Another library may have made
            // the kept pool current again.
            kept_pool::reserved(device, handle).is_ok_and(|held| held == 0)
                && Self::current_of(device).is_ok_and(|current| current != handle)
        });
        let Some(KeptPool {
            handle, granted, ..
        }) = taken
        else {
            return Ok(None);
        };
        let pool = Self::with_handle(device, handle, props, Kind::Own);
        // A failure returns the pool to the kept ones.
        pool.note_current();
        *pool.granted() = granted;
        pool.reset_peaks()?;
        if let Err(error) = pool.reset_access() {
            log!(debug, %error, "a kept memory pool is not used again");
            pool.note_changed();
            return Ok(None);
        }
        Ok(Some(pool))
    }
}
