//! Errors of ledgers.

use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;

use super::{ArgumentError, CallError, LedgerShortage};
use crate::descriptors;
use crate::display::{Bytes, SetBy};

/// An error of opening a ledger or of changing its terms. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum LedgerError {
    /// An argument cannot be used.
    Argument(#[from] ArgumentError),
    /// The process is a forked child of the one that opened the ledger or the device.
    Call(#[from] CallError),
    /// The ledger has another limit. The first process that opens a ledger sets it.
    #[error(
        "{} has a limit of {}, set by the processes that use it, and this one requires {}",
        .path.display(), Bytes(*.limit), Bytes(*.required)
    )]
    OtherLimit {
        /// The ledger's file.
        path: PathBuf,
        /// The ledger's limit in bytes.
        limit: u64,
        /// The limit given, in bytes.
        required: u64,
    },
    /// The limit is above the memory of the device that this process sees, as in a slice of a GPU
    /// (vGPU). A ledger is for processes that see the same memory.
    #[error(
        "{} cannot have a limit of {}: this process sees {} of the device. Processes in different \
         slices of a GPU need a ledger for each slice, in directories of their own{}",
        .path.display(), Bytes(*.limit), Bytes(*.view), SetBy(*.memory_set_by)
    )]
    BeyondView {
        /// The ledger's file.
        path: PathBuf,
        /// The limit, given or agreed, in bytes.
        limit: u64,
        /// The device's memory as this process sees it, in bytes.
        view: u64,
        /// The option that sets the device's memory, if it is no GPU.
        memory_set_by: Option<&'static str>,
    },
    /// A process cannot join under this name.
    #[error("a process cannot be named {name:?} in a ledger: {problem}")]
    Name {
        /// The name.
        name: String,
        /// The reason why it cannot.
        problem: &'static str,
    },
    /// The budget that all processes share leaves too little for a guarantee.
    #[error("no memory for the guarantee: {0}")]
    Short(LedgerShortage),
    /// The file is not a ledger, or not one of this device.
    #[error("{} is not a usable ledger: {reason}", .path.display())]
    NotALedger {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The file was made by a version of this library with another layout.
    #[error("{} has layout {found}, and this version uses layout {supported}", .path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version of its layout.
        found: u64,
        /// The version that is supported.
        supported: u64,
    },
    /// The file belongs to another user, or has other permissions than this process asks for.
    #[error(
        "{} belongs to user {uid} with mode {mode:04o}, and this process requires {expected:04o}",
        .path.display()
    )]
    Access {
        /// The file.
        path: PathBuf,
        /// The owner's user id.
        uid: u32,
        /// The permissions.
        mode: u32,
        /// The permissions that are required.
        expected: u32,
    },
    /// The file system does not give all processes the same locks and mappings.
    #[error("{} is on {name}: use a local file system, such as tmpfs", .path.display())]
    FileSystem {
        /// The file.
        path: PathBuf,
        /// The file system.
        name: &'static str,
    },
    /// All slots are taken.
    #[error("{} has no free slot: {slots} processes use it", .path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// The number of slots.
        slots: usize,
    },
    /// This file was removed or replaced each time this process had opened it.
    #[error("{} was removed or replaced each time it was opened", .0.display())]
    Replaced(PathBuf),
    /// No thread could be started, with this error of the system.
    #[error("the ledger's thread could not be started: {0}")]
    Thread(Errno),
    /// A system call failed.
    #[error("{call} failed for {}: {}", .path.display(), descriptors::Why(*.errno))]
    System {
        /// The call.
        call: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        errno: Errno,
    },
}

impl LedgerError {
    /// Adds the option that sets the device's memory to an error that shows that memory.
    pub(crate) fn set_by(mut self, option: Option<&'static str>) -> Self {
        if let Self::BeyondView { memory_set_by, .. } = &mut self {
            *memory_set_by = option;
        }
        self
    }
}

/// An error of a request to a process of a ledger.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The process serves no requests on this socket: it has ended, or does not allow any.
    #[error("no process serves {}", .0.display())]
    NotServed(PathBuf),
    /// The process refused for this reason, and nothing has changed.
    #[error("the process refused: {0}")]
    Refused(String),
    /// The process did not answer in this time. It may still do what it was asked.
    #[error("the process did not answer within {0:?}")]
    TimedOut(Duration),
    /// The socket is another user's than the slot in the ledger.
    #[error("user {uid} serves the process's socket, and the process is another user's")]
    OtherUser {
        /// The user that serves the socket.
        uid: u32,
    },
    /// The answer is not one of this version, for this reason.
    #[error("the process's answer cannot be read: {0}")]
    Malformed(String),
    /// A system call failed.
    #[error("{} cannot be used: {}", .path.display(), descriptors::Why(*.errno))]
    System {
        /// The path of the process's socket.
        path: PathBuf,
        /// The system's error.
        errno: Errno,
    },
}
