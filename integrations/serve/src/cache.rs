//! The only difference between the servers: the cache to which attention appends keys and values.
//!
//! Tokens are the second dimension of appended tensors, (1, tokens, heads, size), so in either
//! cache the keys of a sequence are one matrix with contiguous rows.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use candle_core::{Error, Result, Tensor};
use candle_nn::kv_cache::KvCache as CandleCache;
use cuvmm_candle::{KvCache, Memory};

const TOKENS: usize = 1;

/// The initial capacity of candle's own cache and its growth, as in candle's models.
pub(crate) const STEP: usize = 512;

/// The keys and values of one layer of one sequence.
pub(crate) trait Cache {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)>;

    fn truncate(&mut self, tokens: usize) -> Result<()>;

    /// Creates a cache that starts with the first tokens of this cache. Later changes to either are
    /// not visible in the other.
    fn fork(&mut self, tokens: usize) -> Result<Box<dyn Cache>>;
}

pub(crate) type Caches = Vec<Box<dyn Cache>>;

/// Creates cuvmm-candle's cache, which adds memory after the existing tokens.
pub(crate) fn elastic(memory: &Memory, most: usize) -> Box<dyn Cache> {
    Box::new(KvCache::new(memory, TOKENS, most))
}

/// Creates cuvmm-candle's cache, whose forks share the memory of the common tokens.
pub(crate) fn forking(memory: &Memory, most: usize) -> Box<dyn Cache> {
    Box::new(KvCache::new(memory, TOKENS, most).with_forks())
}

/// Creates candle-nn's own cache, which copies everything to a larger buffer.
pub(crate) fn candle() -> Box<dyn Cache> {
    Box::new(CandleCache::new(TOKENS, STEP))
}

/// Creates candle-nn's own cache, with its memory counted against a limit.
pub(crate) fn counted(budget: &Rc<Budget>, token: u64) -> Box<dyn Cache> {
    Box::new(Counted::new(budget, token))
}

pub(crate) fn is_shortage(error: &Error) -> bool {
    let counted = match error {
        Error::Cuda(error) => error.is::<OverLimit>(),
        _ => false,
    };
    counted || cuvmm_candle::shortage(error).is_some()
}

impl Cache for KvCache {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        Self::append(self, k, v)
    }

    fn truncate(&mut self, tokens: usize) -> Result<()> {
        Ok(Self::truncate(self, tokens)?)
    }

    fn fork(&mut self, tokens: usize) -> Result<Box<dyn Cache>> {
        Ok(Box::new(Self::fork(self, tokens)?))
    }
}

impl Cache for CandleCache {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        Self::append(self, k, v)
    }

    /// Copies the kept tokens, because candle's cache has no such operation.
    fn truncate(&mut self, tokens: usize) -> Result<()> {
        let kept = first(self, tokens)?;
        *self = Self::new(TOKENS, STEP);
        copy(self, kept)
    }

    /// Copies the tokens: candle's cache has no such operation, and a clone would share the buffer.
    fn fork(&mut self, tokens: usize) -> Result<Box<dyn Cache>> {
        let mut forked = Box::new(Self::new(TOKENS, STEP));
        copy(&mut *forked, first(self, tokens)?)?;
        Ok(forked)
    }
}

/// Returns views of the keys and values of the first tokens, or `None` before the first append.
fn first(cache: &CandleCache, tokens: usize) -> Result<Option<(Tensor, Tensor)>> {
    let (Some(k), Some(v)) = (cache.k()?, cache.v()?) else {
        return Ok(None);
    };
    let first = |all: Tensor| all.narrow(TOKENS, 0, tokens);
    Ok(Some((first(k)?, first(v)?)))
}

fn copy(to: &mut dyn Cache, tokens: Option<(Tensor, Tensor)>) -> Result<()> {
    match tokens {
        Some((k, v)) => to.append(&k, &v).map(drop),
        None => Ok(()),
    }
}

/// A budget that only counts memory: candle's own comes from the process's pool without a limit.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    held: Cell<u64>,
    whole: Option<Rc<Budget>>,
}

