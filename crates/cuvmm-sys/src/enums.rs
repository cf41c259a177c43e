//! The C enumerations of the memory calls, each an integer with names.

use crate::newtype::c_enum;

c_enum! {
    /// Where memory lies.
    pub struct CUmemLocationType {
        /// No place.
        CU_MEM_LOCATION_TYPE_INVALID = 0x0,
        /// A device, by its number.
        CU_MEM_LOCATION_TYPE_DEVICE = 0x1,
        /// Host memory, wherever.
        CU_MEM_LOCATION_TYPE_HOST = 0x2,
        /// One NUMA node of the host, by its number.
        CU_MEM_LOCATION_TYPE_HOST_NUMA = 0x3,
        /// The NUMA node that the calling thread runs on.
        CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 0x4,
    }
}

c_enum! {
    /// The kind of a physical allocation.
    pub struct CUmemAllocationType {
        /// No kind.
        CU_MEM_ALLOCATION_TYPE_INVALID = 0x0,
        /// Memory that stays where it is.
        CU_MEM_ALLOCATION_TYPE_PINNED = 0x1,
        /// Memory that moves to whoever touches it; only for memory pools.
        CU_MEM_ALLOCATION_TYPE_MANAGED = 0x2,
    }
}

c_enum! {
    /// How a physical allocation can be passed to another process. One bit each: a request may
    /// name several, an export names one.
    pub struct CUmemAllocationHandleType {
        /// Not at all.
        CU_MEM_HANDLE_TYPE_NONE = 0x0,
        /// As a file descriptor.
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 0x1,
        /// As a Windows NT handle.
        CU_MEM_HANDLE_TYPE_WIN32 = 0x2,
        /// As a Windows kernel-mode handle.
        CU_MEM_HANDLE_TYPE_WIN32_KMT = 0x4,
        /// As bytes that mean something to every node of one NVLink fabric.
        CU_MEM_HANDLE_TYPE_FABRIC = 0x8,
    }
}

c_enum! {
    /// What a location may do with a mapping.
    pub struct CUmemAccess_flags {
        /// Nothing.
        CU_MEM_ACCESS_FLAGS_PROT_NONE = 0x0,
        /// Read.
        CU_MEM_ACCESS_FLAGS_PROT_READ = 0x1,
        /// Read and write.
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 0x3,
    }
}

c_enum! {
    /// Which granularity is asked for.
    pub struct CUmemAllocationGranularity_flags {
        /// The smallest that works.
        CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0x0,
        /// The one that the driver recommends for speed.
        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 0x1,
    }
}

c_enum! {
    /// What a range of addresses can be exported as.
    pub struct CUmemRangeHandleType {
        /// A dma-buf file descriptor.
        CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 0x1,
    }
}

c_enum! {
    /// A setting or a counter of a memory pool.
    pub struct CUmemPool_attribute {
        /// `int`: reuse memory that an event orders before the new user.
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
        /// `int`: reuse memory whose last user happens to be done.
        CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
        /// `int`: make the new user wait for the old one.
        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
        /// `cuuint64_t`: bytes to keep when the pool could give memory back.
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
        /// `cuuint64_t`: bytes that the pool holds.
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
        /// `cuuint64_t`: the most bytes that the pool held; writing 0 starts anew.
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
        /// `cuuint64_t`: bytes in use.
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
        /// `cuuint64_t`: the most bytes that were in use; writing 0 starts anew.
        CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,
    }
}

c_enum! {
    /// What to ask about an address.
    pub struct CUpointer_attribute {
        /// `CUcontext`: the context it was allocated in.
        CU_POINTER_ATTRIBUTE_CONTEXT = 1,
        /// `CUmemorytype`: host or device.
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
        /// `CUdeviceptr`: the address as devices see it.
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
        /// `void *`: the address as the host sees it.
        CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
        /// `int`: whether copies that touch it wait.
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
        /// `unsigned long long`: a number that no other allocation of this process has.
        CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
        /// `int`: whether it is managed memory.
        CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
        /// `int`: the device it belongs to.
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
        /// `int`: whether `cuIpcGetMemHandle` would take it.
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
        /// `CUdeviceptr`: where its allocation starts.
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
        /// `size_t`: the bytes of its allocation.
        CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
        /// `int`: whether anything is mapped there.
        CU_POINTER_ATTRIBUTE_MAPPED = 13,
        /// `int`: the handle types it can be exported as.
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
        /// `int`: whether network cards may reach it directly.
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
        /// `int`: the access that the current context's device has.
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
        /// `CUmemoryPool`: the pool it came from.
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,
        /// `size_t`: the bytes of the mapping it lies in.
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
        /// `CUdeviceptr`: where the mapping it lies in starts.
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19,
        /// `unsigned long long`: a number for the physical memory below it.
        CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID = 20,
    }
}

c_enum! {
    /// What kind of memory an address points at.
    pub struct CUmemorytype {
        /// The host's.
        CU_MEMORYTYPE_HOST = 0x01,
        /// A device's.
        CU_MEMORYTYPE_DEVICE = 0x02,
        /// An array's.
        CU_MEMORYTYPE_ARRAY = 0x03,
        /// Unified memory.
        CU_MEMORYTYPE_UNIFIED = 0x04,
    }
}

c_enum! {
    /// What the driver is told about the use of managed memory.
    pub struct CUmem_advise {
        /// Mostly read: copies may stand in several places.
        CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
        /// Not mostly read after all.
        CU_MEM_ADVISE_UNSET_READ_MOSTLY = 2,
        /// Should lie there.
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
        /// May lie anywhere again.
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION = 4,
        /// Will be used from there: keep it mapped for that user.
        CU_MEM_ADVISE_SET_ACCESSED_BY = 5,
        /// Need not stay mapped for that user.
        CU_MEM_ADVISE_UNSET_ACCESSED_BY = 6,
    }
}

c_enum! {
    /// What to ask about a range of managed memory.
    pub struct CUmem_range_attribute {
        /// `int`: whether all of it is advised as mostly read.
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY = 1,
        /// `int`: the device that all of it prefers.
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION = 2,
        /// An array of `int`: the devices it is kept mapped for.
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY = 3,
        /// `int`: where all of it was last prefetched to.
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4,
        /// `CUmemLocationType`: the kind of place that all of it prefers.
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE = 5,
        /// `int`: the number of the place that all of it prefers.
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID = 6,
        /// `CUmemLocationType`: the kind of place that all of it was last prefetched to.
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE = 7,
        /// `int`: the number of the place that all of it was last prefetched to.
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID = 8,
    }
}

c_enum! {
    /// Which calls are refused while a stream is being captured.
    pub struct CUstreamCaptureMode {
        /// Every call that could disturb a capture, in all threads.
        CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
        /// The same, for captures that this thread began.
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
        /// None.
        CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    }
}

c_enum! {
    /// Whether a stream is being captured.
    pub struct CUstreamCaptureStatus {
        /// It is not.
        CU_STREAM_CAPTURE_STATUS_NONE = 0,
        /// It is.
        CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
        /// It was, and something broke the capture; it still has to be ended.
        CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
    }
}

c_enum! {
    /// Which granularity of a multicast object is asked for.
    pub struct CUmulticastGranularity_flags {
        /// The smallest that works.
        CU_MULTICAST_GRANULARITY_MINIMUM = 0x0,
        /// The one that the driver recommends for speed.
        CU_MULTICAST_GRANULARITY_RECOMMENDED = 0x1,
    }
}
