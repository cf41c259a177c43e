//! A replacement for NCCL in tests. It computes the sums on the host, and registers one mapping at
//! a time, as a NIC does.
//!
//! `unsafe` here: reading and writing memory of the host driver by address; the caller guarantees
//! that the addresses are valid.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{anyhow, ensure};
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::{DeviceAddress, Driver, Ordinal};
use cuvmm::{Device, Stream};

use super::memory::{Group, Handle};

pub(super) struct Fake {
    machine: Arc<HostDriver>,
    devices: Vec<Device>,
    allocated: RefCell<Vec<(usize, DeviceAddress)>>,
    registered: RefCell<BTreeMap<usize, usize>>,
    ever: Cell<usize>,
    reduced: Cell<u64>,
    wrong: Option<u64>,
    fails: Option<u64>,
    aborted: Cell<bool>,
}

impl Fake {
    pub(super) fn new(devices: u16) -> Self {
        let options = HostOptions::new().devices(devices).capacity(4 << 30);
        let machine = Arc::new(HostDriver::new(options));
        let driver: Arc<dyn Driver> = machine.clone();
        let open = |ordinal| Device::open(Arc::clone(&driver), ordinal).unwrap();
        Self {
            machine,
            devices: (0..u32::from(devices)).map(open).collect(),
            allocated: RefCell::default(),
            registered: RefCell::default(),
            ever: Cell::new(0),
            reduced: Cell::new(0),
            wrong: None,
            fails: None,
            aborted: Cell::new(false),
        }
    }

    /// Makes the sum of one element wrong.
    pub(super) fn wrong_at(mut self, element: u64) -> Self {
        self.wrong = Some(element);
        self
    }

    /// Makes the nth all-reduce fail.
    pub(super) fn fails_at(mut self, nth: u64) -> Self {
        self.fails = Some(nth);
        self
    }

    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the number of registrations ever made.
    pub(super) fn registered(&self) -> usize {
        self.ever.get()
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.get()
    }

    /// Returns `true` if all memory and registrations were returned, and the driver holds nothing.
    pub(super) fn is_clean(&self) -> bool {
        self.allocated.borrow().is_empty()
            && self.registered.borrow().is_empty()
            && self.machine.live().is_nothing()
    }

    fn ordinal(rank: usize) -> Ordinal {
        Ordinal(rank as i32)
    }
}

impl Group for Fake {
    fn allocate(&self, rank: usize, bytes: u64) -> anyhow::Result<DeviceAddress> {
        let address = self.machine.alloc(Self::ordinal(rank), bytes)?;
        self.allocated.borrow_mut().push((rank, address));
        Ok(address)
    }

    unsafe fn free(&self, rank: usize, address: DeviceAddress) -> anyhow::Result<()> {
        let one = (rank, address);
        self.allocated.borrow_mut().retain(|other| *other != one);
        // SAFETY: the caller guarantees that `allocate` returned the address and no work uses it.
        unsafe { self.machine.free(Self::ordinal(rank), address)? };
        Ok(())
    }

    unsafe fn register(
        &self,
        rank: usize,
        address: DeviceAddress,
        bytes: u64,
    ) -> anyhow::Result<Handle> {
        let (start, size) = self.machine.address_range(Self::ordinal(rank), address)?;
        ensure!(
            address.0 + bytes <= start.0 + size,
            "the range is of several mappings"
        );
        let handle = self.ever.get();
        self.ever.set(handle + 1);
        self.registered.borrow_mut().insert(handle, rank);
        Ok(Handle(handle))
    }

    unsafe fn deregister(&self, rank: usize, handle: Handle) -> anyhow::Result<()> {
        let was = self.registered.borrow_mut().remove(&handle.0);
        ensure!(was == Some(rank), "never registered on rank {rank}");
        Ok(())
    }

    unsafe fn all_reduce(
        &self,
        from: &[DeviceAddress],
        to: &[DeviceAddress],
        elements: u64,
        streams: &[Stream],
    ) -> anyhow::Result<()> {
        assert_eq!((from.len(), to.len(), streams.len()), (2, 2, 2));
        self.reduced.set(self.reduced.get() + 1);
        if self.fails == Some(self.reduced.get()) {
            return Err(anyhow!("it failed"));
        }
        let mut sums = vec![0f32; elements as usize];
        let mut bytes = vec![0; sums.len() * 4];
        for (rank, &address) in from.iter().enumerate() {
            // SAFETY: the caller guarantees `elements` numbers at the address, which no other work
            // uses.
            unsafe {
                self.machine
                    .copy_to_host(Self::ordinal(rank), &mut bytes, address)?;
            }
            for (sum, number) in sums.iter_mut().zip(bytes.as_chunks().0) {
                *sum += f32::from_ne_bytes(*number);
            }
        }
        if let Some(sum) = self.wrong.and_then(|at| sums.get_mut(at as usize)) {
            *sum += 1.0;
        }
        let bytes: Vec<u8> = sums.into_iter().flat_map(f32::to_ne_bytes).collect();
        for (rank, &address) in to.iter().enumerate() {
            // SAFETY: the caller guarantees `elements` numbers at the address, which no other work
            // uses.
            unsafe {
                self.machine
                    .copy_to_device(Self::ordinal(rank), address, &bytes)?;
            }
        }
        Ok(())
    }

    fn abort(&self) {
        self.aborted.set(true);
    }
}
