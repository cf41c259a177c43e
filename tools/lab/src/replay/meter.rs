//! The cost of a run's driver calls, without those of stamping.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cuvmm::driver::Call;
use cuvmm::driver::model::ModelDriver;
use cuvmm::{CallCounts, Device};

use super::figures::Cost;

pub(crate) struct Meter {
    /// Counts for the stream and all pools, from zero at the start of the run.
    pub(crate) device: Device,
    aside: BTreeMap<Call, Calls>,
    clock: Option<Virtual>,
}

/// A model's clock, and the cost of its calls when the run began. Only the run uses the model.
struct Virtual {
    model: Arc<ModelDriver>,
    begun: Vec<Duration>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Calls {
    pub(crate) count: u64,
    pub(crate) time: Duration,
}

impl Virtual {
    fn new(model: Arc<ModelDriver>) -> Self {
        let begun = Call::ALL.iter().map(|&call| model.spent(call)).collect();
        Self { model, begun }
    }

    /// Returns the cost of calls of a kind since the run began.
    fn spent(&self, call: Call) -> Duration {
        let begun = self.begun.get(call as usize).copied().unwrap_or_default();
        self.model.spent(call).saturating_sub(begun)
    }
}

impl Meter {
    /// Makes a meter of a device with its own counters. On a model, `clock` gives the time of
    /// calls.
    pub(crate) fn new(device: Device, clock: Option<Arc<ModelDriver>>) -> Self {
        Self {
            device,
            aside: BTreeMap::new(),
            clock: clock.map(Virtual::new),
        }
    }

    /// Runs `act` and counts its driver calls by kind.
    fn measure<T>(&self, act: impl FnOnce() -> T) -> (T, BTreeMap<Call, Calls>) {
        let before = self.device.calls();
        let outcome = act();
        (outcome, by_kind(&self.device.calls().since(&before)))
    }

    /// Runs `act` and returns the total cost of its driver calls.
    pub(crate) fn charge<T>(&self, act: impl FnOnce() -> T) -> (T, Calls) {
        let now = || self.clock.as_ref().map(|clock| clock.model.clock());
        let begun = now();
        let (outcome, made) = self.measure(act);
        let mut calls = made.into_values().fold(Calls::default(), Calls::and);
        if let (Some(begun), Some(now)) = (begun, now()) {
            calls.time = now.saturating_sub(begun);
        }
        (outcome, calls)
    }

    /// Runs `act` without counting its copies and their waits. Mapping and the like count: those
    /// are the pool's own calls, if the pool is at work meanwhile.
    pub(crate) fn aside<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let (outcome, made) = self.measure(act);
        for (call, calls) in made.into_iter().filter(|&(call, _)| !maps(call)) {
            let all = self.aside.entry(call).or_default();
            *all = all.and(calls);
        }
        outcome
    }

    pub(crate) fn total(&self) -> Cost {
        let mut cost = Cost::default();
        for (call, Calls { count, time }) in by_kind(&self.device.calls()) {
            let aside = self.aside.get(&call).copied().unwrap_or_default();
            let count = count.saturating_sub(aside.count);
            let time = match &self.clock {
                Some(clock) => clock.spent(call),
                None => time.saturating_sub(aside.time),
            };
            cost.calls += count;
            cost.time += time;
            cost.by_call.insert(call, (count, time));
        }
        cost
    }
}

impl Calls {
    fn and(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            time: self.time + other.time,
        }
    }
}

fn by_kind(counts: &CallCounts) -> BTreeMap<Call, Calls> {
    let each = counts.iter();
    each.map(|(call, count, time)| (call, Calls { count, time }))
        .collect()
}

fn maps(call: Call) -> bool {
    matches!(
        call,
        Call::MemAddressReserve
            | Call::MemAddressFree
            | Call::MemCreate
            | Call::MemRelease
            | Call::MemMap
            | Call::MemUnmap
            | Call::MemSetAccess
    )
}
