//! The interface between a replay in real time and a memory that processes of a ledger share.

use std::time::{Duration, Instant};

use cuvmm::Block;
use cuvmm::error::LedgerRefusal;
use cuvmm::pool::futures::AllocateFuture;

use super::figures::Cost;
use super::memory::Memory;

/// The timeout of growth for idle memory of other processes. Preempting a request costs far more.
pub(crate) const GROWTH_WAITS: Duration = Duration::from_millis(5);

/// A refused request that waits.
pub(crate) enum Wish {
    /// It is served with a block.
    Block(AllocateFuture),
    /// It should be tried again at a time, as by an engine that tries again before a step.
    Again(Instant),
}

/// Memory that may wait for memory of other processes.
pub(crate) trait Shared: Memory {
    /// Returns the wish of a request that was refused `granules` granules, which can grow to
    /// `capacity` granules.
    fn ask(&self, model: usize, granules: u64, capacity: u64) -> Wish;

    /// Assigns the block that served a wish to its request.
    fn hold(
        &mut self,
        block: Block,
        model: usize,
        request: u64,
        granules: u64,
    ) -> anyhow::Result<Self::Block>;

    /// Grows a block like [`grow`](Memory::grow), and waits a moment for memory of other processes.
    fn grow_waiting(&mut self, block: &mut Self::Block, granules: u64) -> anyhow::Result<bool>;

    /// Returns the ledger's reason for the last refusal.
    fn refusal_of_ledger(&self) -> Option<LedgerRefusal>;

    /// Ends the run: returns the cost of each model, and of all with the opening and closing of the
    /// pools.
    ///
    /// # Errors
    /// Memory is still in use, a pool exceeded its limit, or memory cannot be released.
    fn finish(self) -> anyhow::Result<(Vec<Cost>, Cost)>;
}
