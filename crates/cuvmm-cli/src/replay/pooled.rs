//! The replay's memory on a device: pools, tenants and blocks of the library, with every granule
//! stamped.
//!
//! Under `static` each model has a pool of its own with an even share of the limit; under
//! `elastic` all models are tenants of one pool. Everything else is the same, so that what differs
//! between two runs is the policy.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use cuvmm::driver::Call;
use cuvmm::driver::model::ModelDriver;
use cuvmm::error::BlockError;
use cuvmm::{Block, CallCounts, Device, Limit, Pool, Stream, Tenant};

use super::figures::Cost;
use super::memory::Memory;
use super::policy::Policy;
#[cfg(test)]
use super::stamps::Verified;
use super::stamps::{self, Bytes};

/// How the memory is to be divided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Division {
    pub(crate) policy: Policy,
    /// Bytes for all models together, whole granules.
    pub(crate) limit: u64,
    /// Bytes that each model can always have under `elastic`, whole granules.
    pub(crate) guarantee: u64,
}

impl Division {
    /// Bytes that one model's memory is limited to.
    pub(crate) fn tenant_limit(&self, models: usize, granule: u64) -> u64 {
        match self.policy {
            Policy::Static => share(self.limit, models, granule),
            Policy::Elastic => self.limit,
        }
    }

    /// The most bytes that one model can have with all others idle.
    fn ceiling(&self, models: usize, granule: u64) -> u64 {
        match self.policy {
            Policy::Static => self.tenant_limit(models, granule),
            Policy::Elastic => self
                .limit
                .saturating_sub(self.guarantee * (models as u64 - 1)),
        }
    }
}

/// Returns the even share of `limit` of one of `models`, in whole granules.
pub(crate) const fn share(limit: u64, models: usize, granule: u64) -> u64 {
    let models = if models == 0 { 1 } else { models as u64 };
    limit / models / granule * granule
}

/// Memory of some models on one device.
pub(crate) struct Pooled {
    granule: u64,
    /// Most granules of one block, the same for every model.
    ceiling: u64,
    stamped: bool,
    costs: Vec<Cost>,
    meter: Meter,
    last_refusal: Option<BlockError>,
    // In the order in which they are to go: tenants before their pools, the stream last.
    tenants: Vec<Tenant>,
    pools: Vec<Pool>,
    stream: Stream,
}

/// A request's block.
pub(crate) struct Held {
    block: Block,
    model: usize,
    request: u64,
    granules: u64,
}

impl Bytes for Block {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(Block::write(self, offset, bytes)?)
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        Ok(Block::read(self, offset, bytes)?)
    }
}

impl Pooled {
    /// Pools and tenants for the models, on a stream of their own. Where the device is a model's,
    /// its clock says what the calls take.
    ///
    /// # Errors
    /// What building pools and registering tenants gives.
    pub(crate) fn new(
        device: &Device,
        models: &[String],
        division: &Division,
        stamped: bool,
        clock: Option<Arc<ModelDriver>>,
    ) -> anyhow::Result<Self> {
        let clock = clock.map(Virtual::new);
        let device = device.with_own_counters();
        let granule = device.granularity();
        let stream = Stream::new(&device)?;
        let limit = division.tenant_limit(models.len(), granule);
        let pool = |bytes| Pool::builder(&device).limit(Limit::Bytes(bytes)).build();
        let guarantee = match division.policy {
            Policy::Static => 0,
            Policy::Elastic => division.guarantee,
        };
        let mut pools = Vec::new();
        let mut tenants = Vec::new();
        for model in models {
            if pools.is_empty() || division.policy == Policy::Static {
                pools.push(pool(limit)?);
            }
            let pool = pools.last().context("a model needs a pool")?;
            tenants.push(
                pool.tenant(model)
                    .guarantee(guarantee)
                    .limit(limit)
                    .register()?,
            );
        }
        let meter = Meter {
            device,
            aside: BTreeMap::new(),
            clock,
        };
        Ok(Self {
            granule,
            ceiling: division.ceiling(models.len(), granule) / granule,
            stamped,
            costs: vec![Cost::default(); models.len()],
            meter,
            last_refusal: None,
            tenants,
            pools,
            stream,
        })
    }

    /// Ends the run: the cost of each model, and of all with the opening and closing of the pools
    /// in it.
    ///
    /// # Errors
    /// Memory that is still in use, a pool that went over its limit, and failures to give back.
    pub(crate) fn finish(self) -> anyhow::Result<(Vec<Cost>, Cost)> {
        for pool in &self.pools {
            let stats = pool.stats();
            let (in_use, peak, limit) = (stats.in_use, stats.peak, stats.limit);
            ensure!(
                in_use == 0,
                "{in_use} bytes are still in use after the last request"
            );
            ensure!(peak <= limit, "a pool of {limit} bytes held {peak}");
        }
        let Self {
            costs,
            meter,
            tenants,
            pools,
            stream,
            ..
        } = self;
        drop(tenants);
        for pool in pools {
            pool.close()?;
        }
        let failures = meter.device.drop_failures();
        ensure!(
            failures == 0,
            "{failures} driver calls failed while memory was given back"
        );
        drop(stream);
        let mut all = meter.total();
        for cost in &costs {
            all.verified.add(cost.verified.clone());
        }
        Ok((costs, all))
    }

