//! The replay's memory of paged caches: one of the library for each model, and a request's blocks by
//! their numbers.
//!
//! Under `static` each cache has its even share and all of its blocks backed, as the tensors of a
//! server that allocates them when it starts. Under `elastic` the caches have the memory under their
//! blocks in use, in one pool. From the bottom up: `numbers` has the free lists, `service` a model's
//! engine, `options` the terms.

mod numbers;
mod options;
mod service;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cuvmm::driver::model::ModelDriver;
use cuvmm::error::{BlockError, LedgerRefusal, PagedKvError};
use cuvmm::pool::{Pressure, TenantBuilder};
use cuvmm::{Block, Device, PagedKv};

use self::options::{ENDS, TENSORS};
use self::service::Service;
use super::figures::Cost;
use super::memory::{Memory, Usage};
use super::policy::Policy;
use super::shared::{GROWTH_WAITS, Shared, Wish};
use super::stamps::{self, Verified};
use super::tenants::{Division, Ledger, Tenants};

pub(crate) use options::{Options, Terms};

/// The time after which a request is tried again that waits for memory of other processes.
const AGAIN: Duration = Duration::from_millis(20);

/// Backs blocks, with or without waiting.
type Back = fn(&PagedKv, &[u32]) -> Result<(), PagedKvError>;

/// The memory of some models on one device.
pub(crate) struct Paged {
    /// Dropped before the tenants.
    services: Vec<Arc<Service>>,
    tenants: Tenants,
    terms: Terms,
    /// The most blocks of one request, for every model.
    ceiling: u64,
    /// Blocks that each cache reserves.
    reserve: u32,
    /// How a request that is admitted gets its blocks: in a ledger it waits a moment.
    admits: Back,
    /// Bytes of a layer's part of a block, if the first and the last part are stamped.
    stamped: Option<usize>,
}

pub(crate) struct Held {
    model: usize,
    request: u64,
    numbers: Vec<u32>,
}

impl Paged {
    /// Makes the caches of the models. On a model, `clock` gives the time of calls.
    ///
    /// # Errors
    /// A pool, a tenant or a cache cannot be made.
    pub(crate) fn new(
        device: &Device,
        models: &[String],
        division: &Division,
        terms: &Terms,
        stamped: bool,
        clock: Option<Arc<ModelDriver>>,
        ledger: Option<&Ledger>,
    ) -> anyhow::Result<Self> {
        let granule = device.granularity();
        let fixed = division.policy == Policy::Static;
        let blocks = terms.blocks_in(division.tenant_limit(granule));
        let blocks = u32::try_from(blocks).context("the memory has too many blocks")?;
        let services = models
            .iter()
            .map(|_| Service::new(terms.order, blocks, fixed));
        let services = services.map(|made| made.map(Arc::new));
        let services: Vec<Arc<Service>> = services.collect::<Result<_, _>>()?;
        let evicts = terms.keeps && !fixed;
        let tenants = Tenants::new(device, models, division, clock, ledger, |model, tenant| {
            if evicts {
                hooked(tenant, &services[model])
            } else {
                tenant
            }
        })?;
        let part = usize::try_from(terms.block / TENSORS)?;
        let mut made = Self {
            ceiling: terms.blocks_in(division.ceiling(granule)),
            reserve: match fixed {
                true => 0,
                false => u32::try_from(terms.reserve.div_ceil(terms.block))?,
            },
            stamped: stamped.then_some(part),
            admits: match ledger {
                Some(_) => PagedKv::back,
                None => PagedKv::try_back,
            },
            services,
            tenants,
            terms: terms.clone(),
        };
        for model in 0..models.len() {
            let pinned = if fixed { 0..blocks } else { 0..0 };
            let kv = made.tenants.charged(model, |tenant, stream| {
                let kv = PagedKv::builder(tenant, stream, blocks).group(terms.group());
                let kv = kv.layout(terms.layout).extent(terms.extent).pinned(pinned);
                match ledger {
                    Some(_) => kv.timeout(GROWTH_WAITS).build(),
                    None => kv.build(),
                }
            })?;
            made.services[model].set(kv);
            made.reserve(model)?;
        }
        Ok(made)
    }

    /// Returns a model's service, which a borrow of the caches does not keep.
    fn service(&self, model: usize) -> Arc<Service> {
        Arc::clone(&self.services[model])
    }

    /// Reserves again what blocks have used up. A cache without memory for it has a smaller reserve.
    fn reserve(&mut self, model: usize) -> anyhow::Result<()> {
        if self.reserve > 0 {
            let (service, blocks) = (self.service(model), self.reserve);
            self.tenants
                .charged(model, |_, _| service.reserve(blocks))?;
        }
        Ok(())
    }

    /// Backs more blocks of a request, up to `blocks`; returns `false` if they do not fit now. Then
    /// nothing has changed, but that other models may have evicted blocks.
    ///
    /// A request takes kept blocks of its model over where numbers or memory are short: those have
    /// their memory. Only for more than these are other models asked to evict.
    fn extend(&mut self, held: &mut Held, blocks: u64, back: Back) -> anyhow::Result<bool> {
        let more = blocks.saturating_sub(held.numbers.len() as u64);
        let more = u32::try_from(more).context("a request has too many blocks")?;
        let service = self.service(held.model);
        let (free, kept) = service.counts();
        let lacking = more.saturating_sub(free);
        if lacking > kept {
            return Ok(false);
        }
        let mut numbers = self.back(held.model, more, lacking, back)?;
        if numbers.is_none() && self.terms.keeps {
            numbers = self.back(held.model, more, kept.min(more), PagedKv::back)?;
        }
        let Some(numbers) = numbers else {
            return Ok(false);
        };
        let from = held.numbers.len();
        held.numbers.extend(numbers);
        self.stamp(&service, held, from)?;
        self.reserve(held.model)?;
        Ok(true)
    }

