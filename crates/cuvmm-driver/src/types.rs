//! The words of the trait: addresses, handles, properties, flags.
//!
//! All of them are newtypes over what the driver takes, so that a value the header forbids can
//! still be said (the conformance suite says them) and a value the driver invents later is kept.
//! Nothing here checks or rounds.

use std::fmt;
use std::os::fd::OwnedFd;

use bitflags::bitflags;

/// The number of a device as the driver counts them, from 0.
///
/// Signed, because that is what the driver takes; -1 is a question the driver must answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ordinal(pub i32);

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// An address in the space that device and host share (`CUdeviceptr`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The null address, which as a hint means "anywhere".
    pub const NULL: Self = Self(0);

    /// This address `bytes` further, or nothing when that leaves 64 bits.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// How many bytes this address lies behind `base`, or nothing when it lies before it.
    #[must_use]
    pub const fn offset_from(self, base: Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }

    /// Whether this is the null address.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
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
            /// The handle that names nothing (for a stream: the legacy default stream).
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
    /// Names one physical allocation. Handles are counted by the driver: each `create`, `retain`
    /// or `import` wants one `release`.
    PhysicalHandle,
    "CUmemGenericAllocationHandle"
);
handle!(
    /// Names a stream of one device's context.
    StreamHandle,
    "CUstream"
);

impl StreamHandle {
    /// The legacy default stream of the current context, which [`NULL`](Self::NULL) names too
    /// (`CU_STREAM_LEGACY`).
    pub const LEGACY: Self = Self(1);
    /// The default stream of the calling thread: another stream on each thread
    /// (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Self = Self(2);
}

handle!(
    /// Names an event of one device's context.
    EventHandle,
    "CUevent"
);
handle!(
    /// Names a captured graph.
    GraphHandle,
    "CUgraph"
);
handle!(
    /// Names a graph that has been made ready to launch.
    GraphExecHandle,
    "CUgraphExec"
);

/// What kind of place a [`Location`] names (`CUmemLocationType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocationKind(pub i32);

impl LocationKind {
    /// No place.
    pub const INVALID: Self = Self(0);
    /// A device; the id is its ordinal.
    pub const DEVICE: Self = Self(1);
    /// Host memory, the id is ignored.
    pub const HOST: Self = Self(2);
    /// Host memory of one NUMA node; the id is the node.
    pub const HOST_NUMA: Self = Self(3);
    /// Host memory of the NUMA node that the calling thread runs on; the id is ignored.
    pub const HOST_NUMA_CURRENT: Self = Self(4);
}

/// Where memory lies, or who is given access to it.
#[doc(alias = "CUmemLocation")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// What the id counts.
    pub kind: LocationKind,
    /// Device ordinal or NUMA node.
    pub id: i32,
}

impl Location {
    /// The memory of a device.
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

    /// Host memory of one NUMA node.
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
    /// The kinds of handle that a physical allocation can be passed on by, chosen at creation.
    #[doc(alias = "CUmemAllocationHandleType")]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct HandleTypes: u32 {
        /// A file descriptor.
        const POSIX_FD = 0x1;
        /// A Win32 NT handle.
        const WIN32 = 0x2;
        /// A Win32 D3DKMT handle.
        const WIN32_KMT = 0x4;
        /// A fabric handle, which reaches other nodes.
        const FABRIC = 0x8;
        const _ = !0;
    }
}

/// The type of a physical allocation (`CUmemAllocationType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocationType(pub i32);

impl AllocationType {
    /// No type.
    pub const INVALID: Self = Self(0);
    /// Stays where it was created: the only type that `create` takes.
    pub const PINNED: Self = Self(1);
    /// Managed memory; for memory pools of CUDA 13 only.
    pub const MANAGED: Self = Self(2);
}

