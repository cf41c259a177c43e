//! A pool that is served by a mapper thread, and what that takes off the caller's thread.

use cuvmm::{Device, Limit, Mapper, Pool};

/// A pool whose growing blocks are committed ahead.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) pool: Pool,
    mapper: Mapper,
}

impl Mapped {
    /// # Errors
    /// When the pool cannot be, or the device has a mapper already.
    pub(super) fn start(device: &Device, limit: u64) -> anyhow::Result<Self> {
        let device = device.with_own_counters();
        let mapper = Mapper::start(&device)?;
        let pool = Pool::builder(&device)
            .limit(Limit::Bytes(limit))
            .mapper(&mapper)
            .build()?;
        Ok(Self { pool, mapper })
    }

    /// Driver calls made for the pool by other threads than the mapper's.
    pub(super) fn calls_of_others(&self) -> u64 {
        let mapper = || self.pool.device().mapper_calls().total();
        // The two are not counted at one moment: they are read until nothing happens in between.
        loop {
            let before = mapper();
            let all = self.pool.calls().total();
            if mapper() == before && all >= before {
                return all - before;
            }
        }
    }

    /// Ends the mapper; what it had committed ahead goes with the pool.
    pub(super) fn stop(self) {
        drop(self.pool);
        self.mapper.stop();
    }
}
