//! The memory calls of the driver for cases, which pass on all arguments unchanged.
//!
//! `unsafe` is allowed here because the suite exists to make calls that the trait's contract
//! forbids, and to see what the driver returns. The reasons why this does no harm:
//!
//! - the methods are private to this crate, and the cases are their only callers;
//! - a case works on memory that it made itself, and holds no reference into it; memory that it
//!   registers is never freed;
//! - it runs no device work other than the calls that its bench counts, and waits for that work;
//! - a case that may leave its process or context unusable is `Isolated`, and the safe interface of
//!   this crate runs it in a separate process.
//!
//! The `SAFETY` comments below refer to this list.
#![allow(unsafe_code)]

use cuvmm_driver::{
    AccessDesc, DeviceAddress, DriverError, Exported, HandleTypes, ImportSource, PhysicalHandle,
    PhysicalProps,
};

use super::Bench;
use super::ledger::{note, strike};

impl Bench {
    pub(crate) fn reserve(
        &mut self,
        size: u64,
        alignment: u64,
        hint: DeviceAddress,
        flags: u64,
    ) -> Result<DeviceAddress, DriverError> {
        let address = self.driver.reserve(size, alignment, hint, flags)?;
        self.ledger.reservations.push((address, size));
        Ok(address)
    }

    pub(crate) fn free_reservation(
        &mut self,
        address: DeviceAddress,
        size: u64,
    ) -> Result<(), DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.free_reservation(address, size) }?;
        self.ledger.reservations.retain(|(at, _)| *at != address);
        Ok(())
    }

    pub(crate) fn create(
        &mut self,
        size: u64,
        props: &PhysicalProps,
        flags: u64,
    ) -> Result<PhysicalHandle, DriverError> {
        let handle = self.driver.create(size, props, flags)?;
        self.ledger.handles.push(handle);
        Ok(handle)
    }

    pub(crate) fn release(&mut self, handle: PhysicalHandle) -> Result<(), DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.release(handle) }?;
        strike(&mut self.ledger.handles, &handle);
        Ok(())
    }

    pub(crate) fn retain(&mut self, address: DeviceAddress) -> Result<PhysicalHandle, DriverError> {
        let handle = self.driver.retain(address)?;
        self.ledger.handles.push(handle);
        Ok(handle)
    }

    pub(crate) fn physical_props(
        &self,
        handle: PhysicalHandle,
    ) -> Result<PhysicalProps, DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.physical_props(handle) }
    }

    pub(crate) fn export(
        &self,
        handle: PhysicalHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported, DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.export(handle, handle_type, flags) }
    }

    pub(crate) fn import(
        &mut self,
        source: ImportSource,
        handle_type: HandleTypes,
    ) -> Result<PhysicalHandle, DriverError> {
        // SAFETY: see the top of this file; the cases keep a descriptor that they
        // pass open, or pass a number that is not a descriptor.
        let handle = unsafe { self.driver.import(source, handle_type) }?;
        self.ledger.handles.push(handle);
        Ok(handle)
    }

    pub(crate) fn map(
        &mut self,
        address: DeviceAddress,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
        flags: u64,
    ) -> Result<(), DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.map(address, size, offset, handle, flags) }?;
        self.ledger.mappings.push((address, size));
        Ok(())
    }

    pub(crate) fn unmap(&mut self, address: DeviceAddress, size: u64) -> Result<(), DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.unmap(address, size) }?;
        self.ledger.strike_mappings(address, size);
        Ok(())
    }

    pub(crate) fn set_access(
        &mut self,
        address: DeviceAddress,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<(), DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.set_access(address, size, access) }
    }

    pub(crate) fn alloc(&mut self, size: u64) -> Result<DeviceAddress, DriverError> {
        let address = self.driver.alloc(self.device, size)?;
        self.ledger.plain.push(address);
        Ok(address)
    }

    pub(crate) fn managed(&mut self, size: u64, flags: u32) -> Result<DeviceAddress, DriverError> {
        let address = self.driver.managed_alloc(self.device, size, flags)?;
        self.ledger.plain.push(address);
        Ok(address)
    }

    /// Frees plain or managed memory.
    pub(crate) fn free(&mut self, address: DeviceAddress) -> Result<(), DriverError> {
        // SAFETY: see the top of this file.
        unsafe { self.driver.free(self.device, address) }?;
        strike(&mut self.ledger.plain, &address);
        Ok(())
    }

    pub(crate) fn pinned(&mut self, size: u64, flags: u32) -> Result<usize, DriverError> {
        let pointer = self
            .driver
            .host_alloc(self.device, size, flags)?
            .expose_provenance();
        self.ledger.pinned.push(pointer);
        Ok(pointer)
    }

    pub(crate) fn free_pinned(&mut self, pointer: usize) -> Result<(), DriverError> {
        let raw = std::ptr::with_exposed_provenance_mut(pointer);
        // SAFETY: see the top of this file.
        unsafe { self.driver.host_free(self.device, raw) }?;
        strike(&mut self.ledger.pinned, &pointer);
        Ok(())
    }

    /// Registers memory of the program.
    pub(crate) fn register(&mut self, memory: usize, size: u64) -> Result<(), DriverError> {
        let raw = std::ptr::with_exposed_provenance_mut(memory);
        // SAFETY: see the top of this file.
        unsafe { self.driver.host_register(self.device, raw, size, 0) }?;
        self.ledger.registered.push(memory);
        Ok(())
    }

    pub(crate) fn unregister(&mut self, memory: usize) -> Result<(), DriverError> {
        let raw = std::ptr::with_exposed_provenance_mut(memory);
        // SAFETY: see the top of this file.
        unsafe { self.driver.host_unregister(self.device, raw) }?;
        strike(&mut self.ledger.registered, &memory);
        Ok(())
    }

    /// Reads a byte with the CPU, after waiting for the device. Returns `None` on a driver without
    /// memory.
    pub(crate) fn cpu_reads(&self, address: u64) -> Result<Option<u8>, DriverError> {
        if !self.has_memory() {
            return Ok(None);
        }
        self.driver.context_synchronize(self.device)?;
        let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
        // SAFETY: the caller passes an address of pinned, managed or host NUMA memory that is
        // mapped and accessible to the CPU; nothing writes it, since the device has no unfinished
        // work.
        Ok(Some(unsafe { pointer.read_volatile() }))
    }

    /// Writes a byte with the CPU, without waiting for the device. Returns `false` on a driver
    /// without memory.
    pub(crate) fn cpu_writes(&self, address: DeviceAddress, byte: u8) -> bool {
        if !self.has_memory() {
            return false;
        }
        let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address.0 as usize);
        // SAFETY: the caller passes an address in its own managed memory, which no work that it
        // queued accesses.
        unsafe { pointer.write_volatile(byte) };
        true
    }

    /// Releases everything that the case still holds, and returns the errors.
    pub(crate) fn give_back(&mut self) -> Vec<String> {
        let mut troubles = Vec::new();
        self.give_back_work(&mut troubles);
        for (address, size) in std::mem::take(&mut self.ledger.mappings) {
            note(&mut troubles, self.unmap(address, size));
        }
        for handle in std::mem::take(&mut self.ledger.handles) {
            note(&mut troubles, self.release(handle));
        }
        for (address, size) in std::mem::take(&mut self.ledger.reservations) {
            note(&mut troubles, self.free_reservation(address, size));
        }
        for address in std::mem::take(&mut self.ledger.plain) {
            note(&mut troubles, self.free(address));
        }
        for pointer in std::mem::take(&mut self.ledger.pinned) {
            note(&mut troubles, self.free_pinned(pointer));
        }
        for memory in std::mem::take(&mut self.ledger.registered) {
            note(&mut troubles, self.unregister(memory));
        }
        self.give_back_pools(&mut troubles);
        troubles
    }
}
