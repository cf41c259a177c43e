//! The example `serve`: its decoder computes what candle-transformers' llama does, and answers are
//! the same bit for bit with either cache and with any evictions.
//!
//! Tests that need no GPU run on candle's CPU device; the others print a notice if they did not
//! run.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

#[path = "serve/drowsy.rs"]
mod drowsy;
#[path = "serve/odd.rs"]
mod odd;
#[path = "serve/prefix.rs"]
mod prefix;
#[path = "gpu/rig.rs"]
#[allow(dead_code, reason = "the tests of the library use the rest")]
mod rig;
#[path = "../examples/serve/main.rs"]
#[allow(dead_code, reason = "main and its functions are not called here")]
mod serve;

use std::rc::Rc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::{self, Config, Llama, Llama3RopeConfig, Llama3RopeType};
use cuvmm::{HostStore, Limit, Pool};
use cuvmm_candle::{Gpu, Memory};

use serve::batch::Next;
use serve::cache::{self, Budget, Cache, Caches};
use serve::cache_memory::{Asleep, CacheMemory, Elastic, Plain, Spec};
use serve::decoder::{Decoder, bits};
use serve::model::Model;
use serve::modes::{self, Split};
use serve::options::Sleep;
use serve::prefix::Uses;
use serve::server::{Served, Server, drawn};
use serve::system::SystemPrompt;
use serve::trace::Request;
use serve::weights::{Source, small};

/// Two layers, with rows of 2 KiB per token: 1024 tokens fill a granule.
fn tiny() -> Spec {
    let config = Config {
        hidden_size: 512,
        intermediate_size: 768,
        vocab_size: 500,
        num_hidden_layers: 2,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        max_position_embeddings: 2048,
        ..small()
    };
    Spec {
        config,
        dtype: DType::F32,
        source: Source::Seed(7),
        system: SystemPrompt::default(),
    }
}

/// A model that is fast on a CPU too.
fn tinier() -> Spec {
    let mut spec = tiny();
    spec.config = Config {
        hidden_size: 64,
        intermediate_size: 96,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        ..spec.config
    };
    spec
}

fn decoder(spec: &Spec, slots: usize, device: &Device) -> Decoder {
    let cache_memory = Plain::new(device, &Budget::new(u64::MAX), spec).unwrap();
    Decoder::load(&cache_memory.var_builder(), &spec.config, slots).unwrap()
}

fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| random.u32(..500)).collect()
}

fn caches(decoder: &Decoder, make: &dyn Fn() -> Box<dyn Cache>) -> Caches {
    (0..decoder.layers()).map(|_| make()).collect()
}

/// Makes one step of one sequence.
fn step(decoder: &Decoder, token: u32, position: usize, caches: &mut Caches) -> Tensor {
    let next = Next {
        token,
        position,
        caches,
    };
    decoder.step(&mut [next]).unwrap().narrow(0, 0, 1).unwrap()
}

/// Compares the logits of a prompt and of some tokens with those of candle-transformers.
fn same_as_llama(spec: &Spec, device: &Device, make: &dyn Fn() -> Box<dyn Cache>) {
    let config = &spec.config;
    let cache_memory = Plain::new(device, &Budget::new(u64::MAX), spec).unwrap();
    let theirs = Llama::load(cache_memory.var_builder(), config).unwrap();
    let mut their_cache = llama::Cache::new(true, spec.dtype, config, device).unwrap();
    let ours = Decoder::load(&cache_memory.var_builder(), config, 3).unwrap();
    let mut our_caches = caches(&ours, make);
    // Two pieces, of which the second is partial.
    let (prompt, answer) = (tokens(700, 1), tokens(8, 2));
    let mut forward = |tokens: &[u32], position| {
        let tokens = Tensor::new(tokens, device).unwrap().unsqueeze(0).unwrap();
        theirs.forward(&tokens, position, &mut their_cache).unwrap()
    };
    let near = |ours: &Tensor, theirs: &Tensor, what: &str| {
        assert_eq!(ours.dims(), theirs.dims(), "{what}");
        let [ours, theirs] =
            [ours, theirs].map(|logits| logits.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        let most = theirs
            .iter()
            .fold(0f32, |most, logit| most.max(logit.abs()));
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert!(
                (ours - theirs).abs() < 2e-4 * most,
                "{what}: {ours} and {theirs} of {most}"
            );
        }
    };
    let logits = ours.prompt(&prompt, 0, &mut our_caches).unwrap();
    near(&logits, &forward(&prompt, 0), "the prompt");
    for (index, &token) in answer.iter().enumerate() {
        let position = prompt.len() + index;
        let logits = step(&ours, token, position, &mut our_caches);
        near(
            &logits,
            &forward(&[token], position),
            &format!("step {index}"),
        );
    }
}