    /// Backs free blocks and takes kept ones over, `blocks` in all; returns `None` if memory is short.
    fn back(
        &mut self,
        model: usize,
        blocks: u32,
        kept: u32,
        back: Back,
    ) -> anyhow::Result<Option<Vec<u32>>> {
        let service = self.service(model);
        let mut numbers = service.take(blocks - kept)?;
        let kv = service.kv()?;
        let outcome = self.tenants.charged(model, |_, _| back(kv, &numbers));
        let outcome = match outcome {
            Err(PagedKvError::Back { cause, .. }) => Err(cause),
            other => Ok(other?),
        };
        if self.tenants.fitted::<()>(outcome)?.is_none() {
            service.untake(&numbers)?;
            return Ok(None);
        }
        numbers.extend(service.take_over(kept));
        Ok(Some(numbers))
    }

    /// Stamps the blocks of a request from the one at `from` on.
    fn stamp(&mut self, service: &Service, held: &Held, from: usize) -> anyhow::Result<()> {
        let Some(bytes) = self.stamped else {
            return Ok(());
        };
        self.tenants.aside(|| {
            for (at, &number) in held.numbers.iter().enumerate().skip(from) {
                for (place, stamp) in stamps(held.request, at) {
                    let filled = stamps::filled(stamp, bytes);
                    service.kv()?.write(number, place, &filled)?;
                }
            }
            Ok(())
        })
    }

    fn verify(&mut self, service: &Service, held: &Held) -> anyhow::Result<()> {
        let Some(bytes) = self.stamped else {
            return Ok(());
        };
        let verified = self.tenants.aside(|| {
            let mut verified = Verified::default();
            let mut found = vec![0; bytes];
            for (at, &number) in held.numbers.iter().enumerate() {
                for (place, stamp) in stamps(held.request, at) {
                    service.kv()?.read(number, place, &mut found)?;
                    verified.check_filled(held.request, at as u64, stamp, &found);
                }
            }
            anyhow::Ok(verified)
        })?;
        self.tenants.verified(held.model, verified);
        Ok(())
    }
}

/// Gives a tenant the hook that evicts for other tenants what its service keeps.
fn hooked<'a>(tenant: TenantBuilder<'a>, service: &Arc<Service>) -> TenantBuilder<'a> {
    // The cache in the service has the tenant, which has the hook.
    let service = Arc::downgrade(service);
    tenant.on_pressure(move |pressure: &Pressure| {
        // Blocks that cannot be evicted stay, and the request is refused.
        let _ = service.upgrade().map(|it| it.evict(pressure.bytes));
    })
}

/// Returns the first and the last part of a request's block, each with the stamp that fills it.
fn stamps(request: u64, at: usize) -> [((usize, u32, usize), u64); 2] {
    let [start, end] = ENDS;
    let (first, last) = stamps::stamps(request, at as u64);
    [(start, first), (end, last)]
}

impl Memory for Paged {
    type Block = Held;

    /// Returns the bytes of a block of the caches.
    fn granule(&self) -> u64 {
        self.terms.block
    }

    fn ceiling(&self, _model: usize) -> u64 {
        self.ceiling
    }

    fn allocate(
        &mut self,
        model: usize,
        request: u64,
        blocks: u64,
        _capacity: u64,
    ) -> anyhow::Result<Option<Held>> {
        let mut held = Held {
            model,
            request,
            numbers: Vec::new(),
        };
        Ok(self.extend(&mut held, blocks, self.admits)?.then_some(held))
    }

    fn grow(&mut self, held: &mut Held, blocks: u64) -> anyhow::Result<bool> {
        self.extend(held, blocks, PagedKv::try_back)
    }

    fn free(&mut self, held: Held) -> anyhow::Result<()> {
        let service = self.service(held.model);
        self.verify(&service, &held)?;
        let keeps = self.terms.keeps;
        let end = || service.end(&held.numbers, keeps);
        self.tenants.charged(held.model, |_, _| end())
    }

    /// Evicts all that is kept, and waits.
    fn settle(&mut self) -> anyhow::Result<()> {
        for service in &self.services {
            service.evict(u64::MAX)?;
        }
        self.tenants.settle()
    }

    fn last_refusal(&self) -> Option<String> {
        self.tenants.last_refusal().map(BlockError::to_string)
    }

    fn usage(&self, model: usize) -> anyhow::Result<Option<Usage>> {
        let service = &self.services[model];
        let (_, kept) = service.counts();
        Ok(Some(Usage {
            held: service.kv()?.stats()?.committed,
            kept: u64::from(kept) * self.terms.block,
            evicted: service.evicted(),
        }))
    }
}

impl Shared for Paged {
    /// Returns a wish to be tried again: engines do so before each step.
    fn ask(&self, _model: usize, _blocks: u64, _capacity: u64) -> Wish {
        Wish::Again(Instant::now() + AGAIN)
    }

    fn hold(&mut self, _: Block, _: usize, _: u64, _: u64) -> anyhow::Result<Held> {
        bail!("a paged cache waits for no block")
    }

    fn grow_waiting(&mut self, held: &mut Held, blocks: u64) -> anyhow::Result<bool> {
        self.extend(held, blocks, PagedKv::back)
    }

    fn refusal_of_ledger(&self) -> Option<LedgerRefusal> {
        self.tenants.refusal_of_ledger()
    }

    fn finish(self) -> anyhow::Result<(Vec<Cost>, Cost)> {
        drop(self.services);
        self.tenants.settle()?;
        self.tenants.finish()
    }
}

#[cfg(test)]
mod tests;
