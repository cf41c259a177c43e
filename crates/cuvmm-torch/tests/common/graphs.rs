//! Pools of graphs, as PyTorch opens them for captures.

use std::ffi::{c_int, c_long};
use std::ptr::null_mut;

use super::{Cuda, Handle, Torch, compiled, loaded};

/// The functions of pools of graphs, on device 0.
#[derive(Clone, Copy)]
pub(crate) struct Graphs {
    opener: usize,
    begin: unsafe extern "C" fn(usize, u64, u64, Handle),
    asked: unsafe extern "C" fn() -> c_long,
    alive: unsafe extern "C" fn() -> c_int,
    end: unsafe extern "C" fn(c_int, [u64; 2]),
    release: unsafe extern "C" fn(c_int, [u64; 2]),
    start: unsafe extern "C" fn(Handle, c_int) -> c_int,
    stop: unsafe extern "C" fn(Handle, *mut Handle) -> c_int,
    synchronize: unsafe extern "C" fn() -> c_int,
}

impl Graphs {
    /// Loads the filters of streams. Ends the process where there is no compiler.
    pub(crate) fn of(torch: &Torch, cuda: &Cuda) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let Some(library) = compiled(folder.path(), "filter.cpp", "libfilter.so", &[]) else {
            println!("{}", super::ENDED);
            std::process::exit(0);
        };
        let library = loaded(library);
        // SAFETY: the functions have these types.
        let (begin, asked, alive) = unsafe {
            (
                *library.get(b"filter_begin").unwrap(),
                *library.get(b"filter_asked").unwrap(),
                *library.get(b"filter_alive").unwrap(),
            )
        };
        Self {
            opener: torch.function("cuvmm_begin_allocate_to_pool"),
            begin,
            asked,
            alive,
            end: torch.function("cuvmm_end_allocate_to_pool"),
            release: torch.function("cuvmm_release_pool"),
            start: cuda.function("cuStreamBeginCapture_v2"),
            stop: cuda.function("cuStreamEndCapture"),
            synchronize: cuda.function("cuCtxSynchronize"),
        }
    }

    /// Opens a pool for a stream.
    pub(crate) fn begin(&self, id: u64, stream: Handle) {
        // SAFETY: the function has this type.
        unsafe { (self.begin)(self.opener, 0, id, stream) };
    }

    /// Returns how often filters were called, and whether the last one lives.
    pub(crate) fn filters(&self) -> (c_long, bool) {
        // SAFETY: they may be called at any time.
        unsafe { ((self.asked)(), (self.alive)() != 0) }
    }

    pub(crate) fn end(&self, id: u64) {
        // SAFETY: it may be called at any time.
        unsafe { (self.end)(0, [0, id]) };
    }

    pub(crate) fn release(&self, id: u64) {
        // SAFETY: it may be called at any time.
        unsafe { (self.release)(0, [0, id]) };
    }

    /// Begins a capture in global mode.
    pub(crate) fn start(&self, stream: Handle) {
        // SAFETY: the tests pass live streams.
        assert_eq!(unsafe { (self.start)(stream, 0) }, 0);
    }

    /// Ends a capture. Returns the driver's code.
    pub(crate) fn stop(&self, stream: Handle) -> c_int {
        let mut graph = null_mut();
        // SAFETY: the tests pass live streams, and the result is written to a local.
        unsafe { (self.stop)(stream, &mut graph) }
    }

    /// Captures into a pool as PyTorch does, with a capture that fails: PyTorch then closes no pool.
    pub(crate) fn fail(&self, id: u64, stream: Handle, body: impl FnOnce()) {
        self.begin(id, stream);
        self.start(stream);
        body();
        // SAFETY: it takes no arguments.
        assert_ne!(unsafe { (self.synchronize)() }, 0);
        assert_ne!(self.stop(stream), 0, "the capture was broken");
    }

    /// Captures into a pool and returns what `body` does. Nothing breaks the capture.
    pub(crate) fn capture<T>(&self, id: u64, stream: Handle, body: impl FnOnce() -> T) -> T {
        self.begin(id, stream);
        self.start(stream);
        let value = body();
        assert_eq!(self.stop(stream), 0, "the capture was broken");
        self.end(id);
        value
    }
}
