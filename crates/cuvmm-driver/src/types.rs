//! The types of the trait: addresses, handles, properties, flags.
//!
//! They are newtypes over the driver's integers. A value that the header does not define can still
//! be passed to the driver (the conformance suite does so), and a value that a later driver
//! introduces is kept. Nothing here checks or rounds.

use std::fmt;
use std::ops::{Add, Sub};

use bitflags::bitflags;

/// The number of a device, counted by the driver from 0.
///
/// Signed, as in the driver's ABI; the driver itself rejects -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ordinal(pub i32);

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// An address in the space that device and host share (`CUdeviceptr`).
///
/// `+` and `-` wrap around at 64 bits and never panic, so that `base + (address - base)` is
/// `address`. [`checked_add`](Self::checked_add) and [`offset_from`](Self::offset_from) tell when
/// a result does not fit.
///
/// ```
/// use cuvmm_driver::DeviceAddress;
///
/// let base = DeviceAddress(0x1000);
/// assert_eq!(base + 0x20, DeviceAddress(0x1020));
/// assert_eq!((base + 0x20) - base, 0x20);
/// assert!(base.is_aligned_to(0x1000) && !(base + 8).is_aligned_to(16));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The null address, which as a hint means "anywhere".
    pub const NULL: Self = Self(0);

    /// Returns the address `bytes` after this one, or `None` if it does not fit in 64 bits.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// Returns the distance in bytes from `base` to this address, or `None` if this address is
    /// lower.
    #[must_use]
    pub const fn offset_from(self, base: Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }

    /// Returns `true` if the address is a multiple of `alignment` bytes; of 0 bytes only the null
    /// address is.
    #[must_use]
    #[doc(alias = "alignment")]
    pub const fn is_aligned_to(self, alignment: u64) -> bool {
        self.0.is_multiple_of(alignment)
    }

    /// Returns `true` if this is the null address.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

impl Add<u64> for DeviceAddress {
    type Output = Self;

