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
