//! Access of devices other than the region's own: see
//! [`Space::grant_to`](crate::extents::Space::grant_to).

use super::Region;
use crate::device::Device;
use crate::error::{MemoryError, ShareError};
use crate::extents::{Fence, Poll};
use crate::own::{Access, AccessGrant, Stream, reachable};

impl Region {
    /// Gives another device access to all memory that is committed now or later (`cuMemSetAccess`
    /// for each extent).
    ///
    /// On an H200 a grant costs 0.8 ms for an extent of 2 MiB and 10 ms for one of 2 GiB.
    ///
    /// # Errors
    /// [`MemoryError`] when the device belongs to another driver, cannot reach the memory, already
    /// has more access ([revoke](Self::revoke) it first), or the driver refuses. Nothing has
    /// changed.
    pub fn grant(&mut self, device: &Device, access: Access) -> Result<(), MemoryError> {
        self.may_change(device)?;
        if access == Access::None || access < self.access_of(device) {
            let device = device.location();
            return Err(MemoryError::Access(device));
        }
        let owners = self.space.owners();
        let to_come = self.layout.places().filter(|place| !owners.contains(place));
        for place in to_come.chain(&owners) {
            reachable(device, place)?;
        }
        let guest = AccessGrant::new(device, access);
        self.zeros.grant_to(&guest)?;
        self.with_withdrawn(|region| region.space.grant_to(guest))
            .inspect_err(|_| self.zeros.revoke_from(device))
    }

    /// The devices that have access, the region's own first.
    pub(crate) fn users(&self) -> impl Iterator<Item = &Device> {
        self.space.users()
    }

    /// Checks that no registration may write to the region, and that waiting for its devices would
    /// break no known capture: neither one with a guard, nor one of a stream that the region has
    /// noted.
    pub(crate) fn may_be_sealed(&self) -> Result<(), ShareError> {
        self.all_unregistered()?;
        let noted = self.fence_after(&[])?;
        Ok(Stream::check_none_captured(
            self.users(),
            noted.streams_of(),
        )?)
    }

    /// Waits for the devices that have access, and makes all committed memory read-only
    /// (`cuMemSetAccess` for each extent). All or nothing; an error while part of the region is
    /// registered.
    pub(crate) fn seal(&mut self) -> Result<(), ShareError> {
        self.may_be_sealed()?;
        Device::settle_all(self.users())?;
        Ok(self.with_withdrawn(|region| region.space.cap_all(Access::Read))?)
    }

    /// Revokes another device's access if all its work is complete (`cuMemSetAccess` for each
    /// extent). Never waits.
    ///
    /// Marks all work of the device (`cuCtxRecordEvent`), which breaks every graph capture on its
    /// context.
    ///
    /// # Errors
    /// [`MemoryError`] while work of the device is running or queued, a
    /// [capture guard](crate::pool::CaptureGuard) for it lives or part of the region is
    /// [registered](Self::register), or when the driver refuses; the device keeps its access.
    pub fn revoke(&mut self, device: &Device) -> Result<(), MemoryError> {
        self.may_change(device)?;
        self.all_unregistered()?;
        match Fence::device(device.clone()).poll()? {
            Poll::Complete => self.revoke_from(device),
            Poll::Pending | Poll::NeedsSynchronise => Err(MemoryError::InUse(device.location())),
        }
    }

    /// Waits for another device (`cuCtxSynchronize`) and revokes its access (`cuMemSetAccess` for
    /// each extent). The wait breaks every graph capture on the device's context.
    ///
    /// # Errors
    /// Those of [`Self::revoke`], except that running work is waited for.
    pub fn revoke_blocking(&mut self, device: &Device) -> Result<(), MemoryError> {
        self.may_change(device)?;
        self.all_unregistered()?;
        device.settle()?;
        self.revoke_from(device)
    }

    /// Returns the access that a device has.
    #[doc(alias = "right_of")]
    #[must_use]
    pub fn access_of(&self, device: &Device) -> Access {
        self.space.access_of(device)
    }

    fn revoke_from(&mut self, device: &Device) -> Result<(), MemoryError> {
        self.with_withdrawn(|region| region.space.revoke_from(device))?;
        self.zeros.revoke_from(device);
        Ok(())
    }

    /// Checks that a device's access may be changed: the device belongs to the same driver and is
    /// not the region's own.
    fn may_change(&self, device: &Device) -> Result<(), MemoryError> {
        device.check_driver(self.device())?;
        if device.is_same(self.device()) {
            let device = device.location();
            return Err(MemoryError::Access(device));
        }
        Ok(())
    }
}
