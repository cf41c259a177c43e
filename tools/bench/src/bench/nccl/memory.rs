//! Buffers of both sides on each rank, and all-reduces on them that are waited for.
//!
//! `unsafe` here: passing addresses to NCCL and to the driver. A buffer owns the memory at its
//! addresses, its registrations end before that memory is freed, and all work queued on it has
//! ended before a call returns.
#![allow(unsafe_code)]

use anyhow::{Context as _, ensure};
use cuvmm::driver::{DeviceAddress, HandleTypes};
use cuvmm::{Access, Device, Extent, Region, Registration, Stream};

/// NCCL's handle of a registration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) usize);

/// A group of devices, each of them a rank: NCCL, or its replacement in tests.
pub(super) trait Group {
    /// Allocates memory of NCCL on a rank.
    fn allocate(&self, rank: usize, bytes: u64) -> anyhow::Result<DeviceAddress>;

    /// Frees memory of NCCL on a rank.
    ///
    /// # Safety
    /// The address came from `allocate`, and no work uses it.
    unsafe fn free(&self, rank: usize, address: DeviceAddress) -> anyhow::Result<()>;

    /// Registers a range with the communicator of a rank.
    ///
    /// # Safety
    /// The range is mapped, and stays mapped until it is deregistered.
    unsafe fn register(
        &self,
        rank: usize,
        address: DeviceAddress,
        bytes: u64,
    ) -> anyhow::Result<Handle>;

    /// Ends a registration.
    ///
    /// # Safety
    /// The handle came from `register` on this rank, and no work uses the registered range.
    unsafe fn deregister(&self, rank: usize, handle: Handle) -> anyhow::Result<()>;

    /// Queues the sum of the numbers at `from` of all ranks, to be written at `to` on each rank.
    ///
    /// # Safety
    /// For each rank, `elements` numbers are mapped at its two addresses, and there is a stream of
    /// its device. The memory stays mapped, and no other work uses it, until the streams have been
    /// waited for.
    unsafe fn all_reduce(
        &self,
        from: &[DeviceAddress],
        to: &[DeviceAddress],
        elements: u64,
        streams: &[Stream],
    ) -> anyhow::Result<()>;

    /// Aborts: queued work need not complete any more.
    fn abort(&self);
}

/// A group with a stream on each rank.
pub(super) struct Bench<'a> {
    group: &'a dyn Group,
    devices: &'a [Device],
    streams: Vec<Stream>,
}

/// A buffer on one rank.
pub(super) struct Buffer<'a> {
    bench: &'a Bench<'a>,
    rank: usize,
    owner: Owner,
    bytes: u64,
    handles: Vec<Handle>,
}

enum Owner {
    Nccl(DeviceAddress),
    Ours {
        region: Box<Region>,
        /// The lease that is held while NCCL has the region registered.
        proof: Option<Registration>,
    },
}

/// The unit in which a buffer is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// Each extent separately.
    Extent,
    /// The whole buffer in one range.
    Whole,
}

impl<'a> Bench<'a> {
    /// Creates a stream on each device.
    ///
    /// # Errors
    /// When a stream cannot be created.
    pub(super) fn new(group: &'a dyn Group, devices: &'a [Device]) -> anyhow::Result<Self> {
        let streams = devices.iter().map(Stream::new).collect::<Result<_, _>>()?;
        Ok(Self {
            group,
            devices,
            streams,
        })
    }

    pub(super) const fn ranks(&self) -> usize {
        self.devices.len()
    }

