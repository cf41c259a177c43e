//! The binary interface that this crate assumes, as data.
//!
//! The project's command `cargo xtask abi` compares it with NVIDIA's headers. Programs do not need it.
//!
//! Functions are not here: they are in [`SYMBOLS`].

use core::mem::{align_of, offset_of, size_of};

use crate::*;

/// The size, alignment and fields of a C type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The type's name, here and in C.
    pub name: &'static str,
    /// The size in bytes.
    pub size: usize,
    /// The alignment in bytes.
    pub align: usize,
    /// The fields that mean the same in every version of the header.
    pub fields: &'static [Field],
}

/// A field of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The path of the field in C, such as `allocFlags.usage`.
    pub path: &'static str,
    /// The offset in bytes from the start of the structure.
    pub offset: usize,
    /// The size in bytes.
    pub size: usize,
}

/// A named number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// The constant's name, here and in C.
    pub name: &'static str,
    /// The constant's value.
    pub value: i64,
}

/// Returns the size of the type that a field accessor returns. The accessor is never called.
const fn size_behind<T, F>(_field: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! layouts {
    ($( $name:ident { $( $c_field:literal = $($field:ident).+ ),* $(,)? } )*) => {
        /// Every C type that is passed to or from the driver by value or behind a pointer.
        pub const LAYOUTS: &[Layout] = &[
            $(
                Layout {
                    name: stringify!($name),
                    size: size_of::<$name>(),
                    align: align_of::<$name>(),
                    fields: &[
                        $(
                            Field {
                                path: $c_field,
                                offset: offset_of!($name, $($field).+),
                                size: size_behind(|it: &$name| &it.$($field).+),
                            },
                        )*
                    ],
                },
            )*
        ];
    };
}

layouts! {
    CUmemLocation { "type" = kind, "id" = id }
    CUmemAllocationProp {
        "type" = kind,
        "requestedHandleTypes" = requestedHandleTypes,
        "location" = location,
        "location.type" = location.kind,
        "location.id" = location.id,
        "win32HandleMetaData" = win32HandleMetaData,
        "allocFlags" = allocFlags,
        "allocFlags.compressionType" = allocFlags.compressionType,
        "allocFlags.gpuDirectRDMACapable" = allocFlags.gpuDirectRDMACapable,
        "allocFlags.usage" = allocFlags.usage,
        "allocFlags.reserved" = allocFlags.reserved,
    }
    CUmemAccessDesc { "location" = location, "flags" = flags }
    // `reserved` is left out because CUDA 13.0 named its first byte.
    CUmemPoolProps {
        "allocType" = allocType,
        "handleTypes" = handleTypes,
        "location" = location,
        "win32SecurityAttributes" = win32SecurityAttributes,
        "maxSize" = maxSize,
        "usage" = usage,
    }
    CUmemPoolPtrExportData { "reserved" = reserved }
    CUmemFabricHandle { "data" = data }
    CUipcMemHandle { "reserved" = reserved }
    CUuuid { "bytes" = bytes }
    CUmulticastObjectProp {
        "numDevices" = numDevices,
        "size" = size,
        "handleTypes" = handleTypes,
        "flags" = flags,
    }
    CUlaunchAttributeValue { "pad" = pad }
    CUlaunchAttribute { "id" = id, "pad" = pad, "value" = value }
    CUlaunchConfig {
        "gridDimX" = gridDimX,
        "gridDimY" = gridDimY,
        "gridDimZ" = gridDimZ,
        "blockDimX" = blockDimX,
        "blockDimY" = blockDimY,
        "blockDimZ" = blockDimZ,
        "sharedMemBytes" = sharedMemBytes,
        "hStream" = hStream,
        "attrs" = attrs,
        "numAttrs" = numAttrs,
    }

    CUcontext {}
    CUstream {}
    CUevent {}
    CUmodule {}
    CUfunction {}
    CUgraph {}
    CUgraphExec {}
    CUmemoryPool {}
    CUhostFn {}
    CUdevice {}
    CUdeviceptr {}
    CUmemGenericAllocationHandle {}
    cuuint64_t {}

    CUresult {}
    CUdevice_attribute {}
    CUmemLocationType {}
    CUmemAllocationType {}
    CUmemAllocationHandleType {}
    CUmemAccess_flags {}
    CUmemAllocationGranularity_flags {}
    CUmemRangeHandleType {}
    CUmemPool_attribute {}
    CUpointer_attribute {}
    CUmemorytype {}
    CUmem_advise {}
    CUmem_range_attribute {}
    CUstreamCaptureMode {}
    CUstreamCaptureStatus {}
    CUmulticastGranularity_flags {}
    CUlaunchAttributeID {}
}

/// Returns every named number of this crate with its value: result codes, enumerations, option
/// bits.
#[must_use]
pub fn constants() -> Vec<Constant> {
    macro_rules! of {
        ($($name:ident),* $(,)?) => {
            [
                $(
                    $name::KNOWN
                        .iter()
                        .map(|&(name, value)| Constant { name, value: value.0.into() })
                        .collect::<Vec<_>>(),
                )*
            ]
        };
    }
    let flags = crate::flags::KNOWN
        .iter()
        .map(|&(name, value)| Constant { name, value });
    let devices = [
        Constant {
            name: "CU_DEVICE_CPU",
            value: CU_DEVICE_CPU.into(),
        },
        Constant {
            name: "CU_DEVICE_INVALID",
            value: CU_DEVICE_INVALID.into(),
        },
    ];
    of!(
        CUresult,
        CUdevice_attribute,
        CUmemLocationType,
        CUmemAllocationType,
        CUmemAllocationHandleType,
        CUmemAccess_flags,
        CUmemAllocationGranularity_flags,
        CUmemRangeHandleType,
        CUmemPool_attribute,
        CUpointer_attribute,
        CUmemorytype,
        CUmem_advise,
        CUmem_range_attribute,
        CUstreamCaptureMode,
        CUstreamCaptureStatus,
        CUmulticastGranularity_flags,
        CUlaunchAttributeID,
    )
    .into_iter()
    .flatten()
    .chain(flags)
    .chain(devices)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::{LAYOUTS, constants};

    #[test]
    fn facts_are_those_of_the_types() {
        let props = LAYOUTS.iter().find(|of| of.name == "CUmemAllocationProp");
        let props = props.expect("in the table");
        assert_eq!((props.size, props.align), (32, 8));
        let usage = props.fields.iter().find(|of| of.path == "allocFlags.usage");
        let usage = usage.expect("in the table");
        assert_eq!((usage.offset, usage.size), (26, 2));
        let unknown = constants().into_iter().find(|of| of.value == 999);
        let name = unknown.expect("in the table").name;
        assert_eq!(name, "CUDA_ERROR_UNKNOWN");
    }
}
