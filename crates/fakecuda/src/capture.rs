//! Captures and graphs.
//!
//! `unsafe` is allowed here to export functions (see `state`). The C caller promises valid handles,
//! and the host driver refuses others.
#![allow(unsafe_code)]

use cuvmm_driver::{CaptureMode, Driver, GraphExecHandle, GraphHandle};
use cuvmm_sys::{
    CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use crate::contexts::current;
use crate::edge::{code, export, present, put, take};
use crate::state::driver;
use crate::streams::{stream_handle, target};

export! {
    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) {
        let driver = driver()?;
        // SAFETY: the caller passes a mode to read and to write, or null.
        let asked = unsafe { take(mode) }?;
        let former = driver.exchange_capture_mode(CaptureMode(asked.0)).map_err(code)?;
        // SAFETY: the caller passes a mode to read and to write, or null.
        unsafe { put(mode, CUstreamCaptureMode(former.0)) }
    }

    fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus) {
        current()?;
        present(status)?;
        let (device, stream) = target(Some(stream_handle(stream)))?;
        // SAFETY: the caller promises valid handles, and others are refused.
        let found = unsafe { driver()?.capture_status(device, stream) }.map_err(code)?;
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(status, CUstreamCaptureStatus(found.0)) }
    }

    fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) {
        let (device, stream) = target(Some(stream_handle(stream)))?;
        let mode = CaptureMode(mode.0);
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.capture_begin(device, stream, mode) }.map_err(code)
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        current()?;
        present(graph)?;
        let (device, stream) = target(Some(stream_handle(stream)))?;
        // SAFETY: the caller promises valid handles, and others are refused.
        let ended = unsafe { driver()?.capture_end(device, stream) }.map_err(code)?;
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(graph, std::ptr::without_provenance_mut(ended.0 as usize)) }
    }

    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: u64) {
        let device = current()?;
        present(executable)?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let graph = GraphHandle(graph.addr() as u64);
        // SAFETY: the caller promises valid handles, and others are refused.
        let made = unsafe { driver()?.graph_instantiate(device, graph) }.map_err(code)?;
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(executable, std::ptr::without_provenance_mut(made.0 as usize)) }
    }

    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) {
        let device = current()?;
        let executable = GraphExecHandle(executable.addr() as u64);
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.graph_launch(device, executable, stream_handle(stream)) }.map_err(code)
    }

    fn cuGraphDestroy(graph: CUgraph) {
        // Destroying needs no context, so any device will do: device 0 where no context is current.
        let device = current().unwrap_or(cuvmm_driver::Ordinal(0));
        let graph = GraphHandle(graph.addr() as u64);
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.graph_destroy(device, graph) }.map_err(code)
    }

    fn cuGraphExecDestroy(executable: CUgraphExec) {
        let device = current().unwrap_or(cuvmm_driver::Ordinal(0));
        let executable = GraphExecHandle(executable.addr() as u64);
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.graph_exec_destroy(device, executable) }.map_err(code)
    }
}
