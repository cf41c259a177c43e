//! Driver calls by hand: the work of a program without the library, with as few calls as possible.
//!
//! `unsafe` here: the `Driver` methods that take addresses and handles. Each owner below passes
//! only values that the driver returned, and returns each once. The only work launched on this
//! memory is fills and copies that are waited for.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;

use cuvmm::Stream;
use cuvmm::driver::model::Snapshot;
use cuvmm::driver::{
    AccessDesc, AccessFlags, DeviceAddress, Driver, Exported, HandleTypes, ImportSource, Location,
    MemPoolAttribute, MemPoolProps, Ordinal, PhysicalHandle, PhysicalProps, Result,
};

#[derive(Clone, Debug)]
pub(super) struct Hand {
    driver: Arc<dyn Driver>,
    device: Ordinal,
}

impl Hand {
    pub(super) fn new(driver: Arc<dyn Driver>, device: Ordinal) -> Self {
        Self { driver, device }
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    pub(super) const fn device(&self) -> Ordinal {
        self.device
    }

    pub(super) fn shared_driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver)
    }

    pub(super) fn create(&self, size: u64) -> Result<Bare<'_>> {
        let handle = self
            .driver
            .create(size, &PhysicalProps::device(self.device), 0)?;
        Ok(self.own(handle, size))
    }

    /// Creates a physical that can be exported as a descriptor.
    pub(super) fn create_shareable(&self, size: u64) -> Result<Bare<'_>> {
        let mut props = PhysicalProps::device(self.device);
        props.handle_types = HandleTypes::POSIX_FD;
        let handle = self.driver.create(size, &props, 0)?;
        Ok(self.own(handle, size))
    }

    /// Imports a physical by a descriptor from another process.
    pub(super) fn import(&self, descriptor: BorrowedFd<'_>, size: u64) -> Result<Bare<'_>> {
        let source = ImportSource::Fd(descriptor.as_raw_fd());
        // SAFETY: the descriptor is borrowed, so it is open.
        let handle = unsafe { self.driver.import(source, HandleTypes::POSIX_FD)? };
        Ok(self.own(handle, size))
    }

    const fn own(&self, handle: PhysicalHandle, size: u64) -> Bare<'_> {
        Bare {
            hand: self,
            handle,
            size,
        }
    }

    /// Reserves addresses, with capacity to record `extents` physicals without allocating.
    pub(super) fn reserve(&self, size: u64, extents: usize) -> Result<Range<'_>> {
        Ok(Range {
            hand: self,
            address: self.driver.reserve(size, 0, DeviceAddress::NULL, 0)?,
            size,
            held: Vec::with_capacity(extents),
            mapped: 0,
        })
    }

    /// Commits adjacent extents: reserve, create and map each, one set_access.
    pub(super) fn commit(&self, extents: &[u64]) -> Result<Range<'_>> {
        let mut range = self.reserve(extents.iter().sum(), extents.len())?;
        extents.iter().try_for_each(|&size| range.hold(size))?;
        range.map()?;
        Ok(range)
    }

    /// Allocates memory with `cuMemAlloc`.
    pub(super) fn plain(&self, size: u64) -> Result<Plain<'_>> {
        let address = self.driver.alloc(self.device, size)?;
        Ok(Plain {
            hand: self,
            address,
            size,
        })
    }

    pub(super) fn pooled(&self, stream: &Stream, size: u64, times: usize) -> Result<()> {
        let stream = stream.as_raw();
        for _ in 0..times {
            // SAFETY: the stream is borrowed, so it is live; the memory was just allocated, and no
            // work uses it.
            unsafe {
                let address = self.driver.alloc_async(self.device, size, stream)?;
                self.driver.free_async(self.device, address, stream)?;
            }
        }
        Ok(())
    }

    /// Creates a memory pool that keeps all its memory, and destroys it. It is never the current
    /// one.
    pub(super) fn memory_pool(&self, maximum: u64) -> Result<()> {
        let mut props = MemPoolProps::device(self.device);
        props.maximum = maximum;
        let pool = self.driver.mem_pool_create(self.device, &props)?;
        let threshold = MemPoolAttribute::RELEASE_THRESHOLD;
        // SAFETY: the pool was just created, nothing allocates from it, and it is destroyed once.
        unsafe {
            let set = self
                .driver
                .mem_pool_set_attribute(self.device, pool, threshold, u64::MAX);
            set.and(self.driver.mem_pool_destroy(self.device, pool))
        }
    }

    const fn access(&self, flags: AccessFlags) -> AccessDesc {
        access(self.device, flags)
    }
}

pub(super) const fn access(device: Ordinal, flags: AccessFlags) -> AccessDesc {
    AccessDesc {
        location: Location::device(device),
        flags,
    }
}

#[derive(Debug)]
pub(super) struct Bare<'a> {
    hand: &'a Hand,
    handle: PhysicalHandle,
    size: u64,
}