/// What a physical allocation is made of and may be used for.
#[doc(alias = "CUmemAllocationProp")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PhysicalProps {
    /// [`AllocationType::PINNED`].
    pub allocation_type: AllocationType,
    /// The handle types it can be exported as.
    pub handle_types: HandleTypes,
    /// Where it lies.
    pub location: Location,
    /// Ask for compressible memory (`CU_MEM_ALLOCATION_COMP_GENERIC`, 1); 0 for none.
    pub compression: u8,
    /// Ask for memory that RDMA devices can reach.
    pub rdma_capable: bool,
    /// Usage bits (`CU_MEM_CREATE_USAGE_*`); 0 for none.
    pub usage: u16,
}

impl PhysicalProps {
    /// Plain memory of a device.
    #[must_use]
    pub const fn device(ordinal: Ordinal) -> Self {
        Self::at(Location::device(ordinal))
    }

    /// Plain memory at a location.
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

/// Which granularity is asked for (`CUmemAllocationGranularity_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GranularityKind(pub i32);

impl GranularityKind {
    /// The least multiple that works.
    pub const MINIMUM: Self = Self(0);
    /// The multiple that performs best.
    pub const RECOMMENDED: Self = Self(1);
}

/// A right of access (`CUmemAccess_flags`).
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

/// One right for one place.
#[doc(alias = "CUmemAccessDesc")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccessDesc {
    /// Who.
    pub location: Location,
    /// What.
    pub flags: AccessFlags,
}

/// A device's memory by the driver's own count, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free for this process to take, as far as the driver knows; other processes race for it.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

/// What `export` hands out.
#[derive(Debug)]
#[non_exhaustive]
pub enum Exported {
    /// For [`HandleTypes::POSIX_FD`]: a close-on-exec descriptor that keeps the memory alive.
    Fd(OwnedFd),
    /// For [`HandleTypes::FABRIC`]: 64 bytes that name the memory across nodes.
    Fabric([u8; 64]),
}

/// What `import` is given.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ImportSource {
    /// A descriptor by value. It stays the caller's.
    Fd(i32),
    /// A fabric handle.
    Fabric([u8; 64]),
}

/// A device attribute (`CUdevice_attribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceAttribute(pub i32);

impl DeviceAttribute {
    /// Managed memory is supported.
    pub const MANAGED_MEMORY: Self = Self(83);
    /// Host and device may touch managed memory at the same time.
    pub const CONCURRENT_MANAGED_ACCESS: Self = Self(89);
    /// The device reaches pageable host memory.
    pub const PAGEABLE_MEMORY_ACCESS: Self = Self(88);
    /// The device reaches pageable host memory through the host's page tables.
    pub const PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: Self = Self(100);
    /// The host touches managed memory that lies on the device without moving it.
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
    /// Physicals can be made reachable for RDMA.
    pub const GPU_DIRECT_RDMA_WITH_VMM: Self = Self(110);
    /// Memory pools (`cuMemAllocAsync`) are supported.
    pub const MEMORY_POOLS: Self = Self(115);
    /// A mapped range can be exported as a dma-buf.
    pub const DMA_BUF: Self = Self(124);
    /// Physicals can be exported as fabric handles, says the driver; the call may still refuse.
    pub const HANDLE_TYPE_FABRIC: Self = Self(128);
    /// Multicast objects are supported.
    pub const MULTICAST: Self = Self(132);
    /// The host NUMA node closest to the device.
    pub const HOST_NUMA_ID: Self = Self(134);
    /// Physicals can be created on host NUMA nodes.
    pub const HOST_NUMA_VMM: Self = Self(141);
}

/// A pointer attribute (`CUpointer_attribute`) whose value fits 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PointerAttribute(pub i32);

impl PointerAttribute {
    /// What the memory is: 1 host, 2 device, 4 unified (`CUmemorytype`).
    pub const MEMORY_TYPE: Self = Self(2);
    /// A number that is unique for each allocation of the process.
    pub const BUFFER_ID: Self = Self(7);
    /// Whether the memory is managed.
    pub const IS_MANAGED: Self = Self(8);
    /// The ordinal of the device the memory belongs to.
    pub const DEVICE_ORDINAL: Self = Self(9);
    /// First address of the mapped range.
    pub const RANGE_START_ADDR: Self = Self(11);
    /// Size of the mapped range in bytes.
    pub const RANGE_SIZE: Self = Self(12);
    /// The handle types the allocation can be exported as.
    pub const ALLOWED_HANDLE_TYPES: Self = Self(14);
}

