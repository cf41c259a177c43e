//! Allocations of a heap over a hardened pool: each is a block of the pool.
//!
//! So each has a mapping of its own with guards on either side, is filled and unmapped when it is
//! freed, and its addresses rest. The heap itself holds no memory and reuses none. An allocation ends
//! where its block ends, so that an access past its end meets the guard.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use crate::error::{ArgumentError, BlockError, CallError};
use crate::own::Stream;
use crate::pool::{Block, Tenant};
use crate::size::aligned;
use crate::sync::{Mutex, MutexGuard};

/// The blocks of a heap.
pub(super) struct Guarded {
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    /// The blocks of live allocations by the addresses of these.
    blocks: HashMap<u64, Arc<Block>>,
    /// Blocks of freed allocations. `None` if none is kept.
    kept: Option<Vec<Arc<Block>>>,
    counts: BlockCounts,
}

/// Counts of a heap's blocks. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockCounts {
    /// The sizes of live allocations, as requested.
    pub(super) live: u64,
    pub(super) peak_live: u64,
    pub(super) allocations: u64,
    /// The sizes of all blocks, kept ones too.
    pub(super) held: u64,
    pub(super) peak_held: u64,
    pub(super) blocks: u64,
    pub(super) extents: u64,
    /// Extents that blocks ever had.
    pub(super) mapped: u64,
}

impl Guarded {
    /// With `keeps`, all blocks are kept until graphs end, or the heap.
    pub(super) fn new(keeps: bool) -> Self {
        let live = Live {
            kept: keeps.then(Vec::new),
            ..Live::default()
        };
        Self {
            live: Mutex::new(live),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a block that ends where `size` bytes at an aligned address end. Returns that
    /// address.
    pub(super) fn allocate(
        &self,
        tenant: &Tenant,
        (size, alignment): (u64, u64),
        stream: &Stream,
    ) -> Result<u64, BlockError> {
        let what = "bytes of an allocation";
        let overflow = ArgumentError::Overflow { what, value: size };
        let padded = aligned(size, alignment).ok_or(overflow)?;
        let whole = tenant.device().granule().round_up(padded).ok_or(overflow)?;
        let block = allocate_block(tenant, whole, stream)?;
        let at = block.address().0 + (whole - padded);
        let extents = block.extents().len() as u64;
        let mut live = self.lock();
        let counts = &mut live.counts;
        counts.live += size;
        counts.peak_live = counts.peak_live.max(counts.live);
        counts.allocations += 1;
        counts.held += whole;
        counts.peak_held = counts.peak_held.max(counts.held);
        counts.blocks += 1;
        counts.extents += extents;
        counts.mapped += extents;
        live.blocks.insert(at, Arc::new(block));
        Ok(at)
    }

    /// Frees the block of an allocation of `size` bytes, or keeps it.
    pub(super) fn free(&self, at: u64, size: u64) {
        let mut live = self.lock();
        let Some(block) = live.blocks.remove(&at) else {
            debug_assert!(false, "no block is under an allocation");
            return;
        };
        live.counts.live -= size;
        live.counts.allocations -= 1;
        if let Some(kept) = &mut live.kept {
            kept.push(block);
            return;
        }
        drop(live);
        self.end(block);
    }

    /// Frees the blocks that were kept, and keeps none from now on.
    pub(super) fn end_graphs(&self) {
        let kept = self.lock().kept.take();
        kept.into_iter().flatten().for_each(|block| self.end(block));
    }

    fn end(&self, block: Arc<Block>) {
        let (bytes, extents) = (block.size(), block.extents().len() as u64);
        drop(block);
        let counts = &mut self.lock().counts;
        counts.held -= bytes;
        counts.blocks -= 1;
        counts.extents -= extents;
    }

    /// Records that work of another stream uses an allocation.
    pub(super) fn record_use(&self, at: u64, stream: &Stream) -> Result<(), CallError> {
        let block = self.lock().blocks.get(&at).cloned();
        let Some(block) = block else {
            debug_assert!(false, "no block is under an allocation");
            return Ok(());
        };
        match block.is_open_to(stream.device()) {
            true => block.record_use(stream),
            false => Err(CallError::WrongDriver),
        }
    }

    pub(super) fn counts(&self) -> BlockCounts {
        self.lock().counts
    }
}

/// Allocates a block. If memory is short, waits once for the work of its stream, which memory that
/// was freed in the order of the stream waits for, unless a capture prevents that.
fn allocate_block(tenant: &Tenant, size: u64, stream: &Stream) -> Result<Block, BlockError> {
    let allocate = || tenant.block(size).home_stream(stream).allocate();
    match allocate() {
        Err(error) if error.is_out_of_memory() => {
            if stream.is_capturing()? || tenant.is_capturing() {
                return Err(error);
            }
            stream.settle()?;
            allocate()
        }
        outcome => outcome,
    }
}
