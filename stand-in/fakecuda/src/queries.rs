//! Settings of streams and contexts: flags, priorities, limits.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use cuvmm_driver::{CaptureStatus, StreamHandle};
use cuvmm_sys::{CUcontext, CUdevice, CUgraph, CUresult, CUstream, CUstreamCaptureStatus};

use crate::contexts::{current, name};
use crate::edge::{Outcome, code, export_also, present, put};
use crate::identity::attribute;
use crate::owned::{self, Known, Object};
use crate::stack;
use crate::state::{driver, state};
use crate::streams::{HIGHEST, device_of, stream_handle};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT;

/// The limits of a context with their values on an H200: the stack, the buffer of `printf`, the
/// heap of `malloc` in kernels, the depth of launches (which no longer exists), the number of
/// pending launches, the fetch granularity and the persisting part of the L2 cache (which the
/// device gives), the shared memory of a block, and the memory of graphics interoperation. The last
/// two can only be read.
const LIMITS: [Option<u64>; 9] = [
    Some(1024),
    Some(8_650_752),
    Some(8_388_608),
    None,
    Some(2048),
    Some(64),
    None,
    Some(232_448),
    Some(0),
];

/// The limit of the persisting part of the L2 cache, and the attribute with its maximum.
const PERSISTING: u32 = 6;
const MOST_PERSISTING: i32 = 108;

const SETTABLE: u32 = 7;

const MULTIPROCESSORS: i32 = 16;

static SET: Mutex<BTreeMap<(usize, u32), u64>> = Mutex::new(BTreeMap::new());

