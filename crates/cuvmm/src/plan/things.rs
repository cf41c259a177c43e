//! The objects that names stand for while a plan is checked.

use std::collections::BTreeMap;
use std::ops::Range;

use super::asked::Asked;
use crate::device::Device;
use crate::error::{ArgumentError, PlanError, PlanProblem};
use crate::size::{Granularity, range_within};

/// The kind of object that a name stands for.
pub(super) enum Thing<'a> {
    Addresses {
        size: u64,
        device: usize,
        /// The index of the act that reserves them.
        act: usize,
        used: Use<'a>,
    },
    Physical {
        size: u64,
        device: usize,
        mappings: usize,
    },
    Striped,
}

/// The use of addresses, which only later steps determine.
pub(super) enum Use<'a> {
    None,
    Mapped(Places<'a>),
    Committed(Asked),
}

impl Thing<'_> {
    const fn is(&self) -> &'static str {
        match self {
            Self::Addresses { used, .. } => match used {
                Use::None => "a range of addresses",
                Use::Mapped(_) => "a range that physicals are mapped in",
                Use::Committed(_) => "a range that is committed in",
            },
            Self::Physical { .. } => "physical memory",
            Self::Striped => "a striped range",
        }
    }
}

pub(super) const TO_MAP_IN: &str = "a range to map in";
pub(super) const TO_COMMIT_IN: &str = "a range to commit in";
pub(super) const A_PHYSICAL: &str = "physical memory";

/// The size and name of each mapped physical, by offset.
pub(super) type Places<'a> = BTreeMap<u64, (u64, &'a str)>;

/// All names at one step.
pub(super) struct Things<'a> {
    devices: &'a [Device],
    /// The number of the step that is being checked, from 1.
    pub(super) step: usize,
    by_name: BTreeMap<&'a str, Thing<'a>>,
    /// The acts whose addresses later steps map physicals in.
    pub(super) by_hand: Vec<usize>,
}

/// Addresses to commit in.
pub(super) struct Committable<'c> {
    pub(super) size: u64,
    pub(super) granule: Granularity,
    pub(super) asked: &'c mut Asked,
}

impl<'a> Things<'a> {
    pub(super) const fn new(devices: &'a [Device]) -> Self {
        Self {
            devices,
            step: 0,
            by_name: BTreeMap::new(),
            by_hand: Vec::new(),
        }
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Thing<'a>> {
        self.by_name.remove(name)
    }

    /// Increments or decrements the number of a physical's mappings.
    pub(super) fn count_mapping(&mut self, physical: &str, more: bool) {
        if let Some(Thing::Physical { mappings, .. }) = self.by_name.get_mut(physical) {
            *mappings = if more { *mappings + 1 } else { *mappings - 1 };
        }
    }

