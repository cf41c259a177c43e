//! Memory of the device that no pool of the ledger has: contexts, other libraries, other programs.
//!
//! The driver tells how much of the device is in use, and each process writes into its slot how
//! much its pools have. The difference is *foreign*. The ledger's processes cannot have more than
//! the rest of the device, whatever the limit is.
//!
//! A pool counts memory before it asks the driver for it, and until the driver has it back. The
//! slots are read before and after the driver is asked, and the larger value counts. So this memory
//! is never taken for foreign.
//!
//! Memory pools of the driver are charged with what they may hold, and counted with what they were
//! last seen to hold, because other libraries allocate from them without asking. Their process
//! reads their figures with each operation on them, before it reclaims memory, once a second, and
//! for each look at the ledger while a request of another process waits. Until the next reading
//!
//! - memory obtained since the last reading counts as foreign. The device seems to leave less than
//!   it does, by at most the charge that was not seen in use. No more is granted than there is.
//! - memory released since then still counts as theirs. The device seems to leave more than it
//!   does, by at most that memory. An operation of the library that releases reads the figures
//!   itself, before it ends. By themselves such pools release only what exceeds their release
//!   threshold, at a synchronization, or what the driver needs for another allocation of the same
//!   process.
//!
//! Without a capture guard, both last for a second at most.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::layout::{Layout, Slot};
use crate::device::WeakDevice;
use crate::sync::Mutex;

const PAUSE: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct Foreign {
    device: WeakDevice,
    measured: Mutex<Option<Instant>>,
    /// Set when the count of bytes in the driver's memory pools has changed since the measurement.
    expired: AtomicBool,
    /// Bytes that pools of the ledger can have; [`u64::MAX`] before the first measurement. Charges
    /// read it without the lock.
    usable: AtomicU64,
}

impl Foreign {
    pub(super) fn of(device: WeakDevice) -> Self {
        Self {
            device,
            measured: Mutex::default(),
            expired: AtomicBool::new(false),
            usable: AtomicU64::new(u64::MAX),
        }
    }

    pub(super) fn expire(&self) {
        self.expired.store(true, Ordering::Release);
    }

    /// Measures (`cuMemGetInfo`), unless the last measurement is younger than a few milliseconds
    /// and has not [expired](Self::expire), and shows the result in the process's slot. Keeps the
    /// last result if the driver refuses. Returns the bytes that all pools of the ledger can have.
    pub(super) fn measure(&self, layout: &Layout, own: &Slot) -> u64 {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = measured.is_none_or(|at| at.elapsed() >= PAUSE);
        if (self.expired.swap(false, Ordering::AcqRel) || is_old)
            && let Some((usable, foreign)) = self.ask(layout)
        {
            *measured = Some(Instant::now());
            self.usable.store(usable, Ordering::Release);
            // A reader of the new foreign bytes also sees the new usable bytes.
            own.usable.publish(usable);
            own.foreign.publish(foreign);
        }
        self.last()
    }

    pub(super) fn last(&self) -> u64 {
        self.usable.load(Ordering::Acquire)
    }

    pub(super) fn is_measured(&self) -> bool {
        self.last() != u64::MAX
    }

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

/// Returns for each process the bytes that it has from the driver or has lent.
fn obtained(layout: &Layout) -> impl Iterator<Item = u64> {
    let slots = layout.slots.iter().enumerate();
    let found: Vec<u64> = slots.map(|(index, _)| layout.obtained(index)).collect();
    found.into_iter()
}
