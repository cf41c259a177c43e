//! The implementation of the trait, which passes each call on in one line.
//!
//! `unsafe` is allowed here because methods of the trait are `unsafe`; the caller's promise is
//! passed on to the inner driver unchanged.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;

use super::FaultDriver;
use crate::{
    AccessDesc, AccessFlags, Advice, Call, CaptureMode, CaptureStatus, CudaVersion, DeviceAddress,
    DeviceAttribute, DeviceMemory, Driver, DriverKind, EventFlags, EventHandle, Exported,
    GranularityKind, GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, MemoryInfo, Ordinal,
    PhysicalHandle, PhysicalProps, PointerAttribute, RangeAttribute, Result, StreamFlags,
    StreamHandle,
};

/// Generates the methods from lines of call, name, parameters and result.
macro_rules! pass_on {
    (
        safe { $($call:ident = $name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)* }
        unsafe { $($ucall:ident = $uname:ident($($uarg:ident: $uty:ty),*) -> $uout:ty;)* }
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
                    self.inner.$name($($arg),*)
                }
            )*

            $(
                unsafe fn $uname(&self, $($uarg: $uty),*) -> Result<$uout> {
                    self.enter(Call::$ucall)?;
                    // SAFETY: the inner method requires what the caller of this method has
                    // promised.
                    unsafe { self.inner.$uname($($uarg),*) }
                }
            )*
        }
    };
}

