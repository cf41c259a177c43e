//! Graphs of captured work: their flags, and what a capture tells of itself.

use super::super::asker::{Asker, written};
use super::super::library::at;
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("graph.flags", |a| {
        let (graph, _) = captured(a);
        for flags in [0u64, 1, 2, 3, 4, 5, 8, 9, 16, 1 << 32] {
            a.part(flags);
            let made = a.get("cuGraphInstantiateWithFlags", 0u64, &[graph, flags]);
            exec_flags(a, made);
        }
    }),
    case("graph.params", |a| {
        let (graph, stream) = captured(a);
        for (part, flags, upload) in [
            ("0", 0u64, 0u64),
            ("1", 1, 0),
            ("2", 2, stream),
            ("4", 4, 0),
            ("8", 8, 0),
            ("16", 16, 0),
        ] {
            // The flags, the stream to upload on, the node of an error, and the result.
            let mut params = [flags, upload, 7, 7];
            a.part(part);
            let rest = [graph, at(&mut params)];
            let made = a.get("cuGraphInstantiateWithParams", 0u64, &rest);
            a.note(params[2]);
            a.note(params[3] as u32);
            exec_flags(a, made);
        }
        a.part("null");
        a.get("cuGraphInstantiateWithParams", 0u64, &[graph, 0]);
    }),
    case("graph.old_instantiate", |a| {
        let (graph, stream) = captured(a);
        for name in ["cuGraphInstantiate", "cuGraphInstantiate_v2"] {
            let (mut node, mut log) = (7u64, [7u8; 16]);
            a.part(name);
            let rest = [graph, at(&mut node), at(&mut log), 16];
            let made = a.get(name, 0u64, &rest);
            a.note(node);
            a.note(log[0]);
            a.say("cuGraphLaunch", &[made, stream]);
            a.get("cuGraphInstantiate_v2", made, &[graph, 0, 0, 0]);
        }
    }),
    case("graph.upload", |a| {
        let (graph, stream) = captured(a);
        let made = a.made("cuGraphInstantiateWithFlags", &[graph, 0]);
        a.say("cuGraphUpload", &[made, stream]);
        a.say("cuGraphLaunch", &[made, stream]);
        a.say("cuStreamSynchronize", &[stream]);
    }),
    case("capture_info.none", |a| {
        let stream = a.stream();
        info(a, stream);
    }),
    case("capture_info.capturing", |a| {
        let (stream, memory) = (a.stream(), a.alloc(4096));
        a.need("cuStreamBeginCapture_v2", &[stream, 2]);
        info(a, stream);
        a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
        a.part("one_node");
        told(a, "cuStreamGetCaptureInfo_v2", stream);
        a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
        a.part("two_nodes");
        told(a, "cuStreamGetCaptureInfo_v2", stream);
        a.part("end");
        let graph = a.get_last("cuStreamEndCapture", &[stream], 0u64);
        a.tell_last("cuGraphGetNodes", &[graph, 0], 7u64);
    }),
    case("capture_info.joined", |a| {
        let (stream, other, event) = (a.stream(), a.stream(), a.event(2));
        let memory = a.alloc(4096);
        a.need("cuStreamBeginCapture_v2", &[stream, 2]);
        a.need("cuEventRecord", &[event, stream]);
        a.need("cuStreamWaitEvent", &[other, event, 0]);
        a.part("other");
        told(a, "cuStreamGetCaptureInfo_v2", other);
        a.part("same_graph");
        let same = graph_of(a, stream) == graph_of(a, other);
        a.note(same);
        a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
        a.need("cuMemsetD8Async", &[memory + 512, 1, 16, other]);
        a.need("cuEventRecord", &[event, other]);
        a.need("cuStreamWaitEvent", &[stream, event, 0]);
        a.part("both");
        told(a, "cuStreamGetCaptureInfo_v2", stream);
        a.part("same_as_ended");
        let during = graph_of(a, stream);
        let graph = a.get_last("cuStreamEndCapture", &[stream], 0u64);
        a.note(graph == during);
    }),
    case("capture_info.invalid", |a| {
        let stream = a.stream();
        a.need("cuStreamBeginCapture_v2", &[stream, 2]);
        a.call("cuCtxSynchronize", &[]);
        info(a, stream);
    }),
    case("capture_info.default", |a| {
        info(a, 0);
        let stream = a.stream();
        a.need("cuStreamBeginCapture_v2", &[stream, 0]);
        a.part("beside");
        told(a, "cuStreamGetCaptureInfo_v2", 0);
    }),
];

/// Captures a fill, and returns the graph and the stream.
fn captured(a: &mut Asker) -> (u64, u64) {
    let (stream, memory, mut graph) = (a.stream(), a.alloc(4096), 0u64);
    a.need("cuStreamBeginCapture_v2", &[stream, 2]);
    a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
    a.need("cuStreamEndCapture", &[stream, at(&mut graph)]);
    (graph, stream)
}

/// Notes the flags that an executable graph was made with.
fn exec_flags(a: &mut Asker, made: u64) {
    if made != 0 {
        a.tell_last("cuGraphExecGetFlags", &[made], 77u64);
    }
}

/// Notes what each version of the question about a capture answers.
fn info(a: &mut Asker, stream: u64) {
    for version in ["cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3"] {
        a.part(version);
        told(a, version, stream);
    }
    a.part("status_only");
    let mut status = 7u32;
    let arguments = [stream, at(&mut status), 0, 0, 0, 0];
    a.say("cuStreamGetCaptureInfo_v2", &arguments);
    a.note(status);
}

/// Notes status, graph and number of dependencies of a stream's capture.
fn told(a: &mut Asker, version: &str, stream: u64) {
    let (mut status, mut id, mut graph, mut nodes) = (7u32, 7u64, 7u64, 7u64);
    let mut edges = 7u64;
    let first = [stream, at(&mut status), at(&mut id), at(&mut graph)];
    let mut arguments = [&first[..], &[at(&mut nodes)]].concat();
    if version.ends_with("_v3") {
        arguments.push(at(&mut edges));
    }
    let count = a.get_last(version, &arguments, 77u64);
    a.note(status);
    for value in [id, graph, nodes, edges] {
        a.note(written(value, "set"));
    }
    a.note(count);
}

/// Returns the graph that a stream is captured to.
fn graph_of(a: &mut Asker, stream: u64) -> u64 {
    let (mut status, mut graph) = (7u32, 7u64);
    let arguments = [stream, at(&mut status), 0, at(&mut graph), 0, 0];
    a.need("cuStreamGetCaptureInfo_v2", &arguments);
    graph
}
