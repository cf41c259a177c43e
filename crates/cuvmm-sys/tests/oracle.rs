//! A comparison with another binding of the same interface: cudarc's, which bindgen made from
//! NVIDIA's headers.

use core::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys::{self as theirs, CUmemAllocationHandleType_enum as Handle};
use cuvmm_sys::{self as ours, CUresult};

/// Compares named values of an enumeration.
macro_rules! same_values {
    ($ours:ident = $theirs:ident { $($name:ident),* $(,)? }) => {{
        assert_eq!(size_of::<ours::$ours>(), size_of::<theirs::$theirs>());
        assert_eq!(align_of::<ours::$ours>(), align_of::<theirs::$theirs>());
        $(
            assert_eq!(
                i64::from(ours::$ours::$name.0),
                theirs::$theirs::$name as i64,
                stringify!($name),
            );
        )*
        [$(stringify!($name)),*].len()
    }};
}

#[test]
fn result_codes() {
    let compared = same_values!(
        CUresult = cudaError_enum {
            CUDA_SUCCESS,
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_NOT_INITIALIZED,
            CUDA_ERROR_DEINITIALIZED,
            CUDA_ERROR_PROFILER_DISABLED,
            CUDA_ERROR_PROFILER_NOT_INITIALIZED,
            CUDA_ERROR_PROFILER_ALREADY_STARTED,
            CUDA_ERROR_PROFILER_ALREADY_STOPPED,
            CUDA_ERROR_STUB_LIBRARY,
            CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER,
            CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUDA_ERROR_MULTICAST_RESOURCE_FULL,
            CUDA_ERROR_NO_DEVICE,
            CUDA_ERROR_INVALID_DEVICE,
            CUDA_ERROR_DEVICE_NOT_LICENSED,
            CUDA_ERROR_INVALID_IMAGE,
            CUDA_ERROR_INVALID_CONTEXT,
            CUDA_ERROR_CONTEXT_ALREADY_CURRENT,
            CUDA_ERROR_MAP_FAILED,
            CUDA_ERROR_UNMAP_FAILED,
            CUDA_ERROR_ARRAY_IS_MAPPED,
            CUDA_ERROR_ALREADY_MAPPED,
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            CUDA_ERROR_ALREADY_ACQUIRED,
            CUDA_ERROR_NOT_MAPPED,
            CUDA_ERROR_NOT_MAPPED_AS_ARRAY,
            CUDA_ERROR_NOT_MAPPED_AS_POINTER,
            CUDA_ERROR_ECC_UNCORRECTABLE,
            CUDA_ERROR_UNSUPPORTED_LIMIT,
            CUDA_ERROR_CONTEXT_ALREADY_IN_USE,
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            CUDA_ERROR_INVALID_PTX,
            CUDA_ERROR_INVALID_GRAPHICS_CONTEXT,
            CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
            CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
            CUDA_ERROR_JIT_COMPILATION_DISABLED,
            CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY,
            CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC,
            CUDA_ERROR_CONTAINED,
            CUDA_ERROR_INSUFFICIENT_LOADER_VERSION,
            CUDA_ERROR_INVALID_SOURCE,
            CUDA_ERROR_FILE_NOT_FOUND,
            CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
            CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
            CUDA_ERROR_OPERATING_SYSTEM,
            CUDA_ERROR_INVALID_HANDLE,
            CUDA_ERROR_ILLEGAL_STATE,
            CUDA_ERROR_LOSSY_QUERY,
            CUDA_ERROR_NOT_FOUND,
            CUDA_ERROR_NOT_READY,
            CUDA_ERROR_ILLEGAL_ADDRESS,
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUDA_ERROR_LAUNCH_TIMEOUT,
            CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING,
            CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
            CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
            CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
            CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUDA_ERROR_ASSERT,
            CUDA_ERROR_TOO_MANY_PEERS,
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUDA_ERROR_MISALIGNED_ADDRESS,
            CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUDA_ERROR_INVALID_PC,
            CUDA_ERROR_LAUNCH_FAILED,
            CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
            CUDA_ERROR_TENSOR_MEMORY_LEAK,
            CUDA_ERROR_NOT_PERMITTED,
            CUDA_ERROR_NOT_SUPPORTED,
            CUDA_ERROR_SYSTEM_NOT_READY,
            CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
            CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
            CUDA_ERROR_MPS_CONNECTION_FAILED,
            CUDA_ERROR_MPS_RPC_FAILURE,
            CUDA_ERROR_MPS_SERVER_NOT_READY,
            CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
            CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED,
            CUDA_ERROR_MPS_CLIENT_TERMINATED,
            CUDA_ERROR_CDP_NOT_SUPPORTED,
            CUDA_ERROR_CDP_VERSION_MISMATCH,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUDA_ERROR_STREAM_CAPTURE_MERGE,
            CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            CUDA_ERROR_CAPTURED_EVENT,
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
            CUDA_ERROR_TIMEOUT,
            CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
            CUDA_ERROR_EXTERNAL_DEVICE,
            CUDA_ERROR_INVALID_CLUSTER_SIZE,
            CUDA_ERROR_FUNCTION_NOT_LOADED,
            CUDA_ERROR_INVALID_RESOURCE_TYPE,
            CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
            CUDA_ERROR_KEY_ROTATION,
            CUDA_ERROR_STREAM_DETACHED,
            CUDA_ERROR_GRAPH_RECAPTURE_FAILURE,
            CUDA_ERROR_FABRIC_NOT_READY,
            CUDA_ERROR_UNKNOWN,
        }
    );
    assert_eq!(compared, CUresult::KNOWN.len());
}

