//! Prompts with a common start: forks compute the same results as sequences without a fork, bit for
//! bit, and the memory of the common part exists once.

use super::*;
use crate::cache_memory::Held;
use crate::prefix::Prefix;

/// The granularity of GPU memory.
const G: u64 = 2 << 20;

/// An operation on the caches of a sequence.
#[derive(Clone, Copy)]
enum Act {
    /// Computes a prompt of this many tokens.
    Prompt(usize),
    Step(u32),
    Truncate(usize),
}

/// A sequence, all operations on its caches and on their origins, and the logits of its own steps.
struct Branch<'a> {
    decoder: &'a Decoder,
    caches: Caches,
    tokens: usize,
    acts: Vec<Act>,
    seen: Vec<Vec<u32>>,
}

impl<'a> Branch<'a> {
    fn new(decoder: &'a Decoder, caches: Caches) -> Self {
        Self {
            decoder,
            caches,
            tokens: 0,
            acts: Vec::new(),
            seen: Vec::new(),
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Prompt(count) => {
                let prompt = tokens(count, 11);
                let logits = self.decoder.prompt(&prompt, 0, &mut self.caches).unwrap();
                self.seen.push(bits(&logits).unwrap());
                self.tokens = count;
            }
            Act::Step(token) => {
                let logits = step(self.decoder, token, self.tokens, &mut self.caches);
                self.seen.push(bits(&logits).unwrap());
                self.tokens += 1;
            }
            Act::Truncate(count) => {
                for cache in &mut self.caches {
                    cache.truncate(count).unwrap();
                }
                self.tokens = count;
            }
        }
        self.acts.push(act);
    }

    fn steps(&mut self, from: u32, count: u32) {
        (from..from + count).for_each(|token| self.act(Act::Step(token % 500)));
    }

    fn fork(&mut self, count: usize) -> Self {
        let caches = self.caches.iter_mut().map(|cache| cache.fork(count));
        let mut acts = self.acts.clone();
        acts.push(Act::Truncate(count));
        Self {
            decoder: self.decoder,
            caches: caches.collect::<candle_core::Result<_>>().unwrap(),
            tokens: count,
            acts,
            seen: Vec::new(),
        }
    }

    /// Repeats all operations in caches of candle, without a fork, and compares the logits.
    fn ends_as_if_alone(self, name: &str) {
        let mut alone = Branch::new(self.decoder, caches(self.decoder, &cache::candle));
        self.acts.iter().for_each(|&act| alone.act(act));
        let before = alone.seen.len() - self.seen.len();
        for (at, (ours, theirs)) in self.seen.iter().zip(&alone.seen[before..]).enumerate() {
            assert!(ours == theirs, "{name}: the logits behind step {at}");
        }
        assert!(!self.seen.is_empty(), "{name} has done nothing");
    }
}

/// Runs a sequence of `700 * scale` and a few more tokens that is forked twice, with a fork of a
/// fork. `between` runs in the middle; `settle` runs where work must be complete.
fn branches(
    decoder: &Decoder,
    make: &dyn Fn() -> Box<dyn Cache>,
    scale: usize,
    mut between: impl FnMut(),
    settle: impl Fn(),
) {
    let end = 700 * scale;
    let mut root = Branch::new(decoder, caches(decoder, make));
    root.act(Act::Prompt(end));
    root.steps(1, 3);
    let mut whole = root.fork(end + 3);
    let mut part = root.fork(end - 150);
    between();
    // In turn, with different tokens, so that a write to another sequence's memory is detected.
    for at in 0..6 {
        for (branch, token) in [(&mut root, 10), (&mut whole, 110), (&mut part, 210)] {
            branch.steps(token + at, 1);
        }
    }
    let mut late = whole.fork(end + 5);
    late.steps(300, 4);
    // Truncates to before the fork, and to before the forks made from it.
    settle();
    whole.act(Act::Truncate(end - 300));
    whole.steps(120, 3);
    root.act(Act::Truncate(200 * scale));
    root.steps(20, 3);
    between();
    part.ends_as_if_alone("the fork of a part");
    late.steps(310, 3);
    root.steps(30, 3);
    root.ends_as_if_alone("the root");
    // The sequences that it began with are gone.
    whole.steps(130, 3);
    let mut again = late.fork(end - 10);
    late.ends_as_if_alone("the fork of a fork");
    again.steps(400, 2);
    again.ends_as_if_alone("a fork of what has gone");
    whole.ends_as_if_alone("the fork of the whole");
}

#[test]
fn branches_compute_what_a_sequence_does_alone() {
    let decoder = decoder(&tinier(), 2, &Device::Cpu);
    branches(&decoder, &cache::candle, 1, || {}, || {});
}

