//! Threads near a device.

use std::fs;

use cuvmm_driver::{Call, DeviceAttribute};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::device::Device;

/// Returns the processors of the host's NUMA node that is closest to a device, if the driver and the
/// system know it.
pub(super) fn processors(device: &Device) -> Option<CpuSet> {
    let node = device.call(Call::DeviceGetAttribute, |driver, ordinal| {
        driver.device_attribute(ordinal, DeviceAttribute::HOST_NUMA_ID)
    });
    let path = format!("/sys/devices/system/node/node{}/cpulist", node.ok()?);
    let list = fs::read_to_string(path).ok()?;
    let mut processors = CpuSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            let last = last.min(CpuSet::MAX_CPU - 1);
            (first..=last).for_each(|processor| processors.set(processor));
        }
    }
    Some(processors)
}

/// Moves the calling thread to some processors. Memory that it touches is taken from their node.
pub(super) fn move_to(processors: &CpuSet) {
    // Refused if the process may use none of them. Then the thread stays where it is.
    let _ = sched_setaffinity(None, processors);
}
