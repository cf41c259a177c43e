//! Capturing a stream's work into a graph, and launching graphs.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ptr;

use cuvmm_sys::{CUgraph, CUgraphExec, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};

use super::CudaDriver;
use super::answer::ask_optional;
use crate::{
    CaptureMode, CaptureStatus, GraphExecHandle, GraphHandle, Ordinal, Result, StreamHandle,
};

pub(super) fn exchange_capture_mode(driver: &CudaDriver, mode: CaptureMode) -> Result<CaptureMode> {
    let mut mode = CUstreamCaptureMode(mode.0);
    ask_optional!(driver, ThreadExchangeStreamCaptureMode:
        cuThreadExchangeStreamCaptureMode(&mut mode))?;
    Ok(CaptureMode(mode.0))
}

/// # Safety
/// See [`Driver::capture_status`](crate::Driver::capture_status).
pub(super) unsafe fn capture_status(
    driver: &CudaDriver,
    device: Ordinal,
    stream: StreamHandle,
) -> Result<CaptureStatus> {
    let _current = driver.enter(device)?;
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    ask_optional!(driver, StreamIsCapturing:
        cuStreamIsCapturing(stream.0 as CUstream, &mut status))?;
    Ok(CaptureStatus(status.0))
}

impl CudaDriver {
    /// Returns the number of the capture in which a stream takes part (`cuStreamGetCaptureInfo`), which no
    /// other capture of the process has. Returns `None` if the stream does not capture, or its capture is
    /// broken.
    ///
    /// # Errors
    /// The driver's error, also where it lacks the function (before CUDA 10.1).
    ///
    /// # Safety
    /// See [`Driver::capture_status`](crate::Driver::capture_status).
    pub unsafe fn capture_id(&self, device: Ordinal, stream: StreamHandle) -> Result<Option<u64>> {
        let _current = self.enter(device)?;
        let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        ask_optional!(self, StreamIsCapturing:
            cuStreamGetCaptureInfo(stream.0 as CUstream, &mut status, &mut id))?;
        Ok((CaptureStatus(status.0) == CaptureStatus::ACTIVE).then_some(id))
    }
}

/// # Safety
/// See [`Driver::capture_begin`](crate::Driver::capture_begin).
pub(super) unsafe fn capture_begin(
    driver: &CudaDriver,
    device: Ordinal,
    stream: StreamHandle,
    mode: CaptureMode,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let mode = CUstreamCaptureMode(mode.0);
    ask_optional!(driver, StreamBeginCapture:
        cuStreamBeginCapture_v2(stream.0 as CUstream, mode))
}

/// # Safety
/// See [`Driver::capture_end`](crate::Driver::capture_end).
pub(super) unsafe fn capture_end(
    driver: &CudaDriver,
    device: Ordinal,
    stream: StreamHandle,
) -> Result<GraphHandle> {
    let _current = driver.enter(device)?;
    let mut graph = ptr::null_mut();
    ask_optional!(driver, StreamEndCapture:
        cuStreamEndCapture(stream.0 as CUstream, &mut graph))?;
    Ok(GraphHandle(graph as u64))
}

/// # Safety
/// See [`Driver::graph_instantiate`](crate::Driver::graph_instantiate).
pub(super) unsafe fn graph_instantiate(
    driver: &CudaDriver,
    device: Ordinal,
    graph: GraphHandle,
) -> Result<GraphExecHandle> {
    let _current = driver.enter(device)?;
    let mut executable = ptr::null_mut();
    ask_optional!(driver, GraphInstantiate:
        cuGraphInstantiateWithFlags(&mut executable, graph.0 as CUgraph, 0))?;
    Ok(GraphExecHandle(executable as u64))
}

/// # Safety
/// See [`Driver::graph_launch`](crate::Driver::graph_launch).
pub(super) unsafe fn graph_launch(
    driver: &CudaDriver,
    device: Ordinal,
    graph: GraphExecHandle,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, GraphLaunch:
        cuGraphLaunch(graph.0 as CUgraphExec, stream.0 as CUstream))
}

/// # Safety
/// See [`Driver::graph_destroy`](crate::Driver::graph_destroy).
pub(super) unsafe fn graph_destroy(
    driver: &CudaDriver,
    device: Ordinal,
    graph: GraphHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, GraphDestroy: cuGraphDestroy(graph.0 as CUgraph))
}

/// # Safety
/// See [`Driver::graph_exec_destroy`](crate::Driver::graph_exec_destroy).
pub(super) unsafe fn graph_exec_destroy(
    driver: &CudaDriver,
    device: Ordinal,
    graph: GraphExecHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, GraphExecDestroy: cuGraphExecDestroy(graph.0 as CUgraphExec))
}