/// Returns two models with different system prompts, which are shared or computed by each sequence.
pub(super) fn with_system(mut spec: Spec, tokens: usize, cached: bool) -> [Spec; 2] {
    let words = spec.config.vocab_size as u32;
    [7, 8].map(|seed| {
        spec.source = Source::Seed(seed);
        spec.system = SystemPrompt::drawn(seed, tokens, words, cached);
        spec.clone()
    })
}

/// Returns the bytes that candle's own cache takes for `count` steps in all layers.
pub(super) fn steps(count: u64) -> u64 {
    count * tinier().sequence(1, 512 * 64)
}

pub(super) fn plain(cached: bool, limit: u64) -> Vec<Model> {
    let specs = with_system(tinier(), 700, cached);
    let weights: u64 = specs.iter().map(|spec| spec.weights().unwrap()).sum();
    let limit = limit.saturating_add(weights);
    modes::plain(&Device::Cpu, &specs, 4, limit).unwrap()
}

#[test]
fn answers_are_the_same_with_a_prompt_that_is_shared() {
    // The sequences grow beyond 1024 tokens in the middle of the answer.
    let requests = at_once([300, 320, 3, 310, 315, 8], 30);
    let apart = serve_all(&plain(false, u64::MAX), true, &requests);
    assert_eq!(apart.figures.prefixes, [Uses::default(); 2]);
    let none = modes::plain(&Device::Cpu, &[tinier(), tinier()], 4, u64::MAX).unwrap();
    let none = serve_all(&none, true, &requests);
    assert_ne!(none.answers, apart.answers, "a system prompt says nothing");

    let wide = serve_all(&plain(true, u64::MAX), true, &requests);
    assert_eq!(wide.answers, apart.answers);
    assert_eq!(wide.figures.prefixes, [Uses { read: 1, hits: 2 }; 2]);
    assert_eq!(wide.figures.thrown_out, 0);
    // Enough for both prefixes, and three sequences that do not grow.
    let narrow = serve_all(&plain(true, steps(2 * 2 + 3 * 2 + 2)), true, &requests);
    assert_eq!(narrow.answers, apart.answers);
    let figures = &narrow.figures;
    assert!(figures.thrown_out > 0 && figures.again > 0, "{figures:?}");
    assert!(figures.hits() > 4, "{figures:?}");
}

#[test]
fn a_system_prompt_is_the_beginning_of_each_prompt() {
    let requests = at_once([300, 3, 310, 8], 20);
    // A single piece, so that results are the same computed together and separately.
    let shared = with_system(tinier(), 512, true);
    let with = modes::plain(&Device::Cpu, &shared, 4, u64::MAX).unwrap();
    let with = serve_all(&with, true, &requests);
    let specs = shared.clone().map(|spec| Spec {
        system: SystemPrompt::default(),
        ..spec
    });
    let models = modes::plain(&Device::Cpu, &specs, 4, u64::MAX).unwrap();
    let asked = drawn(&requests, &models).into_iter();
    let asked = asked.map(|(mut request, own)| {
        let prompt = [&shared[request.model].system.tokens[..], &own].concat();
        request.prompt = prompt.len();
        (request, prompt)
    });
    let without = Server::serve(&models, true, asked.collect()).unwrap();
    assert_eq!(with.answers, without.answers);
}

/// Serves one request, and returns the answer and the usage of the first model's prefix.
fn alone(cached: bool, limit: u64, answer: usize) -> (Vec<Vec<u32>>, Uses) {
    let requests = at_once([300], answer);
    let served = serve_all(&plain(cached, limit), true, &requests);
    (served.answers, served.figures.prefixes[0])
}

#[test]
fn a_prompt_is_not_shared_where_there_is_no_room_for_it() {
    let (expected, _) = alone(false, u64::MAX, 10);
    // Two steps for the prompt and two for its copy. The shortage is detected before the prompt is
    // computed.
    let (answers, uses) = alone(true, steps(4) - 1, 10);
    assert_eq!((answers, uses), (expected.clone(), Uses::default()));
    let (answers, uses) = alone(true, steps(4), 10);
    assert_eq!((answers, uses), (expected, Uses { read: 1, hits: 0 }));
}

#[test]
fn a_sequence_that_grows_has_the_memory_of_its_prefix() {
    // Three steps at the end, and two more while the last cache grows; the prefix has two.
    let (expected, _) = alone(false, u64::MAX, 40);
    let (answers, uses) = alone(true, steps(4), 40);
    assert_eq!((answers, uses), (expected, Uses { read: 1, hits: 0 }));
}

