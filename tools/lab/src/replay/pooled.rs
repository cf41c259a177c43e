//! The replay's memory on a device: pools, tenants and blocks of the library, with every granule
//! stamped.
//!
//! Under `static` each model has a pool with an even share of the limit; under `elastic` all models
//! are tenants of one pool, and under `ledger` each has a process whose pool is in the ledger.
//! Everything else is the same, so that only the policy differs between runs.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
#[cfg(target_os = "linux")]
use cuvmm::Ledger;
use cuvmm::driver::model::ModelDriver;
use cuvmm::error::{BlockError, LedgerRefusal};
use cuvmm::pool::BlockBuilder;
use cuvmm::pool::PoolBuilder;
use cuvmm::pool::futures::AllocateFuture;
use cuvmm::{Block, Device, Limit, Mapper, Pool, Stream, Tenant};
use serde::{Deserialize, Serialize};

use super::figures::Cost;
use super::memory::Memory;
use super::meter::Meter;
use super::policy::Policy;
#[cfg(test)]
use super::stamps::Verified;
use super::stamps::{self, Bytes};

/// The timeout of a block's growth for idle memory of other processes. Preempting a request costs
/// far more.
const GROWTH_WAITS: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Division {
    pub(crate) policy: Policy,
    /// The number of models in all processes.
    pub(crate) models: usize,
    /// Bytes for all models together, whole granules.
    pub(crate) limit: u64,
    /// Bytes that each model can always have unless the policy is `static`, whole granules.
    pub(crate) guarantee: u64,
}

impl Division {
    /// Returns the limit of one model's memory in bytes.
    fn tenant_limit(&self, granule: u64) -> u64 {
        match self.policy {
            Policy::Static => share(self.limit, self.models, granule),
            Policy::Elastic | Policy::Ledger => self.limit,
        }
    }

    /// Returns the bytes that a pool guarantees to one model. A ledger guarantees them to the
    /// process.
    fn tenant_guarantee(&self) -> u64 {
        match self.policy {
            Policy::Elastic => self.guarantee,
            Policy::Static | Policy::Ledger => 0,
        }
    }

    /// Returns the most bytes of one model while all others are idle.
    fn ceiling(&self, granule: u64) -> u64 {
        let others = (self.models as u64).saturating_sub(1);
        match self.policy {
            Policy::Static => self.tenant_limit(granule),
            Policy::Elastic | Policy::Ledger => self.limit.saturating_sub(self.guarantee * others),
        }
    }
}

/// Returns one of `models` even shares of `limit`, in whole granules.
pub(crate) const fn share(limit: u64, models: usize, granule: u64) -> u64 {
    let models = if models == 0 { 1 } else { models as u64 };
    limit / models / granule * granule
}

/// The memory of some models on one device.
pub(crate) struct Pooled {
    granule: u64,
    /// The most granules of one block, for every model.
    ceiling: u64,
    stamped: bool,
    costs: Vec<Cost>,
    meter: Meter,
    last_refusal: Option<BlockError>,
    // Drop order: tenants before their pools, the stream last.
    tenants: Vec<Tenant>,
    pools: Vec<Pool>,
    mapper: Option<Mapper>,
    stream: Stream,
}

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

/// A ledger, of which there is none on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) type Ledger = std::convert::Infallible;

#[cfg(target_os = "linux")]
fn in_ledger<'a>(pool: PoolBuilder<'a>, ledger: &'a Ledger) -> PoolBuilder<'a> {
    pool.ledger(ledger)
}

#[cfg(not(target_os = "linux"))]
fn in_ledger<'a>(_: PoolBuilder<'a>, ledger: &'a Ledger) -> PoolBuilder<'a> {
    match *ledger {}
}

