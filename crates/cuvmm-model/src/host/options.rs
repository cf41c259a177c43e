//! Options of the host driver.

use cuvmm_driver::sys::CudaVersion;

use super::system;
use crate::model::{Costs, Manner, RandomFailures, Rules, shared_options};
use cuvmm_driver::DeviceAttribute;

/// Options of a [`HostDriver`](super::HostDriver).
///
/// The default is one device named "host memory" with half of the system's available memory.
#[derive(Clone, Debug)]
pub struct HostOptions {
    rules: Rules,
    capacity: Option<u64>,
}

impl HostOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the memory of each device in bytes.
    ///
    /// It may exceed the system's memory: only memory that is written is allocated.
    #[must_use]
    #[doc(alias = "memory")]
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.capacity = Some(bytes);
        self
    }

    pub(super) fn into_rules(self) -> Rules {
        let mut rules = self.rules;
        rules.granularity = rules.granularity.max(system::page_size());
        rules.capacity = match self.capacity {
            Some(bytes) => bytes,
            None => {
                let share = rules.host_capacity / u64::try_from(rules.devices.max(1)).unwrap_or(1);
                (share - share % rules.granularity).max(rules.granularity)
            }
        };
        rules
    }
}

impl Default for HostOptions {
    fn default() -> Self {
        let rules = Rules {
            name: "host memory".to_owned(),
            host_capacity: system::available_memory() / 2,
            ..Rules::default()
        };
        Self {
            rules,
            capacity: None,
        }
    }
}

shared_options!(HostOptions);
