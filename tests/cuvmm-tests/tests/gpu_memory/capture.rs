//! Captures in the pool's context: one under a guard, and one of another library, unknown to the
//! pool.
//!
//! `unsafe` is used to capture and launch graphs. Streams and graphs belong to the tests, and
//! memory that a graph uses is leased or held until its launches are complete.
#![allow(unsafe_code)]

use std::time::Duration;

use crate::gpu;
use crate::gpu::{D0, Stage};
use crate::on_each;
use cuvmm::driver::{CaptureMode, GraphExecHandle, GraphHandle};
use cuvmm::error::{BlockError, MemoryError};
use cuvmm::{DeviceVec, Region, Stream};

fn begin(stage: &Stage, stream: &Stream, mode: CaptureMode) {
    // SAFETY: the stream is alive.
    unsafe { stage.driver().capture_begin(D0, stream.as_raw(), mode) }.unwrap();
}

/// Ends a capture, which must not be broken.
fn finish(stage: &Stage, stream: &Stream) -> GraphHandle {
    // SAFETY: the stream is alive.
    let graph = unsafe { stage.driver().capture_end(D0, stream.as_raw()) };
    graph.expect("the capture was not broken")
}

fn destroy(stage: &Stage, graph: GraphHandle) {
    // SAFETY: the graph is destroyed once.
    unsafe { stage.driver().graph_destroy(D0, graph) }.unwrap();
}

/// Ends a capture, which must not be broken, and instantiates its graph. No stream captures then: a
/// graph is not instantiated in a thread that captures.
fn end(stage: &Stage, stream: &Stream) -> GraphExecHandle {
    let graph = finish(stage, stream);
    // SAFETY: the graph is alive.
    let ready = unsafe { stage.driver().graph_instantiate(D0, graph) }.unwrap();
    destroy(stage, graph);
    ready
}

fn launch(stage: &Stage, graph: GraphExecHandle, stream: &Stream) {
    // SAFETY: the tests hold everything that the graph uses.
    unsafe { stage.driver().graph_launch(D0, graph, stream.as_raw()) }.unwrap();
}

fn forget(stage: &Stage, graph: GraphExecHandle) {
    // SAFETY: the launches are complete, and the graph is destroyed once.
    unsafe { stage.driver().graph_exec_destroy(D0, graph) }.unwrap();
}

