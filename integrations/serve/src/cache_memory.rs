//! The source of a model's memory: a tenant of a pool, or candle's own memory, counted against the
//! same limit. This module does not decide which sequence gets memory and which gives it up.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::Config;
use cuvmm::error::SleepError;
use cuvmm::{Contents, HostStore, Tenant};
use cuvmm_candle::{Arena, Memory, Weights};

use super::cache::{self, Budget, Cache, Charge, STEP};
use super::system::SystemPrompt;
use super::weights::{Source, layout};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    pub(crate) weights: u64,
    pub(crate) caches: u64,
    /// The part of `caches` that several sequences share.
    pub(crate) shared: u64,
    /// Cached memory, for the next sequence.
    pub(crate) idle: u64,
}

pub(crate) trait CacheMemory {
    fn cache(&self) -> Box<dyn Cache>;

    /// Returns the bytes that a sequence of `tokens` tokens takes.
    fn sequence(&self, tokens: usize) -> u64;

    /// Returns the least bytes that a fork of `tokens` tokens takes.
    fn forked(&self, tokens: usize) -> u64;

    fn headroom(&self) -> anyhow::Result<u64>;

    fn settle(&self) -> anyhow::Result<()>;

    fn weights(&self) -> u64;

    /// Returns the bytes that sleep now and are needed to wake.
    fn asleep(&self) -> u64;

    fn is_asleep(&self) -> bool {
        self.asleep() > 0
    }

    /// Releases the memory of an idle model. Returns `false` if it cannot sleep.
    fn sleep(&self) -> anyhow::Result<bool>;

    /// Returns `true` if caches keep their contents while asleep. Weights always do.
    fn keeps_caches(&self) -> bool;

    /// Wakes the model. Returns `false` if memory is short.
    fn wake(&self) -> anyhow::Result<bool>;

    fn held(&self) -> Held;
}

/// A model, independent of its memory.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) config: Config,
    pub(crate) dtype: DType,
    pub(crate) source: Source,
    pub(crate) system: SystemPrompt,
}

impl Spec {
    pub(crate) fn weights(&self) -> anyhow::Result<u64> {
        let shapes = layout(&self.config).into_iter();
        Ok(Arena::bytes_for(
            shapes.map(|(_, shape)| (shape, self.dtype)),
        )?)
    }

    /// Returns the bytes of the keys, or of the values, of a token in a layer.
    fn row(&self) -> u64 {
        let size = self.config.hidden_size / self.config.num_attention_heads;
        (self.config.num_key_value_heads * size * self.dtype.size_in_bytes()) as u64
    }

    pub(crate) fn token(&self) -> u64 {
        2 * self.row()
    }

    /// Returns the bytes of `tokens` tokens if rows come in whole steps of `step` bytes.
    pub(crate) fn sequence(&self, tokens: usize, step: u64) -> u64 {
        let rows = 2 * self.config.num_hidden_layers as u64;
        (tokens as u64 * self.row()).next_multiple_of(step) * rows
    }

    /// Returns the part of [`sequence`](Self::sequence) in steps that are not full.
    fn boundary(&self, tokens: usize, step: u64) -> u64 {
        match (tokens as u64 * self.row()).is_multiple_of(step) {
            true => 0,
            false => self.sequence(1, step),
        }
    }

    /// Returns the bytes that sleep with a model: its weights, and the caches kept while it is
    /// idle.
    pub(crate) fn idle(&self, granule: u64) -> anyhow::Result<u64> {
        let weights = self.weights()?.next_multiple_of(granule);
        let prefix = match self.system.is_shared() {
            true => self.sequence(self.system.tokens.len(), granule),
            false => 0,
        };
        Ok(weights + prefix)
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Asleep {
    Never,
    Keep(Rc<HostStore>),
    /// Weights are drawn or read again, and caches are lost.
    Discard,
}

pub(crate) struct Elastic {
    memory: Memory,
    spec: Spec,
    weights: Weights,
    asleep: Asleep,
}

/// The timeout for a model's last work before it sleeps. No more work is queued meanwhile.
const LAST_WORK: Duration = Duration::from_secs(5);

impl Elastic {
    pub(crate) fn new(memory: &Memory, spec: &Spec, asleep: Asleep) -> anyhow::Result<Self> {
        let mut weights = Weights::new(memory, spec.weights()?)?;
        spec.source.each(&spec.config, spec.dtype, |name, tensor| {
            Ok(weights.insert(name, tensor)?)
        })?;
        Ok(Self {
            memory: memory.clone(),
            spec: spec.clone(),
            weights,
            asleep,
        })
    }

    pub(crate) fn var_builder(&self) -> VarBuilder<'static> {
        self.weights.var_builder(self.spec.dtype)
    }

    fn tenant(&self) -> &Tenant {
        self.memory.tenant()
    }
}

impl CacheMemory for Elastic {
    fn cache(&self) -> Box<dyn Cache> {
        let most = self.spec.config.max_position_embeddings;
        match self.spec.system.is_shared() {
            true => cache::forking(&self.memory, most),
            false => cache::elastic(&self.memory, most),
        }
    }

    fn sequence(&self, tokens: usize) -> u64 {
        self.spec
            .sequence(tokens, self.memory.gpu().device().granularity())
    }

    /// Forks share whole extents; the least possible cost assumes extents of one granule.
    fn forked(&self, tokens: usize) -> u64 {
        self.spec
            .boundary(tokens, self.memory.gpu().device().granularity())
    }

