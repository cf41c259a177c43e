//! Memory that a call took away while queued work still named it.
//!
//! A GPU may run queued work at any moment, so each of these calls can fault a kernel or hand its
//! writes to the next owner of the address. The machine would not show that by itself: work that
//! is let go runs at once, and finds whatever is mapped at its addresses by then.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;

use super::access::{Rights, Who};
use super::backing::Backing;
use super::copies::Use;
use super::state::State;
use super::work::Named;
use crate::{AccessFlags, Call, DeviceAddress, Ordinal, StreamHandle};

/// How many hazards are kept with their figures; later ones are counted only.
const KEPT: usize = 64;

/// A call that took memory away, or a right on it, while queued work still named it.
///
/// Work is queued until it has run: because its stream is held back, or because it waits for an
/// event or for other work.
#[derive(Debug)]
#[non_exhaustive]
pub struct Hazard {
    /// The call: one that unmaps, lowers access, or frees.
    pub call: Call,
    /// The first byte that the call took away and the work names.
    pub address: DeviceAddress,
    /// From there to the last such byte.
    pub size: u64,
    /// The device that the work is queued on.
    pub device: Ordinal,
    /// The stream that the work is queued on. Its handle may have been destroyed.
    pub stream: StreamHandle,
    /// The kind of work.
    pub work: &'static str,
    /// The right that the work needs.
    pub needs: AccessFlags,
    backtrace: Backtrace,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let does = match self.needs {
            AccessFlags::READ => "reads",
            _ => "writes",
        };
        write!(
            f,
            "{} took away {:#x}, {} bytes, which a {} queued on stream {:#x} of device {} {does}",
            self.call, self.address.0, self.size, self.work, self.stream.0, self.device.0
        )?;
        match self.backtrace.status() {
            BacktraceStatus::Captured => write!(f, "\n{}", self.backtrace),
            _ => Ok(()),
        }
    }
}

/// The hazards that no test has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Hazards {
    first: Vec<Hazard>,
    count: u64,
}

impl Hazards {
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn take(&mut self) -> Vec<Hazard> {
        self.count = 0;
        std::mem::take(&mut self.first)
    }

    fn note(&mut self, hazard: Hazard) {
        self.count += 1;
        if self.first.len() < KEPT {
            self.first.push(hazard);
        }
    }
}

/// A range of addresses that loses what a queue may need.
pub(crate) struct Taken {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) loss: Loss,
}

/// Who loses what.
pub(crate) enum Loss {
    /// A mapping's rights change.
    Mapping { before: Rights, after: Rights },
    /// An allocation ends for every device; the program loses it too where it touches it directly.
    Allocation { touchable: bool },
}

impl Taken {
    pub(crate) fn unmapped(start: u64, size: u64, before: Rights) -> Self {
        let after = Rights::default();
        let loss = Loss::Mapping { before, after };
        Self { start, size, loss }
    }

    /// The part of a range that work on a device can no longer use as it means to.
    fn of(&self, device: i32, named: &Named) -> Option<(u64, u64)> {
        let lost = match &self.loss {
            Loss::Mapping { before, after } => {
                let allows = |rights: &Rights| named.how.allowed(rights.of(Who::Device(device)));
                !named.of_host && allows(before) && !allows(after)
            }
            Loss::Allocation { touchable } => !named.of_host || *touchable,
        };
        let start = self.start.max(named.start);
        let end = (self.start + self.size).min(named.start.saturating_add(named.size));
        (lost && start < end).then_some((start, end))
    }
}

impl<B: Backing> State<B> {
    /// Notes each range of queued work that loses memory, or a right on it, by this call.
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