on_each! {
    fn a_graph_is_captured_and_replayed_while_memory_moves(stage) {
        let g = stage.g();
        let pool = stage.pool(48);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [stream, other] = stage.streams();
        let block = a.allocate_on(&stream, 16 * g).unwrap();
        drop(a.allocate_on(&stream, 8 * g).unwrap());
        let idle = b.allocate_on(&other, 16 * g).unwrap();
        stage.late_fill(&other, &idle, stage.stamp(), Duration::from_millis(5));
        drop(idle);
        stage.settle();

        let guard = pool.capture_guard();
        begin(stage, &stream, CaptureMode::GLOBAL);
        let stamp = stage.stamp();
        stage.fill(&stream, &block, stamp);
        // Cached memory of the home stream and fresh memory can be allocated and freed.
        let calls = pool.calls();
        let warm = a.block(8 * g).home_stream(&stream).try_allocate().unwrap();
        assert_eq!(pool.calls().total(), calls.total());
        let fresh = a.block(8 * g).home_stream(&stream).try_allocate().unwrap();
        drop((warm, fresh));
        // Memory with a pending fence cannot.
        let refused = a.block(24 * g).home_stream(&stream).try_allocate();
        assert!(matches!(refused, Err(BlockError::Capturing(_))), "{refused:?}");
        let kept = block.free().unwrap_err();
        assert_eq!(kept.reason, MemoryError::Capturing);
        let block = kept.owner;
        let graph = end(stage, &stream);
        drop(guard);

        let lease = block.lease();
        let address = block.address();
        drop(block);
        for _ in 0..3 {
            stage.work().fill(&stream, address, 16 * g, stage.stamp(), Duration::ZERO);
            launch(stage, graph, &stream);
            stage.work().check(&stream, address, 16 * g, stamp);
            // All other memory changes hands meanwhile.
            for tenant in [&a, &b] {
                let wait = Duration::from_secs(10);
                let moved = tenant.block(32 * g).home_stream(&other).timeout(wait);
                let moved = moved.allocate().unwrap();
                stage.check(&other, &moved, 0);
                stage.late_fill(&other, &moved, stage.stamp(), Duration::from_millis(1));
            }
        }
        stage.settle();
        forget(stage, graph);
        drop(lease);
        let all = gpu::eventually(|| b.try_allocate(48 * g));
        drop((all, a, b));
        pool.close().unwrap();
    }

    fn a_capture_of_another_library_is_not_broken(stage) {
        let g = stage.g();
        let pool = stage.pool(16);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [ours, more, theirs] = stage.streams();
        let plain = a.allocate_on(&theirs, 4 * g).unwrap();
        for mode in [CaptureMode::GLOBAL, CaptureMode::THREAD_LOCAL, CaptureMode::RELAXED] {
            let block = a.allocate_on(&ours, 12 * g).unwrap();
            stage.late_fill(&ours, &block, stage.stamp(), Duration::from_millis(5));
            begin(stage, &theirs, mode);
            let stamp = stage.stamp();
            stage.fill(&theirs, &plain, stamp);
            drop(block);
            // These calls poll fences, map, unmap or scrub in the thread that captures. Blocks
            // without a home stream are left out: they wait for an event on the whole context,
            // which the driver refuses during any capture in it.
            let moved = gpu::eventually(|| b.block(12 * g).home_stream(&more).try_allocate());
            drop(moved);
            drop(gpu::eventually(|| a.block(g).home_stream(&ours).try_allocate()));
            pool.trim(0).unwrap();
            let graph = end(stage, &theirs);
            launch(stage, graph, &theirs);
            stage.check(&theirs, &plain, stamp);
            stage.settle();
            forget(stage, graph);
            pool.trim(0).unwrap();
        }
        drop((plain, a, b));
        stage.settle();
        pool.close().unwrap();
    }

    fn a_new_block_without_a_stream_leaves_a_foreign_capture_alone(stage) {
        let g = stage.g();
        let pool = stage.pool(8);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [ours, theirs] = stage.streams();
        let block = a.allocate_on(&ours, 8 * g).unwrap();
        stage.fill(&ours, &block, stage.stamp());
        drop(block);
        begin(stage, &theirs, CaptureMode::GLOBAL);
        // Scrubbed on a stream of the pool's own, which is created and synchronized for this.
        let block = gpu::eventually(|| b.try_allocate(8 * g));
        forget(stage, end(stage, &theirs));
        stage.check(&theirs, &block, 0);
        stage.settle();
        drop((block, a, b));
        pool.close().unwrap();
    }

    fn what_is_given_up_while_its_home_stream_captures_breaks_no_capture(stage) {
        let words = usize::try_from(stage.g() / 4).unwrap();
        let pool = stage.pool(4);
        let tenant = pool.tenant("a").register().unwrap();
        let [home, theirs] = stage.streams();
        let plain = tenant.allocate_on(&theirs, stage.g()).unwrap();
        for mode in [CaptureMode::GLOBAL, CaptureMode::THREAD_LOCAL, CaptureMode::RELAXED] {
            let mut vec = DeviceVec::<u32>::new(&stage.device, &home, words).unwrap();
            vec.resize(words, 1).unwrap();
            let mut region = Region::reserve(&stage.device, stage.g()).unwrap();
            region.commit(0..stage.g()).unwrap();
            stage.work().fill(&home, vec.address(), stage.g(), stage.stamp(), Duration::from_millis(5));
            region.fill(&home, 0..stage.g(), 7).unwrap();
            begin(stage, &home, mode);
            begin(stage, &theirs, mode);
            let stamp = stage.stamp();
            stage.fill(&theirs, &plain, stamp);
            vec.truncate(1);
            assert_eq!(vec.shrink_to_fit().unwrap(), 0);
            assert!(vec.read(0, &mut [0]).is_err());
            region.decommit_after(0..stage.g(), &[]).unwrap();
            assert_eq!(region.purge().unwrap().given_back, 0);
            destroy(stage, finish(stage, &home));
            let graph = end(stage, &theirs);
            launch(stage, graph, &theirs);
            stage.check(&theirs, &plain, stamp);
            stage.settle();
            forget(stage, graph);
            drop(vec);
            gpu::eventually(|| match region.purge().unwrap().given_back {
                0 => Err("pending"),
                given => Ok(given),
            });
        }
        drop((plain, tenant));
        stage.settle();
        pool.close().unwrap();
    }
}
