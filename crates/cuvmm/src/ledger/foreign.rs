//! Memory of the device that no pool of the ledger has: contexts, other libraries, other programs.
//!
//! The driver tells how much of the device is in use, and each process writes into its slot how
//! much its pools have. The difference is *foreign*, and the ledger's processes cannot have more
//! than the rest of the device, whatever the limit is.
//!
//! A pool counts memory before it asks the driver for it, and until the driver has it back. The
//! slots are read before and after the driver is asked, and the larger value counts. So memory of
//! pools is never taken for foreign.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::layout::{Layout, Slot};
use crate::device::WeakDevice;
use crate::sync::Mutex;

/// The shortest time between two measurements for requests that are refused.
const PAUSE: Duration = Duration::from_millis(5);

/// The foreign memory of a device, as this process last measured it.
#[derive(Debug)]
pub(super) struct Foreign {
    device: WeakDevice,
    /// When it was last measured.
    measured: Mutex<Option<Instant>>,
    /// Bytes that pools of the ledger can have; everything before the first measurement. Read by
    /// each charge, without the lock.
    usable: AtomicU64,
}

impl Foreign {
    pub(super) fn of(device: WeakDevice) -> Self {
        Self {
            device,
            measured: Mutex::default(),
            usable: AtomicU64::new(u64::MAX),
        }
    }

    /// Measures (`cuMemGetInfo`), unless the last measurement is younger than a few milliseconds,
    /// and shows the result in the process's slot. Keeps the last result if the driver refuses.
    /// Returns the bytes that all pools of the ledger can have; everything before the first
    /// measurement.
    pub(super) fn measure(&self, layout: &Layout, own: &Slot) -> u64 {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        if measured.is_none_or(|at| at.elapsed() >= PAUSE)
            && let Some((usable, foreign)) = self.ask(layout)
        {
            *measured = Some(Instant::now());
            self.usable.store(usable, Ordering::Release);
            own.foreign.publish(foreign);
            own.usable.publish(usable);
        }
        self.last()
    }

    /// Returns the result of the last measurement.
    pub(super) fn last(&self) -> u64 {
        self.usable.load(Ordering::Acquire)
    }

    pub(super) fn is_measured(&self) -> bool {
        self.last() != u64::MAX
    }

    /// Returns the bytes that pools of the ledger can have, and the foreign bytes.
    fn ask(&self, layout: &Layout) -> Option<(u64, u64)> {
        let device = self.device.upgrade()?;
        let before = obtained(layout);
        let info = device.memory_info().ok()?;
        let pools = before
            .zip(obtained(layout))
            .map(|(one, other)| one.max(other));
        let pools = pools.fold(0, u64::saturating_add);
        let used = info.total.saturating_sub(info.free);
        let foreign = used.saturating_sub(pools);
        Some((info.total.saturating_sub(foreign), foreign))
    }
}

/// Returns the bytes of each process that its pools have or that other processes have of it.
fn obtained(layout: &Layout) -> impl Iterator<Item = u64> {
    let slots = layout.slots.iter().enumerate();
    let found: Vec<u64> = slots.map(|(index, _)| layout.obtained(index)).collect();
    found.into_iter()
}
