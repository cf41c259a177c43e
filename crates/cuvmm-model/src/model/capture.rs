//! Stream capture, and the calls that invalidate a capture.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::state::State;
use super::stream_table::{Capture, StreamKey};
use super::work::Work;
use cuvmm_driver::{CUresult, CaptureMode, CaptureStatus, GraphHandle, Ordinal, StreamHandle};

const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const INVALIDATED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
const ILLEGAL_STATE: CUresult = CUresult::CUDA_ERROR_ILLEGAL_STATE;

/// The capture that a stream records for, its graph, and the nodes that the next node depends on,
/// by unique numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// A number that is unique among captures.
    pub id: u64,
    /// The graph that the end of the capture returns.
    pub graph: GraphHandle,
    /// The nodes that the next node depends on.
    pub nodes: Vec<u64>,
}

fn known(mode: CaptureMode) -> Answer {
    let known = [
        CaptureMode::GLOBAL,
        CaptureMode::THREAD_LOCAL,
        CaptureMode::RELAXED,
    ];
    require(known.contains(&mode), INVALID_VALUE)
}

impl<B: Backing> State<B> {
    pub(crate) fn exchange_capture_mode(&mut self, mode: CaptureMode) -> Answer<CaptureMode> {
        known(mode)?;
        let before = self.capture_modes.insert(thread::current().id(), mode);
        Ok(before.unwrap_or(CaptureMode::GLOBAL))
    }

    pub(crate) fn capture_status(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
    ) -> Answer<CaptureStatus> {
        self.context(device)?;
        let key = self.stream(device, stream)?;
        let id = self.streams.get(key).and_then(|stream| stream.capture);
        Ok(match id.and_then(|id| self.captures.get(&id)) {
            None => CaptureStatus::NONE,
            Some(capture) if capture.broken => CaptureStatus::INVALIDATED,
            Some(_) => CaptureStatus::ACTIVE,
        })
    }

    pub(crate) fn capture_begin(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> Answer {
        self.context(device)?;
        known(mode)?;
        let origin = self.stream(device, stream)?;
        require(!origin.is_legacy(), UNSUPPORTED)?;
        let id = self.captures_begun + 1;
        let Some(stream) = self.streams.get_mut(origin) else {
            return Err(ILLEGAL_STATE);
        };
        require(stream.capture.is_none(), ILLEGAL_STATE)?;
        stream.capture = Some(id);
        self.captures_begun = id;
        let thread = thread::current().id();
        self.captures.insert(
            id,
            Capture {
                origin,
                mode,
                thread,
                nodes: Vec::new(),
                last: BTreeMap::new(),
                graph: None,
                broken: false,
            },
        );
        Ok(())
    }

    pub(crate) fn capture_end(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
    ) -> Answer<GraphHandle> {
        self.context(device)?;
        let key = self.stream(device, stream)?;
        let id = self
            .streams
            .get(key)
            .and_then(|stream| stream.capture)
            .ok_or(ILLEGAL_STATE)?;
        let capture = self.captures.get(&id).ok_or(ILLEGAL_STATE)?;
        let unmatched = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        require(capture.origin == key, unmatched)?;
        let here = capture.thread == thread::current().id();
        let wrong = CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        require(here || capture.mode == CaptureMode::RELAXED, wrong)?;
        let Some(capture) = self.end_capture(id) else {
            return Err(ILLEGAL_STATE);
        };
        if capture.broken {
            capture
                .graph
                .into_iter()
                .for_each(|graph| self.handles.give_back(graph));
            return Err(INVALIDATED);
        }
        let graph = capture.graph.unwrap_or_else(|| self.handles.take());
        self.graphs.insert(graph, capture.nodes);
        Ok(GraphHandle(graph))
    }

    /// Returns the capture that a stream records for.
    pub(crate) fn captured_graph(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
    ) -> Answer<Option<Recording>> {
        self.context(device)?;
        let key = self.stream(device, stream)?;
        let id = self.streams.get(key).and_then(|stream| stream.capture);
        let Some((id, capture)) = id.and_then(|id| Some((id, self.captures.get_mut(&id)?))) else {
            return Ok(None);
        };
        let handles = &mut self.handles;
        let graph = *capture.graph.get_or_insert_with(|| handles.take());
        let nodes = capture.last.get(&key).cloned().unwrap_or_default();
        Ok(Some(Recording {
            id,
            graph: GraphHandle(graph),
            nodes: nodes.into_iter().map(|node| id << 32 | node).collect(),
        }))
    }

    pub(crate) fn end_captures_of(&mut self, device: i32) {
        let captures = self.captures.iter();
        let began = captures.filter(|(_, capture)| capture.origin.device == device);
        let ids: Vec<_> = began.map(|(&id, _)| id).collect();
        for id in ids {
            self.end_capture(id);
        }
    }

    fn end_capture(&mut self, id: u64) -> Option<Capture> {
        self.streams.forget_capture(id);
        self.captures.remove(&id)
    }

    /// Ends the captures that began on a stream being destroyed, or invalidates the capture that
    /// the stream joined.
    pub(crate) fn leave_capture(&mut self, key: StreamKey) {
        let id = self.streams.get(key).and_then(|stream| stream.capture);
        let Some(id) = id else { return };
        match self.captures.get_mut(&id) {
            Some(capture) if capture.origin != key => capture.broken = true,
            _ => {
                let ended = self.end_capture(id);
                let graph = ended.and_then(|capture| capture.graph);
                graph
                    .into_iter()
                    .for_each(|graph| self.handles.give_back(graph));
            }
        }
    }

    pub(crate) fn is_recording(&self, id: u64) -> bool {
        self.captures
            .get(&id)
            .is_some_and(|capture| !capture.broken)
    }

    /// Makes a stream that waits for an event of a capture record for that capture from now on. If
    /// that capture is over, refuses the call and invalidates the stream's own capture.
    pub(crate) fn join_capture(&mut self, key: StreamKey, id: u64, nodes: BTreeSet<u64>) -> Answer {
        let recording = self.is_recording(id);
        let Some(stream) = self.streams.get_mut(key) else {
            return Err(ILLEGAL_STATE);
        };
        if !recording {
            let own = stream.capture;
            self.break_captures(|id, _| Some(id) == own);
            return Err(INVALID_VALUE);
        }
        match stream.capture {
            Some(other) if other != id => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE),
            _ => {
                stream.capture = Some(id);
                if let Some(capture) = self.captures.get_mut(&id) {
                    capture.last.entry(key).or_default().extend(nodes);
                }
                Ok(())
            }
        }
    }

