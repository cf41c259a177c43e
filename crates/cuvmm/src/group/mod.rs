//! Groups of processes whose blocks sleep and wake in all of them or in none.
//!
//! A model that is split over several devices (tensor parallelism) has a process, a *rank*, for each
//! device. If one rank slept and another did not, neither could serve. A [`Group`] is a name in a
//! directory that all ranks share, on one machine. An operation of a group has two phases:
//!
//! 1. Each rank does all that can fail: it waits for work, takes host memory and copies, or charges,
//!    maps and copies back ([`PreparedSleep`](crate::sleep::PreparedSleep),
//!    [`PreparedWake`](crate::sleep::PreparedWake)).
//! 2. When all ranks are ready, each does the rest, which cannot fail. If one rank fails, ends, calls
//!    another operation, or is not ready in time, all undo their part, and each rank's error names
//!    that rank, its process and its reason.
//!
//! A call is collective, as in MPI or NCCL: every rank makes it, and it returns in all of them when
//! the decision is made. A rank that ends after the decision changes nothing for the others.
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use cuvmm::driver::host::{HostDriver, HostOptions};
//! use std::time::Duration;
//!
//! use cuvmm::{Contents, Device, Group, HostStore, Pool};
//!
//! # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
//! # let device = Device::open(driver, 0)?;
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path();
//! let pool = Pool::builder(&device).build()?;
//! let model = pool.tenant("model").register()?;
//! let weights = model.block(4 << 20).tag("weights").allocate()?;
//! let store = HostStore::builder(&device).pinned(4 << 20).build()?;
//!
//! // In each process of a group of one.
//! let group = Group::join(directory, "tp0", 1, None)?;
//! let timeout = Duration::from_secs(60);
//! group.sleep(&model.blocks().tag("weights"), Contents::Keep(&store), timeout)?;
//! assert!(weights.is_asleep());
//! group.wake(&model.blocks().tag("weights"), timeout)?;
//! assert!(!weights.is_asleep());
//! # Ok(())
//! # }
//! ```
//!
//! # Waits
//! Each wait ends with the `timeout` of the calling rank, or when a rank's process has ended. A rank
//! that calls late finds the operation undone by the others, and begins the next one, in which it
//! waits for them: programs that repeat a failed operation meet again.
//!
//! # The file
//! A group is the file `NAME.cuvmm-group`, which only its user can open (mode 0600). It must be on a
//! local file system, such as tmpfs. It stays when the ranks have gone; the next ones use it again,
//! also with another number of ranks. Every content is valid: a file that another program has
//! changed leads to an error, and at worst to a wrong decision. Ranks in different PID namespaces
//! (containers) can share it.

mod joining;
mod layout;
mod membership;
mod rank;
mod round;
#[cfg(test)]
mod tests;
mod view;
mod watch;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use self::rank::Rank;
use crate::error::{GroupError, SleepError, Undone};
use crate::sleep::{Blocks, Contents, Progress, Slept, Woken};

pub use round::Entered;
pub use view::{RankStats, ranks};

/// A rank's membership in a group. See [the module](self).
///
/// The process leaves the group when this is dropped. In a forked child every call is an error.
#[derive(Debug)]
pub struct Group {
    rank: Rank,
}

impl Group {
    /// Joins a group in a directory, made if needed, as a rank below `ranks`, or as the first one
    /// that is free. Does not wait for other ranks. The rank of a process that has ended is free.
    ///
    /// # Errors
    /// [`GroupError`] if the name cannot be a file's, there are more than 128 ranks or none, the
    /// group has another number of ranks, another process has the rank, the file is no group's or
    /// another user's, or a system call fails.
    pub fn join(
        directory: impl AsRef<Path>,
        name: &str,
        ranks: u32,
        rank: Option<u32>,
    ) -> Result<Self, GroupError> {
        let rank = joining::join(directory.as_ref(), name, ranks, rank)?;
        Ok(Self { rank })
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.rank.name
    }