#[test]
fn enumerations() {
    let compared = same_values!(
        CUmemLocationType = CUmemLocationType_enum {
            CU_MEM_LOCATION_TYPE_INVALID,
            CU_MEM_LOCATION_TYPE_DEVICE,
            CU_MEM_LOCATION_TYPE_HOST,
            CU_MEM_LOCATION_TYPE_HOST_NUMA,
            CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT,
        }
    );
    assert_eq!(compared, ours::CUmemLocationType::KNOWN.len());
    let compared = same_values!(
        CUmemAllocationType = CUmemAllocationType_enum {
            CU_MEM_ALLOCATION_TYPE_INVALID,
            CU_MEM_ALLOCATION_TYPE_PINNED,
            CU_MEM_ALLOCATION_TYPE_MANAGED,
        }
    );
    assert_eq!(compared, ours::CUmemAllocationType::KNOWN.len());
    // This enumeration is a set of bits, for which bindgen makes a newtype.
    for (mine, yours) in [
        (
            ours::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            Handle::CU_MEM_HANDLE_TYPE_NONE,
        ),
        (
            ours::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Handle::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        ),
        (
            ours::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_WIN32,
            Handle::CU_MEM_HANDLE_TYPE_WIN32,
        ),
        (
            ours::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_WIN32_KMT,
            Handle::CU_MEM_HANDLE_TYPE_WIN32_KMT,
        ),
        (
            ours::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
            Handle::CU_MEM_HANDLE_TYPE_FABRIC,
        ),
    ] {
        assert_eq!(i64::from(mine.0), i64::from(yours.0), "{mine}");
    }
    let compared = same_values!(
        CUmemAccess_flags = CUmemAccess_flags_enum {
            CU_MEM_ACCESS_FLAGS_PROT_NONE,
            CU_MEM_ACCESS_FLAGS_PROT_READ,
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    );
    assert_eq!(compared, ours::CUmemAccess_flags::KNOWN.len());
    let compared = same_values!(
        CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags_enum {
            CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        }
    );
    assert_eq!(
        compared,
        ours::CUmemAllocationGranularity_flags::KNOWN.len()
    );
    let compared = same_values!(
        CUmemRangeHandleType = CUmemRangeHandleType_enum {
            CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
        }
    );
    assert_eq!(compared, ours::CUmemRangeHandleType::KNOWN.len());
    let compared = same_values!(
        CUmemPool_attribute = CUmemPool_attribute_enum {
            CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
            CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
            CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
            CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        }
    );
    assert_eq!(compared, ours::CUmemPool_attribute::KNOWN.len());
    let compared = same_values!(
        CUpointer_attribute = CUpointer_attribute_enum {
            CU_POINTER_ATTRIBUTE_CONTEXT,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
            CU_POINTER_ATTRIBUTE_HOST_POINTER,
            CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
            CU_POINTER_ATTRIBUTE_BUFFER_ID,
            CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CU_POINTER_ATTRIBUTE_MAPPED,
            CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
            CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
            CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
            CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
        }
    );
    assert_eq!(compared, ours::CUpointer_attribute::KNOWN.len());
    let compared = same_values!(
        CUmemorytype = CUmemorytype_enum {
            CU_MEMORYTYPE_HOST,
            CU_MEMORYTYPE_DEVICE,
            CU_MEMORYTYPE_ARRAY,
            CU_MEMORYTYPE_UNIFIED,
        }
    );
    assert_eq!(compared, ours::CUmemorytype::KNOWN.len());
    let compared = same_values!(
        CUmem_advise = CUmem_advise_enum {
            CU_MEM_ADVISE_SET_READ_MOSTLY,
            CU_MEM_ADVISE_UNSET_READ_MOSTLY,
            CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
            CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
            CU_MEM_ADVISE_SET_ACCESSED_BY,
            CU_MEM_ADVISE_UNSET_ACCESSED_BY,
        }
    );
    assert_eq!(compared, ours::CUmem_advise::KNOWN.len());
    let compared = same_values!(
        CUmem_range_attribute = CUmem_range_attribute_enum {
            CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
            CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
            CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
            CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE,
            CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID,
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID,
        }
    );
    assert_eq!(compared, ours::CUmem_range_attribute::KNOWN.len());
    let compared = same_values!(
        CUstreamCaptureMode = CUstreamCaptureMode_enum {
            CU_STREAM_CAPTURE_MODE_GLOBAL,
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    );
    assert_eq!(compared, ours::CUstreamCaptureMode::KNOWN.len());
    let compared = same_values!(
        CUstreamCaptureStatus = CUstreamCaptureStatus_enum {
            CU_STREAM_CAPTURE_STATUS_NONE,
            CU_STREAM_CAPTURE_STATUS_ACTIVE,
            CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        }
    );
    assert_eq!(compared, ours::CUstreamCaptureStatus::KNOWN.len());
    let compared = same_values!(
        CUmulticastGranularity_flags = CUmulticastGranularity_flags_enum {
            CU_MULTICAST_GRANULARITY_MINIMUM,
            CU_MULTICAST_GRANULARITY_RECOMMENDED,
        }
    );
    assert_eq!(compared, ours::CUmulticastGranularity_flags::KNOWN.len());
    let compared = same_values!(
        CUdevice_attribute = CUdevice_attribute_enum {
            CU_DEVICE_ATTRIBUTE_WARP_SIZE,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            CU_DEVICE_ATTRIBUTE_INTEGRATED,
            CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
            CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
            CU_DEVICE_ATTRIBUTE_ECC_ENABLED,
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
            CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
            CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
            CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
            CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
            CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
            CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
            CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_NUMA_CONFIG,
            CU_DEVICE_ATTRIBUTE_NUMA_ID,
            CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_MPS_ENABLED,
            CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
            CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        }
    );
    assert_eq!(compared, ours::CUdevice_attribute::KNOWN.len());
}

/// Compares size, alignment and field offsets of a structure.
macro_rules! same_layout {
    ($name:ident { $($($ours:ident).+ = $($theirs:ident).+),* $(,)? }) => {
        assert_eq!(size_of::<ours::$name>(), size_of::<theirs::$name>(), stringify!($name));
        assert_eq!(align_of::<ours::$name>(), align_of::<theirs::$name>(), stringify!($name));
        $(
            assert_eq!(
                offset_of!(ours::$name, $($ours).+),
                offset_of!(theirs::$name, $($theirs).+),
                stringify!($name: $($ours).+),
            );
        )*
    };
}

#[test]
fn structures() {
    // The other binding follows the header, in which `id` has been a member of an anonymous union
    // since CUDA 13.2; hence the field's name.
    same_layout!(CUmemLocation { kind = type_, id = __bindgen_anon_1 });
    same_layout!(CUmemAllocationProp {
        kind = type_,
        requestedHandleTypes = requestedHandleTypes,
        location = location,
        win32HandleMetaData = win32HandleMetaData,
        allocFlags = allocFlags,
        allocFlags.compressionType = allocFlags.compressionType,
        allocFlags.gpuDirectRDMACapable = allocFlags.gpuDirectRDMACapable,
        allocFlags.usage = allocFlags.usage,
        allocFlags.reserved = allocFlags.reserved,
    });
    same_layout!(CUmemAccessDesc { location = location, flags = flags });
    same_layout!(CUmemPoolProps {
        allocType = allocType,
        handleTypes = handleTypes,
        location = location,
        win32SecurityAttributes = win32SecurityAttributes,
        maxSize = maxSize,
        usage = usage,
    });
    same_layout!(CUmemPoolPtrExportData { reserved = reserved });
    same_layout!(CUmemFabricHandle { data = data });
    same_layout!(CUipcMemHandle { reserved = reserved });
    same_layout!(CUuuid { bytes = bytes });
    same_layout!(CUmulticastObjectProp {
        numDevices = numDevices,
        size = size,
        handleTypes = handleTypes,
        flags = flags,
    });
    same_layout!(CUdevice {});
    same_layout!(CUdeviceptr {});
    same_layout!(CUmemGenericAllocationHandle {});
    same_layout!(CUstream {});
    same_layout!(CUhostFn {});
}

#[test]
fn the_table_of_facts_says_what_the_types_are() {
    let location = ours::abi::LAYOUTS
        .iter()
        .find(|layout| layout.name == "CUmemAllocationProp")
        .expect("in the table");
    assert_eq!((location.size, location.align), (32, 8));
    let usage = location
        .fields
        .iter()
        .find(|field| field.path == "allocFlags.usage")
        .expect("in the table");
    assert_eq!((usage.offset, usage.size), (26, 2));
    assert!(
        ours::abi::constants()
            .iter()
            .any(|constant| constant.name == "CUDA_ERROR_UNKNOWN" && constant.value == 999)
    );
}
