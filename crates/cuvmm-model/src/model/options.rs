//! The options of a machine.

use std::collections::{BTreeMap, BTreeSet};

use cuvmm_driver::sys::CudaVersion;

use super::{Costs, RandomFailures};
use cuvmm_driver::DeviceAttribute;

/// The calls that the machine accepts, and its choices where the documentation leaves them open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Manner {
    /// Accepts and refuses what a real GPU's driver was measured to accept and refuse.
    #[default]
    AsMeasured,
    /// Also refuses everything that the header forbids: mapping past the end of a reservation or
    /// across two, unmapping or granting access over a hole, mapping a released handle, unknown
    /// handle types, and the granularity of a device that does not exist. Each is `INVALID_VALUE`,
    /// except the last, which is `INVALID_DEVICE`.
    Strict,
    /// Refuses what [`Strict`](Self::Strict) refuses, and makes each open choice to the
    /// disadvantage of code that relies on it: see [the module](super#the-hostile-manner).
    Hostile,
}

/// The parameters of the rules, from either option type.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) name: String,
    pub(crate) devices: i32,
    pub(crate) capacity: u64,
    pub(crate) host_capacity: u64,
    pub(crate) granularity: u64,
    pub(crate) mapping_ceiling: u64,
    pub(crate) address_end: u64,
    pub(crate) numa_nodes: i32,
    pub(crate) fabric: bool,
    pub(crate) manner: Manner,
    pub(crate) seed: u64,
    pub(crate) spite: Option<RandomFailures>,
    pub(crate) version: CudaVersion,
    pub(crate) unreachable: BTreeSet<(i32, i32)>,
    pub(crate) attributes: BTreeMap<i32, i32>,
    pub(crate) costs: Costs,
    pub(crate) late: bool,
    pub(crate) shadow: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            name: "model GPU".to_owned(),
            devices: 1,
            capacity: 143 << 30,
            host_capacity: 256 << 30,
            granularity: 2 << 20,
            mapping_ceiling: 524_000,
            address_end: 1 << 47,
            numa_nodes: 1,
            fabric: false,
            manner: Manner::AsMeasured,
            seed: 0,
            spite: None,
            version: CudaVersion::new(13, 0),
            unreachable: BTreeSet::new(),
            attributes: BTreeMap::new(),
            costs: Costs::default(),
            late: false,
            shadow: false,
        }
    }
}

impl Rules {
    /// Returns the size of the gap before each reservation, which an access beyond the end of one
    /// reservation does not cross. In the hostile manner it is 0: such an access reaches the next
    /// reservation.
    pub(crate) fn gap(&self) -> u64 {
        match self.manner {
            Manner::Hostile => 0,
            _ => self.granularity,
        }
    }
}