#[test]
fn the_prefix_of_a_model_that_does_not_run_gives_way() {
    let requests = at_once([300; 4], 5);
    let expected = serve_all(&plain(false, u64::MAX), true, &requests);
    // Enough for one prefix and one sequence, so that the models take turns.
    let served = serve_all(&plain(true, steps(5)), true, &requests);
    assert_eq!(served.answers, expected.answers);
    assert_eq!(served.figures.prefixes, [Uses { read: 2, hits: 0 }; 2]);
    // Enough for two prefixes and a sequence.
    let served = serve_all(&plain(true, steps(7)), true, &requests);
    assert_eq!(served.answers, expected.answers);
    assert_eq!(served.figures.prefixes, [Uses { read: 1, hits: 1 }; 2]);
}

/// Returns models with more tokens, and a system prompt that takes three granules in each of its
/// four rows, two of them full.
fn long(cached: bool) -> [Spec; 2] {
    let mut spec = tiny();
    spec.config.max_position_embeddings = 4096;
    with_system(spec, 2500, cached)
}

#[test]
fn on_a_gpu_branches_share_memory_and_compute_the_same() {
    let Some((_turn, gpu)) = gpu("on_a_gpu_branches_share_memory_and_compute_the_same") else {
        return;
    };
    let [spec, _] = long(true);
    let (_pool, memory, cache_memory, decoder) = elastic(&gpu, &spec, Asleep::Never, 192);
    let begun = memory.tenant().stats().in_use;
    let mut seen = Vec::new();
    branches(
        &decoder,
        &|| cache_memory.cache(),
        3,
        || seen.push(memory.tenant().stats().shared),
        || cache_memory.settle().unwrap(),
    );
    // Two full granules of each row are shared by three sequences; later part of them.
    assert_eq!((seen.len(), seen[0]), (2, 4 * 2 * G));
    assert!(seen[1] > 0);
    cache_memory.settle().unwrap();
    assert!(cache_memory.headroom().unwrap() > 0);
    let stats = memory.tenant().stats();
    assert_eq!((stats.in_use, stats.shared), (begun, 0));
    assert_eq!(gpu.device().drop_failures(), 0);
}

#[test]
fn branches_sleep_and_go_on() {
    let Some((_turn, gpu)) = gpu("branches_sleep_and_go_on") else {
        return;
    };
    let store = HostStore::builder(gpu.device())
        .pinned(192 << 20)
        .build()
        .unwrap();
    let [spec, _] = long(true);
    let asleep = Asleep::Keep(Rc::new(store));
    let (_pool, memory, cache_memory, decoder) = elastic(&gpu, &spec, asleep, 192);
    let mut slept = 0;
    let between = || {
        assert!(cache_memory.sleep().unwrap() && cache_memory.is_asleep());
        assert_eq!(memory.tenant().stats().committed, 0);
        // Meanwhile another tenant takes the memory and writes to it.
        let other = memory
            .tenant()
            .allocate_on(gpu.stream(), 160 << 20)
            .unwrap();
        other.write(0, &vec![0xff; 160 << 20]).unwrap();
        drop(other);
        assert!(cache_memory.wake().unwrap() && !cache_memory.is_asleep());
        slept += 1;
    };
    let settle = || cache_memory.settle().unwrap();
    branches(&decoder, &|| cache_memory.cache(), 3, between, settle);
    assert_eq!(slept, 2);
    assert_eq!(gpu.device().drop_failures(), 0);
}

#[test]
fn the_memory_of_a_prefix_is_there_once_and_goes_back() {
    let Some((_turn, gpu)) = gpu("the_memory_of_a_prefix_is_there_once_and_goes_back") else {
        return;
    };
    let specs = long(true);
    let split = Split::Elastic(Sleep::Never);
    let models = modes::pooled(&gpu, &specs[..1], 4, (192 << 20, 0), split).unwrap();
    let cache_memory = &models[0].cache_memory;
    // The granules of caches, and those of them that are shared.
    let held = || {
        cache_memory.settle().unwrap();
        assert!(cache_memory.headroom().unwrap() > 0);
        let Held { caches, shared, .. } = cache_memory.held();
        (caches / G, shared / G)
    };
    assert_eq!(held(), (0, 0));
    let mut prefix = Prefix::new(&models[0]);
    assert_eq!(prefix.wanted(1, true), 16 * G);
    let first = prefix.begin(true).unwrap();
    assert_eq!((held(), prefix.wanted(1, true)), ((16, 8), 4 * G));
    let second = prefix.begin(true).unwrap();
    assert_eq!(held(), (20, 8));
    let apart = prefix.begin(false).unwrap();
    assert_eq!(held(), (32, 8));
    drop((first, apart));
    assert_eq!(held(), (16, 8));
    assert!(prefix.give_up() && !prefix.give_up());
    assert_eq!(held(), (12, 0));
    drop(second);
    assert_eq!(held(), (0, 0));
}

