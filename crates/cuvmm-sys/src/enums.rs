//! The C enumerations of the memory calls, each an integer with names.

use crate::newtype::c_enum;

c_enum! {
    /// The kind of a location of memory.
    pub struct CUmemLocationType {
        /// No location.
        CU_MEM_LOCATION_TYPE_INVALID = 0x0,
        /// A device, by its number.
        CU_MEM_LOCATION_TYPE_DEVICE = 0x1,
        /// Host memory on any node.
        CU_MEM_LOCATION_TYPE_HOST = 0x2,
        /// One NUMA node of the host, by its number.
        CU_MEM_LOCATION_TYPE_HOST_NUMA = 0x3,
        /// The NUMA node that the calling thread runs on.
        CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 0x4,
    }
}

c_enum! {
    /// The type of a physical allocation.
    pub struct CUmemAllocationType {
        /// No type.
        CU_MEM_ALLOCATION_TYPE_INVALID = 0x0,
        /// Memory that stays where it is.
        CU_MEM_ALLOCATION_TYPE_PINNED = 0x1,
        /// Memory that migrates to the processor that accesses it; only for memory pools.
        CU_MEM_ALLOCATION_TYPE_MANAGED = 0x2,
    }
}

c_enum! {
    /// The ways to share a physical allocation with another process, one bit each. A request may
    /// contain several, an export takes one.
    pub struct CUmemAllocationHandleType {
        /// No sharing.
        CU_MEM_HANDLE_TYPE_NONE = 0x0,
        /// A file descriptor.
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 0x1,
        /// A Windows NT handle.
        CU_MEM_HANDLE_TYPE_WIN32 = 0x2,
        /// A Windows kernel-mode handle.
        CU_MEM_HANDLE_TYPE_WIN32_KMT = 0x4,
        /// Bytes that are valid on every node of one NVLink fabric.
        CU_MEM_HANDLE_TYPE_FABRIC = 0x8,
    }
}

c_enum! {
    /// The access of a location to a mapping.
    pub struct CUmemAccess_flags {
        /// No access.
        CU_MEM_ACCESS_FLAGS_PROT_NONE = 0x0,
        /// Read only.
        CU_MEM_ACCESS_FLAGS_PROT_READ = 0x1,
        /// Read and write.
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 0x3,
    }
}

c_enum! {
    /// The kind of granularity to query.
    pub struct CUmemAllocationGranularity_flags {
        /// The smallest granularity that the driver accepts.
        CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0x0,
        /// The granularity that the driver recommends for speed.
        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 0x1,
    }
}

c_enum! {
    /// The kinds of handle that a range of addresses can be exported as.
    pub struct CUmemRangeHandleType {
        /// A dma-buf file descriptor.
        CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 0x1,
    }
}

c_enum! {
    /// A setting or a counter of a memory pool.
    pub struct CUmemPool_attribute {
        /// `int`: 1 to reuse memory that an event orders before the new user.
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
        /// `int`: 1 to reuse memory whose last user happens to be done.
        CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
        /// `int`: 1 to make the new user wait for the old one.
        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
        /// `cuuint64_t`: bytes to keep when the pool could return memory.
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
        /// `cuuint64_t`: bytes that the pool holds.
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
        /// `cuuint64_t`: the maximum of the bytes that the pool held; writing 0 resets it.
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
        /// `cuuint64_t`: bytes in use.
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
        /// `cuuint64_t`: the maximum of the bytes in use; writing 0 resets it.
        CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,
    }
}

