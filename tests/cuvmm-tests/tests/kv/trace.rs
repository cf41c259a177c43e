//! Memory that a cache holds for the requests of a trace, compared with the size of their tokens.
//!
//! The traces are not part of the repository. They are read from `../shared/traces`, or from the
//! folder in `CUVMM_TRACES`.
#![allow(clippy::print_stderr)]

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;

use crate::common::{GIB, model};
use cuvmm::kv::{Layout, SequenceId, Shape};
use cuvmm::{KvCache, Limit, Mapper, Pool, Stream};

/// A model like Llama 3 8B: 128 KiB per token.
const SHAPE: Shape = Shape {
    layers: 32,
    kv_heads: 8,
    head_size: 128,
    element_bytes: 2,
    max_tokens: 16_384,
    max_sequences: 1024,
};

/// Decode steps per second.
const STEPS: f64 = 40.0;

/// Seconds of warm-up, before the figures count.
const WARM_UP: f64 = 60.0;

/// Seconds of the trace that are played: half of it, since the test is built without optimization.
const LENGTH: f64 = 900.0;

struct Request {
    arrives: f64,
    prompt: u64,
    generated: u64,
}

fn trace() -> Option<Vec<Request>> {
    let folder = std::env::var_os("CUVMM_TRACES").map(PathBuf::from);
    let beside = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../shared/traces"
    ));
    let file = folder.unwrap_or(beside).join("azure-conv-first-half.csv");
    let Ok(text) = std::fs::read_to_string(&file) else {
        eprintln!(
            "*** THE MEMORY OF A CACHE WAS NOT MEASURED: there is no {}",
            file.display()
        );
        return None;
    };
    let request = |line: &str| {
        let mut fields = line.trim().split(',');
        let (_, time) = fields.next()?.split_once(' ')?;
        let mut parts = time.split(':').map(|part| part.parse::<f64>().unwrap());
        let arrives = (parts.next()? * 60.0 + parts.next()?) * 60.0 + parts.next()?;
        Some(Request {
            arrives,
            prompt: fields.next()?.parse().ok()?,
            generated: fields.next()?.parse().ok()?,
        })
    };
    let mut requests: Vec<Request> = text.lines().skip(1).filter_map(request).collect();
    let first = requests.first()?.arrives;
    requests
        .iter_mut()
        .for_each(|request| request.arrives -= first);
    requests.retain(|request| request.arrives < LENGTH);
    Some(requests)
}

struct Outcome {
    /// Held memory divided by live memory, of their sums over time.
    ratio: f64,
    /// The largest ratio at one moment.
    worst: f64,
    precommitted: f64,
    padding: f64,
    completed: usize,
    /// Idle memory divided by live memory.
    idle: f64,
    preempted: usize,
    /// Driver calls per request, including the mapper's.
    create_calls: f64,
    append_calls: f64,
    live_gib: f64,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "held {:.3} of live, {:.3} at worst (precommitted memory {:.3}, padding {:.3}), idle {:.2}; \
             {:.1} GiB live, {} completed, {} preempted; driver calls a request: {:.1} to create, \
             {:.1} to append",
            self.ratio,
            self.worst,
            self.precommitted,
            self.padding,
            self.idle,
            self.live_gib,
            self.completed,
            self.preempted,
            self.create_calls,
            self.append_calls,
        )
    }
}

fn serve(requests: &[Request], layout: Layout, limit: u64, with_mapper: bool) -> Outcome {
    let rig = model();
    let mapper = with_mapper.then(|| Mapper::start(&rig.device).unwrap());
    let builder = Pool::builder(&rig.device).limit(Limit::Bytes(limit));
    let builder = match &mapper {
        Some(mapper) => builder.mapper(mapper),
        None => builder,
    };
    let pool = builder.build().unwrap();
    let tenant = pool.tenant("conversation").register().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let builder = KvCache::builder(&tenant, &stream, SHAPE).layout(layout);
    let mut cache = builder.build().unwrap();
    let mut requests_to_come = requests.iter().peekable();
    let mut waiting: VecDeque<&Request> = VecDeque::new();
    let mut running: Vec<(SequenceId, u64, &Request)> = vec![];
    let (mut live, mut held, mut precommitted, mut padding) = (0.0, 0.0, 0.0, 0.0);
    let (mut worst, mut samples, mut completed, mut preempted) = (0.0f64, 0.0, 0, 0);
    let (mut create_calls, mut append_calls, mut idle) = (0.0, 0.0, 0.0);
    let calls = || pool.calls().total() as f64;
    for step in 0.. {
        let now = f64::from(step) / STEPS;
        while let Some(request) = requests_to_come.next_if(|request| request.arrives <= now) {
            waiting.push_back(request);
        }
        let before = calls();
        while let Some(request) = waiting.front() {
            let Ok(id) = cache.try_create(request.prompt) else {
                break;
            };
            running.push((id, request.generated, request));
            waiting.pop_front();
        }
        let created = calls();
        // If memory is short, the youngest sequence starts over.
        loop {
            let batch: Vec<_> = running.iter().map(|&(id, ..)| (id, 1)).collect();
            match cache.try_append(&batch) {
                Ok(()) => break,
                Err(error) => assert!(error.is_shortage(), "{error}"),
            }
            let (id, _, request) = running.pop().unwrap();
            cache.free(id).unwrap();
            waiting.push_front(request);
            preempted += 1;
        }
        create_calls += created - before;
        append_calls += calls() - created;
        if requests_to_come.peek().is_none() {
            break;
        }
        running.retain_mut(|(id, left, _)| {
            *left = left.saturating_sub(1);
            if *left == 0 {
                cache.free(*id).unwrap();
                completed += 1;
            }
            *left > 0
        });
        if now > WARM_UP && step % 40 == 0 {
            let stats = cache.stats();
            live += stats.live as f64;
            held += stats.held as f64;
            precommitted += stats.precommitted as f64;
            padding += stats.padding as f64;
            idle += stats.idle as f64;
            samples += 1.0;
            if stats.live > 0 {
                worst = worst.max(stats.held as f64 / stats.live as f64);
            }
        }
    }
    Outcome {
        ratio: held / live,
        worst,
        precommitted: precommitted / live,
        padding: padding / live,
        completed,
        idle: idle / live,
        preempted,
        create_calls: create_calls / requests.len() as f64,
        append_calls: append_calls / requests.len() as f64,
        live_gib: live / samples / GIB as f64,
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn memory_held_for_a_conversation_trace() {
    let Some(requests) = trace() else {
        return;
    };
    for (layout, limit, with_mapper) in [
        (Layout::TokenMajor, 60 * GIB, false),
        (Layout::TokenMajor, 60 * GIB, true),
        (Layout::TokenMajor, 7 * GIB, false),
        (Layout::TokenMajor, 7 * GIB, true),
        (Layout::LayerMajor, 60 * GIB, false),
    ] {
        let outcome = serve(&requests, layout, limit, with_mapper);
        let gib = limit / GIB;
        eprintln!("{layout:?}, {gib} GiB, mapper {with_mapper}: {outcome:.3}");
        assert!(outcome.completed > requests.len() * 9 / 10);
        if layout == Layout::TokenMajor {
            assert!(outcome.ratio <= 1.10, "{outcome}");
        }
    }
}