/// Advice for managed memory (`CUmem_advise`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Advice(pub i32);

impl Advice {
    /// Mostly read: copies may lie in several places.
    pub const SET_READ_MOSTLY: Self = Self(1);
    /// Undo [`Advice::SET_READ_MOSTLY`].
    pub const UNSET_READ_MOSTLY: Self = Self(2);
    /// Prefer to keep it at the location.
    pub const SET_PREFERRED_LOCATION: Self = Self(3);
    /// Undo [`Advice::SET_PREFERRED_LOCATION`].
    pub const UNSET_PREFERRED_LOCATION: Self = Self(4);
    /// The location will access it: keep it mapped there.
    pub const SET_ACCESSED_BY: Self = Self(5);
    /// Undo [`Advice::SET_ACCESSED_BY`].
    pub const UNSET_ACCESSED_BY: Self = Self(6);
}

/// A question about a managed range (`CUmem_range_attribute`) whose answer is one integer. Who it
/// is accessed by, number 3, is a list and has a
/// [method of its own](crate::Driver::range_accessed_by).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RangeAttribute(pub i32);

impl RangeAttribute {
    /// 1 when the whole range is read mostly.
    pub const READ_MOSTLY: Self = Self(1);
    /// Ordinal of the preferred device, -1 host, -2 none or not the same for the whole range.
    pub const PREFERRED_LOCATION: Self = Self(2);
    /// Ordinal of the device it was last prefetched to, -1 host, -2 none.
    pub const LAST_PREFETCH_LOCATION: Self = Self(4);
    /// The [`LocationKind`] that the whole range prefers; [`LocationKind::INVALID`] when there is
    /// none or not the same. Tells NUMA nodes from the host. CUDA 12.2.
    pub const PREFERRED_LOCATION_TYPE: Self = Self(5);
    /// The device or NUMA node that the whole range prefers, if its kind is one of the two.
    /// CUDA 12.2.
    pub const PREFERRED_LOCATION_ID: Self = Self(6);
    /// The [`LocationKind`] that the whole range was last prefetched to. CUDA 12.2.
    pub const LAST_PREFETCH_LOCATION_TYPE: Self = Self(7);
    /// The device or NUMA node that the whole range was last prefetched to, if its kind is one of
    /// the two. CUDA 12.2.
    pub const LAST_PREFETCH_LOCATION_ID: Self = Self(8);
}

bitflags! {
    /// How a stream is made (`CUstream_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct StreamFlags: u32 {
        /// Takes no part in the legacy default stream's implicit ordering.
        const NON_BLOCKING = 0x1;
        const _ = !0;
    }
}

bitflags! {
    /// How an event is made (`CUevent_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct EventFlags: u32 {
        /// A synchronising thread sleeps instead of spinning.
        const BLOCKING_SYNC = 0x1;
        /// Keeps no times: cheaper.
        const DISABLE_TIMING = 0x2;
        const _ = !0;
    }
}

/// How strictly a thread's calls are held to what a capture allows (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CaptureMode(pub i32);

impl CaptureMode {
    /// Calls that may break a capture are refused while any thread captures.
    pub const GLOBAL: Self = Self(0);
    /// Calls that may break a capture are refused while this thread captures.
    pub const THREAD_LOCAL: Self = Self(1);
    /// Nothing is refused.
    pub const RELAXED: Self = Self(2);
}

/// Whether a stream records instead of running (`CUstreamCaptureStatus`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CaptureStatus(pub i32);

impl CaptureStatus {
    /// The stream runs its work.
    pub const NONE: Self = Self(0);
    /// The stream records its work.
    pub const ACTIVE: Self = Self(1);
    /// The stream recorded, but the capture was broken.
    pub const INVALIDATED: Self = Self(2);
}