    /// Does something for a model, and charges it with the driver calls made.
    fn charged<T>(&mut self, model: usize, act: impl FnOnce(&Tenant, &Stream) -> T) -> T {
        let (outcome, calls) = self
            .meter
            .charge(|| act(&self.tenants[model], &self.stream));
        let cost = &mut self.costs[model];
        cost.calls += calls.count;
        cost.time += calls.time;
        outcome
    }

    /// Returns `None` for memory that does not fit. Every other error ends the run.
    fn fitted<T>(&mut self, outcome: Result<T, BlockError>) -> anyhow::Result<Option<T>> {
        match outcome {
            Ok(fitted) => Ok(Some(fitted)),
            Err(refusal) if refusal.is_shortage() => {
                self.last_refusal = Some(refusal);
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn stamp(&mut self, held: &mut Held, from: u64) -> anyhow::Result<()> {
        if !self.stamped {
            return Ok(());
        }
        let stamps = || {
            stamps::write(
                &mut held.block,
                self.granule,
                held.request,
                from,
                held.granules,
            )
        };
        self.meter
            .aside(stamps)
            .context("a granule cannot be stamped")
    }
}

impl Memory for Pooled {
    type Block = Held;

    fn granule(&self) -> u64 {
        self.granule
    }

    fn ceiling(&self, _model: usize) -> u64 {
        self.ceiling
    }

    fn allocate(
        &mut self,
        model: usize,
        request: u64,
        granules: u64,
        capacity: u64,
    ) -> anyhow::Result<Option<Held>> {
        let size = granules * self.granule;
        let capacity = capacity * self.granule;
        let outcome = self.charged(model, |tenant, stream| {
            tenant
                .block(size)
                .capacity(capacity)
                .home_stream(stream)
                .try_allocate()
        });
        let Some(block) = self.fitted(outcome)? else {
            return Ok(None);
        };
        let mut held = Held {
            block,
            model,
            request,
            granules,
        };
        self.stamp(&mut held, 0)?;
        Ok(Some(held))
    }

    fn grow(&mut self, held: &mut Held, granules: u64) -> anyhow::Result<bool> {
        let size = granules * self.granule;
        let outcome = self.charged(held.model, |_, _| held.block.try_grow_to(size));
        if self.fitted(outcome)?.is_none() {
            return Ok(false);
        }
        let from = std::mem::replace(&mut held.granules, granules);
        self.stamp(held, from)?;
        Ok(true)
    }

    fn free(&mut self, mut held: Held) -> anyhow::Result<()> {
        if self.stamped {
            let verify =
                || stamps::verify(&mut held.block, self.granule, held.request, held.granules);
            let verified = self.meter.aside(verify).context("stamps cannot be read")?;
            self.costs[held.model].verified.add(verified);
        }
        self.charged(held.model, |_, _| drop(held.block));
        Ok(())
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        Ok(self.stream.synchronize()?)
    }

    fn last_refusal(&self) -> Option<String> {
        self.last_refusal.as_ref().map(ToString::to_string)
    }
}

/// Counts the driver calls of a run, less those of stamping.
struct Meter {
    /// Counts for the stream and all pools. It was at zero when the run began.
    device: Device,
    aside: BTreeMap<Call, Calls>,
    clock: Option<Virtual>,
}

/// A model's clock, and the cost of its calls when the run began. The run alone uses the model.
struct Virtual {
    model: Arc<ModelDriver>,
    begun: Vec<Duration>,
}

/// Driver calls and the time in them.
#[derive(Clone, Copy, Debug, Default)]
struct Calls {
    count: u64,
    time: Duration,
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
    /// Does something that makes driver calls, and counts them by kind.
    fn measure<T>(&self, act: impl FnOnce() -> T) -> (T, BTreeMap<Call, Calls>) {
        let before = self.device.calls();
        let outcome = act();
        (outcome, by_kind(&self.device.calls().since(&before)))
    }

    /// Does something and says what all its driver calls cost together.
    fn charge<T>(&self, act: impl FnOnce() -> T) -> (T, Calls) {
        let now = || self.clock.as_ref().map(|clock| clock.model.clock());
        let begun = now();
        let (outcome, made) = self.measure(act);
        let mut calls = made.into_values().fold(Calls::default(), Calls::and);
        if let (Some(begun), Some(now)) = (begun, now()) {
            calls.time = now.saturating_sub(begun);
        }
        (outcome, calls)
    }

    /// Does something whose copies, and the waiting they need, do not count. Mapping and the like
    /// do: they are the pool's own, should it be at work meanwhile.
    fn aside<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let (outcome, made) = self.measure(act);
        for (call, calls) in made.into_iter().filter(|&(call, _)| !maps(call)) {
            let all = self.aside.entry(call).or_default();
            *all = all.and(calls);
        }
        outcome
    }

    fn total(&self) -> Cost {
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

#[cfg(test)]
mod tests;