#[test]
fn servers_of_all_kinds_share_a_prompt() {
    let Some((_turn, gpu)) = gpu("servers_of_all_kinds_share_a_prompt") else {
        return;
    };
    // Eight at once, most of which grow into a fourth granule; then each model alone, in turn.
    let mut requests = at_once([550, 540, 560, 40, 565, 553, 300, 571], 40);
    for (index, model) in [0, 1, 0].into_iter().enumerate() {
        requests.extend((0..8).map(|more| Request {
            model,
            arrival: Duration::from_millis(2000 + 600 * index as u64),
            prompt: 480 + 15 * more,
            answer: 20,
        }));
    }
    let (shared, apart) = (long(true), long(false));
    let wide = modes::plain(gpu.candle(), &apart, 8, u64::MAX).unwrap();
    let wide = serve_all(&wide, true, &requests);
    assert_eq!((wide.figures.thrown_out, wide.figures.hits()), (0, 0));

    // Enough for a prefix of each model, and three sequences that do not grow.
    let granule = gpu.device().granularity();
    let limit = 2 * (shared[0].idle(granule).unwrap() + 3 * shared[0].sequence(1, granule));
    for (split, together) in [
        (Split::Elastic(Sleep::Keep), true),
        (Split::Elastic(Sleep::Discard), true),
        (Split::Elastic(Sleep::Never), true),
        (Split::Shares, false),
    ] {
        let models = modes::pooled(&gpu, &shared, 8, (limit, 0), split).unwrap();
        let served = serve_all(&models, together, &requests);
        assert!(served.answers == wide.answers, "{split:?}");
        let figures = &served.figures;
        assert!(
            figures.thrown_out > 0 && figures.again > 0,
            "{split:?}: {figures:?}"
        );
        assert!(figures.hits() >= 16, "{split:?}: {figures:?}");
        assert!(figures.most_shared() >= 8 * G, "{split:?}: {figures:?}");
        let sleeps = matches!(split, Split::Elastic(Sleep::Keep | Sleep::Discard));
        assert_eq!(!figures.slept.is_empty(), sleeps, "{split:?}: {figures:?}");
        assert_eq!(!figures.woken.is_empty(), sleeps, "{split:?}: {figures:?}");
        for model in &models {
            model.cache_memory.settle().unwrap();
            model.cache_memory.headroom().unwrap();
            let held = model.cache_memory.held();
            assert_eq!((held.caches, held.shared), (0, 0), "{split:?}: {held:?}");
        }
    }
    // Each sequence has a copy, and the prefix is another one.
    let copies = modes::plain(gpu.candle(), &shared, 8, 2 * limit).unwrap();
    let copies = serve_all(&copies, true, &requests);
    assert!(copies.answers == wide.answers);
    let figures = &copies.figures;
    assert!(
        figures.hits() > 0 && figures.most_shared() == 0,
        "{figures:?}"
    );
    gpu.candle().synchronize().unwrap();
    assert_eq!(gpu.device().drop_failures(), 0);
}

#[test]
fn a_prefix_sleeps_with_its_model_or_is_read_anew() {
    let Some((_turn, gpu)) = gpu("a_prefix_sleeps_with_its_model_or_is_read_anew") else {
        return;
    };
    // Each model in turn, and no sequence grows.
    let requests: Vec<Request> = (0..12)
        .map(|index| Request {
            model: index / 4 % 2,
            arrival: Duration::from_millis(1500 * (index as u64 / 4)),
            prompt: 100,
            answer: 20,
        })
        .collect();
    let wide = modes::plain(gpu.candle(), &long(false), 4, u64::MAX).unwrap();
    let wide = serve_all(&wide, true, &requests);
    // Enough for a model, its prefix and five forks, but not for another model.
    let (specs, granule) = (long(true), gpu.device().granularity());
    let limit = specs[0].idle(granule).unwrap() + 5 * specs[0].sequence(1, granule);
    let once = Uses { read: 1, hits: 3 };
    for (sleep, uses) in [
        (Sleep::Keep, [Uses { read: 1, hits: 7 }, once]),
        (Sleep::Discard, [Uses { read: 2, hits: 6 }, once]),
    ] {
        let models = modes::pooled(&gpu, &specs, 4, (limit, 0), Split::Elastic(sleep)).unwrap();
        let served = serve_all(&models, true, &requests);
        assert!(served.answers == wide.answers, "{sleep:?}");
        assert_eq!(served.figures.prefixes, uses, "{sleep:?}");
        assert_eq!(served.figures.thrown_out, 0, "{sleep:?}");
        assert!(served.figures.woken.len() >= 3, "{:?}", served.figures);
    }
}