/// Changes a specification to Llama 3's: scaled positions, and one matrix for embedding and output.
fn stretched(mut spec: Spec) -> Spec {
    spec.config.tie_word_embeddings = true;
    spec.config.rope_theta = 500_000.;
    spec.config.rope_scaling = Some(Llama3RopeConfig {
        factor: 8.,
        low_freq_factor: 1.,
        high_freq_factor: 4.,
        original_max_position_embeddings: 256,
        rope_type: Llama3RopeType::Llama3,
    });
    spec
}

#[test]
fn the_decoder_computes_what_candles_llama_does() {
    same_as_llama(&tinier(), &Device::Cpu, &cache::candle);
    same_as_llama(&stretched(tinier()), &Device::Cpu, &cache::candle);
}

#[test]
fn on_a_gpu_it_does_so_with_either_cache() {
    let Some((_turn, gpu)) = rig::gpu("on_a_gpu_it_does_so_with_either_cache") else {
        return;
    };
    let pool = Pool::builder(gpu.device())
        .limit(Limit::Bytes(64 << 20))
        .build()
        .unwrap();
    let memory = Memory::new(&gpu, &pool.tenant("model").register().unwrap());
    for spec in [tiny(), stretched(tiny())] {
        same_as_llama(&spec, gpu.candle(), &cache::candle);
        same_as_llama(&spec, gpu.candle(), &|| cache::elastic(&memory, 2048));
    }
}

/// Checks that the logits of a sequence are the same bits, alone or in a batch, in any row.
fn alone_and_among_others(device: &Device) {
    let spec = tinier();
    let decoder = decoder(&spec, 5, device);
    let prompts: Vec<Vec<u32>> = (0..5)
        .map(|seed| tokens(30 + 7 * seed as usize, seed))
        .collect();
    let read = |prompt: &Vec<u32>| {
        let mut own = caches(&decoder, &cache::candle);
        decoder.prompt(prompt, 0, &mut own).unwrap();
        own
    };
    let mut together: Vec<Caches> = prompts.iter().map(read).collect();
    let mut next: Vec<Next<'_>> = prompts
        .iter()
        .zip(&mut together)
        .map(|(prompt, caches)| Next {
            token: 3,
            position: prompt.len(),
            caches,
        })
        .collect();
    let among = decoder.step(&mut next).unwrap();
    for (row, prompt) in prompts.iter().enumerate() {
        let alone = step(&decoder, 3, prompt.len(), &mut read(prompt));
        let among = among.narrow(0, row, 1).unwrap();
        assert_eq!(bits(&alone).unwrap(), bits(&among).unwrap(), "row {row}");
    }
}

#[test]
fn who_else_is_in_the_batch_makes_no_difference() {
    alone_and_among_others(&Device::Cpu);
    if let Some((_turn, gpu)) = rig::gpu("who_else_is_in_the_batch_makes_no_difference") {
        alone_and_among_others(gpu.candle());
    }
}

/// Returns requests that all arrive at once, for two models in turn.
fn at_once(prompts: impl IntoIterator<Item = usize>, answer: usize) -> Vec<Request> {
    let request = |(index, prompt)| Request {
        model: index % 2,
        arrival: Duration::ZERO,
        prompt,
        answer,
    };
    prompts.into_iter().enumerate().map(request).collect()
}

fn serve_all(models: &[Model], shared: bool, requests: &[Request]) -> Served {
    let served = Server::serve(models, shared, drawn(requests, models)).unwrap();
    assert_eq!(served.figures.first.len(), requests.len());
    for (answer, request) in served.answers.iter().zip(requests) {
        assert_eq!(answer.len(), request.answer);
    }
    assert_eq!(
        served.figures.tokens,
        requests
            .iter()
            .map(|request| request.answer as u64)
            .sum::<u64>()
    );
    served
}

#[test]
fn answers_are_the_same_when_requests_are_thrown_out() {
    let specs = [tinier(), tinier()];
    let limit = |sequences| {
        let weights: u64 = specs.iter().map(|spec| spec.weights().unwrap()).sum();
        weights + sequences * specs[0].sequence(1, 512 * 64)
    };
    // The sequences grow beyond 512 tokens in the middle of the answer.
    let requests = at_once([500, 490, 505, 3, 495, 507], 30);
    let serve = |limit| {
        let models = modes::plain(&Device::Cpu, &specs, 4, limit).unwrap();
        serve_all(&models, true, &requests)
    };
    let wide = serve(u64::MAX);
    assert_eq!((wide.figures.thrown_out, wide.figures.again), (0, 0));
    let narrow = serve(limit(4));
    assert!(
        narrow.figures.thrown_out > 0 && narrow.figures.again > 0,
        "{:?}",
        narrow.figures
    );
    assert_eq!(narrow.answers, wide.answers);
}

