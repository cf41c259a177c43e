//! The bench a case works at: a driver, a device, and a ledger of all that was handed out.
//!
//! Cases ask their questions through the bench, which enters in the ledger what a successful call
//! handed out and strikes what one took back. After the case the bench gives back what is left;
//! what cannot be given back is a leak. The calls themselves are in `memory` and `work`, and only
//! there is `unsafe` code: the cases are free of it.

mod ledger;
mod memory;
mod work;

use std::sync::Arc;

use cuvmm_driver::{
    AccessDesc, AccessFlags, DeviceAddress, Driver, DriverError, DriverKind, GranularityKind,
    Location, Ordinal, PhysicalHandle, PhysicalProps,
};

use crate::KernelToucher;
use crate::answer::code;
use ledger::Ledger;

/// A device of a driver, and what a case has taken from it so far.
#[derive(Debug)]
pub(crate) struct Bench {
    driver: Arc<dyn Driver>,
    kernels: Option<Arc<dyn KernelToucher>>,
    device: Ordinal,
    granule: u64,
    ledger: Ledger,
}

/// Setting the table: what nearly every case does before its question.
impl Bench {
    /// A bench at device 0.
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        kernels: Option<Arc<dyn KernelToucher>>,
    ) -> Result<Self, DriverError> {
        let device = Ordinal(0);
        let props = PhysicalProps::device(device);
        let granule = driver.allocation_granularity(&props, GranularityKind::MINIMUM)?;
        Ok(Self {
            driver,
            kernels,
            device,
            granule,
            ledger: Ledger::default(),
        })
    }

    /// The driver that is asked.
    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Whether addresses of this driver are backed by memory that the host could touch.
    pub(crate) fn has_memory(&self) -> bool {
        self.driver.kind() != DriverKind::Model
    }

    /// The kernels there are.
    pub(crate) fn kernels(&self) -> Option<Arc<dyn KernelToucher>> {
        self.kernels.clone()
    }

    /// The device that is asked.
    pub(crate) fn device(&self) -> Ordinal {
        self.device
    }

    /// The granule of plain device memory.
    pub(crate) fn granule(&self) -> u64 {
        self.granule
    }

    /// Properties of plain memory of the device.
    pub(crate) fn props(&self) -> PhysicalProps {
        PhysicalProps::device(self.device)
    }

    /// So many granules of addresses.
    pub(crate) fn addresses(&mut self, granules: u64) -> Result<DeviceAddress, DriverError> {
        self.reserve(granules * self.granule, 0, DeviceAddress::NULL, 0)
    }

    /// So many granules of plain device memory.
    pub(crate) fn physical(&mut self, granules: u64) -> Result<PhysicalHandle, DriverError> {
        let props = self.props();
        self.create(granules * self.granule, &props, 0)
    }

    /// Maps a fresh physical of so many granules at an address.
    pub(crate) fn place(
        &mut self,
        address: DeviceAddress,
        granules: u64,
    ) -> Result<PhysicalHandle, DriverError> {
        let handle = self.physical(granules)?;
        self.map(address, granules * self.granule, 0, handle, 0)?;
        Ok(handle)
    }

    /// Grants the device a right on a range.
    pub(crate) fn grant(
        &mut self,
        address: DeviceAddress,
        granules: u64,
        flags: AccessFlags,
    ) -> Result<(), DriverError> {
        let access = AccessDesc {
            location: Location::device(self.device),
            flags,
        };
        self.set_access(address, granules * self.granule, &[access])
    }

    /// A reservation that is mapped whole with one physical and open to the device.
    pub(crate) fn open(
        &mut self,
        granules: u64,
    ) -> Result<(DeviceAddress, PhysicalHandle), DriverError> {
        let address = self.addresses(granules)?;
        let handle = self.place(address, granules)?;
        self.grant(address, granules, AccessFlags::READ_WRITE)?;
        Ok((address, handle))
    }

    /// A reservation of as many granules as the picture has letters: `x` is a mapping of one
    /// granule, `X` starts one of two (followed by `-`), `.` is a hole.
    pub(crate) fn lay(&mut self, picture: &str) -> Result<DeviceAddress, DriverError> {
        let base = self.addresses(picture.len() as u64)?;
        for (index, letter) in picture.bytes().enumerate() {
            let at = self.at(base, index as u64);
            match letter {
                b'x' => drop(self.place(at, 1)?),
                b'X' => drop(self.place(at, 2)?),
                _ => {}
            }
        }
        Ok(base)
    }

    /// The address so many granules behind another.
    pub(crate) fn at(&self, base: DeviceAddress, granules: u64) -> DeviceAddress {
        DeviceAddress(base.0.wrapping_add(granules.wrapping_mul(self.granule)))
    }

    /// Free memory of the device, once everything queued has been done.
    pub(crate) fn free_memory(&self) -> Result<u64, DriverError> {
        self.driver.context_synchronize(self.device)?;
        Ok(self.driver.memory_info(self.device)?.free)
    }

    /// The code that reading four bytes at an address gets.
    pub(crate) fn reads(&self, address: DeviceAddress) -> String {
        code(&self.read(address))
    }
}
