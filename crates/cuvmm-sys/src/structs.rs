//! The structures that are passed to and from the driver, laid out as in C on 64-bit Linux and Windows.
//!
//! Fields keep their C names, except that `type` is `kind`. Reserved bytes must be zero, so every
//! structure that has them has a constructor or a `Default`.

use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

use crate::{
    CUlaunchAttributeID, CUmemAccess_flags, CUmemAllocationHandleType, CUmemAllocationType,
    CUmemLocationType, CUstream,
};

/// A location of memory: a device, the host, or one of its NUMA nodes.
///
/// Since CUDA 13.2 the header declares `id` as one member of a union; its offset has not changed.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemLocation {
    /// The kind of location (`type` in C).
    pub kind: CUmemLocationType,
    /// The number of the device or node; 0 for kinds without a number.
    pub id: c_int,
}

/// The properties of a physical allocation, for `cuMemCreate`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAllocationProp {
    /// The kind of memory (`type` in C).
    pub kind: CUmemAllocationType,
    /// The handle types that it may be exported as, as bits.
    pub requestedHandleTypes: CUmemAllocationHandleType,
    /// The location of the memory.
    pub location: CUmemLocation,
    /// A pointer to an `OBJECT_ATTRIBUTES` of Windows with the security attributes of exported handles, if
    /// the memory can be exported as a Win32 handle; null in all other cases.
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
    /// 1 for memory that network cards access directly.
    pub gpuDirectRDMACapable: c_uchar,
    /// Usage bits.
    pub usage: c_ushort,
    /// Zero.
    pub reserved: [c_uchar; 4],
}

impl CUmemAllocationProp {
    /// Returns the properties of ordinary memory at `location`: pinned, private to the process, not
    /// compressed and not accessible to network cards.
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

/// The access of one location to a mapping, for `cuMemSetAccess`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemAccessDesc {
    /// The location.
    pub location: CUmemLocation,
    /// Its access.
    pub flags: CUmemAccess_flags,
}

/// The properties of a memory pool, for `cuMemPoolCreate`.
///
/// CUDA 13 named the first of the reserved bytes; their offsets have not changed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolProps {
    /// The kind of memory.
    pub allocType: CUmemAllocationType,
    /// The handle types that the pool may be exported as.
    pub handleTypes: CUmemAllocationHandleType,
    /// The location of the memory.
    pub location: CUmemLocation,
    /// A pointer to the `SECURITY_ATTRIBUTES` of Windows of exported handles, if the pool can be exported
    /// as a Win32 handle; null in all other cases.
    pub win32SecurityAttributes: *mut c_void,
    /// The maximum size of the pool in bytes; 0 leaves it to the driver.
    pub maxSize: usize,
    /// Usage bits.
    pub usage: c_ushort,
    /// Zero.
    pub reserved: [c_uchar; 54],
}

impl CUmemPoolProps {
    /// Returns the properties of an ordinary pool at `location`: pinned, private to the process,
    /// without a maximum size of its own.
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

/// Exported data by which another process imports an allocation of a shared memory pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolPtrExportData {
    /// Opaque data of the driver.
    pub reserved: [c_uchar; 64],
}

/// A handle of a physical allocation that is valid throughout an NVLink fabric.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemFabricHandle {
    /// Opaque data of the driver; it may be sent to another machine of the fabric.
    pub data: [c_uchar; 64],
}

/// A legacy IPC handle by which another process opens an allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUipcMemHandle {
    /// Opaque data of the driver.
    pub reserved: [c_char; 64],
}

/// The UUID of a device, which is stable across processes and reboots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUuuid {
    /// The sixteen bytes, in the order in which they are printed.
    pub bytes: [c_char; 16],
}

/// The properties of a multicast object.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUmulticastObjectProp {
    /// The number of devices that will join.
    pub numDevices: c_uint,
    /// The maximum number of bytes that can be bound to each of them.
    pub size: usize,
    /// The handle types that it may be exported as, as bits.
    pub handleTypes: c_ulonglong,
    /// Zero.
    pub flags: c_ulonglong,
}

/// The value of a launch attribute: a union in C, of which the attribute's kind says what it holds.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUlaunchAttributeValue {
    /// The bytes of all members.
    pub pad: [c_uchar; 64],
}

impl CUlaunchAttributeValue {
    /// Returns the value of an attribute that is an `int`.
    #[must_use]
    pub fn int(value: c_int) -> Self {
        let mut pad = [0; 64];
        for (byte, of_value) in pad.iter_mut().zip(value.to_ne_bytes()) {
            *byte = of_value;
        }
        Self { pad }
    }
}

/// An attribute of a kernel launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUlaunchAttribute {
    /// The kind of attribute.
    pub id: CUlaunchAttributeID,
    /// Zero.
    pub pad: [c_char; 4],
    /// Its value.
    pub value: CUlaunchAttributeValue,
}

/// The shape, the stream and the attributes of a kernel launch, for `cuLaunchKernelEx`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUlaunchConfig {
    /// The blocks of the grid.
    pub gridDimX: c_uint,
    /// The blocks of the grid in its second dimension.
    pub gridDimY: c_uint,
    /// The blocks of the grid in its third dimension.
    pub gridDimZ: c_uint,
    /// The threads of a block.
    pub blockDimX: c_uint,
    /// The threads of a block in its second dimension.
    pub blockDimY: c_uint,
    /// The threads of a block in its third dimension.
    pub blockDimZ: c_uint,
    /// The bytes of dynamic shared memory of a block.
    pub sharedMemBytes: c_uint,
    /// The stream.
    pub hStream: CUstream,
    /// The attributes; null if there are none.
    pub attrs: *mut CUlaunchAttribute,
    /// The number of attributes.
    pub numAttrs: c_uint,
}
