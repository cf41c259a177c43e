//! Single driver calls, so that each can be timed.
//!
//! `unsafe` here: the `Driver` methods that take addresses and handles. Each receives values that
//! the driver returned. A call out of order returns an error and corrupts nothing, because no work
//! is launched on the memory.
#![allow(unsafe_code)]

use cuvmm::Stream;
use cuvmm::driver::{
    AccessDesc, AccessFlags, DeviceAddress, Driver, EventFlags, EventHandle, Location, Ordinal,
    PhysicalHandle, PhysicalProps, Result,
};

use super::by_hand::Hand;

/// A mapping, created and removed step by step. A drop removes what remains.
pub(super) struct Calls<'a> {
    driver: &'a dyn Driver,
    device: Ordinal,
    size: u64,
    address: Option<DeviceAddress>,
    physical: Option<PhysicalHandle>,
    mapped: bool,
}

impl<'a> Calls<'a> {
    pub(super) fn new(hand: &'a Hand, size: u64) -> Self {
        Self {
            driver: hand.driver(),
            device: hand.device(),
            size,
            address: None,
            physical: None,
            mapped: false,
        }
    }

    pub(super) fn reserve(&mut self) -> Result<()> {
        let address = self.driver.reserve(self.size, 0, DeviceAddress::NULL, 0)?;
        self.address = Some(address);
        Ok(())
    }

    pub(super) fn create(&mut self) -> Result<()> {
        let props = PhysicalProps::device(self.device);
        self.physical = Some(self.driver.create(self.size, &props, 0)?);
        Ok(())
    }

    pub(super) fn map(&mut self) -> Result<()> {
        if let (Some(address), Some(physical)) = (self.address, self.physical) {
            // SAFETY: this value owns both the addresses and the physical, and both are live.
            unsafe { self.driver.map(address, self.size, 0, physical, 0)? };
            self.mapped = true;
        }
        Ok(())
    }

    pub(super) fn set_access(&mut self) -> Result<()> {
        self.open(&[read_write(self.device)])
    }

    /// Sets access for this device and `peer` in one call.
    pub(super) fn set_access_with(&mut self, peer: Ordinal) -> Result<()> {
        self.open(&[read_write(self.device), read_write(peer)])
    }

    /// Sets access for `peer` alone, after this device has access.
    pub(super) fn let_in(&mut self, peer: Ordinal) -> Result<()> {
        self.open(&[read_write(peer)])
    }

    pub(super) fn shut_out(&mut self, peer: Ordinal) -> Result<()> {
        let flags = AccessFlags::NONE;
        let location = Location::device(peer);
        self.open(&[AccessDesc { location, flags }])
    }

    fn open(&self, access: &[AccessDesc]) -> Result<()> {
        let Some(address) = self.address else {
            return Ok(());
        };
        // SAFETY: no work uses the range.
        unsafe { self.driver.set_access(address, self.size, access) }
    }

    pub(super) fn unmap(&mut self) -> Result<()> {
        let Some(address) = self.address.filter(|_| self.mapped) else {
            return Ok(());
        };
        self.mapped = false;
        // SAFETY: no work uses the range.
        unsafe { self.driver.unmap(address, self.size) }
    }

    pub(super) fn release(&mut self) -> Result<()> {
        match self.physical.take() {
            // SAFETY: this value owns the physical and takes it here, so it is released once.
            Some(physical) => unsafe { self.driver.release(physical) },
            None => Ok(()),
        }
    }

    pub(super) fn free_addresses(&mut self) -> Result<()> {
        match self.address.take() {
            // SAFETY: this value owns the reservation and takes it here, so it is freed once.
            Some(address) => unsafe { self.driver.free_reservation(address, self.size) },
            None => Ok(()),
        }
    }
}

impl Drop for Calls<'_> {
    fn drop(&mut self) {
        // Resources that cannot be returned stay with the driver.
        let _ = self.unmap();
        let _ = self.release();
        let _ = self.free_addresses();
    }
}

fn read_write(device: Ordinal) -> AccessDesc {
    AccessDesc {
        location: Location::device(device),
        flags: AccessFlags::READ_WRITE,
    }
}

/// Returns the next device such that both devices can access each other's memory.
pub(super) fn peer_of(hand: &Hand) -> Option<Ordinal> {
    let (driver, device) = (hand.driver(), hand.device());
    let count = driver.device_count().ok()?;
    let reaches = |one, other| driver.can_access_peer(one, other).unwrap_or(false);
    (1..count)
        .map(|step| Ordinal((device.0 + step) % count))
        .find(|&peer| reaches(peer, device) && reaches(device, peer))
}

pub(super) struct Event<'a> {
    hand: &'a Hand,
    handle: EventHandle,
}

impl<'a> Event<'a> {
    pub(super) fn new(hand: &'a Hand) -> Result<Self> {
        let flags = EventFlags::DISABLE_TIMING;
        let handle = hand.driver().event_create(hand.device(), flags)?;
        Ok(Self { hand, handle })
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        let (driver, device) = (self.hand.driver(), self.hand.device());
        // SAFETY: the event and the stream are live.
        unsafe { driver.event_record(device, self.handle, stream.as_raw()) }
    }

    pub(super) fn query(&self) -> Result<bool> {
        // SAFETY: the event is live.
        unsafe {
            self.hand
                .driver()
                .event_query(self.hand.device(), self.handle)
        }
    }

    pub(super) fn wait_on(&self, stream: &Stream) -> Result<()> {
        let (driver, device) = (self.hand.driver(), self.hand.device());
        // SAFETY: the event and the stream are live.
        unsafe { driver.stream_wait_event(device, stream.as_raw(), self.handle) }
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        let (driver, device) = (self.hand.driver(), self.hand.device());
        // SAFETY: this value owns the event. An event that cannot be destroyed stays with the
        // driver.
        let _ = unsafe { driver.event_destroy(device, self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuvmm::driver::model::{ModelDriver, ModelOptions};

    use super::*;

    fn peer(options: ModelOptions, device: i32) -> Option<i32> {
        let hand = Hand::new(Arc::new(ModelDriver::new(options)), Ordinal(device));
        peer_of(&hand).map(|peer| peer.0)
    }

    #[test]
    fn a_peer_is_the_next_that_is_reached_both_ways() {
        let devices = |count| ModelOptions::new().devices(count);
        assert_eq!(peer(devices(1), 0), None);
        assert_eq!(peer(devices(3), 0), Some(1));
        assert_eq!(peer(devices(3), 2), Some(0));
        assert_eq!(peer(devices(3).unreachable(0, 1), 0), Some(2));
        assert_eq!(peer(devices(3).unreachable(1, 0), 0), Some(2));
        assert_eq!(peer(devices(2).unreachable(1, 0), 0), None);
    }
}