impl Pooled {
    /// Makes pools and tenants for the models, on a stream of their own. On a model, `clock` gives
    /// the time of calls. Pools in a ledger have a mapper, which serves requests that wait for
    /// memory of other processes.
    ///
    /// # Errors
    /// A pool, a tenant or the mapper cannot be made.
    pub(crate) fn new(
        device: &Device,
        models: &[String],
        division: &Division,
        stamped: bool,
        clock: Option<Arc<ModelDriver>>,
        ledger: Option<&Ledger>,
    ) -> anyhow::Result<Self> {
        let meter = Meter::new(device.with_own_counters(), clock);
        let granule = meter.device.granularity();
        let limit = division.tenant_limit(granule);
        let mut memory = Self {
            granule,
            ceiling: division.ceiling(granule) / granule,
            stamped,
            costs: vec![Cost::default(); models.len()],
            last_refusal: None,
            tenants: Vec::new(),
            pools: Vec::new(),
            mapper: ledger.map(|_| Mapper::start(&meter.device)).transpose()?,
            stream: Stream::new(&meter.device)?,
            meter,
        };
        for model in models {
            if memory.pools.is_empty() || division.policy == Policy::Static {
                let mut pool = Pool::builder(&memory.meter.device).limit(Limit::Bytes(limit));
                if let (Some(ledger), Some(mapper)) = (ledger, &memory.mapper) {
                    pool = in_ledger(pool, ledger).mapper(mapper);
                }
                memory.pools.push(pool.build()?);
            }
            let pool = memory.pools.last().context("a model needs a pool")?;
            let tenant = pool.tenant(model).limit(limit);
            let tenant = tenant.guarantee(division.tenant_guarantee());
            memory.tenants.push(tenant.register()?);
        }
        Ok(memory)
    }

    /// Ends the run: returns the cost of each model, and of all with the opening and closing of the
    /// pools.
    ///
    /// # Errors
    /// Memory is still in use, a pool exceeded its limit, or memory cannot be released.
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
            mapper,
            stream,
            ..
        } = self;
        drop(tenants);
        for pool in pools {
            pool.close()?;
        }
        drop(mapper);
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

    /// Requests a block that may wait for memory.
    pub(crate) fn ask(&self, model: usize, granules: u64, capacity: u64) -> AllocateFuture {
        let sizes = (granules * self.granule, capacity * self.granule);
        wish(&self.tenants[model], &self.stream, sizes).allocate_async()
    }

    /// Assigns a block to a request, and stamps it.
    pub(crate) fn hold(
        &mut self,
        block: Block,
        model: usize,
        request: u64,
        granules: u64,
    ) -> anyhow::Result<Held> {
        let mut held = Held {
            block,
            model,
            request,
            granules,
        };
        self.stamp(&mut held, 0)?;
        Ok(held)
    }

    pub(crate) fn refusal_of_ledger(&self) -> Option<LedgerRefusal> {
        let refusal = self.last_refusal.as_ref().and_then(BlockError::shortage);
        Some(refusal?.ledger?.reason)
    }

    /// Grows a block like [`grow`](Memory::grow), and waits a moment for memory of other processes.
    pub(crate) fn grow_waiting(&mut self, held: &mut Held, granules: u64) -> anyhow::Result<bool> {
        self.grow_by(held, granules, Block::grow_to)
    }

    fn grow_by(
        &mut self,
        held: &mut Held,
        granules: u64,
        grow: fn(&mut Block, u64) -> Result<(), BlockError>,
    ) -> anyhow::Result<bool> {
        let size = granules * self.granule;
        let outcome = self.charged(held.model, |_, _| grow(&mut held.block, size));
        if self.fitted(outcome)?.is_none() {
            return Ok(false);
        }
        let from = std::mem::replace(&mut held.granules, granules);
        self.stamp(held, from)?;
        Ok(true)
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

/// Builds a block of the first size in bytes that can grow to the second, with the timeout of
/// growth.
fn wish<'a>(
    tenant: &'a Tenant,
    stream: &'a Stream,
    (size, capacity): (u64, u64),
) -> BlockBuilder<'a> {
    let builder = tenant.block(size).capacity(capacity);
    builder.home_stream(stream).timeout(GROWTH_WAITS)
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
        let sizes = (granules * self.granule, capacity * self.granule);
        let outcome = self.charged(model, |tenant, stream| {
            wish(tenant, stream, sizes).try_allocate()
        });
        let Some(block) = self.fitted(outcome)? else {
            return Ok(None);
        };
        self.hold(block, model, request, granules).map(Some)
    }

    fn grow(&mut self, held: &mut Held, granules: u64) -> anyhow::Result<bool> {
        self.grow_by(held, granules, Block::try_grow_to)
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

#[cfg(test)]
mod tests;
