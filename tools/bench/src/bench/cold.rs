//! cuvmm's side of cold rows: a pool trimmed to nothing, new addresses, and a create for every
//! extent.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use cuvmm::driver::Call;
use cuvmm::error::BlockError;
use cuvmm::{Block, Pool, Scrub, Stream, Tenant};

use super::stage::Stage;

/// Timeout for the release of all memory of the pool.
const PATIENCE: Duration = Duration::from_secs(5);

/// A pool that holds no memory between measurements.
pub(super) struct Cold<'a> {
    stage: &'a Stage,
    pool: Pool,
    stream: Stream,
    tenants: Cell<u64>,
}

/// A block that was committed cold. A drop makes its memory cached; [`Cold::empty`] trims it.
pub(super) struct Taken {
    /// The sizes of the extents in bytes, in order.
    pub(super) extents: Vec<u64>,
    pub(super) calls: u64,
    _block: Block,
    /// Dropped with the block, which frees the addresses, so that the next block has new ones.
    _tenant: Tenant,
}

impl<'a> Cold<'a> {
    /// Creates a pool with a limit, which holds no memory yet.
    pub(super) fn new(stage: &'a Stage, limit: u64) -> anyhow::Result<Self> {
        let pool = stage.pool(limit, Scrub::default())?;
        let stream = Stream::new(&stage.device)?;
        Ok(Self {
            stage,
            pool,
            stream,
            tenants: Cell::new(0),
        })
    }

    /// Times `make`, and checks that all of the block's memory was new.
    ///
    /// # Errors
    /// The block cannot be made, or was not cold.
    pub(super) fn take(
        &self,
        make: impl FnOnce(&Tenant, &Stream) -> Result<Block, BlockError>,
    ) -> anyhow::Result<(f64, Taken)> {
        let number = self.tenants.replace(self.tenants.get() + 1);
        let tenant = self.pool.tenant(format!("cold {number}")).register()?;
        let before = self.pool.calls();
        let (took, block) = self.stage.watch.time(|| make(&tenant, &self.stream))?;
        let calls = self.pool.calls().since(&before);
        let extents: Vec<u64> = block.extents().iter().map(|extent| extent.size).collect();
        let (created, reserved) = (
            calls.count(Call::MemCreate),
            calls.count(Call::MemAddressReserve),
        );
        ensure!(
            extents.iter().sum::<u64>() >= block.size(),
            "{} bytes lie in {extents:?}",
            block.size()
        );
        ensure!(
            created >= extents.len() as u64 && reserved > 0,
            "this was not cold: {created} creates for {} extents, {reserved} reservations",
            extents.len()
        );
        let taken = Taken {
            extents,
            calls: calls.total(),
            _block: block,
            _tenant: tenant,
        };
        Ok((took, taken))
    }

    /// Returns all memory to the driver. No block may be live.
    ///
    /// # Errors
    /// Memory is left after [`PATIENCE`].
    pub(super) fn empty(&self) -> anyhow::Result<()> {
        self.stream.synchronize()?;
        let begun = Instant::now();
        loop {
            self.pool.trim(0)?;
            let stats = self.pool.stats();
            let left = stats.committed + stats.free + stats.quarantined;
            if left == 0 {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                bail!("{left} bytes of the pool were not given back");
            }
            std::thread::yield_now();
        }
    }
}
