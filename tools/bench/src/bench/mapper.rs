//! A pool with a mapper thread, and a count of driver calls that other threads still make.

use cuvmm::{Device, Limit, Mapper, Pool};

#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) pool: Pool,
    mapper: Mapper,
}

impl Mapped {
    /// Starts a mapper for the device, and creates a pool that it serves.
    ///
    /// # Errors
    /// The pool cannot be created, or the device has a mapper already.
    pub(super) fn start(device: &Device, limit: u64) -> anyhow::Result<Self> {
        let device = device.with_own_counters();
        let mapper = Mapper::start(&device)?;
        let pool = Pool::builder(&device)
            .limit(Limit::Bytes(limit))
            .mapper(&mapper)
            .build()?;
        Ok(Self { pool, mapper })
    }

    /// Returns the number of driver calls for the pool by threads other than the mapper's.
    pub(super) fn calls_of_others(&self) -> u64 {
        let mapper = || self.pool.device().mapper_calls().total();
        // The two counters are not read atomically, so they are read again until the mapper makes
        // no call in between.
        loop {
            let before = mapper();
            let all = self.pool.calls().total();
            if mapper() == before && all >= before {
                return all - before;
            }
        }
    }

    /// Drops the pool with its precommitted memory, and stops the mapper.
    pub(super) fn stop(self) {
        drop(self.pool);
        self.mapper.stop();
    }
}
