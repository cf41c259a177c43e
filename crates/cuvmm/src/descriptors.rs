//! File descriptors: whether a call failed because the process may open no more.
//!
//! The driver's answer does not say so: it is out of memory, or an unknown error. The system's answer
//! does not name the limit.

use std::fmt;
use std::os::fd::OwnedFd;

use cuvmm_driver::Call;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// How many descriptors are tried. A driver call that finds too few has closed those that it opened
/// before it returns, so at least one of as many as it opens cannot be opened now either. What a call
/// keeps open was measured: on an H100 a publication takes two of them, one with `cuMemCreate` and one
/// with the export (509 publications with 1,024 files). What a call opens meanwhile is not known, so
/// this is twice that. If it is too few, the driver's own answer is shown; if it is too many, an error
/// of another cause names descriptors while fewer than these are left.
const AT_ONCE: usize = 4;

/// Returns how many descriptors the process may have open (`RLIMIT_NOFILE`), if a call that failed opens
/// some and there are too few.
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
    let are_too_few = || {
        let tried = std::array::from_fn::<_, AT_ONCE, _>(|_| eventfd(0, EventfdFlags::CLOEXEC));
        tried
            .iter()
            .any(|it| it.as_ref().err() == Some(&Errno::MFILE))
    };
    (opens && are_too_few()).then(most)
}

/// Returns how many descriptors the process may have open (`RLIMIT_NOFILE`).
pub(crate) fn most() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A descriptor that is open for nothing. Closing it leaves one for a call that finds no other.
#[derive(Debug)]
pub(crate) struct Spare(Option<OwnedFd>);

impl Spare {
    pub(crate) fn new() -> Self {
        Self(unused())
    }

    /// Opens the descriptor again if it was given up and the process may.
    pub(crate) fn keep(&mut self) {
        if self.0.is_none() {
            self.0 = unused();
        }
    }

    /// Closes the descriptor; returns `false` if there is none.
    pub(crate) fn give_up(&mut self) -> bool {
        self.0.take().is_some()
    }
}

fn unused() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

/// An error of the system, which is shown with the limit if the process may open no more descriptors.
pub(crate) struct Why(pub(crate) Errno);

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)?;
        if self.0 == Errno::MFILE {
            write!(
                f,
                ": this process has as many file descriptors open as it may, {} (RLIMIT_NOFILE): \
                 raise that limit",
                most()
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ChannelError, ControlError, LedgerError};

    /// Whichever call finds no descriptor, the error names descriptors and their limit.
    #[test]
    fn an_error_for_want_of_a_descriptor_names_the_limit() {
        let limit = format!("{} (RLIMIT_NOFILE)", most());
        let path = || "/there".into();
        let all = |errno| {
            [
                ChannelError::System {
                    call: "socket",
                    errno,
                }
                .to_string(),
                LedgerError::System {
                    call: "open",
                    path: path(),
                    errno,
                }
                .to_string(),
                ControlError::System {
                    path: path(),
                    errno,
                }
                .to_string(),
            ]
        };
        let lost = ChannelError::TooManyFiles.to_string();
        for said in all(Errno::MFILE).into_iter().chain([lost]) {
            assert!(
                said.contains("descriptors") && said.contains(&limit),
                "{said}"
            );
        }
        for said in all(Errno::ACCESS) {
            assert!(!said.contains("descriptors"), "{said}");
        }
    }
}
