//! Access of devices other than the space's own. It is granted only on request, since access for a
//! second device costs many times as much as for the first, and revoked only when that device's
//! work is complete.
//!
//! Keeps I-24.

use cuvmm_driver::Location;

use super::space::Space;
use crate::device::Device;
use crate::error::MemoryError;
use crate::own::{Access, AccessGrant, Place};

impl Space {
    pub(crate) fn grant_to(&mut self, guest: AccessGrant) -> Result<(), MemoryError> {
        let named = guest.location();
        let before = self.position(named).map(|at| self.target.access.remove(at));
        let opened = self.open_all(&guest);
        if let Err(error) = opened {
            let none = guest.at_most(Access::None);
            let undone = self.open_all(before.as_ref().unwrap_or(&none));
            if let Err(failed) = &undone {
                log!(error, error = %failed, "a grant could not be undone");
            }
            // The device may still have access to some extents: its work continues to be waited
            // for.
            self.target
                .access
                .extend(before.or(undone.is_err().then_some(none)));
            return Err(error);
        }
        self.target.access.push(guest);
        Ok(())
    }

    pub(crate) fn revoke_from(&mut self, device: &Device) -> Result<(), MemoryError> {
        let Some(at) = self.position(device.location()) else {
            return Ok(());
        };
        if let Err(error) = self.open_all(&AccessGrant::new(device, Access::None)) {
            let before = self
                .target
                .access
                .get(at)
                .map(|before| self.open_all(before));
            if let Some(Err(failed)) = before {
                log!(error, error = %failed, "revoked access could not be restored");
            }
            return Err(error);
        }
        self.target.access.remove(at);
        Ok(())
    }

    /// Caps the access of every device to an extent at `most`.
    pub(crate) fn cap(&mut self, offset: u64, most: Access) -> Result<(), MemoryError> {
        if let Some(placed) = self.extents.get_mut(&offset) {
            let host = placed.host_grant().filter(|_| placed.host);
            placed
                .mapping
                .open(self.target.access.iter().chain(&host), most)?;
            placed.most = most;
        }
        Ok(())
    }

    /// Caps the access of every device to all extents at `most`: all or none.
    pub(crate) fn cap_all(&mut self, most: Access) -> Result<(), MemoryError> {
        let before: Vec<(u64, Access)> = self
            .extents
            .iter()
            .map(|(&offset, placed)| (offset, placed.most))
            .collect();
        for (index, &(offset, had)) in before.iter().enumerate() {
            if let Err(error) = self.cap(offset, had.min(most)) {
                for &(offset, had) in before.iter().take(index) {
                    if let Err(failed) = self.cap(offset, had) {
                        log!(error, error = %failed, "capped access could not be restored");
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn position(&self, named: Location) -> Option<usize> {
        self.target
            .access
            .iter()
            .position(|access| access.location() == named)
    }

    fn open_all(&self, access: &AccessGrant) -> Result<(), MemoryError> {
        self.extents
            .values()
            .try_for_each(|placed| placed.mapping.open([access], placed.most))
    }

    pub(crate) fn access_of(&self, device: &Device) -> Access {
        let found = self
            .target
            .access
            .iter()
            .find(|access| access.named() == Some(device));
        found.map_or(Access::None, AccessGrant::access)
    }

    /// Returns the places of the memory of all extents, each place once.
    pub(crate) fn owners(&self) -> Vec<Place> {
        let mut owners: Vec<Place> = vec![];
        for placed in self.extents.values() {
            let place = placed.mapping.physical().place();
            if !owners.contains(&place) {
                owners.push(place);
            }
        }
        owners
    }

    /// Gives the host's processors the access that devices have to the extents of host memory that
    /// overlap a range.
    pub(crate) fn grant_host(&mut self, start: u64, end: u64) -> Result<(), MemoryError> {
        let range = self.covering(start, end);
        for (_, placed) in self.extents.range_mut(range) {
            let host = placed.host_grant().filter(|_| !placed.host);
            if let Some(host) = host {
                placed.mapping.open([&host], placed.most)?;
                placed.host = true;
            }
        }
        Ok(())
    }
}
