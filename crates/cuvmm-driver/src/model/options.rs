//! How a machine is set up before it answers.

use std::collections::{BTreeMap, BTreeSet};

use cuvmm_sys::CudaVersion;

use super::{Costs, Spite};
use crate::DeviceAttribute;

/// What the machine lets through, and how it answers where the documentation leaves it a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Manner {
    /// What a real GPU's driver was measured to let through and to refuse.
    #[default]
    AsMeasured,
    /// All that the header forbids is refused too: mapping past the end of a reservation or
    /// across two, unmapping or granting access over a hole, mapping a released handle, unknown
    /// handle types, the granularity of a device that is not there. `INVALID_VALUE` each, save
    /// the last, which is `INVALID_DEVICE`.
    Strict,
    /// What is forbidden is refused as in [`Strict`](Self::Strict), and all that is left open is
    /// chosen to the disadvantage of who builds on it: see [the module](super#the-hostile-manner).
    Hostile,
}

/// What the rules are told at the start; both option types build one.
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
    pub(crate) spite: Option<Spite>,
    pub(crate) version: CudaVersion,
    pub(crate) unreachable: BTreeSet<(i32, i32)>,
    pub(crate) attributes: BTreeMap<i32, i32>,
    pub(crate) costs: Costs,
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
        }
    }
}

impl Rules {
    /// How much is left free before each reservation, so that what runs out of one does not run
    /// into the next. Nothing where that is to happen.
    pub(crate) fn gap(&self) -> u64 {
        match self.manner {
            Manner::Hostile => 0,
            _ => self.granularity,
        }
    }
}

/// The methods that both option types share.
macro_rules! shared_options {
    ($options:ident) => {
        impl $options {
            /// How many devices there are; default 1. They all reach each other's memory unless
            /// [`unreachable`](Self::unreachable) says otherwise.
            #[must_use]
            pub fn devices(mut self, count: u16) -> Self {
                self.rules.devices = i32::from(count);
                self
            }

            /// The product name that devices answer with.
            #[must_use]
            pub fn name(mut self, name: impl Into<String>) -> Self {
                self.rules.name = name.into();
                self
            }

            /// The allocation granularity in bytes, rounded up to a power of two and to at least
            /// 4 KiB (or the system's page size, on the host); default 2 MiB.
            #[must_use]
            pub fn granularity(mut self, bytes: u64) -> Self {
                let bytes = bytes.clamp(4096, 1 << 40);
                self.rules.granularity = bytes.next_power_of_two();
                self
            }

            /// How many mappings may have access on one device, aliases counted each;
            /// default 524,000. What would go beyond is `OUT_OF_MEMORY` at `set_access`.
            #[must_use]
            pub fn mapping_ceiling(mut self, mappings: u64) -> Self {
                self.rules.mapping_ceiling = mappings;
                self
            }

            /// How many bytes of host memory physicals may take in all.
            #[must_use]
            pub fn host_capacity(mut self, bytes: u64) -> Self {
                self.rules.host_capacity = bytes;
                self
            }

            /// How many NUMA nodes the host has; default 1.
            #[must_use]
            pub fn numa_nodes(mut self, count: u16) -> Self {
                self.rules.numa_nodes = i32::from(count);
                self
            }

            /// `device` cannot reach the memory of `peer`.
            #[must_use]
            pub fn unreachable(mut self, device: i32, peer: i32) -> Self {
                self.rules.unreachable.insert((device, peer));
                self
            }

            /// Whether fabric handles can be had; by default the call refuses them though the
            /// attribute promises them, as was measured.
            #[must_use]
            pub fn fabric(mut self, yes: bool) -> Self {
                self.rules.fabric = yes;
                self
            }

            /// What is let through, and how it is answered; default as measured.
            #[must_use]
            pub fn manner(mut self, manner: Manner) -> Self {
                self.rules.manner = manner;
                self
            }

            /// What the hostile manner chooses the codes of refusals by; default 0.
            #[must_use]
            pub fn seed(mut self, seed: u64) -> Self {
                self.rules.seed = seed;
                self
            }

            /// Calls fail out of the blue as often as this says, in any manner; by default none
            /// do. [`Machine::set_spite`](crate::model::Machine::set_spite) changes it later.
            #[must_use]
            pub fn spite(mut self, spite: Spite) -> Self {
                self.rules.spite = Some(spite);
                self
            }

            /// The CUDA version that is answered, default 13.0. Calls that came later are
            /// missing symbols.
            #[must_use]
            pub fn version(mut self, version: CudaVersion) -> Self {
                self.rules.version = version;
                self
            }

            /// What one device attribute answers, on every device. Managed memory follows its
            /// attributes: without [`DeviceAttribute::MANAGED_MEMORY`] there is none, and without
            /// [`DeviceAttribute::CONCURRENT_MANAGED_ACCESS`] it cannot be moved to a device by
            /// hand or be advised to lie there.
            #[must_use]
            pub fn attribute(mut self, attribute: DeviceAttribute, value: i32) -> Self {
                self.rules.attributes.insert(attribute.0, value);
                self
            }

            /// What calls cost on the virtual clock; default one H200.
            #[must_use]
            pub fn costs(mut self, costs: Costs) -> Self {
                self.rules.costs = costs;
                self
            }
        }
    };
}
pub(crate) use shared_options;

/// How a [`ModelDriver`](super::ModelDriver) is set up. The default is one device of 143 GiB that
/// behaves and costs as an H200 was measured to.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    pub(crate) rules: Rules,
}

impl ModelOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The memory of each device in bytes; default 143 GiB.
    #[must_use]
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.rules.capacity = bytes;
        self
    }

    /// Where the address space ends; default 2^47.
    #[must_use]
    pub fn address_end(mut self, end: u64) -> Self {
        self.rules.address_end = end;
        self
    }
}

shared_options!(ModelOptions);