    /// Returns this process's rank, from 0.
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.rank.index as u32
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.rank.ranks as u32
    }

    /// Returns the path of the group's file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.rank.path()
    }

    /// Begins an operation with all other ranks, and waits until they have begun it too.
    /// `operation` names it, with all that must be equal in all ranks, such as tags. If a rank passes
    /// another text, no rank begins.
    ///
    /// This is for operations other than [`sleep`](Self::sleep) and [`wake`](Self::wake), such as
    /// one that moves blocks of several tenants.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let group = cuvmm::Group::join(directory.path(), "tp0", 1, None)?;
    /// # let prepare = || Ok::<_, std::io::Error>(());
    /// # let finish = |()| ();
    /// let entered = group.enter("swap adapters", std::time::Duration::from_secs(60))?;
    /// let prepared = match prepare() {
    ///     Ok(prepared) => prepared,
    ///     Err(error) => return Err(entered.fail(error).into()),
    /// };
    /// entered.ready()?; // after an error `prepared` is dropped, which undoes it
    /// finish(prepared);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`GroupError::Undone`] with the rank that is the cause: one that has ended, or had not begun
    /// the same operation within the timeout. [`GroupError`] if another thread is in an operation of
    /// this rank, this is a forked child, or the file was removed.
    pub fn enter(&self, operation: &str, timeout: Duration) -> Result<Entered<'_>, GroupError> {
        Entered::begin(&self.rank, operation, timeout)
    }

    /// Puts the selected blocks of each rank to sleep, in all ranks or in none. Each rank passes its
    /// own blocks, with the same tags, and keeps contents as the others do. Waits for the other
    /// ranks at most for the timeout, and in addition for the work on its own blocks as
    /// [`Blocks::timeout`] says.
    ///
    /// Makes the driver calls of [`Blocks::sleep`]: none before all ranks have called this.
    ///
    /// # Errors
    /// [`GroupError::Sleep`] if this rank's own part failed, or [`GroupError::Undone`] with the rank
    /// that is the cause. All blocks of all ranks are then as before, unless the error says that some
    /// [stayed asleep](GroupError::Stayed).
    pub fn sleep(
        &self,
        blocks: &Blocks<'_>,
        contents: Contents<'_>,
        timeout: Duration,
    ) -> Result<Slept, GroupError> {
        let treated = match contents {
            Contents::Keep(_) => "keep",
            Contents::KeepMarked(_) => "keep marked",
            Contents::Discard => "discard",
        };
        let entered = self.enter(&operation("sleep", blocks, treated), timeout)?;
        let goes_on = |progress: &Progress| blocks.goes_on(progress) && entered.is_open();
        let own: Blocks<'_> = blocks.clone().on_progress(&goes_on);
        match own.prepare_sleep(contents) {
            Ok(prepared) => match entered.ready() {
                Ok(()) => Ok(prepared.finish()),
                Err(undone) => Err(match prepared.cancel() {
                    Ok(()) => undone,
                    Err(stayed) => GroupError::Stayed {
                        undone: Box::new(undone),
                        stayed,
                    },
                }),
            },
            Err(error) => Err(self.failed(entered, error)),
        }
    }

    /// Wakes the selected blocks of each rank, in all ranks or in none. Each rank passes its own
    /// blocks, with the same tags.
    ///
    /// Makes the driver calls of [`Blocks::wake`]: none before all ranks have called this.
    ///
    /// # Errors
    /// The errors of [`sleep`](Self::sleep). All blocks of all ranks then stay asleep, with their
    /// contents.
    pub fn wake(&self, blocks: &Blocks<'_>, timeout: Duration) -> Result<Woken, GroupError> {
        let entered = self.enter(&operation("wake", blocks, ""), timeout)?;
        let goes_on = |progress: &Progress| blocks.goes_on(progress) && entered.is_open();
        let own: Blocks<'_> = blocks.clone().on_progress(&goes_on);
        match own.prepare_wake() {
            // An error drops the prepared blocks, which takes their memory away again.
            Ok(prepared) => entered.ready().map(|()| prepared.finish()),
            Err(error) => Err(self.failed(entered, error)),
        }
    }

    /// Votes against an operation. Returns this rank's own error, unless it gave up because another
    /// rank had ended the operation.
    fn failed(&self, entered: Entered<'_>, error: SleepError) -> GroupError {
        let undone = entered.fail(&error);
        let by_own = matches!(
            &undone,
            GroupError::Undone { rank, cause: Undone::Failed(_), .. } if *rank == self.rank()
        );
        match error {
            SleepError::Cancelled if !by_own => undone,
            error => error.into(),
        }
    }
}

/// Returns the text of an operation.
fn operation(verb: &str, blocks: &Blocks<'_>, treated: &str) -> String {
    let what = blocks.name();
    let parts = [verb, &what, treated];
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(" ")
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of group {}", self.rank(), self.name())
    }
}
