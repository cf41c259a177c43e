//! The system prompt, with which all prompts of a model begin.

/// The tokens with which all prompts of a model begin; none by default.
#[derive(Clone, Debug, Default)]
pub(crate) struct SystemPrompt {
    pub(crate) tokens: Vec<u32>,
    /// `true` if the prompt's caches are kept and forked; otherwise each sequence computes it.
    pub(crate) cached: bool,
}

impl SystemPrompt {
    /// Draws `tokens` tokens out of `words` words.
    pub(crate) fn drawn(seed: u64, tokens: usize, words: u32, cached: bool) -> Self {
        // Prompts are drawn from small seeds, so this seed is inverted.
        let mut random = fastrand::Rng::with_seed(!seed);
        Self {
            tokens: (0..tokens).map(|_| random.u32(..words)).collect(),
            cached,
        }
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.cached && !self.tokens.is_empty()
    }
}
