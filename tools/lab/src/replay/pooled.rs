//! The replay's memory of contiguous blocks: one of the library for each request, with every granule
//! stamped.

use std::sync::Arc;

use anyhow::Context as _;
use cuvmm::driver::model::ModelDriver;
use cuvmm::error::{BlockError, LedgerRefusal};
use cuvmm::pool::BlockBuilder;
use cuvmm::{Block, Device, Stream, Tenant};

use super::figures::Cost;
use super::memory::Memory;
use super::shared::{GROWTH_WAITS, Shared, Wish};
use super::stamps::{self, Bytes};
use super::tenants::{Division, Ledger, Tenants};

/// The memory of some models on one device.
pub(crate) struct Pooled {
    /// The most granules of one block, for every model.
    ceiling: u64,
    stamped: bool,
    tenants: Tenants,
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

impl Pooled {
    /// Makes the memory of the models. On a model, `clock` gives the time of calls.
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
        let tenants = Tenants::new(device, models, division, clock, ledger, |_, it| it)?;
        Ok(Self {
            ceiling: division.ceiling(tenants.granule) / tenants.granule,
            stamped,
            tenants,
        })
    }

    fn grow_by(
        &mut self,
        held: &mut Held,
        granules: u64,
        grow: fn(&mut Block, u64) -> Result<(), BlockError>,
    ) -> anyhow::Result<bool> {
        let size = granules * self.granule();
        let outcome = self
            .tenants
            .charged(held.model, |_, _| grow(&mut held.block, size));
        if self.tenants.fitted(outcome)?.is_none() {
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
        let granule = self.granule();
        let stamps = || stamps::write(&mut held.block, granule, held.request, from, held.granules);
        self.tenants
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
        self.tenants.granule
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
        let sizes = (granules * self.granule(), capacity * self.granule());
        let outcome = self.tenants.charged(model, |tenant, stream| {
            wish(tenant, stream, sizes).try_allocate()
        });
        let Some(block) = self.tenants.fitted(outcome)? else {
            return Ok(None);
        };
        self.hold(block, model, request, granules).map(Some)
    }

    fn grow(&mut self, held: &mut Held, granules: u64) -> anyhow::Result<bool> {
        self.grow_by(held, granules, Block::try_grow_to)
    }

    fn free(&mut self, mut held: Held) -> anyhow::Result<()> {
        if self.stamped {
            let granule = self.granule();
            let verify = || stamps::verify(&mut held.block, granule, held.request, held.granules);
            let verified = self.tenants.aside(verify);
            let verified = verified.context("stamps cannot be read")?;
            self.tenants.verified(held.model, verified);
        }
        self.tenants.charged(held.model, |_, _| drop(held.block));
        Ok(())
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        self.tenants.settle()
    }

    fn last_refusal(&self) -> Option<String> {
        self.tenants.last_refusal().map(ToString::to_string)
    }
}

impl Shared for Pooled {
    fn ask(&self, model: usize, granules: u64, capacity: u64) -> Wish {
        let sizes = (granules * self.granule(), capacity * self.granule());
        let (tenant, stream) = self.tenants.of(model);
        Wish::Block(wish(tenant, stream, sizes).allocate_async())
    }

    fn hold(
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

    fn grow_waiting(&mut self, held: &mut Held, granules: u64) -> anyhow::Result<bool> {
        self.grow_by(held, granules, Block::grow_to)
    }

    fn refusal_of_ledger(&self) -> Option<LedgerRefusal> {
        self.tenants.refusal_of_ledger()
    }

    fn finish(self) -> anyhow::Result<(Vec<Cost>, Cost)> {
        self.tenants.finish()
    }
}

#[cfg(test)]
mod tests;
