//! The weights of a decoder, from a seed or from safetensors files. Names and shapes are those of
//! candle-transformers' llama. A decoder with weights from a seed costs as much as any other and
//! produces random text.

use std::path::PathBuf;

use anyhow::Context as _;
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::Config;

/// Returns the configuration of a small decoder with a realistic shape: 110 million weights.
pub(crate) fn small() -> Config {
    Config {
        hidden_size: 1024,
        intermediate_size: 2816,
        vocab_size: 8192,
        num_hidden_layers: 8,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 8192,
        tie_word_embeddings: false,
    }
}

pub(crate) fn layout(config: &Config) -> Vec<(String, Vec<usize>)> {
    let Config {
        hidden_size: hidden,
        intermediate_size: intermediate,
        vocab_size: words,
        ..
    } = *config;
    let keys = hidden / config.num_attention_heads * config.num_key_value_heads;
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![words, hidden])];
    for layer in 0..config.num_hidden_layers {
        for (name, shape) in [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![intermediate, hidden]),
            ("mlp.up_proj", vec![intermediate, hidden]),
            ("mlp.down_proj", vec![hidden, intermediate]),
        ] {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    all.push(("model.norm.weight".to_owned(), vec![hidden]));
    if !config.tie_word_embeddings {
        all.push(("lm_head.weight".to_owned(), vec![words, hidden]));
    }
    all
}

/// A source of weights that can be read repeatedly.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Seed(u64),
    Files(Vec<PathBuf>),
}

impl Source {
    /// Calls `take` with each available tensor of the layout, on the host.
    pub(crate) fn each(
        &self,
        config: &Config,
        dtype: DType,
        mut take: impl FnMut(&str, &Tensor) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let layout = layout(config);
        match self {
            Self::Seed(seed) => {
                for (index, (name, shape)) in layout.iter().enumerate() {
                    let seed = seed.wrapping_mul(1 << 20).wrapping_add(index as u64);
                    take(name, &drawn(seed, shape)?.to_dtype(dtype)?)?;
                }
            }
            Self::Files(paths) => {
                for path in paths {
                    let found = candle_core::safetensors::load(path, &Device::Cpu);
                    let found = found.with_context(|| path.display().to_string())?;
                    for (name, _) in &layout {
                        if let Some(tensor) = found.get(name) {
                            take(name, &tensor.to_dtype(dtype)?)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Draws a matrix that preserves the scale of its operand, or a norm that changes nothing.
fn drawn(seed: u64, shape: &[usize]) -> candle_core::Result<Tensor> {
    let [rows, columns] = shape else {
        return Tensor::ones(shape, DType::F32, &Device::Cpu);
    };
    let most = (3. / *columns as f32).sqrt();
    let mut random = fastrand::Rng::with_seed(seed);
    let all = (0..rows * columns).map(|_| (random.f32() * 2. - 1.) * most);
    Tensor::from_vec(all.collect(), shape, &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn tiny() -> Config {
        Config {
            hidden_size: 8,
            intermediate_size: 12,
            vocab_size: 10,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            ..small()
        }
    }

    fn all(source: &Source) -> HashMap<String, Tensor> {
        let mut all = HashMap::new();
        let taken = source.each(&tiny(), DType::F32, |name, tensor| {
            all.insert(name.to_owned(), tensor.clone());
            Ok(())
        });
        taken.unwrap();
        all
    }

    #[test]
    fn a_seed_gives_the_same_again_and_another_gives_others() {
        let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (one, again, other) = (
            all(&Source::Seed(1)),
            all(&Source::Seed(1)),
            all(&Source::Seed(2)),
        );
        assert_eq!(one.len(), layout(&tiny()).len());
        for (name, tensor) in &one {
            assert_eq!(flat(tensor), flat(&again[name]), "{name}");
            let is_norm = tensor.rank() == 1;
            assert_eq!(flat(tensor) == flat(&other[name]), is_norm, "{name}");
        }
        let [q, k] =
            ["q", "k"].map(|which| &one[&format!("model.layers.1.self_attn.{which}_proj.weight")]);
        assert_eq!((q.dims(), k.dims()), (&[8, 8][..], &[4, 8][..]));
    }

    #[test]
    fn what_was_saved_comes_back_and_the_rest_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let mut saved = all(&Source::Seed(5));
        let path = folder.path().join("model.safetensors");
        saved.insert(
            "rotary.inv_freq".into(),
            Tensor::new(1f32, &Device::Cpu).unwrap(),
        );
        candle_core::safetensors::save(&saved, &path).unwrap();
        let read = all(&Source::Files(vec![path]));
        assert_eq!(read.len(), saved.len() - 1);
        let name = "model.layers.0.mlp.down_proj.weight";
        assert_eq!(
            read[name].to_vec2::<f32>().unwrap(),
            saved[name].to_vec2::<f32>().unwrap()
        );
    }

    #[test]
    fn a_file_that_is_no_good_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("broken.safetensors");
        std::fs::write(&broken, "no header").unwrap();
        for path in [broken, folder.path().join("absent.safetensors")] {
            let source = Source::Files(vec![path.clone()]);
            let refused = source.each(&tiny(), DType::F32, |_, _| Ok(())).unwrap_err();
            let refused = format!("{refused:#}");
            assert!(refused.contains(path.to_str().unwrap()), "{refused}");
        }
    }
}