#[test]
fn a_request_that_can_never_run_is_an_error() {
    let spec = tinier();
    let weights = spec.weights().unwrap();
    let requests = [Request {
        model: 0,
        arrival: Duration::ZERO,
        prompt: 500,
        answer: 30,
    }];
    // Enough memory for the prompt but not for the answer, and not enough for the prompt.
    for (sequences, says) in [(1, "needs more"), (0, "does not fit")] {
        let limit = weights + sequences * spec.sequence(1, 512 * 64);
        let models = modes::plain(&Device::Cpu, std::slice::from_ref(&spec), 4, limit).unwrap();
        let error = Server::serve(&models, true, drawn(&requests, &models))
            .err()
            .unwrap();
        assert!(format!("{error:#}").contains(says), "{error:#}");
    }
}

#[test]
fn a_limit_below_the_weights_names_the_model_that_has_no_room() {
    let specs = [tinier(), tinier()];
    // Enough memory for the first model's weights only.
    let limit = specs[0].weights().unwrap() * 3 / 2;
    let refused = modes::plain(&Device::Cpu, &specs, 4, limit).err().unwrap();
    let refused = format!("{refused:#}");
    assert!(refused.contains("the weights of model 2"), "{refused}");
}

#[test]
fn a_request_that_no_model_can_answer_is_refused_at_once() {
    let mut spec = tinier();
    spec.system = SystemPrompt::drawn(1, 100, 500, true);
    let models = modes::plain(&Device::Cpu, &[spec], 4, u64::MAX).unwrap();
    let request = |model, prompt, answer| Request {
        model,
        arrival: Duration::ZERO,
        prompt,
        answer,
    };
    let refused = |requests: &[Request], tokens: &dyn Fn(&Request) -> Vec<u32>| {
        let asked = requests.iter().map(|request| (*request, tokens(request)));
        let refused = Server::serve(&models, true, asked.collect());
        format!("{:#}", refused.err().expect("it was answered"))
    };
    let good = request(0, 5, 2);
    for (wrong, says) in [
        (request(1, 5, 2), "no model 1"),
        (request(0, 0, 2), "one token"),
        (request(0, 5, 0), "one token"),
        (request(0, 1940, 9), "100 + 1940 + 9 tokens"),
        (request(0, usize::MAX, 9), "of another length"),
    ] {
        let said = refused(&[good, wrong], &|request| vec![1; request.prompt.min(3000)]);
        assert!(said.contains(says), "{wrong:?}: {said}");
    }
    let said = refused(&[good], &|_| vec![1, 2, 3, 4, 500]);
    assert!(said.contains("500 words"), "{said}");
    let said = refused(&[good], &|_| vec![1; 4]);
    assert!(said.contains("of another length"), "{said}");
    // The longest possible request, and no request.
    let longest = Server::serve(&models, true, drawn(&[request(0, 1940, 8)], &models)).unwrap();
    assert_eq!(longest.answers[0].len(), 8);
    let nothing = Server::serve(&models, true, Vec::new()).unwrap();
    assert!(nothing.answers.is_empty());
}

/// Returns the logits of a prompt and of each step, bit for bit, of a sequence that continues with
/// its own tokens. `between` runs between two steps.
fn generated(
    decoder: &Decoder,
    make: &dyn Fn() -> Box<dyn Cache>,
    mut between: impl FnMut(usize),
) -> Vec<Vec<u32>> {
    let mut own = caches(decoder, make);
    let prompt = tokens(1000, 5);
    let mut logits = decoder.prompt(&prompt, 0, &mut own).unwrap();
    let mut all = vec![bits(&logits).unwrap()];
    for index in 0..60 {
        between(index);
        let token = serve::server::likeliest(&logits).unwrap()[0];
        logits = step(decoder, token, prompt.len() + index, &mut own);
        all.push(bits(&logits).unwrap());
    }
    all
}

/// Returns a tenant with a model, in a pool of `mib` MiB.
fn elastic(gpu: &Gpu, spec: &Spec, asleep: Asleep, mib: u64) -> (Pool, Memory, Elastic, Decoder) {
    let pool = Pool::builder(gpu.device())
        .limit(Limit::Bytes(mib << 20))
        .build()
        .unwrap();
    let memory = Memory::new(gpu, &pool.tenant("model").register().unwrap());
    let cache_memory = Elastic::new(&memory, spec, asleep).unwrap();
    let decoder = Decoder::load(&cache_memory.var_builder(), &spec.config, 2).unwrap();
    (pool, memory, cache_memory, decoder)
}

