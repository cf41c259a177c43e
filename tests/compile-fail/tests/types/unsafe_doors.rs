//! Functions whose safety the types cannot guarantee require `unsafe`.

use std::sync::Arc;

use cuvmm::driver::{DeviceAddress, Driver, Ordinal, StreamHandle};

fn main() {}

fn stream(device: &cuvmm::Device) {
    drop(cuvmm::Stream::from_raw(device, StreamHandle(1), Arc::new(())));
}

fn unmap(driver: &dyn Driver) {
    drop(driver.unmap(DeviceAddress(4096), 4096));
}

fn fill(driver: &dyn Driver) {
    drop(driver.fill(Ordinal(0), DeviceAddress(4096), 0, 4096));
}