#[derive(Debug)]
pub(crate) struct OverLimit {
    asked: u64,
    held: u64,
    limit: u64,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, held, limit } = self;
        write!(
            f,
            "{asked} bytes more than the {held} held are over the limit of {limit}"
        )
    }
}

impl std::error::Error for OverLimit {}

impl Budget {
    pub(crate) fn new(limit: u64) -> Rc<Self> {
        Rc::new(Self {
            limit,
            held: Cell::new(0),
            whole: None,
        })
    }

    /// Creates a budget that separately counts its part of another.
    pub(crate) fn within(whole: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self {
            limit: whole.limit,
            held: Cell::new(0),
            whole: Some(Rc::clone(whole)),
        })
    }

    pub(crate) fn headroom(&self) -> u64 {
        let own = self.limit.saturating_sub(self.held.get());
        let whole = self.whole.as_ref().map(|whole| whole.headroom());
        whole.unwrap_or(own).min(own)
    }

    pub(crate) fn held(&self) -> u64 {
        self.held.get()
    }

    fn change(&self, to: &dyn Fn(u64) -> u64) {
        self.held.set(to(self.held.get()));
        if let Some(whole) = &self.whole {
            whole.change(to);
        }
    }
}

/// A part of a [`Budget`], returned on drop.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Rc<Budget>,
    bytes: u64,
}

impl Charge {
    fn nothing(budget: &Rc<Budget>) -> Self {
        Self {
            budget: Rc::clone(budget),
            bytes: 0,
        }
    }

    pub(crate) fn new(budget: &Rc<Budget>, bytes: u64) -> std::result::Result<Self, OverLimit> {
        if bytes > budget.headroom() {
            return Err(OverLimit {
                asked: bytes,
                held: budget.limit - budget.headroom(),
                limit: budget.limit,
            });
        }
        budget.change(&|held| held + bytes);
        Ok(Self {
            budget: Rc::clone(budget),
            bytes,
        })
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.change(&|held| held - self.bytes);
    }
}

struct Counted {
    inner: CandleCache,
    charged: Charge,
    token: u64,
}

impl Counted {
    fn new(budget: &Rc<Budget>, token: u64) -> Self {
        Self {
            inner: CandleCache::new(TOKENS, STEP),
            charged: Charge::nothing(budget),
            token,
        }
    }
}