#[test]
fn both_caches_give_the_same_bits_while_they_grow() {
    let Some((_turn, gpu)) = rig::gpu("both_caches_give_the_same_bits_while_they_grow") else {
        return;
    };
    let (_pool, memory, cache_memory, decoder) = elastic(&gpu, &tiny(), Asleep::Never, 96);
    let (begun, mut seen) = (memory.tenant().stats().in_use, Vec::new());
    let ours = generated(&decoder, &|| cache_memory.cache(), |_| {
        let caches = memory.tenant().stats().in_use - begun;
        if seen.last() != Some(&caches) {
            seen.push(caches);
        }
    });
    // Four rows of one granule each, and then of two.
    assert_eq!(seen, [8 << 20, 16 << 20]);
    assert!(ours == generated(&decoder, &cache::candle, |_| {}));
}

#[test]
fn a_generation_sleeps_and_goes_on() {
    let Some((_turn, gpu)) = rig::gpu("a_generation_sleeps_and_goes_on") else {
        return;
    };
    let store = HostStore::builder(gpu.device())
        .pinned(96 << 20)
        .build()
        .unwrap();
    let asleep = Asleep::Keep(Rc::new(store));
    let (_pool, memory, cache_memory, decoder) = elastic(&gpu, &tiny(), asleep, 96);
    let expected = generated(&decoder, &cache::candle, |_| {});
    let mut slept = 0;
    let ours = generated(&decoder, &|| cache_memory.cache(), |index| {
        // Before the cache grows, and afterwards.
        if index % 25 == 10 {
            assert!(cache_memory.sleep().unwrap() && cache_memory.is_asleep());
            assert_eq!(memory.tenant().stats().committed, 0);
            // Meanwhile another tenant takes all of the memory and writes to it.
            gpu.device().synchronize().unwrap();
            let other = memory.tenant().allocate_on(gpu.stream(), 80 << 20).unwrap();
            other.write(0, &vec![0xff; 80 << 20]).unwrap();
            assert!(!cache_memory.wake().unwrap(), "there was room");
            drop(other);
            assert!(cache_memory.wake().unwrap() && !cache_memory.is_asleep());
            slept += 1;
        }
    });
    assert_eq!(slept, 2);
    assert!(ours == expected);
}

#[test]
fn servers_of_all_kinds_give_the_same_answers() {
    let Some((_turn, gpu)) = rig::gpu("servers_of_all_kinds_give_the_same_answers") else {
        return;
    };
    let mut specs = [tiny(), tiny()];
    specs[1].source = Source::Seed(8);
    // Eight at once, most of which grow into a second granule; then each model alone, in turn, with
    // more requests than fit beside the other model's weights.
    let mut requests = at_once([1000, 990, 1010, 40, 1015, 1003, 600, 1020], 40);
    for (index, model) in [0, 1, 0].into_iter().enumerate() {
        requests.extend((0..8).map(|more| Request {
            model,
            arrival: Duration::from_secs(3 + index as u64),
            prompt: 860 + 20 * more,
            answer: 20,
        }));
    }
    let wide = modes::plain(gpu.candle(), &specs, 8, u64::MAX).unwrap();
    let wide = serve_all(&wide, true, &requests);
    assert_eq!(wide.figures.thrown_out, 0);

    let granule = gpu.device().granularity();
    let weights = specs[0].weights().unwrap().next_multiple_of(granule);
    let limit = 2 * (weights + 3 * specs[0].sequence(1, granule));
    for (split, shared) in [
        (Split::Elastic(Sleep::Keep), true),
        (Split::Elastic(Sleep::Discard), true),
        (Split::Elastic(Sleep::Never), true),
        (Split::Shares, false),
    ] {
        let models = modes::pooled(&gpu, &specs, 8, limit, split).unwrap();
        let served = serve_all(&models, shared, &requests);
        assert!(served.answers == wide.answers, "{split:?}");
        let figures = &served.figures;
        assert!(
            figures.thrown_out > 0 && figures.again > 0,
            "{split:?}: {figures:?}"
        );
        let sleeps = matches!(split, Split::Elastic(Sleep::Keep | Sleep::Discard));
        assert_eq!(!figures.slept.is_empty(), sleeps, "{split:?}: {figures:?}");
        assert_eq!(!figures.woken.is_empty(), sleeps, "{split:?}: {figures:?}");
    }
    gpu.candle().synchronize().unwrap();
    assert_eq!(gpu.device().drop_failures(), 0);
}
