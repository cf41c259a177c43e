//! A pool on the model driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::{Device, Limit, Pool, Scrub, Stream};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
/// The granule of the model.
pub(crate) const GRANULE: u64 = 2 * MIB;

pub(crate) struct Rig {
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
}

impl Rig {
    pub(crate) fn new(bytes: u64) -> Self {
        Self::with(bytes, Scrub::default())
    }

    pub(crate) fn with(bytes: u64, scrub: Scrub) -> Self {
        let driver = ModelDriver::new(ModelOptions::new().capacity(bytes));
        let device = Device::open(Arc::new(driver), 0).unwrap();
        let pool = Pool::builder(&device)
            .limit(Limit::Bytes(bytes))
            .scrub(scrub);
        Self {
            pool: pool.build().unwrap(),
            stream: Stream::new(&device).unwrap(),
        }
    }
}

/// Returns the total time of `times` calls of `timed`.
///
/// `reset` runs after each call and is not timed.
pub(crate) fn repeat<T>(
    times: u64,
    mut timed: impl FnMut() -> T,
    mut reset: impl FnMut(T),
) -> Duration {
    let mut took = Duration::ZERO;
    for _ in 0..times {
        let begun = Instant::now();
        let outcome = timed();
        took += begun.elapsed();
        reset(outcome);
    }
    took
}