    pub(super) fn device(&self, device: usize) -> Result<&'a Device, PlanError> {
        device_of(self.devices, self.step, device)
    }

    pub(super) fn granule(&self, device: usize) -> Result<Granularity, PlanError> {
        Ok(self.device(device)?.granule())
    }

    /// Creates an error about the current step and a name in it.
    pub(super) fn refuse(&self, name: Option<&str>, problem: impl Into<PlanProblem>) -> PlanError {
        PlanError::new(self.step, name, problem)
    }

    pub(super) fn not_zero(&self, number: u64, what: &'static str) -> Result<(), PlanError> {
        ArgumentError::not_zero(what, number).map_err(|error| self.refuse(None, error))
    }

    /// Rounds a size up to whole granules of a device.
    pub(super) fn rounded(&self, size: u64, device: usize) -> Result<u64, PlanError> {
        let granule = self.granule(device)?;
        self.not_zero(size, "the size")?;
        let whole = granule.whole("bytes", size);
        whole.map_err(|error| self.refuse(None, error))
    }

    pub(super) fn name(&mut self, name: &'a str, thing: Thing<'a>) -> Result<(), PlanError> {
        if self.by_name.contains_key(name) {
            return Err(self.refuse(Some(name), PlanProblem::NameTaken));
        }
        self.by_name.insert(name, thing);
        Ok(())
    }

    pub(super) fn thing(&self, name: &str) -> Result<&Thing<'a>, PlanError> {
        self.by_name.get(name).ok_or_else(|| self.unknown(name))
    }

    pub(super) fn unknown(&self, name: &str) -> PlanError {
        self.refuse(Some(name), PlanProblem::UnknownName)
    }

    pub(super) fn wrong(&self, name: &str, thing: &Thing<'_>, needed: &'static str) -> PlanError {
        let is = thing.is();
        self.refuse(Some(name), PlanProblem::WrongKind { is, needed })
    }

    /// Returns the size of addresses to map in, and the ranges that are occupied.
    pub(super) fn mapped(&mut self, name: &str) -> Result<(u64, &mut Places<'a>), PlanError> {
        let fits = |used: &Use<'_>| !matches!(used, Use::Committed(_));
        let (act, size) = self.addresses(name, fits, TO_MAP_IN)?;
        self.by_hand.push(act);
        let unknown = self.unknown(name);
        let Some(Thing::Addresses { used, .. }) = self.by_name.get_mut(name) else {
            return Err(unknown);
        };
        if let Use::None = used {
            *used = Use::Mapped(BTreeMap::new());
        }
        match used {
            Use::Mapped(places) => Ok((size, places)),
            _ => Err(unknown),
        }
    }

    /// Returns addresses to commit in.
    pub(super) fn committed(&mut self, name: &str) -> Result<Committable<'_>, PlanError> {
        let fits = |used: &Use<'_>| !matches!(used, Use::Mapped(_));
        let (_, size) = self.addresses(name, fits, TO_COMMIT_IN)?;
        let granule = self.granule_of(name)?;
        let unknown = self.unknown(name);
        let Some(Thing::Addresses { used, .. }) = self.by_name.get_mut(name) else {
            return Err(unknown);
        };
        if let Use::None = used {
            *used = Use::Committed(Asked::new(granule));
        }
        match used {
            Use::Committed(asked) => Ok(Committable {
                size,
                granule,
                asked,
            }),
            _ => Err(unknown),
        }
    }

    /// Returns the index of the act that reserves addresses, and their size.
    pub(super) fn addresses(
        &self,
        name: &str,
        fits: impl Fn(&Use<'_>) -> bool,
        needed: &'static str,
    ) -> Result<(usize, u64), PlanError> {
        match self.thing(name)? {
            Thing::Addresses {
                act, size, used, ..
            } if fits(used) => Ok((*act, *size)),
            other => Err(self.wrong(name, other, needed)),
        }
    }

    pub(super) fn granule_of(&self, name: &str) -> Result<Granularity, PlanError> {
        match self.thing(name)? {
            Thing::Addresses { device, .. } => self.granule(*device),
            other => Err(self.wrong(name, other, TO_COMMIT_IN)),
        }
    }

    pub(super) fn aligned(&self, name: &str, offset: u64) -> Result<(), PlanError> {
        let granule = self.granule_of(name)?;
        ArgumentError::aligned("an offset in bytes", offset, granule.bytes())
            .map_err(|error| self.refuse(Some(name), error))
    }

    /// Returns the whole granules of a range in addresses to commit in.
    pub(super) fn range(
        &mut self,
        name: &str,
        offset: u64,
        size: u64,
    ) -> Result<Range<u64>, PlanError> {
        let committable = self.committed(name)?;
        let (within, granule) = (committable.size, committable.granule);
        self.not_zero(size, "the size")?;
        self.aligned(name, offset)?;
        let whole = granule.whole("bytes", size);
        let whole = whole.map_err(|error| self.refuse(None, error))?;
        range_within(offset, whole, within)
            .ok_or_else(|| self.refuse(Some(name), ArgumentError::bytes(offset, whole, within)))
    }
}

/// Returns the device at an index that a step names.
pub(super) fn device_of(
    devices: &[Device],
    step: usize,
    device: usize,
) -> Result<&Device, PlanError> {
    devices.get(device).ok_or_else(|| {
        let (start, len) = (device as u64, devices.len() as u64);
        let (what, end) = ("devices", start + 1);
        let outside = ArgumentError::OutOfRange {
            what,
            start,
            end,
            len,
        };
        PlanError::new(step, None, outside)
    })
}