    /// Returns the address `bytes` after this one, wrapping around at 64 bits.
    fn add(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl Sub for DeviceAddress {
    type Output = u64;

    /// Returns the distance in bytes from `base` to this address, wrapping around at 64 bits.
    fn sub(self, base: Self) -> u64 {
        self.0.wrapping_sub(base.0)
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $c:literal) => {
        $(#[$doc])*
        #[doc(alias = $c)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl $name {
            /// The null handle. For a stream, it names the legacy default stream.
            pub const NULL: Self = Self(0);
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
    };
}

handle!(
    /// The handle of one physical allocation.
    ///
    /// The driver counts references: each `create`, `retain` or `import` needs one `release`.
    PhysicalHandle,
    "CUmemGenericAllocationHandle"
);
handle!(
    /// The handle of a stream of one device's context.
    StreamHandle,
    "CUstream"
);

impl StreamHandle {
    /// The legacy default stream of the current context, which [`NULL`](Self::NULL) names too
    /// (`CU_STREAM_LEGACY`).
    pub const LEGACY: Self = Self(1);
    /// The default stream of the calling thread; each thread has its own (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Self = Self(2);
}

handle!(
    /// The handle of an event of one device's context.
    EventHandle,
    "CUevent"
);
handle!(
    /// The handle of a captured graph.
    GraphHandle,
    "CUgraph"
);
handle!(
    /// The handle of an instantiated graph, which can be launched.
    GraphExecHandle,
    "CUgraphExec"
);
handle!(
    /// The handle of a memory pool of the driver.
    MemPoolHandle,
    "CUmemoryPool"
);

/// The kind of a [`Location`] (`CUmemLocationType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocationKind(pub i32);

impl LocationKind {
    /// No location.
    pub const INVALID: Self = Self(0);
    /// A device; the id is its ordinal.
    pub const DEVICE: Self = Self(1);
    /// Host memory; the id is ignored.
    pub const HOST: Self = Self(2);
    /// Host memory of one NUMA node; the id is the node.
    pub const HOST_NUMA: Self = Self(3);
    /// Host memory of the NUMA node that the calling thread runs on; the id is ignored.
    pub const HOST_NUMA_CURRENT: Self = Self(4);
}

/// A location of memory, or one that is granted access to memory.
#[doc(alias = "CUmemLocation")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// The kind, which determines the meaning of the id.
    pub kind: LocationKind,
    /// The device ordinal or NUMA node.
    pub id: i32,
}

impl Location {
    /// Returns the location of a device.
    #[must_use]
    pub const fn device(ordinal: Ordinal) -> Self {
        Self {
            kind: LocationKind::DEVICE,
            id: ordinal.0,
        }
    }

    /// Host memory.
    pub const HOST: Self = Self {
        kind: LocationKind::HOST,
        id: 0,
    };

    /// Returns the location of one NUMA node of the host.
    #[must_use]
    pub const fn host_numa(node: i32) -> Self {
        Self {
            kind: LocationKind::HOST_NUMA,
            id: node,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            LocationKind::DEVICE => write!(f, "device {}", self.id),
            LocationKind::HOST => f.write_str("host"),
            LocationKind::HOST_NUMA => write!(f, "host NUMA node {}", self.id),
            LocationKind::HOST_NUMA_CURRENT => f.write_str("current host NUMA node"),
            LocationKind(other) => write!(f, "location type {other} id {}", self.id),
        }
    }
}

bitflags! {
    /// The handle types that a physical allocation can be exported as, chosen at creation.
    #[doc(alias = "CUmemAllocationHandleType")]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct HandleTypes: u32 {
        /// A file descriptor.
        const POSIX_FD = 0x1;
        /// A Win32 NT handle.
        const WIN32 = 0x2;
        /// A Win32 D3DKMT handle, which nothing closes. The driver may know it; no [`Exported`](crate::Exported)
        /// holds one.
        const WIN32_KMT = 0x4;
        /// A fabric handle, which can be imported on other nodes.
        const FABRIC = 0x8;
        const _ = !0;
    }
}

impl fmt::Display for HandleTypes {
    /// Writes the names, as in `POSIX_FD | FABRIC`; `none` for none, and unknown bits in
    /// hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_empty() {
            true => f.write_str("none"),
            false => bitflags::parser::to_writer(self, f),
        }
    }
}

/// The type of a physical allocation (`CUmemAllocationType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocationType(pub i32);

impl AllocationType {
    /// No type.
    pub const INVALID: Self = Self(0);
    /// Pinned memory: it stays where it was created. The only type that `create` accepts.
    pub const PINNED: Self = Self(1);
    /// Managed memory, only for memory pools of CUDA 13.
    pub const MANAGED: Self = Self(2);
}

/// The properties of a physical allocation.
#[doc(alias = "CUmemAllocationProp")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PhysicalProps {
    /// The allocation type, [`AllocationType::PINNED`].
    pub allocation_type: AllocationType,
    /// The handle types that the allocation can be exported as.
    pub handle_types: HandleTypes,
    /// The location of the memory.
    pub location: Location,
    /// The requested compression: 1 for `CU_MEM_ALLOCATION_COMP_GENERIC`, 0 for none.
    pub compression: u8,
    /// `true` requests memory that RDMA devices can access.
    pub rdma_capable: bool,
    /// Usage bits (`CU_MEM_CREATE_USAGE_*`); 0 for none.
    pub usage: u16,
}

impl PhysicalProps {
    /// Returns the properties of plain memory of a device.
    #[must_use]
    pub const fn device(ordinal: Ordinal) -> Self {
        Self::at(Location::device(ordinal))
    }

    /// Returns the properties of plain memory at a location.
    #[must_use]
    pub const fn at(location: Location) -> Self {
        Self {
            allocation_type: AllocationType::PINNED,
            handle_types: HandleTypes::empty(),
            location,
            compression: 0,
            rdma_capable: false,
            usage: 0,
        }
    }
}

