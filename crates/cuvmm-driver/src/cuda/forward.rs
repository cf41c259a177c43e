//! The implementation of the trait, which forwards each method to the file that implements it.
//!
//! `unsafe` is allowed here because methods that are `unsafe` in the trait are `unsafe` in these
//! files too, and the caller's obligation is passed on unchanged.
#![allow(unsafe_code)]

use cuvmm_sys::CudaVersion;

use super::{
    CudaDriver, addresses, capture, copies, devices, events, managed, mapping, physical, plain,
    pools, streams,
};
use crate::call::driver_methods;
use crate::{
    AccessDesc, AccessFlags, Advice, CaptureMode, CaptureStatus, DeviceAddress, DeviceAttribute,
    DeviceMemory, Driver, DriverKind, EventFlags, EventHandle, Exported, GranularityKind,
    GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location, MemPoolAttribute,
    MemPoolHandle, MemPoolProps, MemPoolTicket, MemoryInfo, Ordinal, OsHandle, PhysicalHandle,
    PhysicalProps, PointerAttribute, RangeAttribute, Result, StreamFlags, StreamHandle,
};

macro_rules! forward {
    (
        safe { $($file:ident: $call:ident = $name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)* }
        unsafe {
            $($ufile:ident: $ucall:ident = $uname:ident($($uarg:ident: $uty:ty),*) -> $uout:ty;)*
        }
    ) => {
        impl Driver for CudaDriver {
            fn kind(&self) -> DriverKind {
                DriverKind::Cuda
            }

            fn device_memory(&self) -> DeviceMemory {
                DeviceMemory::Device
            }

            $(
                fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                    $file::$name(self, $($arg),*)
                }
            )*

            $(
                unsafe fn $uname(&self, $($uarg: $uty),*) -> Result<$uout> {
                    // SAFETY: the function has the same obligation as this method, and the caller
                    // has met it.
                    unsafe { $ufile::$uname(self, $($uarg),*) }
                }
            )*
        }
    };
}

driver_methods! { forward }
