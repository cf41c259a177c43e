//! The caches of a model's system prompt: it is read once, and every sequence begins with a fork of them.
//!
//! It is read by itself and a request's own tokens behind it, forked or not, so what is computed for a
//! sequence is the same, bit for bit. When its memory has to go is not decided here.

use candle_core::Result;

use super::cache::Caches;
use super::model::Model;

/// What became of a prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// How often it was read.
    pub(crate) read: u64,
    /// Sequences that found it there.
    pub(crate) hits: u64,
}

/// The caches of a model's system prompt.
pub(crate) struct Prefix<'a> {
    model: &'a Model,
    /// Of its tokens and no more. None before it is read, and after it was given up.
    caches: Caches,
    /// What a fork takes, in bytes: the least there may be, until there was one.
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

    /// Whether a sequence that may fork it finds it there.
    pub(crate) fn is_hit(&self, may_fork: bool) -> bool {
        self.forks(may_fork) && self.is_there()
    }

    fn forks(&self, may_fork: bool) -> bool {
        may_fork && self.model.system.is_shared()
    }

    /// What it takes to begin a sequence of so many tokens besides the system prompt, in bytes.
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

    /// The caches of a sequence, with the system prompt in them.
    ///
    /// # Errors
    /// What the decoder and the caches say. If there was no memory for the fork, the prefix is there all the
    /// same.
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

    /// A sequence was begun, and found it there.
    pub(crate) fn hit(&mut self) {
        self.hits += 1;
    }

    /// Gives up its memory, as far as no sequence has it too. Whether it had any.
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

/// Caches that begin as others do.
fn fork(caches: &mut Caches, tokens: usize) -> Result<Caches> {
    caches.iter_mut().map(|cache| cache.fork(tokens)).collect()
}