/// The properties of a memory pool.
#[doc(alias = "CUmemPoolProps")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemPoolProps {
    /// The allocation type: [`AllocationType::PINNED`], or since CUDA 13 also
    /// [`AllocationType::MANAGED`].
    pub allocation_type: AllocationType,
    /// The handle types that the pool can be exported as. Since CUDA 11.3.
    pub handle_types: HandleTypes,
    /// The location of the memory.
    pub location: Location,
    /// The maximum of the bytes that the pool holds; 0 leaves it to the driver. Since CUDA 12.2.
    pub maximum: u64,
    /// Usage bits; 0 for none.
    pub usage: u16,
}

impl MemPoolProps {
    /// Returns the properties of a plain pool of a device's memory.
    #[must_use]
    pub const fn device(ordinal: Ordinal) -> Self {
        Self::at(Location::device(ordinal))
    }

    /// Returns the properties of a plain pool of memory at a location: pinned, not exportable, and
    /// without a maximum of its own.
    #[must_use]
    pub const fn at(location: Location) -> Self {
        Self {
            allocation_type: AllocationType::PINNED,
            handle_types: HandleTypes::empty(),
            location,
            maximum: 0,
            usage: 0,
        }
    }
}

/// An attribute of a memory pool (`CUmemPool_attribute`).
///
/// The value is a `u64` here. The driver's `int` attributes are 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemPoolAttribute(pub i32);

impl MemPoolAttribute {
    /// 1 (the default) if memory freed on another stream may be reused where an event orders the
    /// allocation behind the free.
    pub const REUSE_FOLLOW_EVENT_DEPENDENCIES: Self = Self(1);
    /// 1 (the default) if memory freed on another stream may be reused when the free is done.
    pub const REUSE_ALLOW_OPPORTUNISTIC: Self = Self(2);
    /// 1 (the default) if the driver may make the allocating stream wait for a free on another
    /// stream.
    pub const REUSE_ALLOW_INTERNAL_DEPENDENCIES: Self = Self(3);
    /// The bytes that the pool may hold after a synchronization; 0 by default.
    pub const RELEASE_THRESHOLD: Self = Self(4);
    /// The bytes that the pool holds. Read-only.
    pub const RESERVED_MEM_CURRENT: Self = Self(5);
    /// The maximum of the bytes that the pool held. Can be set to 0, which starts it anew.
    pub const RESERVED_MEM_HIGH: Self = Self(6);
    /// The bytes in use. Read-only.
    pub const USED_MEM_CURRENT: Self = Self(7);
    /// The maximum of the bytes in use. Can be set to 0, which starts it anew.
    pub const USED_MEM_HIGH: Self = Self(8);
}

/// The data by which another process imports an allocation of a shared memory pool. It is not a
/// handle and keeps nothing alive.
#[doc(alias = "CUmemPoolPtrExportData")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemPoolTicket(pub [u8; 64]);

/// The kind of granularity to query (`CUmemAllocationGranularity_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GranularityKind(pub i32);

impl GranularityKind {
    /// The smallest granularity that the driver accepts.
    pub const MINIMUM: Self = Self(0);
    /// The granularity with the best performance.
    pub const RECOMMENDED: Self = Self(1);
}

/// An access to memory (`CUmemAccess_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AccessFlags(pub i32);

impl AccessFlags {
    /// No access.
    pub const NONE: Self = Self(0);
    /// Read only.
    pub const READ: Self = Self(1);
    /// Read and write.
    pub const READ_WRITE: Self = Self(3);
}

/// The access of one location.
#[doc(alias = "CUmemAccessDesc")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccessDesc {
    /// The location that is given access.
    pub location: Location,
    /// The access it is given.
    pub flags: AccessFlags,
}