impl Cache for Counted {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let tokens = self.inner.current_seq_len() + k.dim(TOKENS)?;
        let bytes = tokens.next_multiple_of(STEP) as u64 * self.token;
        if bytes <= self.charged.bytes() {
            return self.inner.append(k, v);
        }
        // During the copy both buffers exist.
        let more = Charge::new(&self.charged.budget, bytes);
        let more = more.map_err(|error| Error::Cuda(Box::new(error)))?;
        let appended = self.inner.append(k, v)?;
        self.charged = more;
        Ok(appended)
    }

    fn truncate(&mut self, tokens: usize) -> Result<()> {
        self.inner.truncate(tokens)
    }

    fn fork(&mut self, tokens: usize) -> Result<Box<dyn Cache>> {
        let mut forked = Box::new(Self::new(&self.charged.budget, self.token));
        copy(&mut *forked, first(&self.inner, tokens)?)?;
        Ok(forked)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn flat(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    fn tokens(count: usize) -> Tensor {
        let all = Tensor::arange(0f32, (count * 8) as f32, &Device::Cpu).unwrap();
        all.reshape((1, count, 2, 4)).unwrap()
    }

    #[test]
    fn candles_cache_keeps_what_it_is_told_to() {
        let mut cache = CandleCache::new(TOKENS, STEP);
        cache.truncate(0).unwrap();
        let many = tokens(STEP + 3);
        Cache::append(&mut cache, &many, &many).unwrap();
        Cache::truncate(&mut cache, 2).unwrap();
        let one = Tensor::zeros((1, 1, 2, 4), DType::F32, &Device::Cpu).unwrap();
        let (k, v) = Cache::append(&mut cache, &one, &one).unwrap();
        let expected = Tensor::cat(&[&tokens(2), &one], 1).unwrap();
        assert_eq!((flat(&k), flat(&v)), (flat(&expected), flat(&expected)));
    }

    #[test]
    fn forks_of_candles_cache_are_copies() {
        let budget = Budget::new(u64::MAX);
        for mut root in [candle(), counted(&budget, 10)] {
            assert!(root.fork(0).is_ok(), "nothing of nothing");
            root.append(&tokens(5), &tokens(5)).unwrap();
            let mut fork = root.fork(3).unwrap();
            let [ours, theirs] =
                [7f32, 9.].map(|all| Tensor::full(all, (1, 1, 2, 4), &Device::Cpu).unwrap());
            // Both write at the position of the other's tokens, and then read.
            root.truncate(3).unwrap();
            root.append(&ours, &ours).unwrap();
            let (k, v) = fork.append(&theirs, &theirs).unwrap();
            let (root_k, root_v) = root.append(&ours, &theirs).unwrap();
            let expected = |more: &[&Tensor]| {
                let begun = tokens(3);
                flat(&Tensor::cat(&[&[&begun], more].concat(), TOKENS).unwrap())
            };
            assert_eq!([flat(&k), flat(&v)], [(); 2].map(|()| expected(&[&theirs])));
            assert_eq!(flat(&root_k), expected(&[&ours, &ours]));
            assert_eq!(flat(&root_v), expected(&[&ours, &theirs]));
            assert!(fork.fork(5).is_err(), "it has but four");
        }
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_fork_of_a_counted_cache_is_charged_for() {
        let budget = Budget::new(5 * STEP as u64 * 10);
        let mut root = counted(&budget, 10);
        let many = tokens(STEP + 1);
        root.append(&many, &many).unwrap();
        let fork = root.fork(STEP + 1).unwrap();
        assert_eq!(budget.held(), 4 * STEP as u64 * 10);
        let refused = root.fork(STEP + 1).err().unwrap();
        assert!(is_shortage(&refused), "{refused}");
        let short = root.fork(STEP).unwrap();
        assert_eq!(budget.headroom(), 0);
        drop((root, short));
        assert_eq!(budget.held(), 2 * STEP as u64 * 10);
        drop(fork);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_counted_cache_is_refused_beyond_the_limit_and_gives_back() {
        // Three steps: the current buffer, and the larger one during the copy.
        let budget = Budget::new(3 * STEP as u64 * 10);
        let mut cache = counted(&budget, 10);
        let many = tokens(STEP);
        cache.append(&many, &many).unwrap();
        assert_eq!(budget.headroom(), 2 * STEP as u64 * 10);
        cache.append(&tokens(1), &tokens(1)).unwrap();
        assert_eq!(budget.headroom(), STEP as u64 * 10);
        let refused = cache.append(&many, &many).unwrap_err();
        assert!(is_shortage(&refused), "{refused}");
        assert!(refused.to_string().contains("15360"), "{refused}");
        let (k, _) = cache.append(&tokens(1), &tokens(1)).unwrap();
        assert_eq!(k.dim(TOKENS).unwrap(), STEP + 2);
        drop(cache);
        assert_eq!(budget.headroom(), 3 * STEP as u64 * 10);
        assert!(!is_shortage(&Error::Msg("something else".into())));
    }

    #[test]
    fn parts_of_a_budget_are_counted_apart_and_together() {
        let whole = Budget::new(10);
        let (one, other) = (Budget::within(&whole), Budget::within(&whole));
        let charge = Charge::new(&one, 6).unwrap();
        let _kept = Charge::new(&other, 3).unwrap();
        assert_eq!((one.held(), other.held(), whole.held()), (6, 3, 9));
        let refused = Charge::new(&other, 2).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "2 bytes more than the 9 held are over the limit of 10"
        );
        drop(charge);
        assert_eq!((one.held(), other.headroom(), whole.held()), (0, 7, 3));
    }
}
