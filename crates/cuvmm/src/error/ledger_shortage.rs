//! The figures of a charge that a ledger refused.

use std::fmt;

use crate::display::Bytes;

/// The figures of a charge that a ledger refused. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct LedgerShortage {
    /// Bytes by which the process's charge was to grow.
    pub wanted: u64,
    /// Bytes left for the process.
    pub left: u64,
    /// The limit of all processes together.
    pub limit: u64,
    /// Bytes charged to this process.
    pub held: u64,
    /// The reason.
    pub reason: LedgerRefusal,
}

/// The reason why a ledger refused a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub enum LedgerRefusal {
    /// The charges of all processes reach the limit.
    Full,
    /// The charges of all processes reach what contexts, other libraries and other programs leave of
    /// the device, which is less than the limit.
    Foreign,
    /// The process's own limit is reached.
    ProcessLimit,
    /// A request of another process has waited longer. Until it is served or ends, other processes
    /// are charged for new blocks beyond their guarantees only as far as it need not wait for them
    /// ([rule](crate::ledger#memory-that-another-process-needs)).
    OlderRequest,
    /// Other processes charged at the same time, again and again.
    Contended,
    /// The file was removed or replaced since it was opened, so other processes do not see this
    /// one's charges any more.
    Replaced,
}

impl LedgerRefusal {
    /// Returns `true` if memory that other processes give back can end the refusal.
    pub(crate) const fn is_of_others(self) -> bool {
        !matches!(self, Self::ProcessLimit | Self::Replaced)
    }
}

impl fmt::Display for LedgerShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (wanted, left) = (Bytes(self.wanted), Bytes(self.left));
        let (limit, held) = (Bytes(self.limit), Bytes(self.held));
        write!(
            f,
            "the ledger leaves {left} of {wanted} to this process, which holds {held} of {limit}"
        )?;
        f.write_str(match self.reason {
            LedgerRefusal::Full => "",
            LedgerRefusal::Foreign => ": other programs and contexts have the rest of the device",
            LedgerRefusal::ProcessLimit => ": its own limit is reached",
            LedgerRefusal::OlderRequest => ": an older request of another process waits",
            LedgerRefusal::Contended => ": other processes charge at the same time",
            LedgerRefusal::Replaced => ": the ledger's file was removed or replaced",
        })
    }
}

impl std::error::Error for LedgerShortage {}
