//! Memory and access that a call takes away from queued work.

use std::backtrace::Backtrace;

use super::backing::Backing;
use super::hazards::Hazard;
use super::rights::{Rights, Who};
use super::state::State;
use super::work::{Named, Use};
use cuvmm_driver::{AccessFlags, Call, DeviceAddress, Ordinal};

pub(crate) struct Taken {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) loss: Loss,
}

pub(crate) enum Loss {
    /// The access to a mapping changes.
    Mapping { before: Rights, after: Rights },
    /// An allocation ends for every device, and for the program if it is touchable.
    Allocation { touchable: bool },
    /// Memory of the program is no longer pinned.
    Registration,
}

impl Taken {
    pub(crate) fn unmapped(start: u64, size: u64, before: Rights) -> Self {
        let after = Rights::default();
        let loss = Loss::Mapping { before, after };
        Self { start, size, loss }
    }

    /// Returns the part of a named range that a device's work can no longer use.
    fn of(&self, device: i32, named: &Named) -> Option<(u64, u64)> {
        let lost = match &self.loss {
            Loss::Mapping { before, after } => {
                let allows = |rights: &Rights| named.how.allowed(rights.of(Who::Device(device)));
                !named.of_host && allows(before) && !allows(after)
            }
            Loss::Allocation { touchable } => !named.of_host || *touchable,
            Loss::Registration => named.of_host,
        };
        let start = self.start.max(named.start);
        let end = (self.start + self.size).min(named.start.saturating_add(named.size));
        (lost && start < end).then_some((start, end))
    }
}

impl<B: Backing> State<B> {
    /// Records a hazard for each range of queued work that loses memory or access by this call.
    pub(crate) fn note_hazards(&mut self, call: Call, taken: &[Taken]) {
        let hazards = &mut self.hazards;
        self.streams.each_queued(|device, stream, work| {
            work.each_named(&mut |named| {
                let parts = taken.iter().filter_map(|taken| taken.of(device, &named));
                let hull = parts.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
                let Some((start, end)) = hull else { return };
                hazards.note(Hazard {
                    call,
                    address: DeviceAddress(start),
                    size: end - start,
                    device: Ordinal(device),
                    stream,
                    work: work.name(),
                    needs: match named.how {
                        Use::Read => AccessFlags::READ,
                        Use::Write => AccessFlags::READ_WRITE,
                    },
                    backtrace: Backtrace::capture(),
                });
            });
        });
    }
}
