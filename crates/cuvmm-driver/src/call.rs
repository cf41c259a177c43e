//! The driver calls by name, for errors, counters and injected faults.

use std::fmt;

macro_rules! calls {
    ($($variant:ident = $name:literal),+ $(,)?) => {
        /// One driver call, named as in NVIDIA's documentation.
        ///
        /// Where the driver has several symbols for a call (`_v2`, `_ptsz`), the plain name stands
        /// for all of them.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum Call {
            $(
                #[doc = concat!("`", $name, "`")]
                #[doc(alias = $name)]
                $variant,
            )+
        }

        impl Call {
            /// All calls, in the order of their discriminants.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the name in NVIDIA's documentation.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

calls! {
    Init = "cuInit",
    DriverGetVersion = "cuDriverGetVersion",
    DeviceGetCount = "cuDeviceGetCount",
    DeviceGetName = "cuDeviceGetName",
    DeviceGetUuid = "cuDeviceGetUuid",
    DeviceGetAttribute = "cuDeviceGetAttribute",
    DeviceTotalMem = "cuDeviceTotalMem",
    DeviceCanAccessPeer = "cuDeviceCanAccessPeer",
    PrimaryCtxRetain = "cuDevicePrimaryCtxRetain",
    PrimaryCtxRelease = "cuDevicePrimaryCtxRelease",
    CtxPushCurrent = "cuCtxPushCurrent",
    CtxPopCurrent = "cuCtxPopCurrent",
    CtxGetCurrent = "cuCtxGetCurrent",
    CtxGetDevice = "cuCtxGetDevice",
    CtxSynchronize = "cuCtxSynchronize",
    CtxRecordEvent = "cuCtxRecordEvent",
    MemGetInfo = "cuMemGetInfo",
    MemGetAllocationGranularity = "cuMemGetAllocationGranularity",
    MemAddressReserve = "cuMemAddressReserve",
    MemAddressFree = "cuMemAddressFree",
    MemCreate = "cuMemCreate",
    MemRelease = "cuMemRelease",
    MemMap = "cuMemMap",
    MemUnmap = "cuMemUnmap",
    MemSetAccess = "cuMemSetAccess",
    MemGetAccess = "cuMemGetAccess",
    MemRetainAllocationHandle = "cuMemRetainAllocationHandle",
    MemGetAllocationPropertiesFromHandle = "cuMemGetAllocationPropertiesFromHandle",
    MemExportToShareableHandle = "cuMemExportToShareableHandle",
    MemImportFromShareableHandle = "cuMemImportFromShareableHandle",
    MemGetHandleForAddressRange = "cuMemGetHandleForAddressRange",
    MemGetAddressRange = "cuMemGetAddressRange",
    PointerGetAttribute = "cuPointerGetAttribute",
    IpcGetMemHandle = "cuIpcGetMemHandle",
    MemcpyHtoD = "cuMemcpyHtoD",
    MemcpyDtoH = "cuMemcpyDtoH",
    MemcpyDtoD = "cuMemcpyDtoD",
    MemcpyHtoDAsync = "cuMemcpyHtoDAsync",
    MemcpyDtoHAsync = "cuMemcpyDtoHAsync",
    MemcpyDtoDAsync = "cuMemcpyDtoDAsync",
    MemsetD8 = "cuMemsetD8",
    MemsetD8Async = "cuMemsetD8Async",
    StreamCreate = "cuStreamCreate",
    StreamDestroy = "cuStreamDestroy",
    StreamSynchronize = "cuStreamSynchronize",
    StreamQuery = "cuStreamQuery",
    StreamWaitEvent = "cuStreamWaitEvent",
    EventCreate = "cuEventCreate",
    EventDestroy = "cuEventDestroy",
    EventRecord = "cuEventRecord",
    EventQuery = "cuEventQuery",
    EventSynchronize = "cuEventSynchronize",
    ThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode",
    StreamIsCapturing = "cuStreamIsCapturing",
    StreamBeginCapture = "cuStreamBeginCapture",
    StreamEndCapture = "cuStreamEndCapture",
    GraphInstantiate = "cuGraphInstantiate",
    GraphLaunch = "cuGraphLaunch",
    GraphDestroy = "cuGraphDestroy",
    GraphExecDestroy = "cuGraphExecDestroy",
    MemAlloc = "cuMemAlloc",
    MemFree = "cuMemFree",
    MemAllocAsync = "cuMemAllocAsync",
    MemFreeAsync = "cuMemFreeAsync",
    MemAllocFromPoolAsync = "cuMemAllocFromPoolAsync",
    MemPoolCreate = "cuMemPoolCreate",
    MemPoolDestroy = "cuMemPoolDestroy",
    MemPoolGetAttribute = "cuMemPoolGetAttribute",
    MemPoolSetAttribute = "cuMemPoolSetAttribute",
    MemPoolTrimTo = "cuMemPoolTrimTo",
    MemPoolGetAccess = "cuMemPoolGetAccess",
    MemPoolSetAccess = "cuMemPoolSetAccess",
    DeviceGetDefaultMemPool = "cuDeviceGetDefaultMemPool",
    DeviceGetMemPool = "cuDeviceGetMemPool",
    DeviceSetMemPool = "cuDeviceSetMemPool",
    MemPoolExportToShareableHandle = "cuMemPoolExportToShareableHandle",
    MemPoolImportFromShareableHandle = "cuMemPoolImportFromShareableHandle",
    MemPoolExportPointer = "cuMemPoolExportPointer",
    MemPoolImportPointer = "cuMemPoolImportPointer",
    MemHostAlloc = "cuMemHostAlloc",
    MemFreeHost = "cuMemFreeHost",
    MemHostRegister = "cuMemHostRegister",
    MemHostUnregister = "cuMemHostUnregister",
    MemAllocManaged = "cuMemAllocManaged",
    MemPrefetchAsync = "cuMemPrefetchAsync",
    MemAdvise = "cuMemAdvise",
    MemRangeGetAttribute = "cuMemRangeGetAttribute",
}

impl Call {
    /// The number of calls; every `call as usize` is less than this.
    pub const COUNT: usize = Self::ALL.len();
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Passes the methods of the trait [`Driver`](crate::Driver) to a macro, but for those that answer
/// without a call: for each the file of `cuda/` that implements it, its call, its name, its
/// parameters and its result. Exported for drivers around another one, which need the names of the types.
#[doc(hidden)]
#[macro_export]
macro_rules! driver_methods {
    ($callback:ident) => {
        $callback! {
            safe {
                devices: DriverGetVersion = version() -> CudaVersion;
                devices: DeviceGetCount = device_count() -> i32;
                devices: DeviceGetName = device_name(device: Ordinal) -> String;
                devices: DeviceGetUuid = device_uuid(device: Ordinal) -> [u8; 16];
                devices: DeviceGetAttribute = device_attribute(
                    device: Ordinal, attribute: DeviceAttribute
                ) -> i32;
                devices: DeviceTotalMem = total_memory(device: Ordinal) -> u64;
                devices: MemGetInfo = memory_info(device: Ordinal) -> MemoryInfo;
                devices: DeviceCanAccessPeer = can_access_peer(device: Ordinal, peer: Ordinal) -> bool;
                devices: MemGetAllocationGranularity = allocation_granularity(
                    props: &PhysicalProps, kind: GranularityKind
                ) -> u64;
                addresses: MemAddressReserve = reserve(
                    size: u64, alignment: u64, hint: DeviceAddress, flags: u64
                ) -> DeviceAddress;
                physical: MemCreate = create(size: u64, props: &PhysicalProps, flags: u64) -> PhysicalHandle;
                physical: MemRetainAllocationHandle = retain(address: DeviceAddress) -> PhysicalHandle;
                mapping: MemGetAccess = get_access(address: DeviceAddress, location: Location) -> AccessFlags;
                mapping: MemGetAddressRange = address_range(
                    device: Ordinal, address: DeviceAddress
                ) -> (DeviceAddress, u64);
                mapping: PointerGetAttribute = pointer_attribute(
                    device: Ordinal, address: DeviceAddress, attribute: PointerAttribute
                ) -> u64;
                mapping: IpcGetMemHandle = ipc_mem_handle(device: Ordinal, address: DeviceAddress) -> [u8; 64];
                streams: StreamCreate = stream_create(device: Ordinal, flags: StreamFlags) -> StreamHandle;
                events: EventCreate = event_create(device: Ordinal, flags: EventFlags) -> EventHandle;
                events: CtxSynchronize = context_synchronize(device: Ordinal) -> ();
                capture: ThreadExchangeStreamCaptureMode = exchange_capture_mode(
                    mode: CaptureMode
                ) -> CaptureMode;
                plain: MemAlloc = alloc(device: Ordinal, size: u64) -> DeviceAddress;
                plain: MemHostAlloc = host_alloc(device: Ordinal, size: u64, flags: u32) -> *mut u8;
                managed: MemAllocManaged = managed_alloc(
                    device: Ordinal, size: u64, flags: u32
                ) -> DeviceAddress;
                managed: MemAdvise = advise(
                    device: Ordinal, address: DeviceAddress, size: u64, advice: Advice, location: Location
                ) -> ();
                managed: MemRangeGetAttribute = range_attribute(
                    device: Ordinal, address: DeviceAddress, size: u64, attribute: RangeAttribute
                ) -> i32;
                managed: MemRangeGetAttribute = range_accessed_by(
                    device: Ordinal, address: DeviceAddress, size: u64
                ) -> Vec<Location>;
                pools: MemPoolCreate = mem_pool_create(
                    device: Ordinal, props: &MemPoolProps
                ) -> MemPoolHandle;
                pools: DeviceGetDefaultMemPool = default_mem_pool(device: Ordinal) -> MemPoolHandle;
                pools: DeviceGetMemPool = current_mem_pool(device: Ordinal) -> MemPoolHandle;
                pools: MemPoolExportPointer = mem_pool_export_pointer(
                    device: Ordinal, address: DeviceAddress
                ) -> MemPoolTicket;
            }
            unsafe {
                addresses: MemAddressFree = free_reservation(address: DeviceAddress, size: u64) -> ();
                physical: MemRelease = release(handle: PhysicalHandle) -> ();
                physical: MemGetAllocationPropertiesFromHandle = physical_props(
                    handle: PhysicalHandle
                ) -> PhysicalProps;
                physical: MemExportToShareableHandle = export(
                    handle: PhysicalHandle, handle_type: HandleTypes, flags: u64
                ) -> Exported;
                physical: MemImportFromShareableHandle = import(
                    source: ImportSource, handle_type: HandleTypes
                ) -> PhysicalHandle;
                mapping: MemMap = map(
                    address: DeviceAddress, size: u64, offset: u64, handle: PhysicalHandle, flags: u64
                ) -> ();
                mapping: MemUnmap = unmap(address: DeviceAddress, size: u64) -> ();
                mapping: MemSetAccess = set_access(
                    address: DeviceAddress, size: u64, access: &[AccessDesc]
                ) -> ();
                mapping: MemGetHandleForAddressRange = dma_buf(
                    device: Ordinal, address: DeviceAddress, size: u64
                ) -> OsHandle;
                copies: MemcpyHtoD = copy_to_device(
                    device: Ordinal, destination: DeviceAddress, source: &[u8]
                ) -> ();
                copies: MemcpyDtoH = copy_to_host(
                    device: Ordinal, destination: &mut [u8], source: DeviceAddress
                ) -> ();
                copies: MemcpyDtoD = copy_on_device(
                    device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64
                ) -> ();
                copies: MemcpyHtoDAsync = copy_to_device_async(
                    device: Ordinal, destination: DeviceAddress, source: *const u8, size: u64,
                    stream: StreamHandle
                ) -> ();
                copies: MemcpyDtoHAsync = copy_to_host_async(
                    device: Ordinal, destination: *mut u8, source: DeviceAddress, size: u64,
                    stream: StreamHandle
                ) -> ();
                copies: MemcpyDtoDAsync = copy_on_device_async(
                    device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64,
                    stream: StreamHandle
                ) -> ();
                copies: MemsetD8 = fill(device: Ordinal, destination: DeviceAddress, byte: u8, size: u64) -> ();
                copies: MemsetD8Async = fill_async(
                    device: Ordinal, destination: DeviceAddress, byte: u8, size: u64, stream: StreamHandle
                ) -> ();
                streams: StreamDestroy = stream_destroy(device: Ordinal, stream: StreamHandle) -> ();
                streams: StreamSynchronize = stream_synchronize(device: Ordinal, stream: StreamHandle) -> ();
                streams: StreamQuery = stream_query(device: Ordinal, stream: StreamHandle) -> bool;
                streams: StreamWaitEvent = stream_wait_event(
                    device: Ordinal, stream: StreamHandle, event: EventHandle
                ) -> ();
                events: EventDestroy = event_destroy(device: Ordinal, event: EventHandle) -> ();
                events: EventRecord = event_record(
                    device: Ordinal, event: EventHandle, stream: StreamHandle
                ) -> ();
                events: CtxRecordEvent = context_record_event(device: Ordinal, event: EventHandle) -> ();
                events: EventQuery = event_query(device: Ordinal, event: EventHandle) -> bool;
                events: EventSynchronize = event_synchronize(device: Ordinal, event: EventHandle) -> ();
                capture: StreamIsCapturing = capture_status(
                    device: Ordinal, stream: StreamHandle
                ) -> CaptureStatus;
                capture: StreamBeginCapture = capture_begin(
                    device: Ordinal, stream: StreamHandle, mode: CaptureMode
                ) -> ();
                capture: StreamEndCapture = capture_end(device: Ordinal, stream: StreamHandle) -> GraphHandle;
                capture: GraphInstantiate = graph_instantiate(
                    device: Ordinal, graph: GraphHandle
                ) -> GraphExecHandle;
                capture: GraphLaunch = graph_launch(
                    device: Ordinal, graph: GraphExecHandle, stream: StreamHandle
                ) -> ();
                capture: GraphDestroy = graph_destroy(device: Ordinal, graph: GraphHandle) -> ();
                capture: GraphExecDestroy = graph_exec_destroy(device: Ordinal, graph: GraphExecHandle) -> ();
                plain: MemFree = free(device: Ordinal, address: DeviceAddress) -> ();
                plain: MemAllocAsync = alloc_async(
                    device: Ordinal, size: u64, stream: StreamHandle
                ) -> DeviceAddress;
                plain: MemFreeAsync = free_async(
                    device: Ordinal, address: DeviceAddress, stream: StreamHandle
                ) -> ();
                plain: MemFreeHost = host_free(device: Ordinal, pointer: *mut u8) -> ();
                plain: MemHostRegister = host_register(
                    device: Ordinal, pointer: *mut u8, size: u64, flags: u32
                ) -> ();
                plain: MemHostUnregister = host_unregister(device: Ordinal, pointer: *mut u8) -> ();
                managed: MemPrefetchAsync = prefetch(
                    device: Ordinal, address: DeviceAddress, size: u64, location: Location,
                    stream: StreamHandle
                ) -> ();
                pools: MemPoolDestroy = mem_pool_destroy(device: Ordinal, pool: MemPoolHandle) -> ();
                pools: MemPoolGetAttribute = mem_pool_attribute(
                    device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute
                ) -> u64;
                pools: MemPoolSetAttribute = mem_pool_set_attribute(
                    device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute, value: u64
                ) -> ();
                pools: MemPoolTrimTo = mem_pool_trim(device: Ordinal, pool: MemPoolHandle, keep: u64) -> ();
                pools: MemPoolGetAccess = mem_pool_access(
                    device: Ordinal, pool: MemPoolHandle, location: Location
                ) -> AccessFlags;
                pools: MemPoolSetAccess = mem_pool_set_access(
                    device: Ordinal, pool: MemPoolHandle, access: &[AccessDesc]
                ) -> ();
                pools: DeviceSetMemPool = set_current_mem_pool(device: Ordinal, pool: MemPoolHandle) -> ();
                pools: MemAllocFromPoolAsync = alloc_from_pool_async(
                    device: Ordinal, size: u64, pool: MemPoolHandle, stream: StreamHandle
                ) -> DeviceAddress;
                pools: MemPoolExportToShareableHandle = mem_pool_export(
                    device: Ordinal, pool: MemPoolHandle, handle_type: HandleTypes, flags: u64
                ) -> Exported;
                pools: MemPoolImportFromShareableHandle = mem_pool_import(
                    device: Ordinal, source: ImportSource, handle_type: HandleTypes, flags: u64
                ) -> MemPoolHandle;
                pools: MemPoolImportPointer = mem_pool_import_pointer(
                    device: Ordinal, pool: MemPoolHandle, ticket: &MemPoolTicket
                ) -> DeviceAddress;
            }
        }
    };
}
pub(crate) use driver_methods;
