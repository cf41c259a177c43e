//! The driver calls that a thread may make while it has a pool locked.
#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cuvmm_driver::Call;
use cuvmm_model::model::{ModelDriver, ModelOptions};

use super::Device;
use crate::deferred::Section;

// I-40
#[test]
fn a_call_that_is_not_short_fails_under_a_pools_lock() {
    let driver = Arc::new(ModelDriver::new(ModelOptions::new()));
    let device = Device::open(driver, 0).unwrap();
    let calls = |call| device.give_back(call, |_, _| Ok(()));
    calls(Call::MemUnmap).unwrap();
    let section = Section::enter();
    calls(Call::EventQuery).unwrap();
    let failed = catch_unwind(AssertUnwindSafe(|| calls(Call::MemUnmap)));
    drop(section);
    assert!(failed.is_err());
    calls(Call::MemUnmap).unwrap();
}