    /// Allocates a buffer with `ncclMemAlloc`.
    ///
    /// # Errors
    /// When NCCL has no memory.
    pub(super) fn theirs(&'a self, rank: usize, bytes: u64) -> anyhow::Result<Buffer<'a>> {
        let address = self.group.allocate(rank, bytes)?;
        Ok(self.buffer(rank, Owner::Nccl(address), bytes))
    }

    /// Creates a region with the properties that NCCL's own memory has, which all ranks can access,
    /// and commits it in steps that end at `ends`.
    ///
    /// # Errors
    /// When the device has no memory.
    pub(super) fn ours(&'a self, rank: usize, ends: &[u64]) -> anyhow::Result<Buffer<'a>> {
        let device = self.devices.get(rank).context("there is no such rank")?;
        let bytes = ends.last().copied().unwrap_or(0);
        let mut builder = Region::builder(device, bytes).for_nccl()?;
        for peer in self.devices.iter().filter(|peer| *peer != device) {
            builder = builder.open_to(peer, Access::ReadWrite);
        }
        let mut region = builder.reserve()?;
        let mut at = 0;
        for &end in ends {
            region.commit(at..end)?;
            at = end;
        }
        let owner = Owner::Ours {
            region: Box::new(region),
            proof: None,
        };
        Ok(self.buffer(rank, owner, bytes))
    }

    const fn buffer(&'a self, rank: usize, owner: Owner, bytes: u64) -> Buffer<'a> {
        Buffer {
            bench: self,
            rank,
            owner,
            bytes,
            handles: vec![],
        }
    }

    /// Runs `times` all-reduces in a row over the first `bytes` of one buffer of each side per
    /// rank, and waits for them.
    ///
    /// # Errors
    /// When a buffer is missing or too small, or NCCL fails; the group cannot be used after that.
    pub(super) fn all_reduce(
        &self,
        from: &[Buffer<'_>],
        to: &mut [Buffer<'_>],
        bytes: u64,
        times: u32,
    ) -> anyhow::Result<()> {
        let fits =
            |(rank, buffer): (usize, &Buffer<'_>)| buffer.rank == rank && bytes <= buffer.bytes;
        ensure!(
            from.len() == self.ranks()
                && to.len() == self.ranks()
                && from.iter().enumerate().all(fits)
                && to.iter().enumerate().all(fits),
            "a buffer is missing or too small"
        );
        let at = |buffers: &[Buffer<'_>]| -> Vec<DeviceAddress> {
            buffers.iter().map(Buffer::address).collect()
        };
        let (from, to) = (at(from), at(to));
        let elements = bytes / size_of::<f32>() as u64;
        for _ in 0..times {
            // SAFETY: the buffers are large enough and are borrowed, and the streams are waited for
            // below or aborted.
            let queued = unsafe { self.group.all_reduce(&from, &to, elements, &self.streams) };
            if let Err(error) = queued {
                self.group.abort();
                self.wait()?;
                return Err(error);
            }
        }
        self.wait()
    }

    fn wait(&self) -> anyhow::Result<()> {
        let waited: Vec<_> = self.streams.iter().map(Stream::synchronize).collect();
        Ok(waited.into_iter().collect::<Result<_, _>>()?)
    }
}

impl Buffer<'_> {
    fn address(&self) -> DeviceAddress {
        match &self.owner {
            Owner::Nccl(address) => *address,
            Owner::Ours { region, .. } => region.address(),
        }
    }

    /// Returns the number of extents, or 1 for NCCL's memory, whose mappings are not known.
    pub(super) fn extents(&self) -> usize {
        match &self.owner {
            Owner::Nccl(_) => 1,
            Owner::Ours { region, .. } => region.extents().len(),
        }
    }

    /// Returns `true` if the memory was created so that it can be exported.
    pub(super) fn is_shareable(&self) -> anyhow::Result<bool> {
        let device = self.device()?;
        let attribute = cuvmm::driver::PointerAttribute::ALLOWED_HANDLE_TYPES;
        let (driver, device) = (device.driver(), device.ordinal());
        let types = driver.pointer_attribute(device, self.address(), attribute)?;
        Ok(types & u64::from(HandleTypes::POSIX_FD.bits()) != 0)
    }

    /// Registers the buffer with the rank's communicator. A region is leased for that long.
    ///
    /// # Errors
    /// When NCCL refuses; parts registered before stay registered.
    pub(super) fn register(&mut self, by: By) -> anyhow::Result<()> {
        let whole = (self.address(), self.bytes);
        let parts: Vec<(DeviceAddress, u64)> = match &mut self.owner {
            Owner::Nccl(_) => vec![whole],
            Owner::Ours { region, proof } => {
                let leased = proof.insert(region.register(0..region.size())?);
                let each = |extent: &Extent| (extent.address, extent.size);
                match by {
                    By::Extent => leased.extents().iter().map(each).collect(),
                    By::Whole => vec![whole],
                }
            }
        };
        for (address, bytes) in parts {
            // SAFETY: the buffer owns the range, and deregisters it before the memory is freed.
            let handle = unsafe { self.bench.group.register(self.rank, address, bytes) }?;
            self.handles.push(handle);
        }
        Ok(())
    }

    /// Copies `bytes` into the buffer at `offset`.
    ///
    /// # Errors
    /// When the bytes do not fit, or the driver refuses.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let at = self.at(offset, bytes.len())?;
        let device = self.device()?;
        // SAFETY: the range is within the buffer, which is borrowed exclusively, and no work runs
        // on it.
        unsafe {
            device
                .driver()
                .copy_to_device(device.ordinal(), at, bytes)?;
        }
        Ok(())
    }

    /// Copies bytes at `offset` of the buffer to the host.
    ///
    /// # Errors
    /// When the bytes do not fit, or the driver refuses.
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        let at = self.at(offset, bytes.len())?;
        let device = self.device()?;
        // SAFETY: the range is within the buffer, which is borrowed, and no work runs on it.
        unsafe { device.driver().copy_to_host(device.ordinal(), bytes, at)? };
        Ok(())
    }

    fn device(&self) -> anyhow::Result<&Device> {
        let device = self.bench.devices.get(self.rank);
        device.context("there is no such rank")
    }

    fn at(&self, offset: u64, bytes: usize) -> anyhow::Result<DeviceAddress> {
        let end = offset.checked_add(bytes as u64);
        ensure!(
            end.is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} of {}",
            self.bytes
        );
        Ok(DeviceAddress(self.address().0 + offset))
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        for handle in self.handles.drain(..) {
            // SAFETY: the handle was registered by this buffer and is deregistered once, and no
            // work runs. Errors are ignored, because the process ends soon.
            let _ = unsafe { self.bench.group.deregister(self.rank, handle) };
        }
        match &mut self.owner {
            Owner::Nccl(address) => {
                // SAFETY: the address came from the group, and no work runs. Errors are ignored,
                // because the process ends soon.
                let _ = unsafe { self.bench.group.free(self.rank, *address) };
            }
            // The region may free its memory only after it was deregistered.
            Owner::Ours { proof, .. } => drop(proof.take()),
        }
    }
}
