//! The run of a plan: its steps are carried out with the library's types, timed and counted, and
//! everything is released at the end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::asked::{Asked, Counted};
use super::check::Act;
use super::clock::Clock;
use super::report::{CallsMade, Ending, Failure, InUse, Peak, Report, StepReport};
use super::stripe::striped;
use super::things::device_of;
use crate::calls::CallCounts;
use crate::device::Device;
use crate::error::{ArgumentError, Error, PlanError, PlanProblem};
use crate::own::{Access, AccessGrant, CloseRefusal, Mapping, Physical, Reservation};
use crate::region::Region;

/// Carries out the acts on the devices, and releases everything.
pub(super) fn run(acts: &[Act<'_>], devices: &[Device], clock: &dyn Clock) -> Report {
    let devices = counted_together(devices);
    let mut run = Run {
        devices: &devices,
        clock,
        made: BTreeMap::new(),
        in_use: InUse::default(),
    };
    let mut steps = Vec::with_capacity(acts.len());
    let mut peak = Peak::default();
    let mut failure = None;
    for (act, step) in acts.iter().zip(1..) {
        let before = run.held_by(act);
        let (outcome, calls, time) = run.timed(|run| run.act(act, step));
        run.in_use = run.in_use.changed(&before, &run.held_by(act));
        let in_use = run.in_use;
        let report = StepReport {
            step,
            calls,
            time: if matches!(act, Act::Wait(_)) {
                Duration::ZERO
            } else {
                time
            },
            in_use,
        };
        peak.note(&in_use);
        match outcome {
            Ok(()) => steps.push(report),
            Err(error) => {
                failure = Some(Failure {
                    reached: report,
                    error,
                });
                break;
            }
        }
    }
    let (refusal, calls, time) = run.timed(Run::end);
    let ending = Ending {
        calls,
        time,
        refusal,
    };
    Report {
        steps,
        failure,
        peak,
        ending,
    }
}

/// The state of a run.
struct Run<'a> {
    devices: &'a [Device],
    clock: &'a dyn Clock,
    made: BTreeMap<&'a str, Made>,
    /// The total that is held, updated with each step, so that no step has to visit everything that
    /// was made.
    in_use: InUse,
}

/// The object that a name stands for.
enum Made {
    /// Addresses with mappings in them, by offset.
    Addresses {
        // Dropped in this order.
        mappings: BTreeMap<u64, Mapping>,
        reservation: Reservation,
    },
    Committed(Box<RegionRun>),
    Physical {
        asked: u64,
        physical: Physical,
    },
}

/// A region, and the bytes that were requested in it.
struct RegionRun {
    region: Region,
    asked: Asked,
    committed: Counted,
    /// The end of the memory that growth has committed from the first byte on.
    grown: u64,
}

/// Reserves addresses, for mappings or for a region.
fn reserved(device: &Device, size: u64, by_hand: bool) -> Result<Made, Error> {
    if by_hand {
        return Ok(Made::Addresses {
            mappings: BTreeMap::new(),
            reservation: Reservation::new(device, size)?,
        });
    }
    let region = Region::reserve(device, size)?;
    Ok(Made::Committed(Box::new(RegionRun::new(region))))
}

impl<'a> Run<'a> {
    /// Runs `act`, and returns its calls and its time.
    fn timed<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> (T, CallsMade, Duration) {
        // All devices share the counters of one.
        let counters = self.devices.first();
        let before = counters.map(Device::calls);
        let begun = self.clock.now();
        let outcome = act(self);
        let took = self.clock.now().saturating_sub(begun);
        let made = counters
            .zip(before)
            .map(|(device, before)| device.calls().since(&before));
        let calls = made.iter().flat_map(CallCounts::iter);
        let calls = calls.map(|(call, count, _)| (call, count)).collect();
        (outcome, calls, took)
    }

