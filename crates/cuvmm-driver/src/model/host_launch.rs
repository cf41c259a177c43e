//! Queueing functions of the program.

use std::sync::Arc;

use super::backing::Backing;
use super::host_calls::HostCall;
use super::machine::Machine;
use super::work::Work;
use crate::{CUresult, Ordinal, StreamHandle};

impl<B: Backing> Machine<B> {
    /// Queues a function on a stream, like `cuLaunchHostFunc`. It runs while the machine is locked,
    /// on the thread whose call makes the stream reach it, so it must not call the driver.
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
}