pass_on! {
    safe {
        DriverGetVersion = version() -> CudaVersion;
        DeviceGetCount = device_count() -> i32;
        DeviceGetName = device_name(device: Ordinal) -> String;
        DeviceGetUuid = device_uuid(device: Ordinal) -> [u8; 16];
        DeviceGetAttribute = device_attribute(
            device: Ordinal, attribute: DeviceAttribute
        ) -> i32;
        DeviceTotalMem = total_memory(device: Ordinal) -> u64;
        MemGetInfo = memory_info(device: Ordinal) -> MemoryInfo;
        DeviceCanAccessPeer = can_access_peer(device: Ordinal, peer: Ordinal) -> bool;
        MemGetAllocationGranularity = allocation_granularity(
            props: &PhysicalProps, kind: GranularityKind
        ) -> u64;
        MemAddressReserve = reserve(
            size: u64, alignment: u64, hint: DeviceAddress, flags: u64
        ) -> DeviceAddress;
        MemCreate = create(size: u64, props: &PhysicalProps, flags: u64) -> PhysicalHandle;
        MemRetainAllocationHandle = retain(address: DeviceAddress) -> PhysicalHandle;
        MemGetAccess = get_access(address: DeviceAddress, location: Location) -> AccessFlags;
        MemGetAddressRange = address_range(
            device: Ordinal, address: DeviceAddress
        ) -> (DeviceAddress, u64);
        PointerGetAttribute = pointer_attribute(
            device: Ordinal, address: DeviceAddress, attribute: PointerAttribute
        ) -> u64;
        IpcGetMemHandle = ipc_mem_handle(device: Ordinal, address: DeviceAddress) -> [u8; 64];
        StreamCreate = stream_create(device: Ordinal, flags: StreamFlags) -> StreamHandle;
        EventCreate = event_create(device: Ordinal, flags: EventFlags) -> EventHandle;
        CtxSynchronize = context_synchronize(device: Ordinal) -> ();
        ThreadExchangeStreamCaptureMode = exchange_capture_mode(
            mode: CaptureMode
        ) -> CaptureMode;
        MemAlloc = alloc(device: Ordinal, size: u64) -> DeviceAddress;
        MemHostAlloc = host_alloc(device: Ordinal, size: u64, flags: u32) -> *mut u8;
        MemAllocManaged = managed_alloc(
            device: Ordinal, size: u64, flags: u32
        ) -> DeviceAddress;
        MemAdvise = advise(
            device: Ordinal, address: DeviceAddress, size: u64, advice: Advice, location: Location
        ) -> ();
        MemRangeGetAttribute = range_attribute(
            device: Ordinal, address: DeviceAddress, size: u64, attribute: RangeAttribute
        ) -> i32;
        MemRangeGetAttribute = range_accessed_by(
            device: Ordinal, address: DeviceAddress, size: u64
        ) -> Vec<Location>;
        MemPoolCreate = mem_pool_create(
            device: Ordinal, props: &MemPoolProps
        ) -> MemPoolHandle;
        DeviceGetDefaultMemPool = default_mem_pool(device: Ordinal) -> MemPoolHandle;
        DeviceGetMemPool = current_mem_pool(device: Ordinal) -> MemPoolHandle;
        MemPoolExportPointer = mem_pool_export_pointer(
            device: Ordinal, address: DeviceAddress
        ) -> MemPoolTicket;
    }
    unsafe {
        MemAddressFree = free_reservation(address: DeviceAddress, size: u64) -> ();
        MemRelease = release(handle: PhysicalHandle) -> ();
        MemGetAllocationPropertiesFromHandle = physical_props(
            handle: PhysicalHandle
        ) -> PhysicalProps;
        MemExportToShareableHandle = export(
            handle: PhysicalHandle, handle_type: HandleTypes, flags: u64
        ) -> Exported;
        MemImportFromShareableHandle = import(
            source: ImportSource, handle_type: HandleTypes
        ) -> PhysicalHandle;
        MemMap = map(
            address: DeviceAddress, size: u64, offset: u64, handle: PhysicalHandle, flags: u64
        ) -> ();
        MemUnmap = unmap(address: DeviceAddress, size: u64) -> ();
        MemSetAccess = set_access(
            address: DeviceAddress, size: u64, access: &[AccessDesc]
        ) -> ();
        MemGetHandleForAddressRange = dma_buf(
            device: Ordinal, address: DeviceAddress, size: u64
        ) -> OwnedFd;
        MemcpyHtoD = copy_to_device(
            device: Ordinal, destination: DeviceAddress, source: &[u8]
        ) -> ();
        MemcpyDtoH = copy_to_host(
            device: Ordinal, destination: &mut [u8], source: DeviceAddress
        ) -> ();
        MemcpyDtoD = copy_on_device(
            device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64
        ) -> ();
        MemcpyHtoDAsync = copy_to_device_async(
            device: Ordinal, destination: DeviceAddress, source: *const u8, size: u64,
            stream: StreamHandle
        ) -> ();
        MemcpyDtoHAsync = copy_to_host_async(
            device: Ordinal, destination: *mut u8, source: DeviceAddress, size: u64,
            stream: StreamHandle
        ) -> ();
        MemcpyDtoDAsync = copy_on_device_async(
            device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64,
            stream: StreamHandle
        ) -> ();
        MemsetD8 = fill(device: Ordinal, destination: DeviceAddress, byte: u8, size: u64) -> ();
        MemsetD8Async = fill_async(
            device: Ordinal, destination: DeviceAddress, byte: u8, size: u64, stream: StreamHandle
        ) -> ();
        StreamDestroy = stream_destroy(device: Ordinal, stream: StreamHandle) -> ();
        StreamSynchronize = stream_synchronize(device: Ordinal, stream: StreamHandle) -> ();
        StreamQuery = stream_query(device: Ordinal, stream: StreamHandle) -> bool;
        StreamWaitEvent = stream_wait_event(
            device: Ordinal, stream: StreamHandle, event: EventHandle
        ) -> ();
        EventDestroy = event_destroy(device: Ordinal, event: EventHandle) -> ();
        EventRecord = event_record(
            device: Ordinal, event: EventHandle, stream: StreamHandle
        ) -> ();
        CtxRecordEvent = context_record_event(device: Ordinal, event: EventHandle) -> ();
        EventQuery = event_query(device: Ordinal, event: EventHandle) -> bool;
        EventSynchronize = event_synchronize(device: Ordinal, event: EventHandle) -> ();
        StreamIsCapturing = capture_status(
            device: Ordinal, stream: StreamHandle
        ) -> CaptureStatus;
        StreamBeginCapture = capture_begin(
            device: Ordinal, stream: StreamHandle, mode: CaptureMode
        ) -> ();
        StreamEndCapture = capture_end(device: Ordinal, stream: StreamHandle) -> GraphHandle;
        GraphInstantiate = graph_instantiate(
            device: Ordinal, graph: GraphHandle
        ) -> GraphExecHandle;
        GraphLaunch = graph_launch(
            device: Ordinal, graph: GraphExecHandle, stream: StreamHandle
        ) -> ();
        GraphDestroy = graph_destroy(device: Ordinal, graph: GraphHandle) -> ();
        GraphExecDestroy = graph_exec_destroy(device: Ordinal, graph: GraphExecHandle) -> ();
        MemFree = free(device: Ordinal, address: DeviceAddress) -> ();
        MemAllocAsync = alloc_async(
            device: Ordinal, size: u64, stream: StreamHandle
        ) -> DeviceAddress;
        MemFreeAsync = free_async(
            device: Ordinal, address: DeviceAddress, stream: StreamHandle
        ) -> ();
        MemFreeHost = host_free(device: Ordinal, pointer: *mut u8) -> ();
        MemPrefetchAsync = prefetch(
            device: Ordinal, address: DeviceAddress, size: u64, location: Location,
            stream: StreamHandle
        ) -> ();
        MemPoolDestroy = mem_pool_destroy(device: Ordinal, pool: MemPoolHandle) -> ();
        MemPoolGetAttribute = mem_pool_attribute(
            device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute
        ) -> u64;
        MemPoolSetAttribute = mem_pool_set_attribute(
            device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute, value: u64
        ) -> ();
        MemPoolTrimTo = mem_pool_trim(device: Ordinal, pool: MemPoolHandle, keep: u64) -> ();
        MemPoolGetAccess = mem_pool_access(
            device: Ordinal, pool: MemPoolHandle, location: Location
        ) -> AccessFlags;
        MemPoolSetAccess = mem_pool_set_access(
            device: Ordinal, pool: MemPoolHandle, access: &[AccessDesc]
        ) -> ();
        DeviceSetMemPool = set_current_mem_pool(device: Ordinal, pool: MemPoolHandle) -> ();
        MemAllocFromPoolAsync = alloc_from_pool_async(
            device: Ordinal, size: u64, pool: MemPoolHandle, stream: StreamHandle
        ) -> DeviceAddress;
        MemPoolExportToShareableHandle = mem_pool_export(
            device: Ordinal, pool: MemPoolHandle, handle_type: HandleTypes, flags: u64
        ) -> Exported;
        MemPoolImportFromShareableHandle = mem_pool_import(
            device: Ordinal, source: ImportSource, handle_type: HandleTypes, flags: u64
        ) -> MemPoolHandle;
        MemPoolImportPointer = mem_pool_import_pointer(
            device: Ordinal, pool: MemPoolHandle, ticket: &MemPoolTicket
        ) -> DeviceAddress;
    }
}