    fn act(&mut self, act: &Act<'a>, step: usize) -> Result<(), Error> {
        match *act {
            Act::Reserve {
                name,
                size,
                device,
                by_hand,
            } => {
                let device = self.device(step, device)?;
                self.made.insert(name, reserved(device, size, by_hand)?);
            }
            Act::Create {
                name,
                asked,
                size,
                device,
            } => {
                let physical = Physical::new(self.device(step, device)?, size)?;
                self.made.insert(name, Made::Physical { asked, physical });
            }
            Act::Map {
                physical,
                within,
                offset,
                ref access,
            } => self.map(step, physical, (within, offset), access)?,
            Act::Unmap { within, offset } => self.unmap(step, within, offset)?,
            Act::Commit {
                within,
                ref range,
                ref asked,
            } => self.region_run(step, within)?.commit(range, asked)?,
            Act::Grow { within, to, by } => self.region_run(step, within)?.grow(to, by)?,
            Act::Decommit { within, ref range } => {
                self.region_run(step, within)?.decommit(range.clone())?;
            }
            Act::Stripe {
                name,
                asked,
                size,
                unit,
                devices,
                ref access,
            } => {
                let mut region_run = self.striped(step, (size, unit), devices, access)?;
                region_run.asked.add(0..asked);
                self.made
                    .insert(name, Made::Committed(Box::new(region_run)));
            }
            Act::Release { name } => {
                let made = self.made.remove(name).ok_or_else(|| unknown(step, name))?;
                made.close()
                    .map_err(|refusal| refused(step, name, refusal))?;
            }
            Act::Wait(time) => self.clock.wait(time),
        }
        Ok(())
    }

    fn map(
        &mut self,
        step: usize,
        physical: &str,
        (within, offset): (&str, u64),
        access: &[usize],
    ) -> Result<(), Error> {
        let access = self.access(step, access)?;
        let memory = match self.made.get(physical) {
            Some(Made::Physical { physical, .. }) => physical.clone(),
            _ => return Err(unknown(step, physical)),
        };
        let Some(Made::Addresses {
            mappings,
            reservation,
        }) = self.made.get_mut(within)
        else {
            return Err(unknown(step, within));
        };
        let mapping = reservation.map(offset, &memory)?;
        mapping.set_access(&access)?;
        mappings.insert(offset, mapping);
        Ok(())
    }

    fn unmap(&mut self, step: usize, within: &str, offset: u64) -> Result<(), Error> {
        let mapping = match self.made.get_mut(within) {
            Some(Made::Addresses { mappings, .. }) => mappings.remove(&offset),
            _ => None,
        };
        let mapping = mapping.ok_or_else(|| unknown(step, within))?;
        let closed = mapping.close().map_err(|failed| failed.reason);
        closed.map_err(|refusal| refused(step, within, refusal))?;
        Ok(())
    }

    fn striped(
        &self,
        step: usize,
        sizes: (u64, u64),
        devices: &[usize],
        access: &[usize],
    ) -> Result<RegionRun, Error> {
        let named = |devices: &[usize]| {
            let found = devices.iter().map(|&device| self.device(step, device));
            found.collect::<Result<Vec<_>, _>>()
        };
        let (places, users) = (named(devices)?, named(access)?);
        let (home, guests) = users
            .split_first()
            .ok_or_else(|| PlanError::new(step, None, ArgumentError::Zero("devices")))?;
        let mut region_run = RegionRun::new(striped(home, guests, &places, sizes)?);
        region_run.committed.add(0..region_run.region.size());
        Ok(region_run)
    }

    fn device(&self, step: usize, device: usize) -> Result<&'a Device, PlanError> {
        device_of(self.devices, step, device)
    }

    fn access(&self, step: usize, devices: &[usize]) -> Result<Vec<AccessGrant>, PlanError> {
        let one = |&device: &usize| {
            let device = self.device(step, device)?;
            Ok(AccessGrant::new(device, Access::ReadWrite))
        };
        devices.iter().map(one).collect()
    }

    fn region_run(&mut self, step: usize, name: &str) -> Result<&mut RegionRun, Error> {
        match self.made.get_mut(name) {
            Some(Made::Committed(region_run)) => Ok(region_run),
            _ => Err(unknown(step, name)),
        }
    }

    /// Returns what the name holds that an act changes.
    fn held_by(&self, act: &Act<'_>) -> InUse {
        let made = act.changes().and_then(|name| self.made.get(name));
        made.map(Made::in_use).unwrap_or_default()
    }

    /// Releases everything: mappings first, then physicals. Returns the reason of the first
    /// failure.
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

