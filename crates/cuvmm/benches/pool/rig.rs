//! A pool on the model driver.

use std::sync::Arc;

use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::{Device, Limit, Pool, Stream};

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
        let driver = ModelDriver::new(ModelOptions::new().capacity(bytes));
        let device = Device::open(Arc::new(driver), 0).unwrap();
        let pool = Pool::builder(&device).limit(Limit::Bytes(bytes));
        Self {
            pool: pool.build().unwrap(),
            stream: Stream::new(&device).unwrap(),
        }
    }
}
