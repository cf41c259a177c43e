//! The caches of a model's system prompt: computed once, and forked for every sequence.
//!
//! The system prompt is computed separately from a request's own tokens, forked or not, so that the
//! results of a sequence are the same bit for bit. This module does not decide when its memory is
//! released.

use candle_core::Result;

use super::cache::Caches;
use super::model::Model;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    pub(crate) read: u64,
    /// The number of sequences that found it present.
    pub(crate) hits: u64,
}

pub(crate) struct Prefix<'a> {
    model: &'a Model,
    /// Caches with exactly the prompt's tokens. Empty before the computation and after a release.
    caches: Caches,
    /// The bytes of a fork: the least possible, until a fork was measured.
    fork: u64,
    read: u64,
    hits: u64,
}

impl<'a> Prefix<'a> {
    pub(crate) fn new(model: &'a Model) -> Self {
        Self {
            model,
            caches: Caches::new(),
            fork: model.cache_memory.forked(model.system.tokens.len()),
            read: 0,
            hits: 0,
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        !self.caches.is_empty()
    }

    /// Returns `true` if a sequence that may fork the prefix finds it present.
    pub(crate) fn is_hit(&self, may_fork: bool) -> bool {
        self.forks(may_fork) && self.is_there()
    }

    fn forks(&self, may_fork: bool) -> bool {
        may_fork && self.model.system.is_shared()
    }

    /// Returns the bytes needed to begin a sequence of `tokens` tokens after the system prompt.
    pub(crate) fn wanted(&self, tokens: usize, may_fork: bool) -> u64 {
        let Model {
            cache_memory,
            system,
            ..
        } = self.model;
        let before = system.tokens.len();
        let all = cache_memory.sequence(before + tokens);
        match (self.forks(may_fork), self.is_there()) {
            (false, _) => all,
            (true, false) => all + self.fork,
            (true, true) => (all + self.fork).saturating_sub(cache_memory.sequence(before)),
        }
    }

    /// Returns caches for a sequence, with the system prompt in them.
    ///
    /// # Errors
    /// Errors of the decoder and the caches. Without memory for the fork, the prefix stays present.
    pub(crate) fn begin(&mut self, may_fork: bool) -> Result<Caches> {
        let Model {
            cache_memory,
            system,
            ..
        } = self.model;
        if !self.forks(may_fork) {
            return self.read();
        }
        let before = system.tokens.len();
        if self.is_there() {
            return fork(&mut self.caches, before);
        }
        self.caches = self.read()?;
        self.read += 1;
        let held = cache_memory.held().caches;
        let forked = fork(&mut self.caches, before)?;
        self.fork = cache_memory.held().caches.saturating_sub(held);
        Ok(forked)
    }

    fn read(&self) -> Result<Caches> {
        let Model {
            decoder, system, ..
        } = self.model;
        let mut caches = self.model.caches();
        if !system.tokens.is_empty() {
            decoder.prompt(&system.tokens, 0, &mut caches)?;
        }
        Ok(caches)
    }

    pub(crate) fn hit(&mut self) {
        self.hits += 1;
    }

    /// Releases the memory that no sequence shares. Returns `true` if the prefix was present.
    pub(crate) fn give_up(&mut self) -> bool {
        !std::mem::take(&mut self.caches).is_empty()
    }

    pub(crate) const fn uses(&self) -> Uses {
        Uses {
            read: self.read,
            hits: self.hits,
        }
    }
}

fn fork(caches: &mut Caches, tokens: usize) -> Result<Caches> {
    caches.iter_mut().map(|cache| cache.fork(tokens)).collect()
}