impl RegionRun {
    fn new(region: Region) -> Self {
        Self {
            asked: Asked::new(region.device().granule()),
            committed: Counted::default(),
            grown: 0,
            region,
        }
    }

    fn commit(&mut self, range: &Range<u64>, asked: &Range<u64>) -> Result<(), Error> {
        self.region.commit(range.clone())?;
        self.committed.add(range.clone());
        self.asked.add(asked.clone());
        Ok(())
    }

    /// Grows as a container does that requests `by` bytes at a time.
    fn grow(&mut self, to: u64, by: u64) -> Result<(), Error> {
        let granule = self.region.device().granule();
        let whole = |bytes: u64| granule.round_up(bytes).unwrap_or(self.region.size());
        let has = self.asked.prefix();
        let mut held = whole(has);
        if self.region.is_committed(0..self.grown) {
            held = held.max(self.grown);
        }
        while held < to {
            // All requests up to this size fit in the memory that is there.
            let fits = (held - has) / by;
            let need = by.saturating_mul(fits + 1).saturating_add(has).min(to);
            let need = granule.round_up(need).unwrap_or(self.region.size());
            held = self.region.grow(held, need)?;
            self.grown = held;
            self.committed.add(0..held);
            self.asked.add(0..held.min(to));
        }
        self.asked.add(0..to);
        Ok(())
    }

    fn decommit(&mut self, range: Range<u64>) -> Result<(), Error> {
        let mut end = range.end;
        // Memory that is precommitted after the last requested byte is released with it.
        if self.asked.end() <= range.end {
            end = end.max(self.grown);
            self.grown = self.grown.min(range.start);
        }
        self.region.decommit_after(range.start..end, &[])?;
        self.asked.remove(range.start..end);
        self.committed.remove(range.start..end);
        self.region.purge()?;
        Ok(())
    }
}

impl Made {
    fn in_use(&self) -> InUse {
        let none = InUse::default();
        match self {
            Self::Addresses {
                mappings,
                reservation,
            } => InUse {
                mappings: mappings.len() as u64,
                addresses: reservation.size(),
                ..none
            },
            Self::Committed(region_run) => {
                let RegionRun { region, asked, .. } = &**region_run;
                let (bytes, covered) = (asked.bytes(), asked.covered());
                let committed = region_run.committed.bytes();
                InUse {
                    asked: bytes,
                    padding: covered - bytes,
                    precommitted: committed - covered,
                    kept: region.held() - committed,
                    mappings: region.mappings(),
                    addresses: region.size(),
                }
            }
            Self::Physical { asked, physical } => InUse {
                asked: *asked,
                padding: physical.size() - asked,
                ..none
            },
        }
    }

    /// Releases it. A failed release is tried once more, and then counted as a failed drop.
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
            Self::Committed(region_run) => {
                region_run.region.close().map_err(|failed| failed.reason)
            }
            Self::Physical { physical, .. } => physical.close().map_err(|failed| failed.reason),
        }
    }
}

/// Returns the devices with counters of their own, which all of them share: the calls of a step are
/// read from one set of counters, however many devices there are.
fn counted_together(devices: &[Device]) -> Vec<Device> {
    let counters = devices.first().map(Device::with_own_counters);
    let counters = counters.iter();
    counters
        .flat_map(|counters| devices.iter().map(|device| device.counted_with(counters)))
        .collect()
}

/// Returns the error for a name that the check found to exist: an error instead of a panic.
fn unknown(step: usize, name: &str) -> Error {
    PlanError::new(step, Some(name), PlanProblem::UnknownName).into()
}

fn refused(step: usize, name: &str, refusal: CloseRefusal) -> Error {
    match refusal {
        CloseRefusal::Call(cause) => cause.into(),
        CloseRefusal::InUse => PlanError::new(step, Some(name), PlanProblem::StillMapped).into(),
    }
}
