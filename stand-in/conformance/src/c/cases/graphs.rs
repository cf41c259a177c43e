//! Graphs of captured work: their flags, and what a capture tells of itself.

use super::super::asker::Asker;
use super::super::library::at;
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("graph.flags", |a| {
        let (graph, _) = captured(a);
        for flags in [0u64, 1, 2, 3, 4, 5, 8, 9, 16, 1 << 32] {
            let mut made = 0u64;
            a.part(flags);
            a.say(
                "cuGraphInstantiateWithFlags",
                &[at(&mut made), graph, flags],
            );
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
            let (mut made, mut params) = (0u64, [flags, upload, 7, 7]);
            a.part(part);
            let arguments = [at(&mut made), graph, at(&mut params)];
            a.say("cuGraphInstantiateWithParams", &arguments);
            a.note(params[2]);
            a.note(params[3] as u32);
            exec_flags(a, made);
        }
        a.part("null");
        let mut made = 0u64;
        a.say("cuGraphInstantiateWithParams", &[at(&mut made), graph, 0]);
    }),
    case("graph.old_instantiate", |a| {
        let (graph, stream) = captured(a);
        for name in ["cuGraphInstantiate", "cuGraphInstantiate_v2"] {
            let (mut made, mut node, mut log) = (0u64, 7u64, [7u8; 16]);
            a.part(name);
            let arguments = [at(&mut made), graph, at(&mut node), at(&mut log), 16];
            a.say(name, &arguments);
            a.note(node);
            a.note(log[0]);
            a.say("cuGraphLaunch", &[made, stream]);
            a.say("cuGraphInstantiate_v2", &[at(&mut made), graph, 0, 0, 0]);
        }
    }),
    case("graph.upload", |a| {
        let (graph, stream) = captured(a);
        let mut made = 0u64;
        a.need("cuGraphInstantiateWithFlags", &[at(&mut made), graph, 0]);
        a.say("cuGraphUpload", &[made, stream]);
        a.say("cuGraphLaunch", &[made, stream]);
        a.say("cuStreamSynchronize", &[stream]);
    }),
    case("capture_info.none", |a| {
        a.enter();
        let stream = a.stream();
        info(a, stream);
    }),
    case("capture_info.capturing", |a| {
        a.enter();
        let (stream, memory) = (a.stream(), a.alloc(4096));
        a.need("cuStreamBeginCapture_v2", &[stream, 2]);
        info(a, stream);
        a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
        a.part("one_node");
        told(a, "cuStreamGetCaptureInfo_v2", stream);
        a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
        a.part("two_nodes");
        told(a, "cuStreamGetCaptureInfo_v2", stream);
        let (mut graph, mut nodes) = (0u64, 7u64);
        a.part("end");
        a.say("cuStreamEndCapture", &[stream, at(&mut graph)]);
        a.say("cuGraphGetNodes", &[graph, 0, at(&mut nodes)]);
        a.note(nodes);
    }),
    case("capture_info.joined", |a| {
        a.enter();
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
        let mut graph = 0u64;
        a.say("cuStreamEndCapture", &[stream, at(&mut graph)]);
        a.note(graph == during);
    }),
    case("capture_info.invalid", |a| {
        a.enter();
        let stream = a.stream();
        a.need("cuStreamBeginCapture_v2", &[stream, 2]);
        a.call("cuCtxSynchronize", &[]);
        info(a, stream);
    }),
    case("capture_info.default", |a| {
        a.enter();
        info(a, 0);
        let stream = a.stream();
        a.need("cuStreamBeginCapture_v2", &[stream, 0]);
        a.part("beside");
        told(a, "cuStreamGetCaptureInfo_v2", 0);
    }),
];

/// Captures a fill, and returns the graph and the stream.
fn captured(a: &mut Asker) -> (u64, u64) {
    a.enter();
    let (stream, memory, mut graph) = (a.stream(), a.alloc(4096), 0u64);
    a.need("cuStreamBeginCapture_v2", &[stream, 2]);
    a.need("cuMemsetD8Async", &[memory, 1, 16, stream]);
    a.need("cuStreamEndCapture", &[stream, at(&mut graph)]);
    (graph, stream)
}

/// Notes the flags that an executable graph was made with.
fn exec_flags(a: &mut Asker, made: u64) {
    if made != 0 {
        let mut flags = 77u64;
        a.say("cuGraphExecGetFlags", &[made, at(&mut flags)]);
        a.note(flags);
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
    let (mut edges, mut count) = (7u64, 77u64);
    let mut arguments = vec![
        stream,
        at(&mut status),
        at(&mut id),
        at(&mut graph),
        at(&mut nodes),
    ];
    if version.ends_with("_v3") {
        arguments.push(at(&mut edges));
    }
    arguments.push(at(&mut count));
    a.say(version, &arguments);
    a.note(status);
    for value in [id, graph, nodes, edges] {
        a.note(match value {
            7 => "unwritten",
            0 => "null",
            _ => "set",
        });
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
