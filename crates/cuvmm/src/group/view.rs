//! Looking at a group from outside.

use std::path::Path;

use super::joining::{FILE_ENDING, check, check_name};
use super::layout::{GroupFile, is_taken};
use super::watch::Watch;
use crate::error::GroupError;

/// A rank of a group, as another program sees it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct RankStats {
    /// The rank, from 0.
    pub rank: u32,
    /// The process id in the process's own PID namespace, or `None` if no process has the rank.
    pub pid: Option<u32>,
    /// `true` if the process is known to have ended.
    pub has_ended: bool,
}

/// Returns the ranks of a group in a directory, in order. Only reads the group's file; makes no
/// driver call.
///
/// # Errors
/// [`GroupError`] if there is no such group, or its file cannot be read.
pub fn ranks(directory: impl AsRef<Path>, name: &str) -> Result<Vec<RankStats>, GroupError> {
    check_name(name)?;
    let path = directory.as_ref().join(format!("{name}{FILE_ENDING}"));
    let file = GroupFile::open_to_read(path)?;
    check(&file)?;
    let layout = file.layout();
    let ranks = usize::try_from(layout.header.ranks.load()).unwrap_or(0);
    let ended = Watch::default().ended(&file, None, ranks);
    let slots = layout.slots.iter().zip(ended).zip(0..);
    let ranks = slots.map(|((slot, has_ended), rank)| RankStats {
        rank,
        pid: is_taken(slot.state.load()).then(|| slot.pid()),
        has_ended,
    });
    Ok(ranks.collect())
}
