//! The attributes of a device that concern memory.

use crate::newtype::c_enum;

c_enum! {
    /// An attribute for `cuDeviceGetAttribute`.
    ///
    /// The value is an `int`. Attributes documented as "1 if" are 0 otherwise. Attributes without a
    /// name here can be queried by number.
    pub struct CUdevice_attribute {
        /// Threads in a warp.
        CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
        /// The number of multiprocessors.
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
        /// 1 if the device shares the host's memory chips.
        CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
        /// 1 if host memory can be mapped for the device.
        CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
        /// The compute mode, which limits the contexts on the device.
        CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
        /// 1 if error correction is on.
        CU_DEVICE_ATTRIBUTE_ECC_ENABLED = 32,
        /// The PCI bus of the device.
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
        /// The PCI slot of the device.
        CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
        /// Peak memory clock in kHz.
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
        /// Memory bus width in bits.
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
        /// Bytes of L2 cache.
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
        /// The number of copy engines that run beside kernels.
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
        /// 1 if host and device share one address space.
        CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
        /// The PCI domain of the device.
        CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
        /// The major number of the compute capability.
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
        /// The minor number of the compute capability.
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
        /// 1 if streams can have priorities.
        CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED = 78,
        /// 1 if managed memory can be allocated.
        CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
        /// 1 if the device can use ordinary host memory.
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
        /// 1 if host and device may use managed memory at the same time.
        CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
        /// 1 if the device reads ordinary host memory through the host's page tables.
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES = 100,
        /// 1 if the host can access managed memory on the device without migrating it.
        CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST = 101,
        /// 1 if reservations, physicals and mappings are supported at all.
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
        /// 1 if physical memory can be exported as a file descriptor.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
        /// 1 if physical memory can be exported as a Windows NT handle.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED = 104,
        /// 1 if physical memory can be exported as a Windows kernel-mode handle.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED = 105,
        /// 1 if physical memory can be compressed.
        CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED = 107,
        /// 1 if physical memory can be created that network cards access directly.
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
        /// 1 if the driver's own memory pools are supported.
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
        /// 1 if network cards can access device memory directly.
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116,
        /// The handle types with which a memory pool can be shared, as bits.
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
        /// 1 if ranges can be exported as dma-buf.
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
        /// 1 if physical memory can be exported to the NVLink fabric. Even then an export may be
        /// refused.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
        /// The way the device's memory appears among the host's NUMA nodes.
        CU_DEVICE_ATTRIBUTE_NUMA_CONFIG = 130,
        /// The NUMA node of the device's memory.
        CU_DEVICE_ATTRIBUTE_NUMA_ID = 131,
        /// 1 if multicast objects are supported.
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132,
        /// 1 if contexts are shared through MPS.
        CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133,
        /// The host's NUMA node closest to the device, or -1.
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,
        /// 1 if physical memory can be created on the host's NUMA nodes.
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
        /// 1 if physical memory can be created on the host without naming a node.
        CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145,
    }
}
