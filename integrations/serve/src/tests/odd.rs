//! Odd settings: for any limit, slots and prompts, a request that could be served alone is also
//! served among others, with the same answer.

use super::*;
use crate::server::Asked;

/// A model that is computed very fast.
fn least(system: usize, seed: u64) -> Spec {
    let config = Config {
        hidden_size: 16,
        intermediate_size: 8,
        vocab_size: 500,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        ..tiny().config
    };
    Spec {
        config,
        dtype: DType::F32,
        source: Source::Seed(seed),
        system: SystemPrompt::drawn(seed, system, 500, true),
    }
}

#[test]
fn whoever_is_served_alone_is_served_among_others() {
    let mut random = fastrand::Rng::with_seed(1);
    let (mut served, mut refused, mut thrown_out) = (0, 0, 0);
    for round in 0..12 {
        let system = [0, 0, 0, 600][random.usize(..4)];
        let specs = [least(system, 1), least(system, 2)];
        let slots = random.usize(1..=3);
        let step = specs[0].sequence(1, cache::STEP as u64 * 32);
        let weights: u64 = specs.iter().map(|spec| spec.weights().unwrap()).sum();
        let more = random.u64(1..=5) * step + random.u64(..2) * step / 2;
        // Models that sleep have additional memory, which sleep gives up.
        let sleeps = random.u8(..3) > 0;
        let unsure = random.u8(..4) == 0;
        let awake = random.u64(1..=2) * drowsy::AWAKE;
        let requests: Vec<Request> = (0..random.usize(2..=6))
            .map(|_| Request {
                model: random.usize(..2),
                arrival: Duration::ZERO,
                prompt: [1, 500, 505, 511][random.usize(..4)],
                answer: [1, 20][random.usize(..2)],
            })
            .collect();
        let serve = |asked: Vec<Asked>| {
            let models = match sleeps {
                true => drowsy::over(&specs, slots, awake + more, false, unsure),
                false => modes::plain(&Device::Cpu, &specs, slots, weights + more).unwrap(),
            };
            let served = Server::serve(&models, true, asked);
            for model in &models {
                assert_eq!(model.cache_memory.held().caches, 0, "round {round}");
            }
            served
        };
        let wide = modes::plain(&Device::Cpu, &specs, slots, u64::MAX).unwrap();
        let asked = drawn(&requests, &wide);
        let wide = Server::serve(&wide, true, asked.clone()).unwrap();
        let alone = asked.iter().all(|asked| serve(vec![asked.clone()]).is_ok());
        match serve(asked) {
            Ok(done) => {
                assert_eq!(done.answers, wide.answers, "round {round}");
                thrown_out += done.figures.thrown_out;
                served += 1;
            }
            Err(error) => {
                assert!(
                    !alone,
                    "round {round}: {error:#}: {requests:?} in {slots} slots, {more} of {step} with {system}, \
                     {sleeps} {unsure} {awake}"
                );
                refused += 1;
            }
        }
    }
    assert!(
        served > 6 && refused > 1,
        "{served} served, {refused} refused, {thrown_out} thrown out"
    );
}
