//! The memory that a keeper has: descriptors of publications, and the names of their memory in ledgers.
//!
//! A keeper opens no device and imports nothing. It names memory in its [ledger](crate::ledger) before
//! it takes the descriptors, and removes the name when it has closed them.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, Weak};

use cuvmm_driver::{Exported, HandleTypes};
use rustix::process::{Resource, getrlimit};

use super::arriving::Arriving;
use super::wire::Description;
use crate::error::{ArgumentError, MemoryError, ShareError};
use crate::ledger::{Ledger, NamedExport, holding};
use crate::sync::Mutex;

/// The name under which other processes of a ledger see a keeper.
const NAME: &str = "keeper";

/// The memory of a keeper's process.
#[derive(Debug)]
pub(super) struct Holdings {
    /// The directory with the ledgers in which memory is named.
    ledgers: Option<PathBuf>,
    /// The ledgers that this process has joined, by their numbers.
    joined: Mutex<Vec<(u64, Weak<Ledger>)>>,
}

/// The name of memory in a ledger. Ends before the membership.
#[derive(Debug)]
pub(super) struct Counted {
    _named: NamedExport,
    _ledger: Arc<Ledger>,
}

impl Holdings {
    pub(super) fn new(ledgers: Option<PathBuf>) -> Self {
        Self {
            ledgers: ledgers.map(directory),
            joined: Mutex::new(Vec::new()),
        }
    }

    /// Returns how many descriptors may be kept: a quarter of the files that this process may open.
    /// Readers have up to half of them.
    pub(super) fn most() -> u64 {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        files / 4
    }

    /// Accepts a description, and names the memory in its ledger.
    ///
    /// # Errors
    /// The memory is given by handles that do not keep it, by more descriptors than can be kept, or was
    /// given back; or its ledger cannot be joined.
    pub(super) fn agree(&self, description: &Description) -> Result<Receiving, ShareError> {
        let handle_type = description.handle_type();
        if handle_type != HandleTypes::POSIX_FD {
            return Err(MemoryError::NotShareable {
                what: "memory to be kept",
                handle_type: HandleTypes::POSIX_FD,
                shareable: handle_type,
            }
            .into());
        }
        let extents = description.extents().len() as u64;
        ArgumentError::at_most("descriptors of kept publications", extents, Self::most())?;
        Ok(Receiving {
            runs: description.runs(),
            description: description.clone(),
            handles: Vec::new(),
            counted: self.count(description)?,
        })
    }

    fn count(&self, description: &Description) -> Result<Option<Counted>, ShareError> {
        let Some((number, block)) = description.counted else {
            return Ok(None);
        };
        let Some(ledger) = self.ledger(number)? else {
            log!(
                warn,
                number,
                "a publication is kept whose ledger is not in the keeper's directory"
            );
            return Ok(None);
        };
        let named = ledger.member().name(block).ok_or(ShareError::GivenBack)?;
        Ok(Some(Counted {
            _named: named,
            _ledger: ledger,
        }))
    }

    /// Returns the ledger with a number, which is joined if it was not.
    fn ledger(&self, number: u64) -> Result<Option<Arc<Ledger>>, ShareError> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        joined.retain(|(_, ledger)| ledger.strong_count() > 0);
        let known = joined.iter().find(|(known, _)| *known == number);
        if let Some(ledger) = known.and_then(|(_, ledger)| ledger.upgrade()) {
            return Ok(Some(ledger));
        }
        let Some(directory) = &self.ledgers else {
            return Ok(None);
        };
        let Some(path) = holding::find(directory, number) else {
            return Ok(None);
        };
        let ledger = Ledger::hold(path, NAME);
        let ledger = Arc::new(ledger.map_err(|error| ShareError::Ledger(Box::new(error)))?);
        joined.push((number, Arc::downgrade(&ledger)));
        Ok(Some(ledger))
    }
}

/// Returns the directory of ledgers for its path, or that of the file of one of them.
fn directory(path: PathBuf) -> PathBuf {
    match path.parent() {
        Some(directory) if path.is_file() => directory.to_owned(),
        _ => path,
    }
}

/// Memory whose descriptors are being received.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) description: Description,
    pub(super) runs: Vec<Range<u64>>,
    /// Closed before the memory loses its name.
    pub(super) handles: Vec<Exported>,
    pub(super) counted: Option<Counted>,
}

impl Arriving for Receiving {
    type Whole = Self;

    fn add(&mut self, handles: Vec<Exported>) -> Result<(), ShareError> {
        let all = self.handles.len() + handles.len();
        let most = self.description.extents().len() as u64;
        ArgumentError::at_most("handles, one for each extent", all as u64, most)?;
        if !handles
            .iter()
            .all(|handle| matches!(handle, Exported::Fd(_)))
        {
            return Err(ArgumentError::HandleType(0).into());
        }
        self.handles.extend(handles);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.handles.len() == self.description.extents().len()
    }

    fn finish(self) -> Result<Self, ShareError> {
        Ok(self)
    }

    fn discard(whole: Self) {
        drop(whole);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::directory;

    #[test]
    fn the_file_of_a_ledger_names_its_directory() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        assert_eq!(directory(at("file")), folder.path());
        assert_eq!(directory(folder.path().to_owned()), folder.path());
        // The directory may be made later.
        assert_eq!(directory(at("later")), at("later"));
    }
}
