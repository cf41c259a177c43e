//! The table of driver functions, from which types, fields and data are generated.
//!
//! A line gives the function's status (required or optional), the CUDA version that introduced it,
//! its symbol as the library exports it (with `_v2` where there is one) and its signature.
//! Generated from the table are the function types ([`functions`]), the fields of [`Api`], and the
//! same table as data ([`SYMBOLS`]), which the ABI checks compare with NVIDIA's headers.
//!
//! `unsafe` is allowed here for one thing: an address that the loader found under a symbol's name
//! becomes a function pointer of that symbol's type.
#![allow(unsafe_code)]

use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use core::fmt;
use core::ptr::NonNull;
use std::path::{Path, PathBuf};

use crate::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUgraph,
    CUgraphExec, CUhostFn, CUipcMemHandle, CUlaunchConfig, CUmem_advise, CUmem_range_attribute,
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemPool_attribute, CUmemPoolProps, CUmemPoolPtrExportData, CUmemRangeHandleType,
    CUmemoryPool, CUmodule, CUmulticastGranularity_flags, CUmulticastObjectProp,
    CUpointer_attribute, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUuuid,
    CudaVersion, MissingSymbol, Optional, Parameter, Symbol, cuuint64_t,
};

macro_rules! field_type {
    (required, $function:ty) => { $function };
    (optional, $function:ty) => { Optional<$function> };
}

macro_rules! is_required {
    (required) => {
        true
    };
    (optional) => {
        false
    };
}

macro_rules! field_value {
    (required, $found:expr, $missing:expr) => {
        // The caller has checked that no required function is missing.
        $found.ok_or($missing)?
    };
    (optional, $found:expr, $missing:expr) => {
        Optional::new($found, $missing)
    };
}

macro_rules! table {
    (
        $(
            $need:ident ($major:literal, $minor:literal)
            fn $name:ident($($parameter:ident: $ty:ty),* $(,)?);
        )*
    ) => {
        /// The type of each driver function, under the function's own name.
        ///
        /// A replacement for the driver can check its signatures with it:
        /// `const _: functions::cuInit = cuInit;` fails to compile when a signature is wrong.
        pub mod functions {
            use super::*;

            $(
                #[doc = concat!("The type of `", stringify!($name), "`.")]
                pub type $name = unsafe extern "C" fn($($parameter: $ty),*) -> CUresult;
            )*
        }

        /// The functions of one loaded libcuda.
        ///
        /// Each field is the function that the library exports under the field's name. Fields of
        /// type [`Optional`] are functions that this driver may lack. The library is never
        /// unloaded, so the functions may be kept for as long as the process lives.
        ///
        /// Calling any of them is `unsafe`; NVIDIA's documentation of the driver API states the
        /// requirements.
        pub struct Api {
            library: PathBuf,
            missing: Vec<MissingSymbol>,
            $(
                #[doc = concat!(
                    "`", stringify!($name), "`, ", stringify!($need), ". Came with CUDA ",
                    $major, ".", $minor, "."
                )]
                pub $name: field_type!($need, functions::$name),
            )*
        }

        impl Api {
            /// Fills the table with the addresses that `find` returns for each name.
            ///
            /// `library` is only used in messages. This constructor is for tests, and for programs
            /// that open libcuda in their own way.
            ///
            /// # Errors
            ///
            /// Returns the required function that `find` did not find. If there are several,
            /// returns the one introduced last, because a driver that has it has the others too.
            ///
            /// # Safety
            ///
            /// The address that `find` returns for a name must be the C function of that name in
            /// CUDA's driver API, or one with the same behavior, and must stay callable for as long
            /// as this `Api` or a function taken from it is used.
            pub unsafe fn from_symbols(
                library: impl Into<PathBuf>,
                mut find: impl FnMut(&'static str) -> Option<NonNull<c_void>>,
            ) -> Result<Self, MissingSymbol> {
                let mut missing = Vec::new();
                let mut addresses = [None; SYMBOLS.len()];
                let mut worst: Option<MissingSymbol> = None;
                for (symbol, address) in SYMBOLS.iter().zip(&mut addresses) {
                    *address = find(symbol.name);
                    if address.is_some() {
                        continue;
                    }
                    let lacks = MissingSymbol { symbol: symbol.name, since: symbol.since };
                    missing.push(lacks);
                    if symbol.required && worst.is_none_or(|worst| worst.since < lacks.since) {
                        worst = Some(lacks);
                    }
                }
                if let Some(worst) = worst {
                    return Err(worst);
                }
                let mut addresses = addresses.into_iter();
                Ok(Self {
                    library: library.into(),
                    missing,
                    $(
                        $name: {
                            let lacks = MissingSymbol {
                                symbol: stringify!($name),
                                since: CudaVersion::new($major, $minor),
                            };
                            let found: Option<functions::$name> =
                                addresses.next().flatten().map(|address| {
                                    // SAFETY: the caller promises that the address under this name
                                    // is that function, whose signature is the type's; a function
                                    // pointer has the size and validity of a non-null data pointer
                                    // on every platform that has dlsym.
                                    unsafe {
                                        core::mem::transmute::<*mut c_void, functions::$name>(
                                            address.as_ptr(),
                                        )
                                    }
                                });
                            field_value!($need, found, lacks)
                        },
                    )*
                })
            }
        }

        /// Every function of the table, in the table's order.
        pub const SYMBOLS: &[Symbol] = &[
            $(
                Symbol {
                    name: stringify!($name),
                    since: CudaVersion::new($major, $minor),
                    required: is_required!($need),
                    parameters: &[
                        $(
                            Parameter {
                                name: stringify!($parameter),
                                rust_type: stringify!($ty),
                            },
                        )*
                    ],
                },
            )*
        ];
    };
}

