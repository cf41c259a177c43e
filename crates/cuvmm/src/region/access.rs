//! Who may touch a region besides its own device: given when asked for, since access for a second
//! device costs many times that for the first, and taken away only when its work has passed.

use cuvmm_driver::Location;

use super::Region;
use super::fence::{Fence, Poll};
use super::layout::reachable;
use super::space::Space;
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError, ShareError};
use crate::own::{Access, AccessGrant, Place};

impl Space {
    /// Gives a device a right on all extents that are here and that will come: all or none.
    pub(super) fn let_in(&mut self, guest: AccessGrant) -> Result<(), MemoryError> {
        let named = guest.location();
        let before = self.position(named).map(|at| self.access.remove(at));
        let opened = self.open_all(&guest);
        if let Err(error) = opened {
            let none = guest.at_most(Access::None);
            let undone = self.open_all(before.as_ref().unwrap_or(&none));
            if let Err(failed) = &undone {
                tracing::error!(error = %failed, "a grant could not be undone");
            }
            // Where its right may stand here and there, its work is waited for still.
            self.access
                .extend(before.or(undone.is_err().then_some(none)));
            return Err(error);
        }
        self.access.push(guest);
        Ok(())
    }

    /// Takes a device's right on all extents: all or none.
    pub(super) fn shut_out(&mut self, device: &Device) -> Result<(), MemoryError> {
        let Some(at) = self.position(device.location()) else {
            return Ok(());
        };
        if let Err(error) = self.open_all(&AccessGrant::device(device, Access::None)) {
            let before = self.access.get(at).map(|before| self.open_all(before));
            if let Some(Err(failed)) = before {
                tracing::error!(error = %failed, "access could not be given back");
            }
            return Err(error);
        }
        self.access.remove(at);
        Ok(())
    }

    /// Lets nobody do more than `most` with an extent from now on.
    pub(crate) fn cap(&mut self, offset: u64, most: Access) -> Result<(), MemoryError> {
        if let Some(placed) = self.extents.get_mut(&offset) {
            let host = placed.host_grant().filter(|_| placed.host);
            let access = self.access.iter().chain(&host);
            let access: Vec<AccessGrant> = access.map(|it| it.at_most(most)).collect();
            placed.mapping.set_access(&access)?;
            placed.most = most;
        }
        Ok(())
    }

    /// Lets each device do no more than `most` with any extent from now on: all or none.
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
                        tracing::error!(error = %failed, "a right could not be given back");
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn position(&self, named: Location) -> Option<usize> {
        self.access
            .iter()
            .position(|access| access.location() == named)
    }

    fn open_all(&self, access: &AccessGrant) -> Result<(), MemoryError> {
        self.extents
            .values()
            .try_for_each(|placed| placed.mapping.set_access(&[access.at_most(placed.most)]))
    }

    /// Every place that memory here lies at.
    fn owners(&self) -> Vec<Place> {
        let mut owners: Vec<Place> = vec![];
        for placed in self.extents.values() {
            let place = placed.mapping.physical().place();
            if !owners.contains(&place) {
                owners.push(place);
            }
        }
        owners
    }
}

impl Region {
    /// Gives another device access to all that is committed and that will be (`cuMemSetAccess` for
    /// each extent).
    ///
    /// On an H200 a grant costs 0.8 ms for an extent of 2 MiB and 10 ms for one of 2 GiB.
    ///
    /// # Errors
    /// [`MemoryError`] when the device is another driver's, cannot reach the memory, has a higher
    /// right already ([revoke](Self::revoke) it first), or the driver refuses. Nothing has changed.
    pub fn grant(&mut self, device: &Device, access: Access) -> Result<(), MemoryError> {
        self.may_change(device)?;
        if access == Access::None || access < self.access_of(device) {
            let device = device.location();
            return Err(MemoryError::Access { device });
        }
        let owners = self.space.owners();
        let to_come = self.layout.places().filter(|place| !owners.contains(place));
        for place in to_come.chain(&owners) {
            reachable(device, place)?;
        }
        let guest = AccessGrant::device(device, access);
        self.zeros.let_in(&guest)?;
        self.space.let_in(guest).inspect_err(|_| {
            self.zeros.shut_out(device);
        })?;
        Ok(())
    }

    /// Whether no registration of it may write.
    pub(crate) fn may_be_sealed(&self) -> Result<(), ShareError> {
        Ok(self.all_unregistered()?)
    }

    /// Waits for the devices that have access, and lets nobody do more than read from now on what is
    /// committed (`cuMemSetAccess` for each extent). All or nothing, and an error while part of it is
    /// registered.
    pub(crate) fn seal(&mut self) -> Result<(), ShareError> {
        self.may_be_sealed()?;
        self.space.users().try_for_each(Device::synchronize)?;
        Ok(self.space.cap_all(Access::Read)?)
    }

    /// Takes access away from another device, if all its work has passed (`cuMemSetAccess` for each
    /// extent). Never waits.
    ///
    /// # Errors
    /// [`MemoryError`] while work of the device is running or queued or part of the region is
    /// [registered](Self::register), or when the driver refuses; the
    /// device has its access still.
    pub fn revoke(&mut self, device: &Device) -> Result<(), MemoryError> {
        self.may_change(device)?;
        self.all_unregistered()?;
        match Fence::device(device.clone()).poll()? {
            Poll::Complete => self.shut_out(device),
            Poll::Pending | Poll::NeedsSynchronise => Err(MemoryError::InUse {
                device: device.location(),
            }),
        }
    }

    /// The same after waiting for the device (`cuCtxSynchronize`).
    ///
    /// # Errors
    /// As [`Self::revoke`], save that it is never in use.
    pub fn revoke_blocking(&mut self, device: &Device) -> Result<(), MemoryError> {
        self.may_change(device)?;
        self.all_unregistered()?;
        device.synchronize()?;
        self.shut_out(device)
    }

    /// The access that a device has.
    #[doc(alias = "right_of")]
    #[must_use]
    pub fn access_of(&self, device: &Device) -> Access {
        self.space
            .access
            .iter()
            .find(|access| access.named() == Some(device))
            .map_or(Access::None, AccessGrant::access)
    }

    fn shut_out(&mut self, device: &Device) -> Result<(), MemoryError> {
        self.space.shut_out(device)?;
        self.zeros.shut_out(device);
        Ok(())
    }

    /// Whether the rights of a device are ours to change.
    fn may_change(&self, device: &Device) -> Result<(), MemoryError> {
        if !device.same_driver(self.device()) {
            return Err(ArgumentError::OTHER_DRIVER.into());
        }
        if device.is_same(self.device()) {
            let device = device.location();
            return Err(MemoryError::Access { device });
        }
        Ok(())
    }
}