/// Generates the methods that both option types share.
macro_rules! shared_options {
    ($options:ident) => {
        impl $options {
            /// Sets the number of devices; default 1.
            ///
            /// They can access each other's memory except where [`unreachable`](Self::unreachable)
            /// says otherwise.
            #[must_use]
            pub fn devices(mut self, count: u16) -> Self {
                self.rules.devices = i32::from(count);
                self
            }

            /// Sets the product name of the devices.
            #[must_use]
            pub fn name(mut self, name: impl Into<String>) -> Self {
                self.rules.name = name.into();
                self
            }

            /// Sets the allocation granularity in bytes; default 2 MiB. Rounded up to a power of
            /// two and to at least 4 KiB (on the host driver, the system's page size).
            #[must_use]
            pub fn granularity(mut self, bytes: u64) -> Self {
                let bytes = bytes.clamp(4096, 1 << 40);
                self.rules.granularity = bytes.next_power_of_two();
                self
            }

            /// Sets the number of mappings that one device may have access to, counting each alias;
            /// default 524,000. Beyond it, `set_access` returns `OUT_OF_MEMORY`.
            #[must_use]
            pub fn mapping_ceiling(mut self, mappings: u64) -> Self {
                self.rules.mapping_ceiling = mappings;
                self
            }

            /// Sets the host memory in bytes that all physicals together may use.
            #[must_use]
            pub fn host_capacity(mut self, bytes: u64) -> Self {
                self.rules.host_capacity = bytes;
                self
            }

            /// Sets the number of NUMA nodes of the host; default 1.
            #[must_use]
            pub fn numa_nodes(mut self, count: u16) -> Self {
                self.rules.numa_nodes = i32::from(count);
                self
            }

            /// Makes the memory of `peer` inaccessible to `device`.
            #[must_use]
            pub fn unreachable(mut self, device: i32, peer: i32) -> Self {
                self.rules.unreachable.insert((device, peer));
                self
            }

            /// Sets whether fabric handles can be created. By default the call refuses them
            /// although the attribute reports them as supported, as was measured.
            #[must_use]
            pub fn fabric(mut self, yes: bool) -> Self {
                self.rules.fabric = yes;
                self
            }

            /// Sets the manner; default [`Manner::AsMeasured`].
            #[must_use]
            pub fn manner(mut self, manner: Manner) -> Self {
                self.rules.manner = manner;
                self
            }

            /// Sets the seed for the hostile manner's codes of refusals; default 0.
            #[must_use]
            pub fn seed(mut self, seed: u64) -> Self {
                self.rules.seed = seed;
                self
            }

            /// Makes calls fail at random, as often as `spite` says, in any manner; by default none
            /// do. [`Machine::set_random_failures`](crate::model::Machine::set_random_failures)
            /// changes this later.
            #[must_use]
            pub fn spite(mut self, spite: RandomFailures) -> Self {
                self.rules.spite = Some(spite);
                self
            }

            /// Sets the CUDA version that the driver reports; default 13.0. Newer calls are missing
            /// symbols.
            #[must_use]
            pub fn version(mut self, version: CudaVersion) -> Self {
                self.rules.version = version;
                self
            }

            /// Sets the value of one device attribute, on every device.
            ///
            /// Managed memory follows its attributes: without [`DeviceAttribute::MANAGED_MEMORY`]
            /// there is none, and without [`DeviceAttribute::CONCURRENT_MANAGED_ACCESS`] it can
            /// neither be prefetched to a device nor be advised to be there.
            #[must_use]
            pub fn attribute(mut self, attribute: DeviceAttribute, value: i32) -> Self {
                self.rules.attributes.insert(attribute.0, value);
                self
            }

            /// Sets whether work runs as late as possible: when a call waits for it, or asks about
            /// it a second time. By default work runs in the call that submits it.
            ///
            /// Late work that no call has waited for is queued, so a call that takes its memory
            /// away is a [`Hazard`](crate::model::Hazard).
            #[must_use]
            pub fn late(mut self, yes: bool) -> Self {
                self.rules.late = yes;
                self
            }

            /// Sets whether reads of bytes that were never written are recorded, for
            /// [`Machine::take_unwritten`](crate::model::Machine::take_unwritten); by default they
            /// are not.
            #[must_use]
            pub fn record_unwritten(mut self, yes: bool) -> Self {
                self.rules.shadow = yes;
                self
            }

            /// Sets the costs of calls on the virtual clock; default those of an H200.
            #[must_use]
            pub fn costs(mut self, costs: Costs) -> Self {
                self.rules.costs = costs;
                self
            }
        }
    };
}
#[cfg(target_os = "linux")]
pub(crate) use shared_options;

/// Options of a [`ModelDriver`](super::ModelDriver).
///
/// The default is one device of 143 GiB with the behavior and costs measured on an H200.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    pub(crate) rules: Rules,
}

impl ModelOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the memory of each device in bytes; default 143 GiB.
    #[must_use]
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.rules.capacity = bytes;
        self
    }

    /// Sets the end of the address space; default 2^47.
    #[must_use]
    pub fn address_end(mut self, end: u64) -> Self {
        self.rules.address_end = end;
        self
    }
}

shared_options!(ModelOptions);