/// A device's memory as counted by the driver, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that this process could allocate now, as far as the driver knows. Other processes
    /// compete for them.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
}

/// A device attribute (`CUdevice_attribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceAttribute(pub i32);

impl DeviceAttribute {
    /// Managed memory is supported.
    pub const MANAGED_MEMORY: Self = Self(83);
    /// Host and device may access managed memory at the same time.
    pub const CONCURRENT_MANAGED_ACCESS: Self = Self(89);
    /// The device can access pageable host memory.
    pub const PAGEABLE_MEMORY_ACCESS: Self = Self(88);
    /// The device accesses pageable host memory through the host's page tables.
    pub const PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: Self = Self(100);
    /// The host can access managed memory on the device without migrating it.
    pub const DIRECT_MANAGED_MEM_ACCESS_FROM_HOST: Self = Self(101);
    /// Virtual memory management (`cuMemAddressReserve` and the rest) is supported.
    pub const VIRTUAL_MEMORY_MANAGEMENT: Self = Self(102);
    /// Physicals can be exported as file descriptors.
    pub const HANDLE_TYPE_POSIX_FD: Self = Self(103);
    /// Physicals can be exported as Win32 handles.
    pub const HANDLE_TYPE_WIN32: Self = Self(104);
    /// Physicals can be exported as Win32 KMT handles.
    pub const HANDLE_TYPE_WIN32_KMT: Self = Self(105);
    /// Compressible memory is supported.
    pub const GENERIC_COMPRESSION: Self = Self(107);
    /// Physicals can be made accessible for RDMA.
    pub const GPU_DIRECT_RDMA_WITH_VMM: Self = Self(110);
    /// Memory pools (`cuMemAllocAsync`) are supported.
    pub const MEMORY_POOLS: Self = Self(115);
    /// A mapped range can be exported as a dma-buf.
    pub const DMA_BUF: Self = Self(124);
    /// Physicals can be exported as fabric handles. The driver may still refuse the export.
    pub const HANDLE_TYPE_FABRIC: Self = Self(128);
    /// Multicast objects are supported.
    pub const MULTICAST: Self = Self(132);
    /// The host NUMA node closest to the device.
    pub const HOST_NUMA_ID: Self = Self(134);
    /// Physicals can be created on host NUMA nodes.
    pub const HOST_NUMA_VMM: Self = Self(141);
}

/// A pointer attribute (`CUpointer_attribute`) whose value fits in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PointerAttribute(pub i32);

impl PointerAttribute {
    /// The memory type: 1 host, 2 device, 4 unified (`CUmemorytype`).
    pub const MEMORY_TYPE: Self = Self(2);
    /// A number that is unique for each allocation in the process.
    pub const BUFFER_ID: Self = Self(7);
    /// 1 if the memory is managed, 0 if not.
    pub const IS_MANAGED: Self = Self(8);
    /// The ordinal of the device that the memory belongs to.
    pub const DEVICE_ORDINAL: Self = Self(9);
    /// The first address of the reservation or of the allocation.
    pub const RANGE_START_ADDR: Self = Self(11);
    /// The size of the reservation or of the allocation in bytes.
    pub const RANGE_SIZE: Self = Self(12);
    /// The handle types that the allocation can be exported as.
    pub const ALLOWED_HANDLE_TYPES: Self = Self(14);
    /// 1 if network cards can access the memory (GPUDirect RDMA), 0 if not.
    pub const IS_GPU_DIRECT_RDMA_CAPABLE: Self = Self(15);
    /// The handle of the memory pool that the allocation came from.
    pub const MEMPOOL_HANDLE: Self = Self(17);
    /// The size in bytes of the mapping, or of the memory from the device that the allocation is a
    /// part of.
    pub const MAPPING_SIZE: Self = Self(18);
    /// The first address of the mapping, or of the memory from the device that the allocation is a
    /// part of.
    pub const MAPPING_BASE_ADDR: Self = Self(19);
}

