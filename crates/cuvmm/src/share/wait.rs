//! Waiting for descriptors until a deadline.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::system::system;
use crate::error::ChannelError;
use crate::sync::thread;

/// The instant by which an exchange must have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    end: Option<Instant>,
    allowed: Duration,
}

impl Deadline {
    pub(super) fn after(allowed: Duration) -> Self {
        Self {
            end: Instant::now().checked_add(allowed),
            allowed,
        }
    }

    pub(super) fn left(&self) -> Duration {
        self.end.map_or(Duration::MAX, |end| {
            end.saturating_duration_since(Instant::now())
        })
    }

    pub(super) fn check(&self) -> Result<(), ChannelError> {
        if self.left().is_zero() {
            return Err(ChannelError::TimedOut(self.allowed));
        }
        Ok(())
    }
}

/// Waits until at least one descriptor is ready for its events or has hung up, and returns the
/// indices of these descriptors.
pub(super) fn wait_for(
    wanted: &[(BorrowedFd<'_>, PollFlags)],
    deadline: Option<Deadline>,
) -> Result<Vec<usize>, ChannelError> {
    loop {
        let mut fds: Vec<PollFd<'_>> = wanted
            .iter()
            .map(|(fd, what)| PollFd::from_borrowed_fd(*fd, *what))
            .collect();
        // A time that does not fit counts as no limit.
        let left = deadline.and_then(|deadline| Timespec::try_from(deadline.left()).ok());
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => {
                let waited = deadline.map_or(Duration::ZERO, |deadline| deadline.allowed);
                return Err(ChannelError::TimedOut(waited));
            }
            Ok(_) => {
                let ready = fds
                    .iter()
                    .enumerate()
                    .filter(|(_, fd)| !fd.revents().is_empty());
                return Ok(ready.map(|(index, _)| index).collect());
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(system("poll")(errno)),
        }
    }
}

pub(super) fn pause(time: Duration) {
    thread::sleep(time);
}