impl Api {
    /// Returns the name or path under which the library was opened.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// Returns the functions of the table that this driver lacks, all of them optional.
    #[must_use]
    pub fn missing(&self) -> &[MissingSymbol] {
        &self.missing
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api")
            .field("library", &self.library)
            .field("missing", &self.missing)
            .finish_non_exhaustive()
    }
}

table! {
    // The driver itself.
    required (2, 0) fn cuInit(flags: c_uint);
    required (2, 2) fn cuDriverGetVersion(version: *mut c_int);
    optional (6, 0) fn cuGetErrorName(error: CUresult, text: *mut *const c_char);
    optional (6, 0) fn cuGetErrorString(error: CUresult, text: *mut *const c_char);

    // Devices.
    required (2, 0) fn cuDeviceGetCount(count: *mut c_int);
    required (2, 0) fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    required (2, 0) fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    optional (9, 2) fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice);
    optional (11, 4) fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    required (2, 0) fn cuDeviceGetAttribute(
        value: *mut c_int,
        attribute: CUdevice_attribute,
        device: CUdevice,
    );
    required (3, 2) fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    required (4, 0) fn cuDeviceCanAccessPeer(
        can: *mut c_int,
        device: CUdevice,
        peer: CUdevice,
    );

    // Contexts. The second version of the primary context's release came in 11.0, so both are
    // listed.
    required (7, 0) fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    required (7, 0) fn cuDevicePrimaryCtxRelease(device: CUdevice);
    optional (11, 0) fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    required (7, 0) fn cuDevicePrimaryCtxGetState(
        device: CUdevice,
        flags: *mut c_uint,
        active: *mut c_int,
    );
    required (4, 0) fn cuCtxPushCurrent_v2(context: CUcontext);
    required (4, 0) fn cuCtxPopCurrent_v2(context: *mut CUcontext);
    required (4, 0) fn cuCtxGetCurrent(context: *mut CUcontext);
    required (4, 0) fn cuCtxSetCurrent(context: CUcontext);
    required (2, 0) fn cuCtxGetDevice(device: *mut CUdevice);
    required (2, 0) fn cuCtxSynchronize();
    optional (12, 5) fn cuCtxRecordEvent(context: CUcontext, event: CUevent);
    required (3, 2) fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);

    // Reservations, physicals and mappings.
    required (10, 2) fn cuMemAddressReserve(
        address: *mut CUdeviceptr,
        size: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: c_ulonglong,
    );
    required (10, 2) fn cuMemAddressFree(address: CUdeviceptr, size: usize);
    required (10, 2) fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        size: usize,
        properties: *const CUmemAllocationProp,
        flags: c_ulonglong,
    );
    required (10, 2) fn cuMemRelease(handle: CUmemGenericAllocationHandle);
    required (10, 2) fn cuMemMap(
        address: CUdeviceptr,
        size: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    );
    required (10, 2) fn cuMemUnmap(address: CUdeviceptr, size: usize);
    required (10, 2) fn cuMemSetAccess(
        address: CUdeviceptr,
        size: usize,
        descriptors: *const CUmemAccessDesc,
        count: usize,
    );
    required (10, 2) fn cuMemGetAccess(
        flags: *mut c_ulonglong,
        location: *const CUmemLocation,
        address: CUdeviceptr,
    );
    required (10, 2) fn cuMemExportToShareableHandle(
        shareable: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        handle_type: CUmemAllocationHandleType,
        flags: c_ulonglong,
    );
    required (10, 2) fn cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle,
        shareable: *mut c_void,
        handle_type: CUmemAllocationHandleType,
    );
    required (10, 2) fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags,
    );
    required (10, 2) fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut CUmemAllocationProp,
        handle: CUmemGenericAllocationHandle,
    );
    optional (11, 0) fn cuMemRetainAllocationHandle(
        handle: *mut CUmemGenericAllocationHandle,
        address: *mut c_void,
    );
    optional (11, 7) fn cuMemGetHandleForAddressRange(
        handle: *mut c_void,
        address: CUdeviceptr,
        size: usize,
        handle_type: CUmemRangeHandleType,
        flags: c_ulonglong,
    );

    // Multicast objects, for the comparison with the headers only. Nothing in this project calls
    // cuMulticastCreate; on a machine with shared GPUs it can disturb other users.
    optional (12, 1) fn cuMulticastCreate(
        handle: *mut CUmemGenericAllocationHandle,
        properties: *const CUmulticastObjectProp,
    );
    optional (12, 1) fn cuMulticastAddDevice(
        handle: CUmemGenericAllocationHandle,
        device: CUdevice,
    );
    optional (12, 1) fn cuMulticastBindMem(
        handle: CUmemGenericAllocationHandle,
        offset: usize,
        memory: CUmemGenericAllocationHandle,
        memory_offset: usize,
        size: usize,
        flags: c_ulonglong,
    );
    optional (12, 1) fn cuMulticastBindAddr(
        handle: CUmemGenericAllocationHandle,
        offset: usize,
        address: CUdeviceptr,
        size: usize,
        flags: c_ulonglong,
    );
    optional (12, 1) fn cuMulticastUnbind(
        handle: CUmemGenericAllocationHandle,
        device: CUdevice,
        offset: usize,
        size: usize,
    );
    optional (12, 1) fn cuMulticastGetGranularity(
        granularity: *mut usize,
        properties: *const CUmulticastObjectProp,
        option: CUmulticastGranularity_flags,
    );

    // The driver's own allocators.
    optional (3, 2) fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    optional (3, 2) fn cuMemFree_v2(address: CUdeviceptr);
    optional (3, 2) fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize);
    optional (2, 2) fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    optional (2, 0) fn cuMemFreeHost(address: *mut c_void);
    optional (6, 5) fn cuMemHostRegister_v2(memory: *mut c_void, bytes: usize, flags: c_uint);
    optional (4, 0) fn cuMemHostUnregister(memory: *mut c_void);
    optional (3, 2) fn cuMemHostGetDevicePointer_v2(
        address: *mut CUdeviceptr,
        host: *mut c_void,
        flags: c_uint,
    );
    optional (11, 2) fn cuMemAllocAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    );
    optional (11, 2) fn cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    );
    optional (11, 2) fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    optional (11, 2) fn cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    optional (11, 2) fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    optional (11, 2) fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool);
    optional (11, 2) fn cuMemPoolCreate(
        pool: *mut CUmemoryPool,
        properties: *const CUmemPoolProps,
    );
    optional (11, 2) fn cuMemPoolDestroy(pool: CUmemoryPool);
    optional (11, 2) fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    optional (11, 2) fn cuMemPoolSetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    );
    optional (11, 2) fn cuMemPoolGetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    );
    optional (11, 2) fn cuMemPoolSetAccess(
        pool: CUmemoryPool,
        descriptors: *const CUmemAccessDesc,
        count: usize,
    );
    optional (11, 2) fn cuMemPoolGetAccess(
        flags: *mut CUmemAccess_flags,
        pool: CUmemoryPool,
        location: *mut CUmemLocation,
    );
    optional (11, 2) fn cuMemPoolExportToShareableHandle(
        shareable: *mut c_void,
        pool: CUmemoryPool,
        handle_type: CUmemAllocationHandleType,
        flags: c_ulonglong,
    );
    optional (11, 2) fn cuMemPoolImportFromShareableHandle(
        pool: *mut CUmemoryPool,
        shareable: *mut c_void,
        handle_type: CUmemAllocationHandleType,
        flags: c_ulonglong,
    );
    optional (11, 2) fn cuMemPoolExportPointer(
        ticket: *mut CUmemPoolPtrExportData,
        address: CUdeviceptr,
    );
    optional (11, 2) fn cuMemPoolImportPointer(
        address: *mut CUdeviceptr,
        pool: CUmemoryPool,
        ticket: *mut CUmemPoolPtrExportData,
    );

    // Queries about addresses.
    optional (3, 2) fn cuMemGetAddressRange_v2(
        base: *mut CUdeviceptr,
        size: *mut usize,
        address: CUdeviceptr,
    );
    optional (4, 0) fn cuPointerGetAttribute(
        data: *mut c_void,
        attribute: CUpointer_attribute,
        address: CUdeviceptr,
    );
    optional (7, 0) fn cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut CUpointer_attribute,
        data: *mut *mut c_void,
        address: CUdeviceptr,
    );
    optional (4, 1) fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr);

    // Managed memory.
    optional (6, 0) fn cuMemAllocManaged(
        address: *mut CUdeviceptr,
        bytes: usize,
        flags: c_uint,
    );
    optional (8, 0) fn cuMemPrefetchAsync(
        address: CUdeviceptr,
        bytes: usize,
        destination: CUdevice,
        stream: CUstream,
    );
    optional (12, 2) fn cuMemPrefetchAsync_v2(
        address: CUdeviceptr,
        bytes: usize,
        destination: CUmemLocation,
        flags: c_uint,
        stream: CUstream,
    );
    optional (8, 0) fn cuMemAdvise(
        address: CUdeviceptr,
        bytes: usize,
        advice: CUmem_advise,
        device: CUdevice,
    );
    optional (12, 2) fn cuMemAdvise_v2(
        address: CUdeviceptr,
        bytes: usize,
        advice: CUmem_advise,
        location: CUmemLocation,
    );
    optional (8, 0) fn cuMemRangeGetAttribute(
        data: *mut c_void,
        data_bytes: usize,
        attribute: CUmem_range_attribute,
        address: CUdeviceptr,
        bytes: usize,
    );
    optional (13, 0) fn cuMemPrefetchBatchAsync(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        destinations: *mut CUmemLocation,
        destination_starts: *mut usize,
        destination_count: usize,
        flags: c_ulonglong,
        stream: CUstream,
    );
    optional (13, 0) fn cuMemDiscardBatchAsync(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        flags: c_ulonglong,
        stream: CUstream,
    );

    // Copies.
    required (3, 2) fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize);
    required (3, 2) fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
    required (3, 2) fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize);
    required (4, 0) fn cuMemcpyPeer(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
    );
    required (3, 2) fn cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    );
    required (3, 2) fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    );
    required (3, 2) fn cuMemcpyDtoDAsync_v2(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    );
    required (4, 0) fn cuMemcpyPeerAsync(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
        stream: CUstream,
    );

    // Fills. The counts are of elements, not bytes.
    optional (3, 2) fn cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, count: usize);
    optional (3, 2) fn cuMemsetD16_v2(to: CUdeviceptr, value: c_ushort, count: usize);
    optional (3, 2) fn cuMemsetD32_v2(to: CUdeviceptr, value: c_uint, count: usize);
    optional (3, 2) fn cuMemsetD8Async(
        to: CUdeviceptr,
        value: c_uchar,
        count: usize,
        stream: CUstream,
    );
    optional (3, 2) fn cuMemsetD16Async(
        to: CUdeviceptr,
        value: c_ushort,
        count: usize,
        stream: CUstream,
    );
    optional (3, 2) fn cuMemsetD32Async(
        to: CUdeviceptr,
        value: c_uint,
        count: usize,
        stream: CUstream,
    );

    // Streams.
    optional (2, 0) fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    optional (5, 5) fn cuStreamCreateWithPriority(
        stream: *mut CUstream,
        flags: c_uint,
        priority: c_int,
    );
    optional (4, 0) fn cuStreamDestroy_v2(stream: CUstream);
    optional (2, 0) fn cuStreamSynchronize(stream: CUstream);
    optional (2, 0) fn cuStreamQuery(stream: CUstream);
    optional (3, 2) fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    optional (9, 2) fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    optional (10, 0) fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void);

    // Events.
    optional (2, 0) fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    optional (4, 0) fn cuEventDestroy_v2(event: CUevent);
    optional (2, 0) fn cuEventRecord(event: CUevent, stream: CUstream);
    optional (2, 0) fn cuEventQuery(event: CUevent);
    optional (2, 0) fn cuEventSynchronize(event: CUevent);
    optional (2, 0) fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);

    // Capture and graphs.
    optional (10, 0) fn cuStreamIsCapturing(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
    );
    optional (10, 1) fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    optional (10, 0) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    optional (10, 1) fn cuStreamGetCaptureInfo(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut cuuint64_t,
    );
    optional (10, 1) fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    optional (11, 4) fn cuGraphInstantiateWithFlags(
        executable: *mut CUgraphExec,
        graph: CUgraph,
        flags: c_ulonglong,
    );
    optional (10, 0) fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
    optional (10, 0) fn cuGraphDestroy(graph: CUgraph);
    optional (10, 0) fn cuGraphExecDestroy(executable: CUgraphExec);

    // Device code, for tests and measurements.
    optional (2, 0) fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    optional (2, 0) fn cuModuleUnload(module: CUmodule);
    optional (2, 0) fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    );
    optional (4, 0) fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    optional (11, 6) fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}
