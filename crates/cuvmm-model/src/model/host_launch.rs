//! Queueing and running functions of the program.
//!
//! A stream that reaches a function is busy until the function has returned. The machine has no
//! threads, and calls no function itself: a thread of its owner takes the functions of a device one
//! after the other and runs them while nothing is locked. So a function may wait for a thread that
//! calls the driver, and a call that waits for the function's stream waits without a lock too.

use std::sync::Arc;

use super::backing::Backing;
use super::host_calls::HostCall;
use super::machine::Machine;
use super::stream_table::Due;
use super::work::Work;
use cuvmm_driver::{CUresult, Ordinal, StreamHandle};

/// A function of the program that a stream has reached. The stream is busy until this value is
/// dropped.
#[must_use = "the stream goes on when this is dropped"]
pub struct HostWork<'a, B: Backing> {
    machine: &'a Machine<B>,
    due: Due,
}

impl<B: Backing> HostWork<'_, B> {
    /// Runs the function. The stream goes on even if the function panics.
    pub fn run(self) {
        self.due.call.run();
    }
}

impl<B: Backing> Drop for HostWork<'_, B> {
    fn drop(&mut self) {
        let (stream, number) = (self.due.stream, self.due.number);
        self.machine
            .with(|state| state.end_host_call(stream, number));
    }
}

impl<B: Backing> std::fmt::Debug for HostWork<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("HostWork").field(&self.due).finish()
    }
}

impl<B: Backing> Machine<B> {
    /// Queues a function on a stream, like `cuLaunchHostFunc`. A thread that calls
    /// [`next_host_work`](Self::next_host_work) runs it when the stream reaches it.
    ///
    /// # Errors
    /// Returns the code that lost the context, `INVALID_HANDLE` for a stream that does not exist,
    /// or `STREAM_CAPTURE_*`.
    pub fn queue_host_call(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        call: impl Fn() + Send + Sync + 'static,
    ) -> Result<(), CUresult> {
        self.with(|state| {
            state.context(device)?;
            let work = Work::Host(HostCall::new(Arc::new(call)));
            state.submit(device, stream, work)?;
            Ok(())
        })
    }

    /// Waits until a stream of a device reaches a function, and returns the function. Functions
    /// come in the order in which streams reached them.
    ///
    /// For a device that does not exist, the call does not return.
    pub fn next_host_work(&self, device: Ordinal) -> HostWork<'_, B> {
        let due = self.wait_until(|state| {
            let due = state
                .due
                .iter()
                .position(|due| due.stream.device == device.0);
            state.due.remove(due?)
        });
        HostWork { machine: self, due }
    }

    /// Waits until no stream of a device is busy with a function of the program. Functions that a
    /// held stream has not reached stay queued.
    pub fn finish_host_work(&self, device: Ordinal) {
        self.wait_until(|state| (!state.streams.is_busy(device.0)).then_some(()));
    }
}
