//! Captures of another library, made on the machine itself.
//!
//! `unsafe` is used to begin and end captures, as the other library would.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{D0, Rig};
use cuvmm::Stream;
use cuvmm::driver::model::{Backing, Machine};
use cuvmm::driver::{Call, CaptureMode, Driver, GraphExecHandle};

pub fn begin(machine: &Machine<impl Backing>, stream: &Stream) {
    // SAFETY: the stream is alive.
    unsafe { machine.capture_begin(D0, stream.as_raw(), CaptureMode::GLOBAL) }.unwrap();
}

/// Ends a capture that must be intact.
pub fn end(machine: &Machine<impl Backing>, stream: &Stream) {
    // SAFETY: the stream is alive, and the graph is not used.
    unsafe {
        let graph = machine.capture_end(D0, stream.as_raw()).unwrap();
        machine.graph_destroy(D0, graph).unwrap();
    }
}

/// Does something before the nth call of a kind, as another thread might.
pub fn before<B: Backing>(
    rig: &Rig<B>,
    call: Call,
    nth: u64,
    act: impl Fn(&Machine<B>) + Send + Sync + 'static,
) {
    let (machine, seen) = (Arc::clone(&rig.machine), AtomicU64::new(0));
    rig.faults.watch(Some(Arc::new(move |made| {
        if made == call && seen.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            act(&machine);
        }
    })));
}

/// Ends a capture that must have been invalidated: no graph has what was queued in it.
pub fn end_broken(machine: &Machine<impl Backing>, stream: &Stream) {
    // SAFETY: the stream is alive.
    let ended = unsafe { machine.capture_end(D0, stream.as_raw()) };
    assert!(ended.is_err(), "a graph has work of this library");
}

/// Captures a stream into a graph.
pub fn capture(rig: &Rig<impl Backing>, stream: &Stream, act: impl FnOnce()) -> GraphExecHandle {
    let machine = &rig.machine;
    // SAFETY: the stream is alive, and the graph is not destroyed twice.
    unsafe {
        machine
            .capture_begin(D0, stream.as_raw(), CaptureMode::GLOBAL)
            .unwrap();
        act();
        let graph = machine.capture_end(D0, stream.as_raw()).unwrap();
        let ready = machine.graph_instantiate(D0, graph).unwrap();
        machine.graph_destroy(D0, graph).unwrap();
        ready
    }
}

/// Launches a graph three times.
pub fn launch_and_destroy(rig: &Rig<impl Backing>, stream: &Stream, graph: GraphExecHandle) {
    // SAFETY: the stream is alive, and the graph was not destroyed before.
    unsafe {
        for _ in 0..3 {
            rig.machine
                .graph_launch(D0, graph, stream.as_raw())
                .unwrap();
        }
        stream.synchronize().unwrap();
        rig.machine.graph_exec_destroy(D0, graph).unwrap();
    }
}
