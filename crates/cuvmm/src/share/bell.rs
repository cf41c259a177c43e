//! What wakes a thread that waits for descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, retry_on_intr, write};

use super::system::system;
use crate::error::ChannelError;

/// Can be read once it was rung, until it is silenced.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> Result<Self, ChannelError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        eventfd(0, flags).map(Self).map_err(system("eventfd"))
    }

    pub(super) fn ring(&self) {
        // One that is full rings already.
        let _ = retry_on_intr(|| write(&self.0, &1u64.to_ne_bytes()));
    }

    pub(super) fn silence(&self) {
        // One that is empty is silent already.
        let _ = read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
