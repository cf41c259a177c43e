//! File descriptors: whether a driver call failed because the process may open no more.
//!
//! The driver's answer does not say so: it is out of memory, or an unknown error.

use cuvmm_driver::Call;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Returns how many descriptors the process may have open (`RLIMIT_NOFILE`), if a call that failed opens
/// some and there are no more.
pub(crate) fn lacking(call: Call) -> Option<u64> {
    let opens = matches!(
        call,
        Call::MemCreate
            | Call::MemExportToShareableHandle
            | Call::MemImportFromShareableHandle
            | Call::MemPoolCreate
            | Call::MemPoolExportToShareableHandle
            | Call::MemPoolImportFromShareableHandle
    );
    let are_used_up = || eventfd(0, EventfdFlags::CLOEXEC).err() == Some(Errno::MFILE);
    (opens && are_used_up()).then(|| getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
}
