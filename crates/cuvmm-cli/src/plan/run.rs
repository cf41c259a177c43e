//! The run of a plan: executes the steps with the library's types, times and counts them, and
//! releases everything at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use cuvmm::error::{ArgumentError, MemoryError};
use cuvmm::{
    Access, AccessGrant, CallCounts, CloseRefusal, Device, Error, Layout, Mapping, Physical, Place,
    Region, Reservation,
};
use cuvmm_command::watch::Watch;

use super::committed::{Committed, rounded};
use super::held::{Held, Peak};
use super::step::Step;

/// Numbers of driver calls by function, including failed ones.
pub(super) type Calls = BTreeMap<&'static str, u64>;

#[derive(Debug)]
pub(super) struct Took {
    pub(super) calls: Calls,
    pub(super) time: Duration,
}

#[derive(Debug)]
pub(super) struct Report {
    /// The steps that were begun, each with the resources held after it. A wait takes no time.
    pub(super) steps: Vec<(Took, Held)>,
    /// The error of the last step, if any. A failed growth keeps the memory it has committed; any
    /// other failed step has changed nothing.
    pub(super) failure: Option<Error>,
    pub(super) peak: Peak,
    /// The release of everything at the end.
    pub(super) ending: Took,
    /// The first failure of that release.
    pub(super) refusal: Option<CloseRefusal>,
}

/// A step that is wrong on every device.
#[derive(Debug)]
pub(super) struct Wrong {
    /// The number of the step, from 1.
    pub(super) step: usize,
    problem: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: {}", self.step, self.problem)
    }
}

enum Stop {
    Wrong(String),
    Error(Error),
}

impl<E: Into<Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// Returns `true` for errors of the plan itself: no device could execute the step.
const fn is_wrong(error: &Error) -> bool {
    use MemoryError::{NotCommitted, Overlap};
    matches!(
        error,
        Error::Argument(_) | Error::Memory(Overlap { .. } | NotCommitted(_))
    )
}

/// Executes the steps until one fails, and then releases everything.
///
/// # Errors
/// The first wrong step; everything is released then too.
pub(super) fn run(steps: &[Step], devices: &[Device], watch: &Watch) -> Result<Report, Wrong> {
    let devices: Vec<_> = devices.iter().map(Device::with_own_counters).collect();
    let mut run = Run {
        devices: &devices,
        watch,
        made: BTreeMap::new(),
        held: Held::default(),
    };
    let mut begun = Vec::with_capacity(steps.len());
    let mut peak = Peak::default();
    let mut failure = None;
    for (step, to_map_in) in steps.iter().zip(to_map_in(steps)) {
        let before = run.held_by(step);
        let (outcome, mut took) = run.timed(|run| run.step(step, to_map_in));
        if let Step::Wait(_) = step {
            took.time = Duration::ZERO;
        }
        run.held = run.held.changed(&before, &run.held_by(step));
        peak.note(&run.held);
        begun.push((took, run.held));
        let problem = match outcome {
            Ok(()) => continue,
            Err(Stop::Wrong(problem)) => problem,
            Err(Stop::Error(error)) if is_wrong(&error) => {
                let name = step.changes().map(|name| format!("{name:?}: "));
                format!("{}{error}", name.unwrap_or_default())
            }
            Err(Stop::Error(error)) => {
                failure = Some(error);
                break;
            }
        };
        let step = begun.len();
        return Err(Wrong { step, problem });
    }
    let (refusal, ending) = run.timed(Run::end);
    Ok(Report {
        steps: begun,
        failure,
        peak,
        ending,
        refusal,
    })
}

/// Returns, for each step, `true` if it reserves addresses that later steps map physicals in.
fn to_map_in(steps: &[Step]) -> Vec<bool> {
    let mut mapped: BTreeSet<&str> = BTreeSet::new();
    let mut found: Vec<bool> = steps
        .iter()
        .rev()
        .map(|step| match step {
            Step::Map { within, .. } | Step::Unmap { within, .. } => mapped.insert(within),
            other => other.changes().is_some_and(|name| mapped.remove(name)),
        })
        .collect();
    found.reverse();
    found
}

struct Run<'a> {
    devices: &'a [Device],
    watch: &'a Watch,
    made: BTreeMap<&'a str, Made>,
    /// The sum over `made`. Each step updates it, so that no step visits everything.
    held: Held,
}

enum Made {
    /// Addresses with mappings in them, by offset.
    Addresses {
        // Dropped in this order.
        mappings: BTreeMap<u64, Mapping>,
        reservation: Reservation,
    },
    Committed(Box<Committed>),
    Physical {
        asked: u64,
        physical: Physical,
    },
}

