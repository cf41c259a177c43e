//! The decoder computes the same as candle-transformers' llama, whatever else is in the batch.

use super::*;

/// Compares the logits of a prompt and of some tokens with candle-transformers'.
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
    let Some((_turn, gpu)) = gpu("on_a_gpu_it_does_so_with_either_cache") else {
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
    if let Some((_turn, gpu)) = gpu("who_else_is_in_the_batch_makes_no_difference") {
        alone_and_among_others(gpu.candle());
    }
}
