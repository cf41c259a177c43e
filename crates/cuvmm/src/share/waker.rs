//! A wake-up signal for threads that wait for descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, retry_on_intr, write};

use super::system::system;
use crate::error::ChannelError;
use crate::sync::atomic::{AtomicBool, Ordering};

/// An eventfd that is readable from [`wake`](Self::wake) until [`silence`](Self::silence).
#[derive(Debug)]
pub(super) struct Waker {
    event: OwnedFd,
    woken: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> Result<Self, ChannelError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = eventfd(0, flags).map_err(system("eventfd"))?;
        let woken = AtomicBool::new(false);
        Ok(Self { event, woken })
    }

    pub(super) fn wake(&self) {
        self.woken.store(true, Ordering::Release);
        // If the counter is full, the eventfd is readable already.
        let _ = retry_on_intr(|| write(&self.event, &1u64.to_ne_bytes()));
    }

    /// Returns `true` after a wake, for a thread that cannot wait for the descriptor.
    pub(super) fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Acquire)
    }

    pub(super) fn silence(&self) {
        self.woken.store(false, Ordering::Release);
        // If the counter is empty, the eventfd is silent already.
        let _ = read(&self.event, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
