//! Calls that are unsafe during a capture: they invalidate captures of their own thread that are not
//! relaxed, and global ones of all threads, unless the calling thread is in relaxed mode.

use cuvmm_driver::{CaptureMode, DriverError, EventHandle, GraphHandle, StreamHandle};

use super::capture::{during, on_thread, recorded, relaxed};
use super::capture_always::in_each_mode;
use super::host_memory::pages;
use crate::{Answered, Bench, Case, Rule};

/// The objects that the calls name. None of them has to do with the capture.
#[derive(Clone, Copy)]
struct Named {
    stream: StreamHandle,
    event: EventHandle,
    graph: GraphHandle,
    pinned: usize,
    registered: usize,
    unregistered: usize,
}

/// A call, and a way to make it.
type Ask = fn(&mut Bench, Named) -> Result<(), DriverError>;
type Way = fn(&mut Bench, Named, Ask) -> Result<(), DriverError>;

const HOST_ALLOC: Ask = |b, _| b.pinned(4096, 0).map(drop);
const HOST_FREE: Ask = |b, named| b.free_pinned(named.pinned);
const HOST_REGISTER: Ask = |b, named| b.register(named.unregistered, 4096);
const HOST_UNREGISTER: Ask = |b, named| b.unregister(named.registered);
const INSTANTIATE: Ask = |b, named| b.instantiate(named.graph).map(drop);
const EVENT_QUERY: Ask = |b, named| b.event_is_done(named.event).map(drop);
const STREAM_QUERY: Ask = |b, named| b.stream_is_done(named.stream).map(drop);
const STREAM_SYNCHRONIZE: Ask = |b, named| b.synchronize(named.stream);

const USUAL: Way = |b, named, ask| ask(b, named);
const RELAXED: Way = |b, named, ask| relaxed(b, |b| ask(b, named));
const ELSEWHERE: Way = |b, named, ask| on_thread(|| ask(b, named));

pub(super) const CASES: &[Case] = in_each_mode!(
    "capture-unsafe",
    "unsafe_host_alloc",
    "Allocate pinned memory",
    |b, mode| asked(b, mode, HOST_ALLOC, USUAL),
    "unsafe_host_alloc_relaxed_thread",
    "Allocate pinned memory, this thread in relaxed mode",
    |b, mode| asked(b, mode, HOST_ALLOC, RELAXED),
    "unsafe_host_alloc_other_thread",
    "Allocate pinned memory on another thread",
    |b, mode| asked(b, mode, HOST_ALLOC, ELSEWHERE),
    "unsafe_host_free",
    "Free pinned memory",
    |b, mode| asked(b, mode, HOST_FREE, USUAL),
    "unsafe_host_free_relaxed_thread",
    "Free pinned memory, this thread in relaxed mode",
    |b, mode| asked(b, mode, HOST_FREE, RELAXED),
    "unsafe_host_free_other_thread",
    "Free pinned memory on another thread",
    |b, mode| asked(b, mode, HOST_FREE, ELSEWHERE),
    "unsafe_host_register",
    "Register host memory",
    |b, mode| asked(b, mode, HOST_REGISTER, USUAL),
    "unsafe_host_register_relaxed_thread",
    "Register host memory, this thread in relaxed mode",
    |b, mode| asked(b, mode, HOST_REGISTER, RELAXED),
    "unsafe_host_register_other_thread",
    "Register host memory on another thread",
    |b, mode| asked(b, mode, HOST_REGISTER, ELSEWHERE),
    "unsafe_host_unregister",
    "Unregister host memory",
    |b, mode| asked(b, mode, HOST_UNREGISTER, USUAL),
    "unsafe_host_unregister_relaxed_thread",
    "Unregister host memory, this thread in relaxed mode",
    |b, mode| asked(b, mode, HOST_UNREGISTER, RELAXED),
    "unsafe_host_unregister_other_thread",
    "Unregister host memory on another thread",
    |b, mode| asked(b, mode, HOST_UNREGISTER, ELSEWHERE),
    "unsafe_instantiate",
    "Instantiate a graph",
    |b, mode| asked(b, mode, INSTANTIATE, USUAL),
    "unsafe_instantiate_relaxed_thread",
    "Instantiate a graph, this thread in relaxed mode",
    |b, mode| asked(b, mode, INSTANTIATE, RELAXED),
    "unsafe_instantiate_other_thread",
    "Instantiate a graph on another thread",
    |b, mode| asked(b, mode, INSTANTIATE, ELSEWHERE),
    "unsafe_event_query",
    "Query an event",
    |b, mode| asked(b, mode, EVENT_QUERY, USUAL),
    "unsafe_event_query_relaxed_thread",
    "Query an event, this thread in relaxed mode",
    |b, mode| asked(b, mode, EVENT_QUERY, RELAXED),
    "unsafe_event_query_other_thread",
    "Query an event on another thread",
    |b, mode| asked(b, mode, EVENT_QUERY, ELSEWHERE),
    "unsafe_stream_query",
    "Query another stream",
    |b, mode| asked(b, mode, STREAM_QUERY, USUAL),
    "unsafe_stream_query_relaxed_thread",
    "Query another stream, this thread in relaxed mode",
    |b, mode| asked(b, mode, STREAM_QUERY, RELAXED),
    "unsafe_stream_query_other_thread",
    "Query another stream on another thread",
    |b, mode| asked(b, mode, STREAM_QUERY, ELSEWHERE),
    "unsafe_stream_synchronize",
    "Wait for another stream",
    |b, mode| asked(b, mode, STREAM_SYNCHRONIZE, USUAL),
    "unsafe_stream_synchronize_relaxed_thread",
    "Wait for another stream, this thread in relaxed mode",
    |b, mode| asked(b, mode, STREAM_SYNCHRONIZE, RELAXED),
    "unsafe_stream_synchronize_other_thread",
    "Wait for another stream on another thread",
    |b, mode| asked(b, mode, STREAM_SYNCHRONIZE, ELSEWHERE),
);

fn asked(b: &mut Bench, mode: CaptureMode, ask: Ask, way: Way) -> Answered {
    let stream = b.stream()?;
    b.capture_begin(stream, CaptureMode::RELAXED)?;
    let graph = b.capture_end(stream)?;
    let (event, pinned) = (recorded(b)?, b.pinned(4096, 0)?);
    let (registered, unregistered) = (pages(1), pages(1));
    b.register(registered, 4096)?;
    let named = Named {
        stream,
        event,
        graph,
        pinned,
        registered,
        unregistered,
    };
    during(b, mode, |b, _| way(b, named, ask))
}
