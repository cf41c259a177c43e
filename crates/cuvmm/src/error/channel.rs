//! Errors of connections to other processes.

use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;

use crate::descriptors;
use crate::display::Bytes;

/// An error of sending or receiving on a channel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer did not answer in this time.
    #[error("the peer did not answer within {0:?}")]
    TimedOut(Duration),
    /// The peer has closed the connection.
    #[error("the peer has closed the connection")]
    Closed,
    /// An earlier error left the channel in an unknown state.
    #[error("the channel cannot be used after an earlier error: connect again")]
    Broken,
    /// The peer is a process of another user.
    #[error("process {pid} of user {uid} is not allowed to connect")]
    NotAllowed {
        /// Its process id.
        pid: u32,
        /// Its user id.
        uid: u32,
    },
    /// The user id is the overflow id, which stands for every user without an id in this process's
    /// user namespace, so it does not identify a user.
    #[error("process {pid} has the overflow user id {uid}: give its user an id in this namespace")]
    UnmappedUser {
        /// The process id; that of this process if it has the overflow id itself.
        pid: u32,
        /// The overflow user id.
        uid: u32,
    },
    /// A received message is not one of this protocol, or not the expected one, for this reason.
    #[error("received a message that is {0}")]
    Malformed(&'static str),
    /// A message exceeds the maximum size of its kind.
    #[error("the message exceeds the maximum of {}", Bytes(*.most as u64))]
    TooLarge {
        /// The maximum in bytes.
        most: usize,
    },
    /// Descriptors were lost in transit: this process may not open as many files.
    #[error(
        "descriptors were lost: this process may open no more than {} (RLIMIT_NOFILE): raise that limit",
        descriptors::most()
    )]
    TooManyFiles,
    /// The maximum number of peers is connected already.
    #[error("the maximum of {most} peers is connected already")]
    Busy {
        /// The maximum.
        most: usize,
    },
    /// Another process listens at this path.
    #[error("another process listens at {}", .0.display())]
    InUse(PathBuf),
    /// No process listens at this path.
    #[doc(alias = "NobodyThere")]
    #[error("no process listens at {}", .0.display())]
    NotListening(PathBuf),
    /// The path cannot be used for a socket: it is too long, or a file is there that no listener of
    /// this user has left.
    #[error("{} {problem}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The fault.
        problem: &'static str,
    },
    /// A system call failed.
    #[error("{call}: {}", descriptors::Why(*.errno))]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        #[source]
        errno: Errno,
    },
}

impl ChannelError {
    /// The error for a file that is not a socket.
    pub(crate) const fn no_socket(path: PathBuf) -> Self {
        let problem = "is not a socket";
        Self::Path { path, problem }
    }

    /// The error for a file that no listener of this library and this user has left.
    pub(crate) const fn not_ours(path: PathBuf) -> Self {
        let problem = "is in the way and was not left by a listener of this user: remove it, or use \
                       another path";
        Self::Path { path, problem }
    }
}

/// The [folder of this user's sockets](crate::share::UserFolder) cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path:?} {problem}")]
pub struct FolderError {
    /// Its path.
    pub path: PathBuf,
    /// The reason.
    pub problem: String,
}