impl Bare<'_> {
    pub(super) fn export(&self) -> Result<Exported> {
        let driver = &self.hand.driver;
        // SAFETY: this value owns the handle, which is live.
        unsafe { driver.export(self.handle, HandleTypes::POSIX_FD, 0) }
    }

    /// Releases the physical.
    ///
    /// # Errors
    /// The driver refuses; the process cannot use or release the physical then.
    pub(super) fn release(self) -> Result<()> {
        let bare = std::mem::ManuallyDrop::new(self);
        // SAFETY: this value owns the handle and is not dropped, so the handle is released once.
        unsafe { bare.hand.driver.release(bare.handle) }
    }
}

impl Drop for Bare<'_> {
    fn drop(&mut self) {
        // SAFETY: this value owns the handle. An allocation that cannot be released stays with the
        // driver.
        let _ = unsafe { self.hand.driver.release(self.handle) };
    }
}

/// A reservation with physicals mapped from its start without gaps. Freed when dropped.
#[derive(Debug)]
pub(super) struct Range<'a> {
    hand: &'a Hand,
    address: DeviceAddress,
    size: u64,
    held: Vec<Bare<'a>>,
    /// Mapped bytes from the start.
    mapped: u64,
}

impl<'a> Range<'a> {
    /// Creates one more physical, to be mapped behind the others.
    pub(super) fn hold(&mut self, size: u64) -> Result<()> {
        self.held.push(self.hand.create(size)?);
        Ok(())
    }

    pub(super) fn adopt(&mut self, bare: Bare<'a>) {
        self.held.push(bare);
    }

    /// Maps the held physicals that are not mapped, with one set_access.
    pub(super) fn map(&mut self) -> Result<()> {
        let from = self.mapped;
        self.place()?;
        self.open_from(from, AccessFlags::READ_WRITE)
    }

    /// Maps the held physicals that are not mapped, without access.
    pub(super) fn place(&mut self) -> Result<()> {
        let driver = &self.hand.driver;
        let from = self.mapped;
        let mut at = 0;
        for bare in &self.held {
            if at >= from {
                let place = DeviceAddress(self.address.0 + at);
                // SAFETY: the handle is live; this range owns the addresses, and nothing is mapped
                // there.
                unsafe { driver.map(place, bare.size, 0, bare.handle, 0)? };
                self.mapped = at + bare.size;
            }
            at += bare.size;
        }
        Ok(())
    }

    /// Maps one physical repeatedly until the range is full, with one set_access for reading.
    pub(super) fn repeat(&mut self, bare: &Bare<'_>) -> Result<()> {
        let from = self.mapped;
        while self.mapped + bare.size <= self.size {
            let place = self.address_at(self.mapped);
            // SAFETY: as in `map`.
            unsafe { self.hand.driver.map(place, bare.size, 0, bare.handle, 0)? };
            self.mapped += bare.size;
        }
        self.open_from(from, AccessFlags::READ)
    }

    /// Maps each mapped extent at other addresses too, for reading, and leaves reading alone here:
    /// a map and two set_access for each.
    pub(super) fn show_in(&self, other: &mut Self) -> Result<()> {
        let reads = [self.hand.access(AccessFlags::READ)];
        for bare in &self.held {
            let (from, at) = (other.mapped, self.address_at(other.mapped));
            // SAFETY: as in `map`.
            unsafe {
                let driver = &self.hand.driver;
                driver.map(other.address_at(from), bare.size, 0, bare.handle, 0)?;
                other.mapped += bare.size;
                other.set_access(from, &reads)?;
                driver.set_access(at, bare.size, &reads)?;
            }
        }
        Ok(())
    }

    /// Gives the device access to everything mapped.
    pub(super) fn open(&self) -> Result<()> {
        self.open_from(0, AccessFlags::READ_WRITE)
    }

    fn open_from(&self, from: u64, flags: AccessFlags) -> Result<()> {
        self.set_access(from, &[self.hand.access(flags)])
    }

    /// Sets access to the mappings from an offset on, in one call.
    pub(super) fn set_access(&self, from: u64, access: &[AccessDesc]) -> Result<()> {
        let (place, size) = (self.address_at(from), self.mapped - from);
        // SAFETY: no work uses the mappings.
        unsafe { self.hand.driver.set_access(place, size, access) }
    }

    pub(super) const fn mapped(&self) -> u64 {
        self.mapped
    }

    pub(super) const fn address_at(&self, offset: u64) -> DeviceAddress {
        DeviceAddress(self.address.0 + offset)
    }

    /// Adds one extent behind the others: create, map, set_access.
    pub(super) fn append(&mut self, size: u64) -> Result<()> {
        let bare = self.hand.create(size)?;
        let place = DeviceAddress(self.address.0 + self.mapped);
        // SAFETY: as in `map`.
        unsafe { self.hand.driver.map(place, size, 0, bare.handle, 0)? };
        self.held.push(bare);
        let from = self.mapped;
        self.mapped += size;
        self.open_from(from, AccessFlags::READ_WRITE)
    }

    /// Unmaps everything in one call; the physicals stay held.
    pub(super) fn unmap(&mut self) -> Result<()> {
        if self.mapped > 0 {
            // SAFETY: all work launched on this memory was waited for.
            unsafe { self.hand.driver.unmap(self.address, self.mapped)? };
            self.mapped = 0;
        }
        Ok(())
    }

