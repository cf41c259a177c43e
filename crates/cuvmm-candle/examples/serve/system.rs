//! The system prompt, with which all prompts of a model begin.

/// With what all prompts of a model begin; with nothing by default.
#[derive(Clone, Debug, Default)]
pub(crate) struct SystemPrompt {
    pub(crate) tokens: Vec<u32>,
    /// Whether its caches are kept and forked; else each sequence reads it.
    pub(crate) cached: bool,
}

impl SystemPrompt {
    /// So many tokens of so many words.
    pub(crate) fn drawn(seed: u64, tokens: usize, words: u32, cached: bool) -> Self {
        // What prompts are drawn from are small numbers.
        let mut random = fastrand::Rng::with_seed(!seed);
        Self {
            tokens: (0..tokens).map(|_| random.u32(..words)).collect(),
            cached,
        }
    }

    /// Whether there is something to fork.
    pub(crate) fn is_shared(&self) -> bool {
        self.cached && !self.tokens.is_empty()
    }
}
