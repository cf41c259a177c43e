//! Models that sleep, on the host: the memory that sleep gives up is counted, as is all memory of
//! candle.

use std::cell::RefCell;

use super::*;
use crate::cache::Charge;
use crate::cache_memory::Held;

/// The bytes that a model gives up when it sleeps.
pub(super) const AWAKE: u64 = 1 << 20;

/// candle's own memory, and additional memory while the model is awake.
struct Drowsy {
    plain: Plain,
    whole: Rc<Budget>,
    awake: RefCell<Option<Charge>>,
    keeps: bool,
    /// Estimates of the memory of caches are zero.
    unsure: bool,
}

impl CacheMemory for Drowsy {
    fn cache(&self) -> Box<dyn Cache> {
        assert!(!self.is_asleep(), "a cache of a model that sleeps");
        self.plain.cache()
    }

    fn sequence(&self, tokens: usize) -> u64 {
        match self.unsure {
            true => 0,
            false => self.plain.sequence(tokens),
        }
    }

    fn forked(&self, tokens: usize) -> u64 {
        match self.unsure {
            true => 0,
            false => self.plain.forked(tokens),
        }
    }

    fn headroom(&self) -> anyhow::Result<u64> {
        self.plain.headroom()
    }

    fn settle(&self) -> anyhow::Result<()> {
        self.plain.settle()
    }

    fn weights(&self) -> u64 {
        self.plain.weights()
    }

    fn asleep(&self) -> u64 {
        match *self.awake.borrow() {
            Some(_) => 0,
            None => AWAKE,
        }
    }

    fn sleep(&self) -> anyhow::Result<bool> {
        Ok(self.awake.take().is_some())
    }

    fn keeps_caches(&self) -> bool {
        self.keeps
    }

    fn wake(&self) -> anyhow::Result<bool> {
        let charge = Charge::new(&self.whole, AWAKE);
        Ok(charge
            .map(|charge| self.awake.replace(Some(charge)))
            .is_ok())
    }

    fn held(&self) -> Held {
        self.plain.held()
    }
}

/// Returns two models that sleep, with a system prompt of two steps and `limit` bytes in addition
/// to their weights.
fn models(limit: u64, keeps: bool, unsure: bool) -> Vec<Model> {
    let specs = prefix::with_system(tinier(), 700, true);
    over(&specs, 4, limit, keeps, unsure)
}

/// Returns models that sleep.
pub(super) fn over(
    specs: &[Spec],
    slots: usize,
    limit: u64,
    keeps: bool,
    unsure: bool,
) -> Vec<Model> {
    let weights: u64 = specs.iter().map(|spec| spec.weights().unwrap()).sum();
    let whole = Budget::new(weights + limit);
    let model = |spec: &Spec| {
        let plain = Plain::new(&Device::Cpu, &whole, spec).unwrap();
        Model {
            name: "drowsy".into(),
            decoder: Decoder::load(&plain.var_builder(), &spec.config, slots).unwrap(),
            words: spec.config.vocab_size,
            system: spec.system.clone(),
            intermediates: None,
            cache_memory: Box::new(Drowsy {
                plain,
                whole: Rc::clone(&whole),
                awake: RefCell::new(None),
                keeps,
                unsure,
            }),
        }
    };
    specs.iter().map(model).collect()
}

/// Serves requests, and checks the answers against models that never sleep.
fn serve_as_ever(models: &[Model], requests: &[Request]) -> Served {
    let served = serve_all(models, true, requests);
    let expected = serve_all(&prefix::plain(false, u64::MAX), true, requests);
    assert_eq!(served.answers, expected.answers);
    served
}

#[test]
fn a_model_that_has_but_waiting_requests_sleeps_for_an_older_one() {
    // Enough for one awake model, its prefix and a sequence.
    let requests = at_once([300; 4], 5);
    let models = models(AWAKE + prefix::steps(5), false, false);
    let served = serve_as_ever(&models, &requests);
    let figures = served.figures;
    assert_eq!((figures.slept.len(), figures.woken.len()), (3, 4));
    assert_eq!(figures.prefixes, [Uses { read: 2, hits: 0 }; 2]);
}

#[test]
fn a_prefix_that_sleep_does_not_keep_is_read_anew() {
    let requests = at_once([300; 4], 5);
    // Enough for one awake model, two prefixes and a sequence.
    for (keeps, uses) in [
        (true, Uses { read: 1, hits: 1 }),
        (false, Uses { read: 2, hits: 0 }),
    ] {
        let models = models(AWAKE + prefix::steps(7), keeps, false);
        let served = serve_as_ever(&models, &requests);
        assert_eq!(served.figures.slept.len(), 3);
        assert_eq!(served.figures.prefixes, [uses; 2]);
    }
}

#[test]
fn an_idle_model_sleeps_for_a_request_that_takes_more_than_was_thought() {
    let requests = at_once([300; 2], 5);
    // Enough for both models awake, both prefixes and half a sequence.
    let models = models(2 * AWAKE + prefix::steps(5), true, true);
    let served = serve_as_ever(&models, &requests);
    assert_eq!(served.figures.slept.len(), 1);
    let uses = [0, 1].map(|hits| Uses { read: 1, hits });
    assert_eq!(served.figures.prefixes, uses);
}

#[test]
fn a_model_that_has_but_waiting_requests_sleeps_for_one_that_grows() {
    // The sequences grow beyond 512 tokens. Enough for both models awake, and for a sequence that
    // does not grow.
    let requests = at_once([500; 3], 30);
    let specs = [tinier(), tinier()];
    let models = over(&specs, 4, 2 * AWAKE + prefix::steps(1), true, false);
    let served = serve_all(&models, true, &requests);
    let wide = modes::plain(&Device::Cpu, &specs, 4, u64::MAX).unwrap();
    assert_eq!(served.answers, serve_all(&wide, true, &requests).answers);
    assert_eq!(served.figures.thrown_out, 0);
    assert_eq!(
        (served.figures.slept.len(), served.figures.woken.len()),
        (2, 3)
    );
}
