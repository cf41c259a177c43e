//! What a device can be asked about itself, as far as memory is concerned.

use crate::newtype::c_enum;

c_enum! {
    /// A question for `cuDeviceGetAttribute`. The answer is an `int`; where the constant's text
    /// says "whether", 0 is no. Questions without a name here can be asked by number.
    pub struct CUdevice_attribute {
        /// Threads in a warp.
        CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
        /// How many multiprocessors the device has.
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
        /// Whether the device shares the host's memory chips.
        CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
        /// Whether host memory can be mapped for the device.
        CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
        /// Who may hold contexts on the device.
        CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
        /// Whether error correction is on.
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
        /// How many copy engines run beside kernels.
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
        /// Whether host and device share one address space.
        CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
        /// The PCI domain of the device.
        CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
        /// The part of the compute capability before the dot.
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
        /// The part of the compute capability after the dot.
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
        /// Whether streams can have priorities.
        CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED = 78,
        /// Whether managed memory can be allocated.
        CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
        /// Whether the device can use ordinary host memory.
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
        /// Whether host and device may use managed memory at the same time.
        CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
        /// Whether the device reads ordinary host memory through the host's page tables.
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES = 100,
        /// Whether the host can use managed memory that lies on the device without moving it.
        CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST = 101,
        /// Whether reservations, physicals and mappings are supported at all.
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
        /// Whether physical memory can be exported as a file descriptor.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
        /// Whether physical memory can be exported as a Windows NT handle.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED = 104,
        /// Whether physical memory can be exported as a Windows kernel-mode handle.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED = 105,
        /// Whether physical memory can be compressed.
        CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED = 107,
        /// Whether physical memory can be created for network cards to reach directly.
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
        /// Whether the driver's own memory pools are supported.
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
        /// Whether network cards can reach device memory directly.
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116,
        /// The handle types with which a memory pool can be shared, as bits.
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
        /// Whether ranges can be exported as dma-buf.
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
        /// Whether physical memory can be exported to the NVLink fabric. A yes is no promise:
        /// the export itself may still be refused.
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
        /// How the device's memory appears among the host's NUMA nodes.
        CU_DEVICE_ATTRIBUTE_NUMA_CONFIG = 130,
        /// The NUMA node that is the device's memory.
        CU_DEVICE_ATTRIBUTE_NUMA_ID = 131,
        /// Whether multicast objects are supported.
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132,
        /// Whether contexts are shared through MPS.
        CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133,
        /// The host's NUMA node closest to the device, or -1.
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,
        /// Whether physical memory can be created on the host's NUMA nodes.
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
        /// Whether physical memory can be created on the host without naming a node.
        CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145,
    }
}
