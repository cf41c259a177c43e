//! Tests of the decoder and the server: the decoder computes what candle-transformers' llama does, and
//! answers are the same bit for bit with either cache and with any evictions.
//!
//! Tests that need no GPU run on candle's CPU device; the others print a notice if they did not
//! run.

mod decoder;
mod drowsy;
mod generation;
mod odd;
mod prefix;
mod server;

use std::io::Write as _;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::{self, Config, Llama, Llama3RopeConfig, Llama3RopeType};
use cuvmm::{HostStore, Limit, Pool};
use cuvmm_candle::error::OpenError;
use cuvmm_candle::{Gpu, Memory};

use crate::batch::Next;
use crate::cache::{self, Budget, Cache, Caches};
use crate::cache_memory::{Asleep, CacheMemory, Elastic, Plain, Spec};
use crate::decoder::{Decoder, bits};
use crate::model::Model;
use crate::modes::{self, Split};
use crate::options::Sleep;
use crate::prefix::Uses;
use crate::server::{Served, Server, drawn};
use crate::system::SystemPrompt;
use crate::trace::Request;
use crate::weights::{Source, small};

/// Returns the GPU, or `None` without one, after printing a notice even if the test harness
/// captures output.
fn gpu(test: &str) -> Option<(MutexGuard<'static, ()>, Gpu)> {
    // The tests count what a device has, so they run one at a time.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let error = match Gpu::open(0) {
        Ok(gpu) => return Some((turn, gpu)),
        Err(OpenError::Cudarc(error)) => error,
        Err(error) => panic!("{error}"),
    };
    if std::env::var_os("CUVMM_REQUIRE_GPU").is_some_and(|value| value == "1") {
        panic!("CUVMM_REQUIRE_GPU=1, and there is no GPU: {error}");
    }
    let said = writeln!(
        std::io::stderr(),
        "\n*** {test} DID NOT RUN: it needs a GPU. {error} ***"
    );
    drop(said);
    None
}

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
