//! The models of each mode: the same decoders, with memory from different sources.

use std::rc::Rc;

use anyhow::Context as _;
use candle_core::Device;
use candle_nn::VarBuilder;
use cuvmm::{CurrentTenantMemPool, HostStore, Limit, Pool};
use cuvmm_candle::{Gpu, Memory};

use super::cache::Budget;
use super::cache_memory::{Asleep, CacheMemory, Elastic, Plain, Spec};
use super::decoder::Decoder;
use super::model::Model;
use super::options::Sleep;

fn name(index: usize) -> String {
    format!("model {}", index + 1)
}

fn weights_in(index: usize, most: u64) -> String {
    format!("the weights of {} in {} MiB", name(index), most >> 20)
}

fn model(
    index: usize,
    spec: &Spec,
    slots: usize,
    vb: &VarBuilder<'_>,
    cache_memory: impl CacheMemory + 'static,
) -> anyhow::Result<Model> {
    Ok(Model {
        name: name(index),
        decoder: Decoder::load(vb, &spec.config, slots)?,
        cache_memory: Box::new(cache_memory),
        words: spec.config.vocab_size,
        system: spec.system.clone(),
        intermediates: None,
    })
}

/// The bytes that a tenant is charged for a memory pool of the driver beyond its maximum.
const EXCHANGE: u64 = 32 << 20;

/// Returns the bytes by which a pool is larger for `room` bytes of intermediate tensors.
pub(crate) fn charged_for(room: u64) -> u64 {
    match room {
        0 => 0,
        _ => room.next_multiple_of(EXCHANGE) + EXCHANGE,
    }
}

/// Gives candle's own allocations a tenant with `room` bytes, or leaves them outside of the pool if
/// `room` is 0.
fn intermediates(
    gpu: &Gpu,
    pool: &Pool,
    room: u64,
) -> anyhow::Result<Option<CurrentTenantMemPool>> {
    if room == 0 {
        return Ok(None);
    }
    let tenant = pool.tenant("intermediates").guarantee(charged_for(room));
    let memory = Memory::new(gpu, &tenant.register()?);
    Ok(Some(memory.intermediates(room)?))
}

/// Makes models over tenants of one pool with a limit in bytes, split equally or used as needed,
/// and with `room` further bytes for candle's own allocations.
pub(crate) fn pooled(
    gpu: &Gpu,
    specs: &[Spec],
    slots: usize,
    (limit, room): (u64, u64),
    split: Split,
) -> anyhow::Result<Vec<Model>> {
    let pool = Pool::builder(gpu.device())
        .limit(Limit::Bytes(limit + charged_for(room)))
        .build()?;
    // Loading models takes memory of candle too.
    let mut intermediates = intermediates(gpu, &pool, room)?;
    let granule = gpu.device().granularity();
    let asleep = match split {
        Split::Shares | Split::Elastic(Sleep::Never) => Asleep::Never,
        Split::Elastic(Sleep::Discard) => Asleep::Discard,
        Split::Elastic(Sleep::Keep) => {
            let all = specs.iter().map(|spec| spec.idle(granule));
            let bytes = all.sum::<anyhow::Result<u64>>()?;
            let store = HostStore::builder(gpu.device()).pinned(bytes).build()?;
            Asleep::Keep(Rc::new(store))
        }
    };
    let share = limit / specs.len() as u64 / granule * granule;
    let mut models: Vec<Model> = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        // Existing models that can sleep give up memory for the new model's weights.
        let others = models.iter().filter(|_| !matches!(asleep, Asleep::Never));
        for other in others.filter(|other| !other.cache_memory.is_asleep()) {
            other.cache_memory.sleep()?;
        }
        let tenant = pool.tenant(name(index));
        let (tenant, most) = match split {
            Split::Shares => (tenant.limit(share), share),
            Split::Elastic(_) => (tenant, limit),
        };
        let memory = Memory::new(gpu, &tenant.register()?);
        let cache_memory =
            Elastic::new(&memory, spec, asleep.clone()).with_context(|| weights_in(index, most))?;
        let vb = cache_memory.var_builder();
        let mut model = model(index, spec, slots, &vb, cache_memory)?;
        model.intermediates = intermediates.take();
        models.push(model);
    }
    Ok(models)
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Split {
    /// Memory moves as needed.
    Elastic(Sleep),
    /// Equal and permanent shares.
    Shares,
}

/// Makes models over candle's own memory, counted against a limit in bytes.
pub(crate) fn plain(
    device: &Device,
    specs: &[Spec],
    slots: usize,
    limit: u64,
) -> anyhow::Result<Vec<Model>> {
    let budget = Budget::new(limit);
    let mut models = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        let cache_memory =
            Plain::new(device, &budget, spec).with_context(|| weights_in(index, limit))?;
        models.push(model(
            index,
            spec,
            slots,
            &cache_memory.var_builder(),
            cache_memory,
        )?);
    }
    Ok(models)
}
