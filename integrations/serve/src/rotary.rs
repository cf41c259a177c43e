//! The angles by which queries and keys are rotated, as in candle-transformers' llama.

use std::f32::consts::PI;

use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::llama::{Config, Llama3RopeConfig, Llama3RopeType};

pub(crate) struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    pub(crate) fn new(config: &Config, dtype: DType, device: &Device) -> Result<Self> {
        let positions = config.max_position_embeddings;
        let frequencies = Tensor::new(frequencies(config), device)?;
        let frequencies = frequencies.reshape((1, frequencies.elem_count()))?;
        let angles = Tensor::arange(0, positions as u32, device)?
            .to_dtype(DType::F32)?
            .reshape((positions, 1))?
            .matmul(&frequencies)?;
        Ok(Self {
            cos: angles.cos()?.to_dtype(dtype)?,
            sin: angles.sin()?.to_dtype(dtype)?,
        })
    }

    /// Returns the cosines and sines at these positions, in any sequences.
    pub(crate) fn at(&self, positions: &Tensor) -> Result<Self> {
        Ok(Self {
            cos: self.cos.index_select(positions, 0)?,
            sin: self.sin.index_select(positions, 0)?,
        })
    }

    /// Rotates a tensor of the shape (1, tokens, heads, size).
    pub(crate) fn turn(&self, tokens: &Tensor) -> Result<Tensor> {
        candle_nn::rotary_emb::rope_thd(tokens, &self.cos, &self.sin)
    }
}

fn frequencies(config: &Config) -> Vec<f32> {
    let size = config.hidden_size / config.num_attention_heads;
    let plain = (0..size)
        .step_by(2)
        .map(|i| 1f32 / config.rope_theta.powf(i as f32 / size as f32));
    match &config.rope_scaling {
        None
        | Some(Llama3RopeConfig {
            rope_type: Llama3RopeType::Default,
            ..
        }) => plain.collect(),
        Some(scaling) => plain.map(|frequency| scaled(frequency, scaling)).collect(),
    }
}

/// Scales a frequency as Llama 3 does: long waves are stretched, short ones are not, and those
/// between in part.
fn scaled(frequency: f32, scaling: &Llama3RopeConfig) -> f32 {
    let original = scaling.original_max_position_embeddings as f32;
    let length = 2. * PI / frequency;
    if length < original / scaling.high_freq_factor {
        frequency
    } else if length > original / scaling.low_freq_factor {
        frequency / scaling.factor
    } else {
        let smooth = (original / length - scaling.low_freq_factor)
            / (scaling.high_freq_factor - scaling.low_freq_factor);
        (1. - smooth) * frequency / scaling.factor + smooth * frequency
    }
}
