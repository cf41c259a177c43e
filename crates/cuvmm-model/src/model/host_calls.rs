//! Functions of the program that run in the order of a stream.

use std::fmt;
use std::sync::Arc;

/// A graph runs the function at each launch.
#[derive(Clone)]
pub(crate) struct HostCall(Arc<dyn Fn() + Send + Sync>);

impl HostCall {
    pub(crate) fn new(call: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self(call)
    }

    pub(crate) fn run(&self) {
        (self.0)();
    }
}

impl fmt::Debug for HostCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostCall")
    }
}