    /// Unmaps, in one call, and releases the physicals that begin at `kept` bytes or behind.
    pub(super) fn shrink(&mut self, kept: u64) -> Result<()> {
        let mut end = self.mapped;
        let mut back = Vec::with_capacity(self.held.len());
        while let Some(bare) = self.held.pop_if(|bare| end - bare.size >= kept) {
            end -= bare.size;
            back.push(bare);
        }
        // SAFETY: no work was launched on this memory, and the range is one of whole mappings.
        unsafe {
            self.hand
                .driver
                .unmap(self.address_at(end), self.mapped - end)?
        };
        self.mapped = end;
        back.into_iter().try_for_each(Bare::release)
    }

    /// Moves everything to another range: one unmap, a map for each extent, one set_access.
    pub(super) fn move_into(&mut self, other: &mut Range<'a>) -> Result<()> {
        self.unmap()?;
        std::mem::swap(&mut self.held, &mut other.held);
        other.map()
    }

    pub(super) fn release(&mut self) -> Result<()> {
        self.held.drain(..).try_for_each(Bare::release)
    }

    /// Unmaps and releases all physicals, and frees the reservation.
    pub(super) fn give_back(mut self) -> Result<()> {
        self.unmap()?;
        self.release()?;
        self.free()
    }

    pub(super) fn free(&mut self) -> Result<()> {
        // SAFETY: nothing is mapped in the range, and it is freed once: the size becomes 0 below.
        let freed = unsafe { self.hand.driver.free_reservation(self.address, self.size) };
        self.size = 0;
        freed
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        if self.size > 0 && self.unmap().is_ok() && self.release().is_ok() {
            // A reservation that cannot be freed stays with the driver.
            let _ = self.free();
        }
    }
}

/// Memory from `cuMemAlloc`, freed when dropped.
#[derive(Debug)]
pub(super) struct Plain<'a> {
    hand: &'a Hand,
    address: DeviceAddress,
    size: u64,
}

impl Plain<'_> {
    pub(super) const fn address(&self) -> DeviceAddress {
        self.address
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    /// Queues a fill of the first bytes with zeros. The free of the memory waits for the fill.
    pub(super) fn fill(&self, stream: &Stream, bytes: u64) -> Result<()> {
        let Hand { driver, device } = self.hand;
        // SAFETY: freeing, explicitly or by dropping, waits for the device.
        unsafe { driver.fill_async(*device, self.address, 0, bytes, stream.as_raw()) }
    }

    /// Queues a copy of the first bytes to other memory. The free of either memory waits for the
    /// copy.
    pub(super) fn copy_to(&self, other: &Self, stream: &Stream, bytes: u64) -> Result<()> {
        let Hand { driver, device } = self.hand;
        let (to, from) = (other.address, self.address);
        // SAFETY: freeing, explicitly or by dropping, waits for the device.
        unsafe { driver.copy_on_device_async(*device, to, from, bytes, stream.as_raw()) }
    }

    /// Copies the first bytes to the host and waits.
    pub(super) fn read(&self, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the memory is live, and no work writes to it now.
        unsafe {
            self.hand
                .driver
                .copy_to_host(self.hand.device, bytes, self.address)
        }
    }

    /// Frees the memory with `cuMemFree`, which waits for the device.
    pub(super) fn free(self) -> Result<()> {
        let plain = std::mem::ManuallyDrop::new(self);
        // SAFETY: this value owns the memory and is not dropped, so it is freed once; the call
        // waits for the work that uses it.
        unsafe { plain.hand.driver.free(plain.hand.device, plain.address) }
    }
}

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `free`. Memory that cannot be freed stays with the driver.
        let _ = unsafe { self.hand.driver.free(self.hand.device, self.address) };
    }
}

/// Makes the mappings of a snapshot on a driver without mappings, and leaves them there. Keeps no
/// books of its own, because the caller measures the memory of the model's books.
pub(super) fn repeat_mappings(
    driver: &dyn Driver,
    device: Ordinal,
    picture: &Snapshot,
) -> Result<()> {
    let props = PhysicalProps::device(device);
    let mut mappings = picture.mappings.iter().peekable();
    for &(first, size) in &picture.reservations {
        let address = driver.reserve(size, 0, DeviceAddress::NULL, 0)?;
        let within = |at: DeviceAddress| at.offset_from(first).filter(|&offset| offset < size);
        while let Some((mapping, offset)) = mappings
            .peek()
            .and_then(|mapping| Some((*mapping, within(mapping.address)?)))
        {
            let handle = driver.create(mapping.size, &props, 0)?;
            let place = DeviceAddress(address.0 + offset);
            // SAFETY: the handle was just created, and nothing is mapped at the addresses, as in
            // the snapshot.
            unsafe {
                driver.map(place, mapping.size, 0, handle, 0)?;
                driver.set_access(place, mapping.size, &mapping.access)?;
            }
            mappings.next();
        }
    }
    Ok(())
}
