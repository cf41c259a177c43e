//! The implementation of the trait, which passes each call on in one line.
//!
//! `unsafe` is allowed here because methods of the trait are `unsafe`; the caller's promise is
//! passed on to the inner driver unchanged.
#![allow(unsafe_code)]

use super::{FaultDriver, tell};
use crate::call::driver_methods;
use crate::{
    AccessDesc, AccessFlags, Advice, Call, CaptureMode, CaptureStatus, CudaVersion, DeviceAddress,
    DeviceAttribute, DeviceMemory, Driver, DriverKind, EventFlags, EventHandle, Exported,
    GranularityKind, GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, MemoryInfo, Ordinal, OsHandle,
    PhysicalHandle, PhysicalProps, PointerAttribute, RangeAttribute, Result, StreamFlags,
    StreamHandle,
};

macro_rules! pass_on {
    (
        safe { $($file:ident: $call:ident = $name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)* }
        unsafe {
            $($ufile:ident: $ucall:ident = $uname:ident($($uarg:ident: $uty:ty),*) -> $uout:ty;)*
        }
    ) => {
        impl Driver for FaultDriver {
            fn kind(&self) -> DriverKind {
                self.inner.kind()
            }

            fn device_memory(&self) -> DeviceMemory {
                self.inner.device_memory()
            }

            $(
                fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                    self.enter(Call::$call)?;
                    let answer = self.inner.$name($($arg),*);
                    tell(&self.behind, Call::$call);
                    answer
                }
            )*

            $(
                unsafe fn $uname(&self, $($uarg: $uty),*) -> Result<$uout> {
                    self.enter(Call::$ucall)?;
                    // SAFETY: the inner method requires what the caller of this method has
                    // promised.
                    let answer = unsafe { self.inner.$uname($($uarg),*) };
                    tell(&self.behind, Call::$ucall);
                    answer
                }
            )*
        }
    };
}

driver_methods! { pass_on }