const TO_MAP_IN: &str = "a range to map in";
const TO_COMMIT_IN: &str = "a range to commit in";
const A_PHYSICAL: &str = "physical memory";

impl<'a> Run<'a> {
    fn timed<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> (T, Took) {
        let counts =
            |run: &Self| -> Vec<CallCounts> { run.devices.iter().map(Device::calls).collect() };
        let before = counts(self);
        let begun = self.watch.now();
        let outcome = act(self);
        let time = self.watch.now().saturating_sub(begun);
        let mut calls = Calls::new();
        for (after, before) in counts(self).iter().zip(&before) {
            for (call, count, _) in after.since(before).iter() {
                *calls.entry(call.name()).or_default() += count;
            }
        }
        (outcome, Took { calls, time })
    }

    fn step(&mut self, step: &'a Step, to_map_in: bool) -> Result<(), Stop> {
        match step {
            Step::Reserve { name, size, device } => {
                let device = self.device(*device)?;
                let made = if to_map_in {
                    Made::Addresses {
                        mappings: BTreeMap::new(),
                        reservation: Reservation::new(device, rounded(size.0, device))?,
                    }
                } else {
                    let region = Region::reserve(device, size.0)?;
                    Made::Committed(Box::new(Committed::new(region)))
                };
                self.name(name, made)?;
            }
            Step::Create { name, size, device } => {
                let (asked, device) = (size.0, self.device(*device)?);
                let physical = Physical::new(device, rounded(asked, device))?;
                self.name(name, Made::Physical { asked, physical })?;
            }
            Step::Map {
                physical,
                within,
                at,
                access,
            } => self.map(physical, within, at.0, access)?,
            Step::Unmap { within, at } => self.unmap(within, at.0)?,
            Step::Commit { within, at, size } => {
                self.committed(within)?.commit(at.map(|at| at.0), size.0)?;
            }
            Step::Grow { within, to, by } => self.committed(within)?.grow(to.0, by.0)?,
            Step::Decommit { within, at, size } => {
                self.committed(within)?.decommit(at.0, size.0)?;
            }
            Step::Stripe {
                name,
                size,
                unit,
                devices,
                access,
            } => {
                let mut made = Committed::new(self.striped(size.0, unit.0, devices, access)?);
                made.commit(Some(0), size.0)?;
                self.name(name, Made::Committed(Box::new(made)))?;
            }
            Step::Release(name) => self.release(name)?,
            Step::Wait(span) => self.watch.wait(span.time),
        }
        Ok(())
    }

    /// Names an object, unless the name is in use.
    fn name(&mut self, name: &'a str, made: Made) -> Result<(), Stop> {
        if self.made.contains_key(name) {
            return Err(wrong(name, "the name is in use already"));
        }
        self.made.insert(name, made);
        Ok(())
    }

    fn map(
        &mut self,
        physical: &str,
        within: &str,
        offset: u64,
        access: &[usize],
    ) -> Result<(), Stop> {
        let memory = match self.made.get(physical) {
            Some(Made::Physical { physical, .. }) => physical.clone(),
            other => return Err(mistaken(physical, other, A_PHYSICAL)),
        };
        let access = match access {
            [] => vec![AccessGrant::new(memory.place(), Access::ReadWrite)],
            named => {
                let named = self.named(named)?.into_iter();
                named
                    .map(|device| AccessGrant::new(device, Access::ReadWrite))
                    .collect()
            }
        };
        let (mappings, reservation) = self.addresses(within)?;
        let mapping = reservation.map(offset, &memory)?;
        mapping.set_access(&access)?;
        mappings.insert(offset, mapping);
        Ok(())
    }

    fn unmap(&mut self, within: &str, offset: u64) -> Result<(), Stop> {
        let (mappings, _) = self.addresses(within)?;
        let missing = MemoryError::NotCommitted(offset..offset.saturating_add(1));
        let mapping = mappings.remove(&offset).ok_or(missing)?;
        let closed = mapping.close().map_err(|failed| failed.reason);
        closed
            .map(drop)
            .map_err(|refusal| refused(within, &refusal))
    }

    fn release(&mut self, name: &str) -> Result<(), Stop> {
        let made = self.made.remove(name);
        let made = made.ok_or_else(|| mistaken(name, None, ""))?;
        made.close().map_err(|refusal| refused(name, &refusal))
    }

