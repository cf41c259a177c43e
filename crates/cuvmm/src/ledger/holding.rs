//! Membership of a process that has no device: it has descriptors of exported memory, and names that
//! memory, so that the memory stays charged to the process that created it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::control::Commands;
use super::file::{LedgerFile, Terms};
use super::joining::Wishes;
use super::member::Member;
use super::{FILE_ENDING, Ledger, control, keeper};
use crate::device::WeakDevice;
use crate::error::LedgerError;

/// Returns the path of the ledger with this number in a directory. Files that are not ledgers are
/// passed over.
pub(crate) fn find(directory: &Path, number: u64) -> Option<PathBuf> {
    let files = std::fs::read_dir(directory).ok()?.flatten();
    let mut ledgers = files.map(|file| file.path()).filter(|path| {
        let name = path.file_name().unwrap_or_default();
        name.as_encoded_bytes().ends_with(FILE_ENDING.as_bytes())
    });
    ledgers.find(|path| LedgerFile::look(path.clone()).is_ok_and(|file| file.number() == number))
}

impl Ledger {
    /// Joins an existing ledger without a device, under a name. The process has a slot, is charged
    /// nothing, and answers requests for figures. It agrees to any limit.
    ///
    /// # Errors
    /// [`LedgerError`] if the file is no ledger of this version, or 128 processes use it.
    pub(crate) fn hold(path: PathBuf, name: &str) -> Result<Self, LedgerError> {
        let look = LedgerFile::look(path.clone())?;
        let header = &look.layout().header;
        let terms = Terms {
            granule: header.granule.load(),
            device: header.uuid(),
            group: look.is_of_group()?,
        };
        let limit = header.limit().saturating_mul(terms.granule);
        let wishes = Wishes {
            limit: None,
            default_limit: limit,
            process_limit: limit,
            priority: 0,
            name: name.to_owned(),
            device: WeakDevice::default(),
            // Descriptors are closed before a process has ended, and it has no other memory.
            lingers: Duration::ZERO,
        };
        let member = Arc::new(Member::join(path, terms, &wishes)?);
        let commands = Arc::new(Commands::figures(terms.group));
        keeper::start(&member, &commands)?;
        let served = control::start(&member, commands)?;
        member.served.get_or_init(|| served);
        Ok(Self {
            member,
            device: terms.device,
        })
    }
}