    /// Records work if its stream is capturing. Work on the default stream invalidates the captures
    /// of the streams that it would wait for.
    pub(crate) fn captured(&mut self, key: StreamKey, work: &Work) -> Answer<bool> {
        if let Some(id) = self.streams.get(key).and_then(|stream| stream.capture) {
            let Some(capture) = self.captures.get_mut(&id) else {
                return Err(INVALIDATED);
            };
            require(!capture.broken, INVALIDATED)?;
            if matches!(work, Work::FreeAllocation { .. } | Work::Prefetch) {
                capture.broken = true;
                return Err(UNSUPPORTED);
            }
            match work {
                Work::Marker => {}
                Work::Graph(nodes) => capture.nodes.extend(nodes.iter().cloned()),
                _ => {
                    let mut node = work.clone();
                    node.keep_source();
                    capture.nodes.push(node);
                }
            }
            if !matches!(work, Work::Marker) {
                let last = capture.nodes.len() as u64;
                capture.last.insert(key, BTreeSet::from([last]));
            }
            return Ok(true);
        }
        if key.is_legacy() {
            let blocking = self.streams.capturing(key.device, true);
            if self.break_captures(|id, _| blocking.contains(&id)) {
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            }
        }
        Ok(false)
    }

    /// Refuses a call that is not allowed while a stream captures (a query, a synchronization, a
    /// plain or pinned allocation and its end, the instantiation of a graph), and invalidates the
    /// captures concerned. A capturing stream may not be queried in any mode.
    pub(crate) fn refuse_in_capture(&mut self, asked: Option<StreamKey>) -> Answer {
        if self.captures.is_empty() {
            return Ok(());
        }
        let me = thread::current().id();
        let mode = self
            .capture_modes
            .get(&me)
            .copied()
            .unwrap_or(CaptureMode::GLOBAL);
        let asked = asked.and_then(|key| self.streams.get(key)?.capture);
        let broke = self.break_captures(|id, capture| {
            let mine = capture.thread == me && capture.mode != CaptureMode::RELAXED;
            let beside = match mode {
                CaptureMode::GLOBAL => mine || capture.mode == CaptureMode::GLOBAL,
                CaptureMode::THREAD_LOCAL => mine,
                _ => false,
            };
            beside || Some(id) == asked
        });
        require(!broke, UNSUPPORTED)
    }

    /// Refuses a call that concerns a whole context, in any mode, while one of its streams
    /// captures.
    pub(crate) fn refuse_while_capturing(&mut self, device: i32) -> Answer {
        if self.captures.is_empty() {
            return Ok(());
        }
        let of_device = self.streams.capturing(device, false);
        require(
            !self.break_captures(|id, _| of_device.contains(&id)),
            UNSUPPORTED,
        )
    }

    /// Invalidates the matching captures and returns `true` if there was one. A capture that was
    /// invalidated before counts until it has ended.
    pub(crate) fn break_captures(&mut self, fits: impl Fn(u64, &Capture) -> bool) -> bool {
        let mut any = false;
        for (&id, capture) in &mut self.captures {
            if fits(id, capture) {
                capture.broken = true;
                any = true;
            }
        }
        any
    }
}
