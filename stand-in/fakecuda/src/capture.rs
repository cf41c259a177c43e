//! Captures and graphs.
//!
//! `unsafe` exports functions (see `state`). The C caller promises valid handles,
//! and the host driver refuses others.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};

use cuvmm_driver::{CaptureMode, Driver, GraphExecHandle, GraphHandle};
use cuvmm_sys::{
    CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use crate::contexts::current;
use crate::edge::{Outcome, code, export, export_also, present, put, take};
use crate::owned::{self, Known, Object};
use crate::state::driver;
use crate::streams::{stream_handle, target};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// The flag that frees the graph's memory at a launch.
const AUTO_FREE: u64 = 1;

/// The flag of a graph that a device may launch.
const DEVICE_LAUNCH: u64 = 4;

/// The flags for instantiation. The last uses the priorities of nodes. None changes the effect of a
/// graph of copies and fills.
const FLAGS: u64 = AUTO_FREE | DEVICE_LAUNCH | 8;

/// The flag that uploads the graph, for `cuGraphInstantiateWithParams` only.
const UPLOAD: u64 = 2;

/// The parameters of `cuGraphInstantiateWithParams`: flags and stream, and as results the failed
/// node and a code.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    flags: u64,
    stream: CUstream,
    failed: *mut c_void,
    result: u32,
}

/// Instantiates a graph with flags out of `permitted`.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn instantiate(
    executable: *mut CUgraphExec,
    graph: CUgraph,
    flags: u64,
    permitted: u64,
) -> Outcome {
    let device = current()?;
    present(executable)?;
    let both = AUTO_FREE | DEVICE_LAUNCH;
    if flags & !permitted != 0 || flags & both == both {
        return Err(INVALID);
    }
    let graph = GraphHandle(graph.addr() as u64);
    // SAFETY: the host driver refuses wrong handles.
    let made = unsafe { driver()?.graph_instantiate(device, graph) }.map_err(code)?;
    // The driver reports no other flags.
    let flags = (flags & both) as u32;
    let known = Known {
        flags,
        ..Known::of(device)
    };
    owned::own(Object::Executable(made.0), known);
    // SAFETY: as the caller promises.
    unsafe {
        put(
            executable,
            std::ptr::without_provenance_mut(made.0 as usize),
        )
    }
}

/// Defines functions that instantiate a graph without flags, and report no failed node.
macro_rules! instantiates_told {
    ($($name:ident)*) => { export_also! {$(
        fn $name(
            executable: *mut CUgraphExec,
            graph: CUgraph,
            node: *mut *mut c_void,
            log: *mut c_char,
            size: usize,
        ) {
            // SAFETY: the caller passes valid pointers for the results, or null, and a log of `size`
            // bytes.
            unsafe {
                instantiate(executable, graph, 0, 0)?;
                if !node.is_null() {
                    put(node, std::ptr::null_mut())?;
                }
                if !log.is_null() && size != 0 {
                    put(log, 0)?;
                }
            }
            Ok(())
        }
    )*} };
}

instantiates_told! {
    cuGraphInstantiate
    cuGraphInstantiate_v2
}

export! {
    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) {
        let driver = driver()?;
        // SAFETY: the caller passes a mode to read and to write, or null.
        let asked = unsafe { take(mode) }?;
        let former = driver.exchange_capture_mode(CaptureMode(asked.0)).map_err(code)?;
        // SAFETY: the caller passes a mode to read and to write, or null.
        unsafe { put(mode, CUstreamCaptureMode(former.0)) }
    }

    fn cuStreamIsCapturing + ptsz(stream: CUstream, status: *mut CUstreamCaptureStatus) {
        current()?;
        present(status)?;
        let (device, stream) = target(Some(stream_handle(stream)))?;
        // SAFETY: the host driver refuses wrong handles.
        let found = unsafe { driver()?.capture_status(device, stream) }.map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(status, CUstreamCaptureStatus(found.0)) }
    }

    fn cuStreamBeginCapture_v2 + ptsz(stream: CUstream, mode: CUstreamCaptureMode) {
        let (device, stream) = target(Some(stream_handle(stream)))?;
        let mode = CaptureMode(mode.0);
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.capture_begin(device, stream, mode) }.map_err(code)
    }

    fn cuStreamEndCapture + ptsz(stream: CUstream, graph: *mut CUgraph) {
        current()?;
        present(graph)?;
        let (device, stream) = target(Some(stream_handle(stream)))?;
        // SAFETY: the host driver refuses wrong handles.
        let ended = unsafe { driver()?.capture_end(device, stream) }.map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(graph, std::ptr::without_provenance_mut(ended.0 as usize)) }
    }

    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: u64) {
        // SAFETY: C's promise (see `edge`).
        unsafe { instantiate(executable, graph, flags, FLAGS) }
    }

    fn cuGraphLaunch + ptsz(executable: CUgraphExec, stream: CUstream) {
        let device = current()?;
        let executable = GraphExecHandle(executable.addr() as u64);
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.graph_launch(device, executable, stream_handle(stream)) }.map_err(code)
    }

    fn cuGraphDestroy(graph: CUgraph) {
        // Destroying needs no context, so without a current context device 0 will do.
        let device = current().unwrap_or(cuvmm_driver::Ordinal(0));
        let graph = GraphHandle(graph.addr() as u64);
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.graph_destroy(device, graph) }.map_err(code)
    }

    fn cuGraphExecDestroy(executable: CUgraphExec) {
        let device = current().unwrap_or(cuvmm_driver::Ordinal(0));
        let executable = GraphExecHandle(executable.addr() as u64);
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.graph_exec_destroy(device, executable) }.map_err(code)?;
        owned::forget(Object::Executable(executable.0));
        Ok(())
    }
}

export_also! {
    fn cuGraphInstantiateWithParams(
        executable: *mut CUgraphExec,
        graph: CUgraph,
        params: *mut Params,
    ) {
        // SAFETY: the caller passes the structure, or null.
        let asked = unsafe { take(params.cast_const()) }?;
        // SAFETY: C's promise (see `edge`).
        let made = unsafe { instantiate(executable, graph, asked.flags, FLAGS | UPLOAD) };
        // No node has failed. 1 is an error without a kind of its own.
        let (failed, result) = (std::ptr::null_mut(), u32::from(made.is_err()));
        // SAFETY: the caller passes the structure.
        unsafe { put(params, Params { failed, result, ..asked }) }?;
        made
    }

    fn cuGraphExecGetFlags(executable: CUgraphExec, flags: *mut u64) {
        let known = owned::known(Object::Executable(executable.addr() as u64)).ok_or(INVALID)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(flags, u64::from(known.flags)) }
    }

    fn cuGraphUpload(executable: CUgraphExec, stream: CUstream) {
        target(Some(stream_handle(stream)))?;
        let known = owned::known(Object::Executable(executable.addr() as u64));
        known.map(drop).ok_or(INVALID)
    }
}
