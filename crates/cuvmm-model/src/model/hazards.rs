//! Hazards: calls that take memory away from queued work.
//!
//! A GPU may run queued work at any moment, so each such call can make a kernel fault or send its
//! writes to the next owner of the address. The machine alone would not show this: released work
//! runs at once, on the memory mapped at its addresses by then.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;

use cuvmm_driver::{AccessFlags, Call, DeviceAddress, Ordinal, StreamHandle};

/// The most hazards kept with their details. Later ones are only counted.
const KEPT: usize = 64;

/// A call that took away memory, or access to it, while queued work still needed it.
///
/// Work is queued until it has run: because its stream is held back, or because it waits for an
/// event or for other work.
#[derive(Debug)]
#[non_exhaustive]
pub struct Hazard {
    /// The call: one that unmaps, lowers access, or frees.
    pub call: Call,
    /// The first byte that the call took away and that the work names.
    pub address: DeviceAddress,
    /// The size in bytes up to the end of the last such byte.
    pub size: u64,
    /// The device that the work is queued on.
    pub device: Ordinal,
    /// The stream that the work is queued on. Its handle may have been destroyed.
    pub stream: StreamHandle,
    /// The kind of work.
    pub work: &'static str,
    /// The access that the work needs.
    pub needs: AccessFlags,
    pub(crate) backtrace: Backtrace,
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

/// Hazards that were not taken yet.
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

    pub(crate) fn note(&mut self, hazard: Hazard) {
        self.count += 1;
        if self.first.len() < KEPT {
            self.first.push(hazard);
        }
    }
}
