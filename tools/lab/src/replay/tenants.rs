//! The pools and tenants of the models of a replay, and what their driver calls cost.
//!
//! Under `static` each model has a pool with an even share of the limit; under `elastic` all models
//! are tenants of one pool, and under `ledger` each has a process whose pool is in the ledger.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use cuvmm::driver::model::ModelDriver;
use cuvmm::error::{BlockError, LedgerRefusal};
use cuvmm::pool::{PoolBuilder, TenantBuilder};
use cuvmm::{Device, Limit, Mapper, Pool, Stream, Tenant};
use serde::{Deserialize, Serialize};

#[cfg(target_os = "linux")]
pub(crate) use cuvmm::Ledger;

use super::figures::Cost;
use super::meter::Meter;
use super::policy::Policy;
use super::stamps::Verified;

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
    pub(crate) fn tenant_limit(&self, granule: u64) -> u64 {
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
    pub(crate) fn ceiling(&self, granule: u64) -> u64 {
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

/// The tenants of some models on one device.
pub(crate) struct Tenants {
    pub(crate) granule: u64,
    costs: Vec<Cost>,
    meter: Meter,
    last_refusal: Option<BlockError>,
    // Drop order: tenants before their pools, the stream last.
    tenants: Vec<Tenant>,
    pools: Vec<Pool>,
    mapper: Option<Mapper>,
    stream: Stream,
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

impl Tenants {
    /// Makes pools and tenants for the models, on a stream of their own. `terms` adds to the terms
    /// of a model's tenant. On a model, `clock` gives the time of calls. Pools in a ledger have a
    /// mapper, which serves requests that wait for memory of other processes.
    ///
    /// # Errors
    /// A pool, a tenant or the mapper cannot be made.
    pub(crate) fn new(
        device: &Device,
        models: &[String],
        division: &Division,
        clock: Option<Arc<ModelDriver>>,
        ledger: Option<&Ledger>,
        terms: impl for<'a> Fn(usize, TenantBuilder<'a>) -> TenantBuilder<'a>,
    ) -> anyhow::Result<Self> {
        let meter = Meter::new(device.with_own_counters(), clock);
        let granule = meter.device.granularity();
        let limit = division.tenant_limit(granule);
        let mut made = Self {
            granule,
            costs: vec![Cost::default(); models.len()],
            last_refusal: None,
            tenants: Vec::new(),
            pools: Vec::new(),
            mapper: ledger.map(|_| Mapper::start(&meter.device)).transpose()?,
            stream: Stream::new(&meter.device)?,
            meter,
        };
        for (index, model) in models.iter().enumerate() {
            if made.pools.is_empty() || division.policy == Policy::Static {
                let mut pool = Pool::builder(&made.meter.device).limit(Limit::Bytes(limit));
                if let (Some(ledger), Some(mapper)) = (ledger, &made.mapper) {
                    pool = in_ledger(pool, ledger).mapper(mapper);
                }
                made.pools.push(pool.build()?);
            }
            let pool = made.pools.last().context("a model needs a pool")?;
            let tenant = pool.tenant(model).limit(limit);
            let tenant = tenant.guarantee(division.tenant_guarantee());
            made.tenants.push(terms(index, tenant).register()?);
        }
        Ok(made)
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

    /// Runs `act` for a model, and counts its driver calls as the model's.
    pub(crate) fn charged<T>(
        &mut self,
        model: usize,
        act: impl FnOnce(&Tenant, &Stream) -> T,
    ) -> T {
        let (outcome, calls) = self
            .meter
            .charge(|| act(&self.tenants[model], &self.stream));
        let cost = &mut self.costs[model];
        cost.calls += calls.count;
        cost.time += calls.time;
        outcome
    }

    /// Returns `None` for memory that does not fit. Every other error ends the run.
    pub(crate) fn fitted<T>(
        &mut self,
        outcome: Result<T, BlockError>,
    ) -> anyhow::Result<Option<T>> {
        match outcome {
            Ok(fitted) => Ok(Some(fitted)),
            Err(refusal) if refusal.is_shortage() => {
                self.last_refusal = Some(refusal);
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Runs `act`, which stamps or verifies, without counting its copies.
    pub(crate) fn aside<T>(&mut self, act: impl FnOnce() -> T) -> T {
        self.meter.aside(act)
    }

    /// Adds the stamps that were verified for a model.
    pub(crate) fn verified(&mut self, model: usize, verified: Verified) {
        self.costs[model].verified.add(verified);
    }

    /// Returns the tenant of a model, and the stream of all.
    pub(crate) fn of(&self, model: usize) -> (&Tenant, &Stream) {
        (&self.tenants[model], &self.stream)
    }

    /// Waits until all freed memory can be reused.
    pub(crate) fn settle(&self) -> anyhow::Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Returns the number of driver calls so far, without those that stamp and verify.
    #[cfg(test)]
    pub(crate) fn calls(&self) -> u64 {
        self.meter.total().calls
    }

    /// Returns the ledger's reason for the last refusal.
    pub(crate) fn refusal_of_ledger(&self) -> Option<LedgerRefusal> {
        Some(self.last_refusal()?.shortage()?.ledger?.reason)
    }

    pub(crate) const fn last_refusal(&self) -> Option<&BlockError> {
        self.last_refusal.as_ref()
    }
}
