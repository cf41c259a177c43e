//! Handles that the driver returns: opaque objects, addresses and ordinals.
//!
//! They are plain pointers and integers, as in the C API. Ownership is the concern of the crates
//! above this one.

use core::ffi::{c_int, c_ulonglong, c_void};

macro_rules! opaque {
    ($( $(#[$doc:meta])* $handle:ident = $object:ident; )*) => {
        $(
            #[doc = concat!("The opaque object that a [`", stringify!($handle), "`] points to.")]
            #[repr(C)]
            #[derive(Debug)]
            pub struct $object {
                _opaque: [u8; 0],
            }

            $(#[$doc])*
            pub type $handle = *mut $object;
        )*
    };
}

opaque! {
    /// A context: one process's state on one device.
    CUcontext = CUctx_st;
    /// A stream: work that runs in order. Null is the legacy default stream.
    CUstream = CUstream_st;
    /// An event: a point in a stream's work.
    CUevent = CUevent_st;
    /// A loaded module of device code.
    CUmodule = CUmod_st;
    /// A function in a module.
    CUfunction = CUfunc_st;
    /// A graph: captured work.
    CUgraph = CUgraph_st;
    /// An executable graph, instantiated from a graph.
    CUgraphExec = CUgraphExec_st;
    /// A memory pool of the driver's own stream-ordered allocator.
    CUmemoryPool = CUmemPoolHandle_st;
}

/// A device's number, as `cuDeviceGet` returns it.
pub type CUdevice = c_int;

/// An address in the unified address space of host and devices.
pub type CUdeviceptr = c_ulonglong;

/// The handle of a physical allocation, from `cuMemCreate` or an import.
pub type CUmemGenericAllocationHandle = c_ulonglong;

/// The 64-bit integer that the header uses for identifiers.
pub type cuuint64_t = u64;

/// A function that the driver calls on a thread of its own. It must not unwind and must not call
/// the driver.
pub type CUhostFn = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// The host processor, where a function of the 8.0 kind takes a device.
pub const CU_DEVICE_CPU: CUdevice = -1;

/// No device.
pub const CU_DEVICE_INVALID: CUdevice = -2;