c_enum! {
    /// An attribute of an address.
    pub struct CUpointer_attribute {
        /// `CUcontext`: the context it was allocated in.
        CU_POINTER_ATTRIBUTE_CONTEXT = 1,
        /// `CUmemorytype`: host or device.
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
        /// `CUdeviceptr`: the address as devices use it.
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
        /// `void *`: the address as the host uses it.
        CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
        /// `int`: 1 if copies of this memory are synchronous.
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
        /// `unsigned long long`: a number that no other allocation of this process has.
        CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
        /// `int`: 1 if the memory is managed.
        CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
        /// `int`: the device it belongs to.
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
        /// `int`: 1 if `cuIpcGetMemHandle` would accept it.
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
        /// `CUdeviceptr`: the start of its allocation.
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
        /// `size_t`: the size of its allocation in bytes.
        CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
        /// `int`: 1 if anything is mapped there.
        CU_POINTER_ATTRIBUTE_MAPPED = 13,
        /// `int`: the handle types it can be exported as.
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
        /// `int`: 1 if network cards may access it directly.
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
        /// `int`: the access that the current context's device has.
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
        /// `CUmemoryPool`: the pool it came from.
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,
        /// `size_t`: the size in bytes of the mapping that contains it.
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
        /// `CUdeviceptr`: the start of the mapping that contains it.
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19,
        /// `unsigned long long`: a number that identifies the physical memory behind it.
        CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID = 20,
    }
}

c_enum! {
    /// The kind of memory at an address.
    pub struct CUmemorytype {
        /// Host memory.
        CU_MEMORYTYPE_HOST = 0x01,
        /// Device memory.
        CU_MEMORYTYPE_DEVICE = 0x02,
        /// An array.
        CU_MEMORYTYPE_ARRAY = 0x03,
        /// Unified memory.
        CU_MEMORYTYPE_UNIFIED = 0x04,
    }
}

c_enum! {
    /// Advice to the driver about the use of managed memory.
    pub struct CUmem_advise {
        /// The range is mostly read: several locations may hold copies.
        CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
        /// The range is not mostly read.
        CU_MEM_ADVISE_UNSET_READ_MOSTLY = 2,
        /// The range should be at the location.
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
        /// The range has no preferred location.
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION = 4,
        /// The location will access the range and should keep it mapped.
        CU_MEM_ADVISE_SET_ACCESSED_BY = 5,
        /// The range need not stay mapped for the location.
        CU_MEM_ADVISE_UNSET_ACCESSED_BY = 6,
    }
}

c_enum! {
    /// An attribute of a range of managed memory.
    pub struct CUmem_range_attribute {
        /// `int`: 1 if all of it is advised as mostly read.
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY = 1,
        /// `int`: the device that all of it prefers.
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION = 2,
        /// An array of `int`: the devices that it is kept mapped for.
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY = 3,
        /// `int`: the device that all of it was last prefetched to.
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4,
        /// `CUmemLocationType`: the kind of location that all of it prefers.
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE = 5,
        /// `int`: the number of the location that all of it prefers.
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID = 6,
        /// `CUmemLocationType`: the kind of location that all of it was last prefetched to.
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE = 7,
        /// `int`: the number of the location that all of it was last prefetched to.
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID = 8,
    }
}

c_enum! {
    /// The calls that are refused while a stream is being captured.
    pub struct CUstreamCaptureMode {
        /// Every call that could disturb a capture, in all threads.
        CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
        /// Every call that could disturb a capture that this thread began.
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
        /// No call.
        CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    }
}

c_enum! {
    /// The capture status of a stream.
    pub struct CUstreamCaptureStatus {
        /// The stream is not being captured.
        CU_STREAM_CAPTURE_STATUS_NONE = 0,
        /// The stream is being captured.
        CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
        /// The capture was invalidated and still has to be ended.
        CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
    }
}

c_enum! {
    /// The kind of granularity of a multicast object to query.
    pub struct CUmulticastGranularity_flags {
        /// The smallest granularity that the driver accepts.
        CU_MULTICAST_GRANULARITY_MINIMUM = 0x0,
        /// The granularity that the driver recommends for speed.
        CU_MULTICAST_GRANULARITY_RECOMMENDED = 0x1,
    }
}

c_enum! {
    /// The attributes of a kernel launch.
    pub struct CUlaunchAttributeID {
        /// No attribute.
        CU_LAUNCH_ATTRIBUTE_IGNORE = 0,
        /// `int`: 1 if the kernel may start before the one before it on its stream has ended.
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    }
}