/// Advice for managed memory (`CUmem_advise`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Advice(pub i32);

impl Advice {
    /// The range is mostly read: several locations may hold copies.
    pub const SET_READ_MOSTLY: Self = Self(1);
    /// Undoes [`Advice::SET_READ_MOSTLY`].
    pub const UNSET_READ_MOSTLY: Self = Self(2);
    /// The range should stay at the location.
    pub const SET_PREFERRED_LOCATION: Self = Self(3);
    /// Undoes [`Advice::SET_PREFERRED_LOCATION`].
    pub const UNSET_PREFERRED_LOCATION: Self = Self(4);
    /// The location will access the range and should keep it mapped.
    pub const SET_ACCESSED_BY: Self = Self(5);
    /// Undoes [`Advice::SET_ACCESSED_BY`].
    pub const UNSET_ACCESSED_BY: Self = Self(6);
}

/// An attribute of a managed range (`CUmem_range_attribute`) whose value is one integer.
///
/// Attribute 3, the locations that access the range, is a list;
/// [`Driver::range_accessed_by`](crate::Driver::range_accessed_by) returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RangeAttribute(pub i32);

impl RangeAttribute {
    /// 1 if the whole range is read-mostly.
    pub const READ_MOSTLY: Self = Self(1);
    /// The ordinal of the preferred device, -1 for the host, -2 if there is none or it differs
    /// within the range.
    pub const PREFERRED_LOCATION: Self = Self(2);
    /// The ordinal of the device that the range was last prefetched to, -1 for the host, -2 for
    /// none.
    pub const LAST_PREFETCH_LOCATION: Self = Self(4);
    /// The [`LocationKind`] that the whole range prefers; [`LocationKind::INVALID`] if there is
    /// none or it differs within the range. Distinguishes NUMA nodes from the host. Since CUDA
    /// 12.2.
    pub const PREFERRED_LOCATION_TYPE: Self = Self(5);
    /// The device or NUMA node that the whole range prefers, if its kind is one of these. Since
    /// CUDA 12.2.
    pub const PREFERRED_LOCATION_ID: Self = Self(6);
    /// The [`LocationKind`] that the whole range was last prefetched to. Since CUDA 12.2.
    pub const LAST_PREFETCH_LOCATION_TYPE: Self = Self(7);
    /// The device or NUMA node that the whole range was last prefetched to, if its kind is one of
    /// these. Since CUDA 12.2.
    pub const LAST_PREFETCH_LOCATION_ID: Self = Self(8);
}

bitflags! {
    /// The flags of a new stream (`CUstream_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct StreamFlags: u32 {
        /// The stream takes no part in the implicit ordering with the legacy default stream.
        const NON_BLOCKING = 0x1;
        const _ = !0;
    }
}

bitflags! {
    /// The flags of a new event (`CUevent_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct EventFlags: u32 {
        /// A synchronizing thread sleeps instead of spinning.
        const BLOCKING_SYNC = 0x1;
        /// The event records no time, which makes it cheaper.
        const DISABLE_TIMING = 0x2;
        const _ = !0;
    }
}

/// The strictness with which calls of a thread are refused during a capture
/// (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CaptureMode(pub i32);

impl CaptureMode {
    /// Calls that could invalidate a capture are refused while any thread captures.
    pub const GLOBAL: Self = Self(0);
    /// Calls that could invalidate a capture are refused while this thread captures.
    pub const THREAD_LOCAL: Self = Self(1);
    /// No call is refused.
    pub const RELAXED: Self = Self(2);
}

/// The capture status of a stream (`CUstreamCaptureStatus`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CaptureStatus(pub i32);

impl CaptureStatus {
    /// The stream runs its work.
    pub const NONE: Self = Self(0);
    /// The stream records its work.
    pub const ACTIVE: Self = Self(1);
    /// The stream was recording, and its capture has been invalidated.
    pub const INVALIDATED: Self = Self(2);
}
