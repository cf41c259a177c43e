//! The ledger's file: a [shared file](super::shared_file) with the ledger's [layout](super::layout).
//!
//! `unsafe` in this file: the claim that the layout consists of atomics.
#![allow(unsafe_code)]

use std::path::PathBuf;

use super::charge::MOST;
use super::layout::{Layout, MAGIC, VERSION, first_bytes, uuid_words};
use super::shared_file::{Contents, Making, SharedFile};
use super::word::Word;
use crate::display::Bytes;
use crate::error::LedgerError;

#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) granule: u64,
    pub(super) device: [u8; 16],
    pub(super) group: bool,
}

pub(super) type LedgerFile = SharedFile<Layout>;

// SAFETY: the layout consists of words and bells, which are atomics of at most 8 bytes.
unsafe impl Contents for Layout {
    const KIND: &'static str = "ledger";
}

impl LedgerFile {
    pub(super) fn open(path: PathBuf, terms: Terms) -> Result<Self, LedgerError> {
        let making = Making {
            group: terms.group,
            first: &first_bytes(terms.granule, terms.device),
        };
        Self::open_or_make(path, making, |ledger| ledger.prepare(terms))
    }

    pub(super) fn look(path: PathBuf) -> Result<Self, LedgerError> {
        let ledger = Self::open_to_read(path)?;
        ledger.check_version()?;
        Ok(ledger)
    }

    /// Checks that the file is a ledger of this device. Initializes a file that lost its contents.
    fn prepare(&self, terms: Terms) -> Result<(), LedgerError> {
        let header = &self.layout().header;
        let device = uuid_words(terms.device);
        // The machine failed before the file's maker had written it to disk.
        if header.magic.load() == 0 && self.is_blank() {
            header.version.store(VERSION);
            header.granule.store(terms.granule);
            header.device[0].store(device[0]);
            header.device[1].store(device[1]);
            header.magic.store(MAGIC);
            return Ok(());
        }
        self.check_version()?;
        let found = header.granule.load();
        if found != terms.granule {
            return Err(self.is_not_one(format!(
                "its granule is {}, and the device's is {}",
                Bytes(found),
                Bytes(terms.granule)
            )));
        }
        let found = [header.device[0].load(), header.device[1].load()];
        if found != device {
            return Err(self.is_not_one("it is another device's".to_owned()));
        }
        Ok(())
    }

    /// Returns `true` if the file may have lost its contents: no limit was set, and no slot was
    /// ever taken.
    fn is_blank(&self) -> bool {
        let layout = self.layout();
        let slots = layout.slots.iter().map(|slot| slot.state.load());
        let charges = layout.charges.iter().map(Word::load);
        layout.header.agreed.load() == 0 && slots.chain(charges).all(|word| word == 0)
    }

    fn check_version(&self) -> Result<(), LedgerError> {
        let header = &self.layout().header;
        if header.magic.load() != MAGIC {
            return Err(self.is_not_one("its first word is not that of a ledger".to_owned()));
        }
        let found = header.version.load();
        if found != VERSION {
            return Err(LedgerError::Version {
                path: self.path().to_owned(),
                found,
                supported: VERSION,
            });
        }
        let granule = header.granule.load();
        if !granule.is_power_of_two() || granule > u64::MAX / (MOST + 1) {
            return Err(self.is_not_one(format!("its granule is {}", Bytes(granule))));
        }
        Ok(())
    }
}
