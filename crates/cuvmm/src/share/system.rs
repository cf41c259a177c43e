//! Conversions from errors of the system to errors of this crate.

use rustix::io::Errno;

use crate::error::ChannelError;

pub(super) fn system(call: &'static str) -> impl Fn(Errno) -> ChannelError {
    move |errno| ChannelError::System { call, errno }
}

pub(super) fn failed(call: &'static str) -> impl Fn(std::io::Error) -> ChannelError {
    move |error| {
        let code = error.raw_os_error().unwrap_or_default();
        system(call)(Errno::from_raw_os_error(code))
    }
}
