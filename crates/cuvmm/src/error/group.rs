//! Errors of groups.

use std::fmt;
use std::path::PathBuf;

use super::{ArgumentError, CallError, LedgerError, SleepError};
use crate::display::Count;

/// An error of joining a group, or of an operation of its ranks together. All ranks are then as they
/// were, unless the error says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// An argument cannot be used.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// The process is a forked child of the one that joined the group.
    #[error("a forked child is no rank of its parent's group: {0}")]
    Call(#[from] CallError),
    /// A group cannot have this name, which is a part of its file's name.
    #[error(
        "a group cannot be named {name:?}: a name has 1 to {most} letters and digits of ASCII, and \
         dots, hyphens and underscores, of which a dot is not the first"
    )]
    Name {
        /// The name.
        name: String,
        /// The most bytes of a name.
        most: usize,
    },
    /// The file is not a group's.
    #[error("{} is not a usable group: {reason}", .path.display())]
    NotAGroup {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The group's file could not be opened, made or used.
    #[error(transparent)]
    File(LedgerError),
    /// The group has another number of ranks, set by the first one that joined.
    #[error("group {group:?} has {}, and this one joins a group of {given}", Count(*.ranks, "rank"))]
    OtherRanks {
        /// The group.
        group: String,
        /// The number of its ranks.
        ranks: u32,
        /// The number given.
        given: u32,
    },
    /// Another process has the rank, or all ranks are taken.
    #[error(
        "{} of group {group:?} {} by process {pid}", Which(*.rank, *.ranks),
        if .rank.is_none() && *.ranks > 1 { "are taken, the last" } else { "is taken," }
    )]
    Taken {
        /// The group.
        group: String,
        /// The number of its ranks.
        ranks: u32,
        /// The rank that was asked for, if one was.
        rank: Option<u32>,
        /// The process that has it, or the last rank.
        pid: u32,
    },
    /// Another thread of this process is in an operation of this rank.
    #[error("this rank of group {group:?} is in an operation already, on another thread")]
    Busy {
        /// The group.
        group: String,
    },
    /// The operation was undone in all ranks.
    #[error("group {group:?} has undone {operation:?}: rank {rank}{} {cause}", Process(*.pid))]
    Undone {
        /// The group.
        group: String,
        /// The operation.
        operation: String,
        /// The rank that is the cause.
        rank: u32,
        /// Its process id in its own PID namespace, or 0 if no process had joined as this rank.
        pid: u32,
        /// The reason.
        cause: Undone,
    },
    /// This rank's own part failed. The operation was undone in all ranks.
    #[error(transparent)]
    Sleep(#[from] SleepError),
    /// The operation was undone in all ranks, except that some blocks of this one stayed asleep.
    #[error("{undone}; of this rank, {stayed}")]
    Stayed {
        /// The reason.
        #[source]
        undone: Box<Self>,
        /// The blocks that stayed asleep.
        stayed: SleepError,
    },
}

/// Why a rank was the cause of an operation's end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Undone {
    /// Its own part failed, for this reason.
    #[error("failed: {0}")]
    Failed(String),
    /// Its process ended before the decision.
    #[error("has ended")]
    Ended,
    /// No process had joined as this rank in time.
    #[error("had not joined in time")]
    NotJoined,
    /// It had not begun the operation in time.
    #[error("had not begun it in time")]
    NotCalled,
    /// It had begun the operation, or the one before, and was not ready in time.
    #[error("was not ready in time")]
    NotReady,
    /// It began another operation.
    #[error("began {operation:?}, and rank {other} another one")]
    OtherOperation {
        /// Its operation.
        operation: String,
        /// A rank with another one.
        other: u32,
    },
}

impl From<LedgerError> for GroupError {
    fn from(error: LedgerError) -> Self {
        match error {
            LedgerError::NotALedger { path, reason } => Self::NotAGroup { path, reason },
            error => Self::File(error),
        }
    }
}

struct Which(Option<u32>, u32);

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self(Some(rank), _) => write!(f, "rank {rank}"),
            Self(None, 1) => f.write_str("the only rank"),
            Self(None, ranks) => write!(f, "all {ranks} ranks"),
        }
    }
}

struct Process(u32);

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            pid => write!(f, " (process {pid})"),
        }
    }
}
