//! A model that is served: what computes, what it computes in, and with what its prompts begin.

use super::cache::Caches;
use super::cache_memory::CacheMemory;
use super::decoder::Decoder;
use super::system::SystemPrompt;

pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) decoder: Decoder,
    pub(crate) cache_memory: Box<dyn CacheMemory>,
    /// Ids of tokens there are.
    pub(crate) words: usize,
    pub(crate) system: SystemPrompt,
}

impl Model {
    /// Empty caches of a sequence.
    pub(crate) fn caches(&self) -> Caches {
        let layers = 0..self.decoder.layers();
        layers.map(|_| self.cache_memory.cache()).collect()
    }
}

/// The names of models.
pub(crate) fn names(models: &[Model]) -> Vec<&str> {
    models.iter().map(|model| model.name.as_str()).collect()
}
