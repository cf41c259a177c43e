//! What the system answers, as our errors.

use rustix::io::Errno;

use crate::error::ChannelError;

/// What a system call answered, as our error.
pub(super) fn system(call: &'static str) -> impl Fn(Errno) -> ChannelError {
    move |errno| ChannelError::System { call, errno }
}

/// An error of the standard library, as ours.
pub(super) fn failed(call: &'static str) -> impl Fn(std::io::Error) -> ChannelError {
    move |error| {
        let code = error.raw_os_error().unwrap_or_default();
        system(call)(Errno::from_raw_os_error(code))
    }
}
