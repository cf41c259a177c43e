//! The functions whose default stream is the calling thread's own.
//!
//! Each calls the usual function with a note that null means that stream. Copies and fills that
//! wait run in the order of the legacy default stream, which waits for more than needed.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_void;

use cuvmm_sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUgraph, CUgraphExec, CUhostFn, CUmemLocation,
    CUmemoryPool, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

thread_local! {
    static MEANT: Cell<bool> = const { Cell::new(false) };
}

/// Returns `true` if null names the thread's own stream in the current call.
pub(crate) fn is_meant() -> bool {
    MEANT.get()
}

/// Runs a call in which null names the thread's own stream.
fn meant(call: impl FnOnce() -> CUresult) -> CUresult {
    let before = MEANT.replace(true);
    // No exported function unwinds.
    let answer = call();
    MEANT.set(before);
    answer
}

/// Defines functions that call another function, in which null names the thread's own stream.
macro_rules! per_thread {
    ($($own:ident = $usual:ident($($parameter:ident: $type:ty),* $(,)?);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $own($($parameter: $type),*) -> CUresult {
            unsafe extern "C" {
                fn $usual($($parameter: $type),*) -> CUresult;
            }
            // SAFETY: both functions have the same requirements.
            meant(|| unsafe { $usual($($parameter),*) })
        }
    )*};
}

per_thread! {
    cuStreamGetFlags_ptsz = cuStreamGetFlags(stream: CUstream, flags: *mut u32);
    cuStreamGetPriority_ptsz = cuStreamGetPriority(stream: CUstream, priority: *mut i32);
    cuStreamGetId_ptsz = cuStreamGetId(stream: CUstream, id: *mut u64);
    cuStreamGetDevice_ptsz = cuStreamGetDevice(stream: CUstream, device: *mut CUdevice);
    cuStreamGetCtx_ptsz = cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuStreamGetCtx_v2_ptsz =
        cuStreamGetCtx_v2(stream: CUstream, context: *mut CUcontext, green: *mut *mut u8);
    cuStreamQuery_ptsz = cuStreamQuery(stream: CUstream);
    cuStreamSynchronize_ptsz = cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent_ptsz = cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    cuEventRecord_ptsz = cuEventRecord(event: CUevent, stream: CUstream);
    cuEventRecordWithFlags_ptsz =
        cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32);
    cuStreamIsCapturing_ptsz =
        cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    cuStreamBeginCapture_v2_ptsz =
        cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    cuStreamEndCapture_ptsz = cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuStreamGetCaptureInfo_ptsz = cuStreamGetCaptureInfo(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
    );
    cuStreamGetCaptureInfo_v2_ptsz = cuStreamGetCaptureInfo_v2(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut CUgraph,
        nodes: *mut *const u64,
        count: *mut usize,
    );
    cuStreamGetCaptureInfo_v3_ptsz = cuStreamGetCaptureInfo_v3(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut CUgraph,
        nodes: *mut *const u64,
        edges: *mut *const u8,
        count: *mut usize,
    );
    cuGraphLaunch_ptsz = cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
    cuLaunchHostFunc_ptsz =
        cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void);
    cuStreamAddCallback_ptsz = cuStreamAddCallback(
        stream: CUstream,
        callback: *const c_void,
        data: *mut c_void,
        flags: u32,
    );
    cuMemAllocAsync_ptsz =
        cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemAllocFromPoolAsync_ptsz = cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    );
    cuMemFreeAsync_ptsz = cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    cuMemPrefetchAsync_ptsz = cuMemPrefetchAsync(
        address: CUdeviceptr,
        bytes: usize,
        device: CUdevice,
        stream: CUstream,
    );
    cuMemPrefetchAsync_v2_ptsz = cuMemPrefetchAsync_v2(
        address: CUdeviceptr,
        bytes: usize,
        place: CUmemLocation,
        flags: u32,
        stream: CUstream,
    );
    cuMemPrefetchBatchAsync_ptsz = cuMemPrefetchBatchAsync(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        places: *mut CUmemLocation,
        starts: *mut usize,
        place_count: usize,
        flags: u64,
        stream: CUstream,
    );
    cuMemDiscardBatchAsync_ptsz = cuMemDiscardBatchAsync(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        flags: u64,
        stream: CUstream,
    );
    cuMemDiscardAndPrefetchBatchAsync_ptsz = cuMemDiscardAndPrefetchBatchAsync(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        places: *mut CUmemLocation,
        starts: *mut usize,
        place_count: usize,
        flags: u64,
        stream: CUstream,
    );
    cuMemcpy_ptds = cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize);
    cuMemcpyAsync_ptsz =
        cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoD_v2_ptds = cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize);
    cuMemcpyDtoH_v2_ptds = cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
    cuMemcpyDtoD_v2_ptds = cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize);
    cuMemcpyHtoDAsync_v2_ptsz = cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    );
    cuMemcpyDtoHAsync_v2_ptsz = cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    );
    cuMemcpyDtoDAsync_v2_ptsz =
        cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyPeer_ptds = cuMemcpyPeer(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
    );
    cuMemcpyPeerAsync_ptsz = cuMemcpyPeerAsync(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
        stream: CUstream,
    );
    cuMemsetD8_v2_ptds = cuMemsetD8_v2(to: CUdeviceptr, value: u8, count: usize);
    cuMemsetD16_v2_ptds = cuMemsetD16_v2(to: CUdeviceptr, value: u16, count: usize);
    cuMemsetD32_v2_ptds = cuMemsetD32_v2(to: CUdeviceptr, value: u32, count: usize);
    cuMemsetD8Async_ptsz =
        cuMemsetD8Async(to: CUdeviceptr, value: u8, count: usize, stream: CUstream);
    cuMemsetD16Async_ptsz =
        cuMemsetD16Async(to: CUdeviceptr, value: u16, count: usize, stream: CUstream);
    cuMemsetD32Async_ptsz =
        cuMemsetD32Async(to: CUdeviceptr, value: u32, count: usize, stream: CUstream);
    cuMemsetD2D8_v2_ptds = cuMemsetD2D8_v2(
        to: CUdeviceptr,
        pitch: usize,
        value: u8,
        width: usize,
        height: usize,
    );
    cuMemsetD2D8Async_ptsz = cuMemsetD2D8Async(
        to: CUdeviceptr,
        pitch: usize,
        value: u8,
        width: usize,
        height: usize,
        stream: CUstream,
    );
    cuMemsetD2D16_v2_ptds = cuMemsetD2D16_v2(
        to: CUdeviceptr,
        pitch: usize,
        value: u16,
        width: usize,
        height: usize,
    );
    cuMemsetD2D16Async_ptsz = cuMemsetD2D16Async(
        to: CUdeviceptr,
        pitch: usize,
        value: u16,
        width: usize,
        height: usize,
        stream: CUstream,
    );
    cuMemsetD2D32_v2_ptds = cuMemsetD2D32_v2(
        to: CUdeviceptr,
        pitch: usize,
        value: u32,
        width: usize,
        height: usize,
    );
    cuMemsetD2D32Async_ptsz = cuMemsetD2D32Async(
        to: CUdeviceptr,
        pitch: usize,
        value: u32,
        width: usize,
        height: usize,
        stream: CUstream,
    );
    cuMemcpy2D_v2_ptds = cuMemcpy2D_v2(rectangle: *const c_void);
    cuMemcpy2DUnaligned_v2_ptds = cuMemcpy2DUnaligned_v2(rectangle: *const c_void);
    cuMemcpy2DAsync_v2_ptsz = cuMemcpy2DAsync_v2(rectangle: *const c_void, stream: CUstream);
}
