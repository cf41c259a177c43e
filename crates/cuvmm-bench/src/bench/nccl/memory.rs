//! Memory of the two sides on each rank, and all-reduces on it that are waited for.
//!
//! `unsafe` here: handing addresses to NCCL and to the driver. A buffer owns what lies at its
//! addresses, registrations end before it, and whatever was queued on it has ended before a call
//! returns.
#![allow(unsafe_code)]

use anyhow::{Context as _, ensure};
use cuvmm::driver::{DeviceAddress, HandleTypes};
use cuvmm::{Access, Device, Extent, Region, Registration, Stream};

/// NCCL's handle of a registration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) usize);

/// Devices brought together, each of them a rank. NCCL, or in tests what plays it.
pub(super) trait Group {
    /// Memory of NCCL's own on a rank.
    fn allocate(&self, rank: usize, bytes: u64) -> anyhow::Result<DeviceAddress>;

    /// # Safety
    /// The address came from `allocate` and nothing uses it.
    unsafe fn free(&self, rank: usize, address: DeviceAddress) -> anyhow::Result<()>;

    /// # Safety
    /// The range is mapped, and stays so until it is deregistered.
    unsafe fn register(
        &self,
        rank: usize,
        address: DeviceAddress,
        bytes: u64,
    ) -> anyhow::Result<Handle>;

    /// # Safety
    /// The handle came from `register` on this rank, and no work uses what it stands for.
    unsafe fn deregister(&self, rank: usize, handle: Handle) -> anyhow::Result<()>;

    /// Queues the sum of what lies at `from` on each rank to `to` on each.
    ///
    /// # Safety
    /// For each rank there are `elements` numbers at its two addresses and a stream of its device; they
    /// stay until the streams were waited for, and no other work uses them.
    unsafe fn all_reduce(
        &self,
        from: &[DeviceAddress],
        to: &[DeviceAddress],
        elements: u64,
        streams: &[Stream],
    ) -> anyhow::Result<()>;

    /// Gives up: what is queued need not come through any more.
    fn abort(&self);
}

/// Ranks, and a stream on each.
pub(super) struct Bench<'a> {
    group: &'a dyn Group,
    devices: &'a [Device],
    streams: Vec<Stream>,
}

/// Memory on one rank.
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
        /// While NCCL has it registered.
        proof: Option<Registration>,
    },
}

/// The part of a buffer that is registered at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// Each extent by itself.
    Extent,
    /// All of it in one range.
    Whole,
}

impl<'a> Bench<'a> {
    /// # Errors
    /// When there are no streams to be had.
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

    /// Memory of NCCL's own.
    ///
    /// # Errors
    /// When NCCL has none.
    pub(super) fn theirs(&'a self, rank: usize, bytes: u64) -> anyhow::Result<Buffer<'a>> {
        let address = self.group.allocate(rank, bytes)?;
        Ok(self.buffer(rank, Owner::Nccl(address), bytes))
    }

    /// Memory of ours as NCCL asks for its own, open to all ranks, committed in steps that
    /// end there.
    ///
    /// # Errors
    /// When the device has none.
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

    /// Runs several all-reduces in a row over the first bytes of the buffers, one of each on each rank,
    /// waited for.
    ///
    /// # Errors
    /// When the buffers are not so large, or NCCL fails; it is of no use then.
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
            // SAFETY: the buffers are as large, they are borrowed, and the streams are waited for
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

    /// How many mappings it is; nothing of NCCL's is known.
    pub(super) fn extents(&self) -> usize {
        match &self.owner {
            Owner::Nccl(_) => 1,
            Owner::Ours { region, .. } => region.extents().len(),
        }
    }

    /// `true` for memory that can be exported.
    pub(super) fn is_shareable(&self) -> anyhow::Result<bool> {
        let device = self.device()?;
        let attribute = cuvmm::driver::PointerAttribute::ALLOWED_HANDLE_TYPES;
        let (driver, device) = (device.driver(), device.ordinal());
        let types = driver.pointer_attribute(device, self.address(), attribute)?;
        Ok(types & u64::from(HandleTypes::POSIX_FD.bits()) != 0)
    }

    /// Registers it with the rank's communicator. Memory of ours is leased for as long.
    ///
    /// # Errors
    /// When NCCL refuses; what was registered until then stays so.
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
            // SAFETY: the buffer owns the range, and deregisters it before that goes.
            let handle = unsafe { self.bench.group.register(self.rank, address, bytes) }?;
            self.handles.push(handle);
        }
        Ok(())
    }

    /// # Errors
    /// When the bytes do not fit, or the driver refuses.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let at = self.at(offset, bytes.len())?;
        let device = self.device()?;
        // SAFETY: the range is in the buffer, which is borrowed alone, and nothing runs on it.
        unsafe {
            device
                .driver()
                .copy_to_device(device.ordinal(), at, bytes)?;
        }
        Ok(())
    }

    /// # Errors
    /// When the bytes do not fit, or the driver refuses.
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        let at = self.at(offset, bytes.len())?;
        let device = self.device()?;
        // SAFETY: the range is in the buffer, which is borrowed, and nothing runs on it.
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
            // SAFETY: registered here, once, and no work runs. A failure is not reported: the
            // process ends soon.
            let _ = unsafe { self.bench.group.deregister(self.rank, handle) };
        }
        match &mut self.owner {
            Owner::Nccl(address) => {
                // SAFETY: it came from the group, and no work runs. A failure is not reported.
                let _ = unsafe { self.bench.group.free(self.rank, *address) };
            }
            // Only now may the region have its memory back.
            Owner::Ours { proof, .. } => drop(proof.take()),
        }
    }
}
