//! The lock of a group's membership: one process joins or leaves at a time.
//!
//! It is held for some system calls, and the kernel releases it when the process dies. A process that
//! joins sees the slot of a rank that leaves taken and locked, or free and not locked.
//!
//! Keeps I-104.

use std::time::Duration;

use rustix::io::Errno;

use super::layout::GroupFile;
use crate::error::GroupError;
use crate::ledger::clock;
use crate::ledger::lock::Lock;

/// How long another process may take to join or to leave.
const PATIENCE: Duration = Duration::from_secs(10);

/// The lock, until this value is dropped.
pub(super) struct Membership<'a>(&'a GroupFile);

impl<'a> Membership<'a> {
    /// Takes the lock, and waits for another process that has it.
    pub(super) fn lock(file: &'a GroupFile) -> Result<Self, GroupError> {
        let until = clock::now() + PATIENCE;
        while !Lock::Joining
            .take(file.file())
            .map_err(file.failed("fcntl"))?
        {
            if clock::now() > until {
                return Err(file.failed("fcntl")(Errno::AGAIN).into());
            }
            clock::sleep(Duration::from_millis(1));
        }
        Ok(Self(file))
    }
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        if let Err(errno) = Lock::Joining.release(self.0.file()) {
            log!(warn, %errno, "the lock of a group's membership could not be released");
        }
    }
}
