//! The backing of the model: addresses without memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::answer::{Answer, OUT_OF_MEMORY};
use super::backing::{Backing, Change, MemoryKey, Part, Place};
use super::pages::Pages;
use super::space::Space;
use cuvmm_driver::{DeviceMemory, DriverKind, OsHandle};

/// The lowest address that the model uses. The system may place pages below it, as Windows does.
const FIRST_ADDRESS: u64 = 1 << 34;

/// Returns `true` if a range of the system lies below all addresses of the model.
fn is_below(address: u64, size: u64) -> bool {
    address.saturating_add(size) <= FIRST_ADDRESS
}

/// A backing without memory.
///
/// Copies from it read zero, copies to it are lost. Only pinned and managed memory is real, because
/// programs access it directly.
#[derive(Debug)]
pub struct Nothing {
    addresses: Space,
    /// The size of the gap before each reservation except at addresses chosen by the caller. An
    /// access beyond the end of one reservation then does not reach the next.
    gap: u64,
    /// Reservations at addresses chosen by the caller.
    chosen: BTreeSet<u64>,
    pages: BTreeMap<u64, Pages>,
}

impl Nothing {
    pub(crate) fn new(address_end: u64, gap: u64) -> Self {
        Self {
            addresses: Space::new(FIRST_ADDRESS..address_end),
            gap,
            chosen: BTreeSet::new(),
            pages: BTreeMap::new(),
        }
    }
}

impl Backing for Nothing {
    const KIND: DriverKind = DriverKind::Model;
    const MEMORY: DeviceMemory = DeviceMemory::Nothing;
    const FILES_AT_ONCE: bool = false;

    fn reserve(&mut self, size: u64, alignment: u64, at: Option<u64>) -> Answer<u64> {
        let Some(at) = at else {
            return self
                .addresses
                .allocate_behind(self.gap, size, alignment)
                .ok_or(OUT_OF_MEMORY);
        };
        if !self.addresses.claim(at, size) {
            return Err(OUT_OF_MEMORY);
        }
        self.chosen.insert(at);
        Ok(at)
    }

    fn unreserve(&mut self, address: u64, size: u64) -> Answer {
        let lead = if self.chosen.remove(&address) {
            0
        } else {
            self.gap
        };
        self.addresses.give_back(address - lead, size + lead);
        Ok(())
    }

    fn create(&mut self, _: MemoryKey, _: u64, _: Option<&Arc<OsHandle>>) -> Answer {
        Ok(())
    }

    fn destroy(&mut self, _: MemoryKey) {}

    fn map(&mut self, _: MemoryKey, _: &[Part]) -> Answer {
        Ok(())
    }

    fn unmap(&mut self, _: &[Part]) -> Answer {
        Ok(())
    }

    fn protect(&mut self, _: &[Change]) -> Answer {
        Ok(())
    }

    fn allocate(&mut self, size: u64, touchable: bool) -> Answer<u64> {
        if !touchable {
            return self.addresses.allocate(size, 1).ok_or(OUT_OF_MEMORY);
        }
        let pages = Pages::new(size)?;
        let address = pages.address();
        // The model may use the system's address already.
        if !is_below(address, size) && !self.addresses.claim(address, size) {
            return Err(OUT_OF_MEMORY);
        }
        self.pages.insert(address, pages);
        Ok(address)
    }

    fn deallocate(&mut self, address: u64, size: u64) {
        self.pages.remove(&address);
        if !is_below(address, size) {
            self.addresses.give_back(address, size);
        }
    }

    fn read(&mut self, _: Place, to: &mut [u8]) -> Answer {
        to.fill(0);
        Ok(())
    }

    fn write(&mut self, _: Place, _: &[u8]) -> Answer {
        Ok(())
    }

    fn fill(&mut self, _: Place, _: u8, _: u64) -> Answer {
        Ok(())
    }

    fn copy(&mut self, _: Place, _: Place, _: u64) -> Answer {
        Ok(())
    }
}
