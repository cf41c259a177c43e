//! The structures that cross the border, laid out as C lays them out on 64-bit Linux.
//!
//! Fields keep their C names, with `type` written `kind`. Reserved bytes must be zero, so every
//! structure that has them has a constructor or a `Default`.

use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

use crate::{CUmemAccess_flags, CUmemAllocationHandleType, CUmemAllocationType, CUmemLocationType};

/// A place for memory: a device, the host, or one of its NUMA nodes.
///
/// From CUDA 13.2 on the header makes `id` one arm of a union; the integer stays where it was.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemLocation {
    /// What kind of place (`type` in C).
    pub kind: CUmemLocationType,
    /// The number of the device or node; 0 where the kind takes no number.
    pub id: c_int,
}

/// What a physical allocation is to be, for `cuMemCreate`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAllocationProp {
    /// The kind of memory (`type` in C).
    pub kind: CUmemAllocationType,
    /// How it may be exported, as bits.
    pub requestedHandleTypes: CUmemAllocationHandleType,
    /// Where it lies.
    pub location: CUmemLocation,
    /// Windows only; null elsewhere.
    pub win32HandleMetaData: *mut c_void,
    /// Compression, RDMA and usage.
    pub allocFlags: CUmemAllocationPropFlags,
}

/// The inner structure `allocFlags` of [`CUmemAllocationProp`], which has no name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUmemAllocationPropFlags {
    /// 0, or [`crate::CU_MEM_ALLOCATION_COMP_GENERIC`].
    pub compressionType: c_uchar,
    /// 1 for memory that network cards reach directly.
    pub gpuDirectRDMACapable: c_uchar,
    /// Usage bits.
    pub usage: c_ushort,
    /// Zero.
    pub reserved: [c_uchar; 4],
}

impl CUmemAllocationProp {
    /// Properties for ordinary memory at `location`: pinned, private to the process, neither
    /// compressed nor open to network cards.
    #[must_use]
    pub const fn pinned(location: CUmemLocation) -> Self {
        Self {
            kind: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32HandleMetaData: core::ptr::null_mut(),
            allocFlags: CUmemAllocationPropFlags {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }
}

/// Who may do what with a mapping, for `cuMemSetAccess`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemAccessDesc {
    /// Who.
    pub location: CUmemLocation,
    /// What.
    pub flags: CUmemAccess_flags,
}

/// What a memory pool is to be, for `cuMemPoolCreate`.
///
/// CUDA 13 gave the first of the reserved bytes a name; the bytes are where they were.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolProps {
    /// The kind of memory.
    pub allocType: CUmemAllocationType,
    /// How the pool may be shared.
    pub handleTypes: CUmemAllocationHandleType,
    /// Where the memory lies.
    pub location: CUmemLocation,
    /// Windows only; null elsewhere.
    pub win32SecurityAttributes: *mut c_void,
    /// The most bytes the pool may hold; 0 leaves it to the driver.
    pub maxSize: usize,
    /// Usage bits.
    pub usage: c_ushort,
    /// Zero.
    pub reserved: [c_uchar; 54],
}

impl CUmemPoolProps {
    /// Properties for an ordinary pool at `location`: pinned, private to the process, without a
    /// bound of its own.
    #[must_use]
    pub const fn pinned(location: CUmemLocation) -> Self {
        Self {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32SecurityAttributes: core::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

/// The ticket with which another process finds an allocation of a shared memory pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolPtrExportData {
    /// The driver's business.
    pub reserved: [c_uchar; 64],
}

/// A physical allocation as the NVLink fabric knows it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemFabricHandle {
    /// The driver's business; safe to send to another machine of the fabric.
    pub data: [c_uchar; 64],
}

/// An allocation of the old kind as another process may open it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUipcMemHandle {
    /// The driver's business.
    pub reserved: [c_char; 64],
}

/// A device's identity across processes and reboots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUuuid {
    /// The sixteen bytes, in the order in which they are printed.
    pub bytes: [c_char; 16],
}

/// What a multicast object is to be.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUmulticastObjectProp {
    /// How many devices will join.
    pub numDevices: c_uint,
    /// The most bytes that can be bound to each of them.
    pub size: usize,
    /// How it may be exported, as bits.
    pub handleTypes: c_ulonglong,
    /// Zero.
    pub flags: c_ulonglong,
}
