//! The check of a plan: names, sizes, ranges. Makes no driver call. The result is a list of acts in
//! which everything is resolved.

use std::ops::Range;
use std::time::Duration;

use super::step::Step;
use super::things::{A_PHYSICAL, Thing, Things, Use};
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError, PlanError, PlanProblem};
use crate::size::range_within;

/// A step with its sizes rounded and its ranges resolved.
#[derive(Debug)]
pub(super) enum Act<'a> {
    /// Reserves addresses, to map in or to commit in.
    Reserve {
        name: &'a str,
        size: u64,
        device: usize,
        by_hand: bool,
    },
    Create {
        name: &'a str,
        asked: u64,
        size: u64,
        device: usize,
    },
    Map {
        physical: &'a str,
        within: &'a str,
        offset: u64,
        access: Vec<usize>,
    },
    Unmap {
        within: &'a str,
        offset: u64,
    },
    Commit {
        within: &'a str,
        range: Range<u64>,
        asked: Range<u64>,
    },
    Grow {
        within: &'a str,
        to: u64,
        by: u64,
    },
    Decommit {
        within: &'a str,
        range: Range<u64>,
    },
    Stripe {
        name: &'a str,
        asked: u64,
        size: u64,
        unit: u64,
        devices: &'a [usize],
        access: Vec<usize>,
    },
    Release {
        name: &'a str,
    },
    Wait(Duration),
}

impl<'a> Act<'a> {
    /// Returns the name whose memory, mappings or addresses it changes.
    pub(super) const fn changes(&self) -> Option<&'a str> {
        match *self {
            Self::Reserve { name, .. }
            | Self::Create { name, .. }
            | Self::Stripe { name, .. }
            | Self::Release { name } => Some(name),
            Self::Map { within, .. }
            | Self::Unmap { within, .. }
            | Self::Commit { within, .. }
            | Self::Grow { within, .. }
            | Self::Decommit { within, .. } => Some(within),
            Self::Wait(_) => None,
        }
    }
}

/// Checks all steps.
pub(super) fn check<'a>(
    steps: &'a [Step],
    devices: &'a [Device],
) -> Result<Vec<Act<'a>>, PlanError> {
    if let Some((first, others)) = devices.split_first() {
        let stranger = others.iter().position(|other| !other.same_driver(first));
        if stranger.is_some() {
            let problem = ArgumentError::OTHER_DRIVER.into();
            return Err(PlanError {
                step: None,
                name: None,
                problem,
            });
        }
    }
    let mut check = Check {
        things: Things::new(devices),
    };
    let mut acts = Vec::with_capacity(steps.len());
    for step in steps {
        check.things.step += 1;
        let act = check.step(step, acts.len())?;
        acts.push(act);
    }
    for index in check.things.by_hand {
        if let Some(Act::Reserve { by_hand, .. }) = acts.get_mut(index) {
            *by_hand = true;
        }
    }
    Ok(acts)
}

struct Check<'a> {
    things: Things<'a>,
}

impl<'a> Check<'a> {
    fn step(&mut self, step: &'a Step, act: usize) -> Result<Act<'a>, PlanError> {
        match *step {
            Step::Reserve {
                ref name,
                size,
                device,
            } => self.reserve(name, size, device, act),
            Step::Create {
                ref name,
                size: asked,
                device,
            } => self.create(name, asked, device),
            Step::Map {
                ref physical,
                ref within,
                offset,
                ref access,
            } => self.map(physical, within, offset, access),
            Step::Unmap { ref within, offset } => self.unmap(within, offset),
            Step::Commit {
                ref within,
                offset,
                size,
            } => self.commit(within, offset, size),
            Step::Grow { ref within, to, by } => self.grow(within, to, by),
            Step::Decommit {
                ref within,
                offset,
                size,
            } => self.decommit(within, offset, size),
            Step::Stripe {
                ref name,
                size,
                unit,
                ref devices,
                ref access,
            } => self.stripe(name, (size, unit), devices, access),
            Step::Release { ref name } => self.release(name),
            Step::Wait { time } => Ok(Act::Wait(time)),
        }
    }

    fn reserve(
        &mut self,
        name: &'a str,
        size: u64,
        device: usize,
        act: usize,
    ) -> Result<Act<'a>, PlanError> {
        let size = self.things.rounded(size, device)?;
        let thing = Thing::Addresses {
            size,
            device,
            act,
            used: Use::None,
        };
        self.things.name(name, thing)?;
        Ok(Act::Reserve {
            name,
            size,
            device,
            by_hand: false,
        })
    }