    fn headroom(&self) -> anyhow::Result<u64> {
        self.memory.gpu().sweep();
        Ok(self.tenant().headroom()?.taking_back)
    }

    fn settle(&self) -> anyhow::Result<()> {
        self.memory.gpu().candle().synchronize()?;
        self.memory.gpu().sweep();
        Ok(())
    }

    fn weights(&self) -> u64 {
        let granule = self.memory.gpu().device().granularity();
        self.weights.bytes().next_multiple_of(granule)
    }

    fn asleep(&self) -> u64 {
        self.tenant().stats().asleep
    }

    fn sleep(&self) -> anyhow::Result<bool> {
        let contents = match &self.asleep {
            Asleep::Never => return Ok(false),
            Asleep::Keep(store) => Contents::Keep(store),
            Asleep::Discard => Contents::Discard,
        };
        self.settle()?;
        self.tenant().blocks().timeout(LAST_WORK).sleep(contents)?;
        Ok(true)
    }

    fn keeps_caches(&self) -> bool {
        matches!(self.asleep, Asleep::Keep(_))
    }

    fn wake(&self) -> anyhow::Result<bool> {
        match self.tenant().blocks().wake() {
            Ok(_) => {}
            Err(SleepError::Block { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        if matches!(self.asleep, Asleep::Discard) {
            let Spec {
                config,
                dtype,
                source,
                ..
            } = &self.spec;
            source.each(config, *dtype, |name, tensor| {
                let to = self.weights.get(name).context("a weight is gone")?;
                Ok(to.slice_set(&tensor.to_device(to.device())?, 0, 0)?)
            })?;
        }
        Ok(true)
    }

    fn held(&self) -> Held {
        let stats = self.tenant().stats();
        let weights = if self.is_asleep() { 0 } else { self.weights() };
        let idle = stats.cached + stats.pending_free + stats.precommitted;
        Held {
            weights,
            caches: stats.committed.saturating_sub(weights + idle),
            shared: stats.shared,
            idle,
        }
    }
}

/// Memory of candle. Models with a common budget share it, sequence by sequence.
pub(crate) struct Plain {
    spec: Spec,
    tensors: HashMap<String, Tensor>,
    device: Device,
    budget: Rc<Budget>,
    weights: Charge,
}

impl Plain {
    pub(crate) fn new(device: &Device, budget: &Rc<Budget>, spec: &Spec) -> anyhow::Result<Self> {
        let budget = Budget::within(budget);
        let weights = Charge::new(&budget, spec.weights()?)?;
        let mut tensors = HashMap::new();
        spec.source.each(&spec.config, spec.dtype, |name, tensor| {
            tensors.insert(name.to_owned(), tensor.to_device(device)?);
            Ok(())
        })?;
        Ok(Self {
            spec: spec.clone(),
            tensors,
            device: device.clone(),
            budget,
            weights,
        })
    }

    pub(crate) fn var_builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.tensors.clone(), self.spec.dtype, &self.device)
    }
}

impl CacheMemory for Plain {
    fn cache(&self) -> Box<dyn Cache> {
        cache::counted(&self.budget, self.spec.token())
    }

    fn sequence(&self, tokens: usize) -> u64 {
        self.spec.sequence(tokens, STEP as u64 * self.spec.row())
    }

    fn forked(&self, tokens: usize) -> u64 {
        self.sequence(tokens)
    }

    fn headroom(&self) -> anyhow::Result<u64> {
        Ok(self.budget.headroom())
    }

    /// Counted memory is available at once.
    fn settle(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn weights(&self) -> u64 {
        self.weights.bytes()
    }

    fn asleep(&self) -> u64 {
        0
    }

    /// Memory of candle's tensors cannot be taken back.
    fn sleep(&self) -> anyhow::Result<bool> {
        Ok(false)
    }

    fn keeps_caches(&self) -> bool {
        true
    }

    fn wake(&self) -> anyhow::Result<bool> {
        Ok(true)
    }

    fn held(&self) -> Held {
        let weights = self.weights.bytes();
        Held {
            weights,
            caches: self.budget.held() - weights,
            shared: 0,
            idle: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::weights::small;
    use super::*;

    #[test]
    fn a_sequence_takes_whole_steps_in_every_layer() {
        let spec = Spec {
            config: small(),
            dtype: DType::BF16,
            source: Source::Seed(1),
            system: SystemPrompt::default(),
        };
        // 8 heads of 64 elements of 2 bytes: 2048 tokens fill a granule of 2 MiB.
        let layers = 2 * 8;
        for (tokens, granules) in [(0, 0), (1, 1), (2048, 1), (2049, 2), (8192, 4)] {
            assert_eq!(
                spec.sequence(tokens, 2 << 20),
                (granules * layers) << 21,
                "{tokens}"
            );
        }
        for (tokens, granules) in [(0, 0), (1, 1), (2048, 0), (2049, 1), (8192, 0)] {
            assert_eq!(
                spec.boundary(tokens, 2 << 20),
                (granules * layers) << 21,
                "{tokens}"
            );
        }
        assert_eq!(spec.sequence(513, 512 << 10), 2 * layers * (512 << 10));
        let weights: usize = layout(&spec.config)
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        assert_eq!(spec.weights().unwrap(), 2 * weights as u64);
    }
}