    /// Reserves a region striped over the devices, `unit` bytes on each in turn.
    fn striped(
        &self,
        size: u64,
        unit: u64,
        devices: &[usize],
        access: &[usize],
    ) -> Result<Region, Stop> {
        let (places, users) = (self.named(devices)?, self.named(access)?);
        let (home, guests) = match &users[..] {
            [] => (places.first(), &[][..]),
            [home, guests @ ..] => (Some(home), guests),
        };
        let home = *home.ok_or(ArgumentError::Zero("the number of devices"))?;
        let layout = Layout::round_robin(places.iter().map(|&device| Place::from(device)), unit);
        let mut builder = Region::builder(home, size).layout(layout);
        for guest in guests.iter().filter(|&&guest| guest != home) {
            builder = builder.open_to(guest, Access::ReadWrite);
        }
        Ok(builder.reserve()?)
    }

    fn device(&self, device: usize) -> Result<&'a Device, ArgumentError> {
        let (start, len) = (device as u64, self.devices.len() as u64);
        let (what, end) = ("devices", start.saturating_add(1));
        self.devices.get(device).ok_or(ArgumentError::OutOfRange {
            what,
            start,
            end,
            len,
        })
    }

    fn named(&self, devices: &[usize]) -> Result<Vec<&'a Device>, ArgumentError> {
        devices.iter().map(|&device| self.device(device)).collect()
    }

    fn addresses(
        &mut self,
        name: &str,
    ) -> Result<(&mut BTreeMap<u64, Mapping>, &mut Reservation), Stop> {
        match self.made.get_mut(name) {
            Some(Made::Addresses {
                mappings,
                reservation,
            }) => Ok((mappings, reservation)),
            other => Err(mistaken(name, other.as_deref(), TO_MAP_IN)),
        }
    }

    fn committed(&mut self, name: &str) -> Result<&mut Committed, Stop> {
        match self.made.get_mut(name) {
            Some(Made::Committed(committed)) => Ok(committed),
            other => Err(mistaken(name, other.as_deref(), TO_COMMIT_IN)),
        }
    }

    /// Returns the resources of the object that a step changes.
    fn held_by(&self, step: &Step) -> Held {
        let made = step.changes().and_then(|name| self.made.get(name));
        made.map(Made::held).unwrap_or_default()
    }

    /// Releases everything: mappings first, then physicals. Returns the first failure.
    fn end(&mut self) -> Option<CloseRefusal> {
        let made = std::mem::take(&mut self.made).into_values();
        let (physicals, others): (Vec<_>, Vec<_>) =
            made.partition(|made| matches!(made, Made::Physical { .. }));
        let mut refusal = None;
        for made in others.into_iter().chain(physicals) {
            refusal = refusal.or(made.close().err());
        }
        refusal
    }
}

impl Made {
    const fn is(&self) -> &'static str {
        match self {
            Self::Addresses { .. } => TO_MAP_IN,
            Self::Committed(_) => TO_COMMIT_IN,
            Self::Physical { .. } => A_PHYSICAL,
        }
    }

    fn held(&self) -> Held {
        match self {
            Self::Addresses {
                mappings,
                reservation,
            } => Held {
                mappings: mappings.len() as u64,
                addresses: reservation.size(),
                ..Held::default()
            },
            Self::Committed(committed) => committed.held(),
            Self::Physical { asked, physical } => Held {
                asked: *asked,
                padding: physical.size() - asked,
                memory: physical.size(),
                ..Held::default()
            },
        }
    }

    /// Releases the object. A failed release is tried once more, and then counted as a failed drop.
    fn close(self) -> Result<(), CloseRefusal> {
        match self {
            Self::Addresses {
                mappings,
                reservation,
            } => {
                let mut refusal = None;
                for mapping in mappings.into_values() {
                    let closed = mapping.close().map_err(|failed| failed.reason);
                    refusal = refusal.or(closed.err());
                }
                let freed = reservation.close().map_err(|failed| failed.reason);
                refusal.or(freed.err()).map_or(Ok(()), Err)
            }
            Self::Committed(committed) => committed.close(),
            Self::Physical { physical, .. } => physical.close().map_err(|failed| failed.reason),
        }
    }
}

fn wrong(name: &str, problem: &str) -> Stop {
    Stop::Wrong(format!("{name:?}: {problem}"))
}

/// Returns the error for a name that is not defined, or means another kind of object than the step
/// needs.
fn mistaken(name: &str, made: Option<&Made>, needed: &str) -> Stop {
    match made.map(Made::is) {
        None => wrong(name, "the name is not defined here"),
        Some(is) => wrong(name, &format!("it is {is}, but the step needs {needed}")),
    }
}

fn refused(name: &str, refusal: &CloseRefusal) -> Stop {
    match refusal {
        CloseRefusal::Call(cause) => (*cause).into(),
        _ => wrong(name, "it is still mapped: unmap it first"),
    }
}

#[cfg(test)]
mod tests;
