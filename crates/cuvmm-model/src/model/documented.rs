//! The codes that each call may return when it fails, according to NVIDIA's documentation.
//!
//! The source is the list of return values that `cuda.h` of CUDA 13.5 gives for each function,
//! which is also the text of the driver API's reference. A function with several versions has the
//! codes of all of them. Codes mentioned only in a note are not listed: that a call may also return
//! an error of earlier work, and that some calls invalidate captures.
//!
//! The list does not cover everything that a driver returns: `cuMemSetAccess` was measured to
//! return `OUT_OF_MEMORY`, which is not documented for it.

use cuvmm_driver::{CUresult, Call};

const COMPAT_NOT_SUPPORTED_ON_DEVICE: CUresult =
    CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE;
const DEINITIALIZED: CUresult = CUresult::CUDA_ERROR_DEINITIALIZED;
const EXTERNAL_DEVICE: CUresult = CUresult::CUDA_ERROR_EXTERNAL_DEVICE;
const HOST_MEMORY_ALREADY_REGISTERED: CUresult =
    CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
const HOST_MEMORY_NOT_REGISTERED: CUresult = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
const ILLEGAL_STATE: CUresult = CUresult::CUDA_ERROR_ILLEGAL_STATE;
const INVALID_CONTEXT: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;
const INVALID_DEVICE: CUresult = CUresult::CUDA_ERROR_INVALID_DEVICE;
const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;
const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const MAP_FAILED: CUresult = CUresult::CUDA_ERROR_MAP_FAILED;
const NOT_FOUND: CUresult = CUresult::CUDA_ERROR_NOT_FOUND;
const NOT_INITIALIZED: CUresult = CUresult::CUDA_ERROR_NOT_INITIALIZED;
const NOT_PERMITTED: CUresult = CUresult::CUDA_ERROR_NOT_PERMITTED;
const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;
const NOT_SUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;
const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
const STREAM_CAPTURE_IMPLICIT: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
const STREAM_CAPTURE_UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const STREAM_CAPTURE_WRONG_THREAD: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
const SYSTEM_DRIVER_MISMATCH: CUresult = CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// Returns the codes that are documented for a call, without success.
pub fn documented(call: Call) -> &'static [CUresult] {
    match call {
        Call::Init => &[
            INVALID_VALUE,
            INVALID_DEVICE,
            SYSTEM_DRIVER_MISMATCH,
            COMPAT_NOT_SUPPORTED_ON_DEVICE,
        ],
        Call::DriverGetVersion => &[INVALID_VALUE],
        Call::DeviceGetCount
        | Call::CtxPushCurrent
        | Call::MemGetInfo
        | Call::MemcpyHtoD
        | Call::MemcpyDtoH
        | Call::MemcpyDtoD
        | Call::MemsetD8
        | Call::MemsetD8Async
        | Call::MemFree
        | Call::MemFreeHost => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_VALUE,
        ],
        Call::DeviceGetName
        | Call::DeviceGetAttribute
        | Call::DeviceTotalMem
        | Call::PointerGetAttribute => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_VALUE,
            INVALID_DEVICE,
        ],
        Call::DeviceGetUuid => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_VALUE,
            INVALID_DEVICE,
        ],
        Call::DeviceCanAccessPeer => &[DEINITIALIZED, NOT_INITIALIZED, INVALID_DEVICE],
        Call::PrimaryCtxRetain => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_VALUE,
            INVALID_DEVICE,
            OUT_OF_MEMORY,
            UNKNOWN,
        ],
        Call::PrimaryCtxRelease => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_DEVICE,
            INVALID_CONTEXT,
        ],
        Call::CtxPopCurrent => &[DEINITIALIZED, NOT_INITIALIZED, INVALID_CONTEXT],
        Call::CtxGetCurrent => &[DEINITIALIZED, NOT_INITIALIZED],
        Call::CtxGetDevice => &[DEINITIALIZED, NOT_INITIALIZED, INVALID_CONTEXT],
        Call::CtxSynchronize => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            STREAM_CAPTURE_UNSUPPORTED,
            INVALID_VALUE,
        ],
        Call::CtxRecordEvent => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_HANDLE,
            STREAM_CAPTURE_UNSUPPORTED,
        ],
        Call::MemGetAllocationGranularity
        | Call::MemAddressFree
        | Call::MemRelease
        | Call::MemUnmap
        | Call::MemRetainAllocationHandle
        | Call::MemGetAllocationPropertiesFromHandle
        | Call::MemExportToShareableHandle
        | Call::MemImportFromShareableHandle => &[
            INVALID_VALUE,
            NOT_INITIALIZED,
            DEINITIALIZED,
            NOT_PERMITTED,
            NOT_SUPPORTED,
        ],
        Call::MemAddressReserve => &[
            INVALID_VALUE,
            OUT_OF_MEMORY,
            NOT_INITIALIZED,
            DEINITIALIZED,
            NOT_PERMITTED,
            NOT_SUPPORTED,
        ],
        Call::MemCreate => &[
            INVALID_VALUE,
            OUT_OF_MEMORY,
            INVALID_DEVICE,
            NOT_INITIALIZED,
            DEINITIALIZED,
            NOT_PERMITTED,
            NOT_SUPPORTED,
        ],
        Call::MemMap => &[
            INVALID_VALUE,
            INVALID_DEVICE,
            OUT_OF_MEMORY,
            NOT_INITIALIZED,
            DEINITIALIZED,
            NOT_PERMITTED,
            NOT_SUPPORTED,
            ILLEGAL_STATE,
        ],
        Call::MemSetAccess | Call::MemPrefetchAsync | Call::MemAdvise => {
            &[INVALID_VALUE, INVALID_DEVICE, NOT_SUPPORTED]
        }
        Call::MemGetAccess => &[
            INVALID_VALUE,
            INVALID_DEVICE,
            NOT_INITIALIZED,
            DEINITIALIZED,
            NOT_PERMITTED,
            NOT_SUPPORTED,
        ],
        Call::MemGetHandleForAddressRange => &[INVALID_VALUE, NOT_SUPPORTED],
        Call::MemGetAddressRange => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            NOT_FOUND,
            INVALID_VALUE,
        ],
        Call::IpcGetMemHandle => &[
            INVALID_HANDLE,
            INVALID_CONTEXT,
            OUT_OF_MEMORY,
            MAP_FAILED,
            INVALID_VALUE,
        ],
        Call::MemcpyHtoDAsync
        | Call::MemcpyDtoHAsync
        | Call::MemcpyDtoDAsync
        | Call::StreamDestroy => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_VALUE,
            INVALID_HANDLE,
        ],
        Call::StreamCreate | Call::MemAlloc | Call::MemHostAlloc => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_VALUE,
            OUT_OF_MEMORY,
            EXTERNAL_DEVICE,
        ],
        Call::MemHostRegister => &[
            INVALID_VALUE,
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            OUT_OF_MEMORY,
            HOST_MEMORY_ALREADY_REGISTERED,
            NOT_PERMITTED,
            NOT_SUPPORTED,
        ],
        Call::MemHostUnregister => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_VALUE,
            HOST_MEMORY_NOT_REGISTERED,
        ],
        Call::StreamSynchronize
        | Call::StreamWaitEvent
        | Call::EventDestroy
        | Call::EventSynchronize => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_HANDLE,
        ],
        Call::StreamQuery => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_HANDLE,
            NOT_READY,
        ],
        Call::EventCreate => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_VALUE,
            OUT_OF_MEMORY,
        ],
        Call::EventRecord => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            INVALID_HANDLE,
            INVALID_VALUE,
        ],
        Call::EventQuery => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_HANDLE,
            INVALID_VALUE,
            NOT_READY,
        ],
        Call::ThreadExchangeStreamCaptureMode
        | Call::StreamBeginCapture
        | Call::GraphInstantiate
        | Call::GraphLaunch
        | Call::GraphDestroy
        | Call::GraphExecDestroy => &[DEINITIALIZED, NOT_INITIALIZED, INVALID_VALUE],
        Call::StreamIsCapturing => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_VALUE,
            STREAM_CAPTURE_IMPLICIT,
        ],
        Call::StreamEndCapture => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_VALUE,
            STREAM_CAPTURE_WRONG_THREAD,
        ],
        Call::MemAllocAsync | Call::MemAllocFromPoolAsync => &[
            INVALID_VALUE,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            NOT_SUPPORTED,
            OUT_OF_MEMORY,
        ],
        Call::MemFreeAsync => &[
            INVALID_VALUE,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            NOT_SUPPORTED,
        ],
        Call::MemAllocManaged => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_CONTEXT,
            NOT_SUPPORTED,
            INVALID_VALUE,
            OUT_OF_MEMORY,
        ],
        Call::MemRangeGetAttribute => &[INVALID_VALUE, NOT_SUPPORTED, INVALID_DEVICE],
        Call::MemPoolCreate => &[INVALID_VALUE, OUT_OF_MEMORY, NOT_PERMITTED, NOT_SUPPORTED],
        Call::MemPoolDestroy
        | Call::MemPoolGetAttribute
        | Call::MemPoolSetAttribute
        | Call::MemPoolTrimTo
        | Call::MemPoolGetAccess
        | Call::MemPoolSetAccess
        | Call::DeviceGetMemPool
        | Call::DeviceSetMemPool => &[INVALID_VALUE],
        Call::DeviceGetDefaultMemPool => &[
            DEINITIALIZED,
            NOT_INITIALIZED,
            INVALID_VALUE,
            INVALID_DEVICE,
            NOT_SUPPORTED,
        ],
        Call::MemPoolExportToShareableHandle
        | Call::MemPoolImportFromShareableHandle
        | Call::MemPoolExportPointer => &[INVALID_VALUE, OUT_OF_MEMORY],
        Call::MemPoolImportPointer => &[INVALID_VALUE, NOT_INITIALIZED, OUT_OF_MEMORY],
        // A call of a later version of the trait has no entry.
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_its_codes() {
        for call in Call::ALL {
            assert!(!documented(*call).is_empty(), "{call:?}");
        }
    }
}