    fn create(&mut self, name: &'a str, asked: u64, device: usize) -> Result<Act<'a>, PlanError> {
        let size = self.things.rounded(asked, device)?;
        let thing = Thing::Physical {
            size,
            device,
            mappings: 0,
        };
        self.things.name(name, thing)?;
        Ok(Act::Create {
            name,
            asked,
            size,
            device,
        })
    }

    fn map(
        &mut self,
        physical: &'a str,
        within: &'a str,
        offset: u64,
        access: &[usize],
    ) -> Result<Act<'a>, PlanError> {
        let step = self.things.step;
        let (bytes, owner) = match self.things.thing(physical)? {
            Thing::Physical { size, device, .. } => (*size, *device),
            other => return Err(self.things.wrong(physical, other, A_PHYSICAL)),
        };
        let access = match access {
            [] => vec![owner],
            named => named.to_vec(),
        };
        for &device in &access {
            self.things.device(device)?;
        }
        let (size, places) = self.things.mapped(within)?;
        let Some(range) = range_within(offset, bytes, size) else {
            let outside = ArgumentError::bytes(offset, bytes, size);
            return Err(PlanError::new(step, Some(within), outside));
        };
        let before = places.range(..range.end).next_back();
        if let Some((&taken, _)) = before.filter(|&(&at, &(size, _))| at + size > offset) {
            let size = bytes;
            let overlap = MemoryError::Overlap {
                offset,
                size,
                taken,
            };
            return Err(PlanError::new(step, Some(within), overlap));
        }
        places.insert(offset, (bytes, physical));
        self.things.aligned(within, offset)?;
        self.things.count_mapping(physical, true);
        Ok(Act::Map {
            physical,
            within,
            offset,
            access,
        })
    }

    fn unmap(&mut self, within: &'a str, offset: u64) -> Result<Act<'a>, PlanError> {
        let missing = MemoryError::NotCommitted(offset..offset.saturating_add(1));
        let missing = self.things.refuse(Some(within), missing);
        let (_, places) = self.things.mapped(within)?;
        let (_, physical) = places.remove(&offset).ok_or(missing)?;
        self.things.count_mapping(physical, false);
        Ok(Act::Unmap { within, offset })
    }

    fn commit(
        &mut self,
        within: &'a str,
        offset: Option<u64>,
        size: u64,
    ) -> Result<Act<'a>, PlanError> {
        let committable = self.things.committed(within)?;
        let behind = committable.granule.round_up(committable.asked.end());
        let offset = offset.or(behind).unwrap_or(committable.size);
        let range = self.things.range(within, offset, size)?;
        let asked = offset..offset + size;
        self.things.committed(within)?.asked.add(asked.clone());
        Ok(Act::Commit {
            within,
            range,
            asked,
        })
    }

    fn grow(&mut self, within: &'a str, to: u64, by: u64) -> Result<Act<'a>, PlanError> {
        self.things.not_zero(by, "bytes of each request")?;
        let step = self.things.step;
        self.things.range(within, 0, to)?;
        let asked = self.things.committed(within)?.asked;
        let has = asked.prefix();
        if to <= has {
            let shrinks = ArgumentError::TooSmall {
                what: "bytes to grow to",
                value: to,
                least: has + 1,
            };
            return Err(PlanError::new(step, Some(within), shrinks));
        }
        asked.add(0..to);
        Ok(Act::Grow { within, to, by })
    }

    fn decommit(&mut self, within: &'a str, offset: u64, size: u64) -> Result<Act<'a>, PlanError> {
        let step = self.things.step;
        let range = self.things.range(within, offset, size)?;
        let committable = self.things.committed(within)?;
        if !committable.asked.covers(&range) {
            return Err(PlanError::new(
                step,
                Some(within),
                MemoryError::NotCommitted(range.clone()),
            ));
        }
        committable.asked.remove(range.clone());
        Ok(Act::Decommit { within, range })
    }

    fn stripe(
        &mut self,
        name: &'a str,
        (asked, unit): (u64, u64),
        devices: &'a [usize],
        access: &[usize],
    ) -> Result<Act<'a>, PlanError> {
        self.things
            .not_zero(devices.len() as u64, "the number of devices")?;
        self.things.not_zero(unit, "a stripe")?;
        let mut size = asked;
        for &device in devices {
            size = size.max(self.things.rounded(asked, device)?);
            let granule = self.things.granule(device)?;
            ArgumentError::aligned("bytes of a stripe", unit, granule.bytes())
                .map_err(|error| self.things.refuse(None, error))?;
        }
        let access = match access {
            [] => devices.iter().take(1).copied().collect(),
            named => named.to_vec(),
        };
        for &device in &access {
            self.things.device(device)?;
        }
        self.things.name(name, Thing::Striped)?;
        Ok(Act::Stripe {
            name,
            asked,
            size,
            unit,
            devices,
            access,
        })
    }

    fn release(&mut self, name: &'a str) -> Result<Act<'a>, PlanError> {
        if let Thing::Physical { mappings: 1.., .. } = self.things.thing(name)? {
            return Err(self.things.refuse(Some(name), PlanProblem::StillMapped));
        }
        if let Some(Thing::Addresses {
            used: Use::Mapped(places),
            ..
        }) = self.things.remove(name)
        {
            places
                .into_values()
                .for_each(|(_, physical)| self.things.count_mapping(physical, false));
        }
        Ok(Act::Release { name })
    }
}
