//! A served model: its decoder, its memory and its system prompt.

use cuvmm::CurrentTenantMemPool;

use super::cache::Caches;
use super::cache_memory::CacheMemory;
use super::decoder::Decoder;
use super::system::SystemPrompt;

pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) decoder: Decoder,
    pub(crate) cache_memory: Box<dyn CacheMemory>,
    pub(crate) words: usize,
    pub(crate) system: SystemPrompt,
    /// The memory of candle's own tensors, for all models; the first model has it.
    pub(crate) intermediates: Option<CurrentTenantMemPool>,
}

impl Model {
    pub(crate) fn caches(&self) -> Caches {
        let layers = 0..self.decoder.layers();
        layers.map(|_| self.cache_memory.cache()).collect()
    }
}

pub(crate) fn names(models: &[Model]) -> Vec<&str> {
    models.iter().map(|model| model.name.as_str()).collect()
}
