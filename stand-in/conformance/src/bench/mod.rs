//! The bench of a case: a driver, a device, and a ledger of acquired resources.
//!
//! Cases make their calls through the bench, which records in the ledger what a successful call
//! acquired and removes what a call released. After the case the bench releases the rest; a failure
//! to do so is a leak. The calls are in `calls`, `memory`, `pools` and `work`, which contain all `unsafe` code: the
//! cases have none.

mod calls;
mod ledger;
mod memory;
mod pools;
mod work;

use std::sync::Arc;

use cuvmm_driver::{
    AccessDesc, AccessFlags, Advice, CUresult, Call, DeviceAddress, Driver, DriverError,
    DriverKind, GranularityKind, Location, Ordinal, PhysicalHandle, PhysicalProps,
    PointerAttribute, RangeAttribute, StreamHandle,
};

use crate::KernelToucher;
use crate::answer::code;
use ledger::Ledger;

/// A device of a driver, and the resources that a case has acquired from it.
#[derive(Debug)]
pub(crate) struct Bench {
    driver: Arc<dyn Driver>,
    kernels: Option<Arc<dyn KernelToucher>>,
    device: Ordinal,
    granule: u64,
    ledger: Ledger,
}

impl Bench {
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

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Returns `true` if the driver's addresses have memory behind them that the host could access.
    pub(crate) fn has_memory(&self) -> bool {
        self.driver.kind() != DriverKind::Model
    }

    /// Returns the kernels. A case that needs them is not run where there are none.
    pub(crate) fn kernels(&self) -> Result<Arc<dyn KernelToucher>, DriverError> {
        let none = DriverError::new(Call::GraphLaunch, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        self.kernels.clone().ok_or(none)
    }

    /// Returns a stream on which a kernel runs for about 200 milliseconds, far longer than a call
    /// that does not wait, even a slow one.
    pub(crate) fn spinning(&mut self) -> Result<StreamHandle, DriverError> {
        let (kernels, stream) = (self.kernels()?, self.stream()?);
        // The first launch may load the kernel, which takes time that is not to be measured.
        kernels.spin(self.device, stream, 0)?;
        self.synchronize(stream)?;
        kernels.spin(self.device, stream, 200)?;
        Ok(stream)
    }

    pub(crate) fn device(&self) -> Ordinal {
        self.device
    }

    pub(crate) fn granule(&self) -> u64 {
        self.granule
    }

    pub(crate) fn props(&self) -> PhysicalProps {
        PhysicalProps::device(self.device)
    }

    /// Reserves addresses of `granules` granules.
    pub(crate) fn addresses(&mut self, granules: u64) -> Result<DeviceAddress, DriverError> {
        self.reserve(granules * self.granule, 0, DeviceAddress::NULL, 0)
    }

    /// Creates a physical of `granules` granules of plain device memory.
    pub(crate) fn physical(&mut self, granules: u64) -> Result<PhysicalHandle, DriverError> {
        let props = self.props();
        self.create(granules * self.granule, &props, 0)
    }

    /// Maps a new physical of `granules` granules at an address.
    pub(crate) fn place(
        &mut self,
        address: DeviceAddress,
        granules: u64,
    ) -> Result<PhysicalHandle, DriverError> {
        let handle = self.physical(granules)?;
        self.map(address, granules * self.granule, 0, handle, 0)?;
        Ok(handle)
    }

    /// Grants the device access to a range.
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

    /// Reserves addresses, maps one physical over all of them and grants the device access.
    pub(crate) fn open(
        &mut self,
        granules: u64,
    ) -> Result<(DeviceAddress, PhysicalHandle), DriverError> {
        let address = self.addresses(granules)?;
        let handle = self.place(address, granules)?;
        self.grant(address, granules, AccessFlags::READ_WRITE)?;
        Ok((address, handle))
    }

    /// Reserves as many granules as the picture has letters and maps them: `x` is a mapping of one
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

    /// Returns the address `granules` granules after `base`.
    pub(crate) fn at(&self, base: DeviceAddress, granules: u64) -> DeviceAddress {
        DeviceAddress(base.0.wrapping_add(granules.wrapping_mul(self.granule)))
    }

    /// Returns the free memory of the device, after waiting for all queued work.
    pub(crate) fn free_memory(&self) -> Result<u64, DriverError> {
        self.driver.context_synchronize(self.device)?;
        Ok(self.driver.memory_info(self.device)?.free)
    }

    pub(crate) fn pointer_attribute(
        &self,
        address: DeviceAddress,
        attribute: PointerAttribute,
    ) -> Result<u64, DriverError> {
        let driver = self.driver();
        driver.pointer_attribute(self.device, address, attribute)
    }

    pub(crate) fn advise(
        &self,
        address: DeviceAddress,
        size: u64,
        advice: Advice,
        location: Location,
    ) -> Result<(), DriverError> {
        let driver = self.driver();
        driver.advise(self.device, address, size, advice, location)
    }

    pub(crate) fn range_attribute(
        &self,
        address: DeviceAddress,
        size: u64,
        attribute: RangeAttribute,
    ) -> Result<i32, DriverError> {
        let driver = self.driver();
        driver.range_attribute(self.device, address, size, attribute)
    }

    /// Returns the code of reading four bytes at an address.
    pub(crate) fn reads(&self, address: DeviceAddress) -> String {
        code(&self.read(address))
    }
}