/// Returns a stream's properties. A default stream has the default settings.
fn about(stream: CUstream) -> Outcome<Known> {
    let stream = stream_handle(stream);
    device_of(stream)?;
    if stream.0 <= StreamHandle::PER_THREAD.0 {
        return Ok(Known::default());
    }
    owned::known(Object::Stream(stream.0)).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

thread_local! {
    /// The nodes last listed for the thread. They are the driver's, until its next call.
    static NODES: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Places for the results about a capture: its number, its graph, the nodes, the kinds of their
/// edges, and the number of nodes.
type Places = (
    *mut u64,
    *mut CUgraph,
    *mut *const u64,
    *mut *const u8,
    *mut usize,
);

/// Writes the state of a stream's capture.
///
/// # Safety
/// The pointers are null or valid for writing.
unsafe fn capture_info(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
    (id, graph, nodes, edges, count): Places,
) -> Outcome {
    let device = current()?;
    present(status)?;
    let (driver, stream) = (driver()?, stream_handle(stream));
    // SAFETY: the host driver refuses wrong handles.
    let found = unsafe { driver.capture_status(device, stream) }.map_err(code)?;
    // SAFETY: as the caller promises.
    unsafe { put(status, CUstreamCaptureStatus(found.0)) }?;
    if found != CaptureStatus::ACTIVE {
        return Ok(());
    }
    let Some(recording) = driver.recording(device, stream)? else {
        return Ok(());
    };
    let handle = std::ptr::without_provenance_mut(recording.graph.0 as usize);
    let (listed, number) = NODES.with_borrow_mut(|kept| {
        *kept = recording.nodes;
        // Without nodes there is no list.
        let first = kept.first().map_or(std::ptr::null(), std::ptr::from_ref);
        (first, kept.len())
    });
    // SAFETY: as the caller promises.
    unsafe {
        may_put(id, recording.id)?;
        may_put(graph, handle)?;
        may_put(nodes, listed)?;
        may_put(edges, std::ptr::null())?;
        may_put(count, number)
    }
}

/// Writes a result unless its pointer is null.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn may_put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller promises.
    unsafe { put(place, value) }
}

fn limit(limit: u32) -> Outcome<u64> {
    let device = current()?;
    let usual = LIMITS.get(limit as usize).ok_or(INVALID)?;
    let usual = match limit {
        // As recorded, three tenths of the most.
        PERSISTING => attribute(device, MOST_PERSISTING)? as u64 / 10 * 3,
        _ => usual.ok_or(UNSUPPORTED)?,
    };
    let context = stack::top().map_or(0, |context| context.addr());
    let set = SET.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(set.get(&(context, limit)).copied().unwrap_or(usual))
}

export_also! {
    fn cuStreamGetFlags + ptsz(stream: CUstream, flags: *mut u32) {
        let known = about(stream)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(flags, known.flags) }
    }

    fn cuStreamGetPriority + ptsz(stream: CUstream, priority: *mut i32) {
        let known = about(stream)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(priority, known.priority) }
    }

    fn cuStreamGetId + ptsz(stream: CUstream, id: *mut u64) {
        let known = about(stream)?;
        let found = match stream_handle(stream) {
            StreamHandle::NULL | StreamHandle::LEGACY => 1,
            StreamHandle::PER_THREAD => 2,
            // Numbers after those of the default streams.
            _ => known.id + 2,
        };
        // SAFETY: C's promise (see `edge`).
        unsafe { put(id, found) }
    }

    fn cuStreamGetDevice + ptsz(stream: CUstream, device: *mut CUdevice) {
        let found = device_of(stream_handle(stream))?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(device, found.0) }
    }

    fn cuStreamGetCtx_v2 + ptsz(stream: CUstream, context: *mut CUcontext, green: *mut *mut u8) {
        let known = about(stream)?;
        let found = match known.context {
            0 => stack::top().unwrap_or(name(current()?)),
            context => std::ptr::without_provenance_mut(context),
        };
        // SAFETY: C's promise (see `edge`).
        unsafe {
            put(context, found)?;
            if !green.is_null() {
                put(green, std::ptr::null_mut())?;
            }
        }
        Ok(())
    }

    fn cuStreamGetCaptureInfo + ptsz(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
    ) {
        let places = (id, null_mut(), null_mut(), null_mut(), null_mut());
        // SAFETY: C's promise (see `edge`).
        unsafe { capture_info(stream, status, places) }
    }

    fn cuStreamGetCaptureInfo_v2 + ptsz(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut CUgraph,
        nodes: *mut *const u64,
        count: *mut usize,
    ) {
        // SAFETY: C's promise (see `edge`).
        unsafe { capture_info(stream, status, (id, graph, nodes, null_mut(), count)) }
    }

    fn cuStreamGetCaptureInfo_v3 + ptsz(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut CUgraph,
        nodes: *mut *const u64,
        edges: *mut *const u8,
        count: *mut usize,
    ) {
        // SAFETY: C's promise (see `edge`).
        unsafe { capture_info(stream, status, (id, graph, nodes, edges, count)) }
    }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        current()?;
        for (place, value) in [(least, 0), (greatest, HIGHEST)] {
            if !place.is_null() {
                // SAFETY: C's promise (see `edge`).
                unsafe { put(place, value) }?;
            }
        }
        Ok(())
    }

    fn cuCtxGetLimit(value: *mut usize, which: u32) {
        current()?;
        present(value)?;
        let found = limit(which)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(value, found as usize) }
    }

    fn cuCtxSetLimit(which: u32, value: usize) {
        limit(which)?;
        if which >= SETTABLE {
            return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
        }
        let context = stack::top().map_or(0, |context| context.addr());
        let mut set = SET.lock().unwrap_or_else(PoisonError::into_inner);
        set.insert((context, which), value as u64);
        Ok(())
    }

    fn cuCtxGetExecAffinity(affinity: *mut [u32; 2], kind: u32) {
        let device = current()?;
        present(affinity)?;
        let found = attribute(device, MULTIPROCESSORS)?;
        // Execution affinity exists under MPS only: a context has all multiprocessors.
        // SAFETY: C's promise (see `edge`).
        unsafe { put(affinity, [kind, found as u32]) }
    }

    fn cuStreamCopyAttributes(to: CUstream, from: CUstream) {
        about(to)?;
        about(from).map(drop)
    }

    fn cuStreamGetAttribute(stream: CUstream, which: u32, value: *mut u64) {
        let known = about(stream)?;
        present(value)?;
        let found = match which {
            // The window of the access policy, whose other words are zero too.
            1 => 0,
            // The default policy of synchronization.
            3 => u64::from(u32::MAX),
            8 => known.priority as u32 as u64,
            _ => return Err(INVALID),
        };
        // SAFETY: C's promise (see `edge`).
        unsafe { put(value, found) }
    }

    fn cuCtxGetCacheConfig(config: *mut u32) {
        current()?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(config, 0) }
    }

    fn cuCtxSetCacheConfig(config: u32) {
        current()?;
        if config > 3 { Err(INVALID) } else { Ok(()) }
    }

    fn cuCtxGetSharedMemConfig(config: *mut u32) {
        current()?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(config, 1) }
    }

    fn cuCtxSetSharedMemConfig(config: u32) {
        current()?;
        if config > 2 { Err(INVALID) } else { Ok(()) }
    }

    fn cuCtxResetPersistingL2Cache() {
        current().map(drop)
    }

    fn cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) {
        current()?;
        if target == 0 && [100, 200].contains(&scope) { Ok(()) } else { Err(INVALID) }
    }

    fn cuProfilerStart() {
        current().map(drop)
    }

    fn cuProfilerStop() {
        current().map(drop)
    }

    fn cuDeviceGetGraphMemAttribute(device: CUdevice, attribute: u32, value: *mut u64) {
        state()?.device(device)?;
        present(value)?;
        if attribute > 3 {
            return Err(INVALID);
        }
        // SAFETY: C's promise (see `edge`).
        unsafe { put(value, 0) }
    }

    fn cuDeviceGraphMemTrim(device: CUdevice) {
        state()?.device(device).map(drop)
    }
}
