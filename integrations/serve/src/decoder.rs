//! A Llama-shaped decoder, for one prompt at a time or one token each of many sequences.
//!
//! It computes the same as candle-transformers' llama, with the same configuration and names. In
//! addition it batches sequences of different lengths, and its attention takes keys and values from
//! a [`Cache`](crate::cache::Cache).
//!
//! The results of a sequence do not depend on the other sequences in the batch: the products of a
//! step always have as many rows as there are slots, a prompt is computed in pieces of one size,
//! and attention handles each sequence separately. So a sequence's tokens are the same bit for bit,
//! whenever it is served, and after an eviction.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Embedding, Linear, Module as _, RmsNorm, VarBuilder};
use candle_transformers::models::llama::Config;

use super::attention::Attention;
use super::batch::{Next, PIECE, Rows};
use super::cache::Caches;
use super::rotary::Rotary;

pub(crate) struct Decoder {
    words: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    rotary: Rotary,
    device: Device,
    slots: usize,
    longest: usize,
}

struct Layer {
    before_attention: RmsNorm,
    attention: Attention,
    before_mlp: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Decoder {
    /// Loads a decoder whose steps have at most `slots` sequences.
    pub(crate) fn load(vb: &VarBuilder<'_>, config: &Config, slots: usize) -> Result<Self> {
        let model = vb.pp("model");
        let words = candle_nn::embedding(
            config.vocab_size,
            config.hidden_size,
            model.pp("embed_tokens"),
        )?;
        let head = match config.tie_word_embeddings {
            true => Linear::new(words.embeddings().clone(), None),
            false => {
                candle_nn::linear_no_bias(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?
            }
        };
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Layer::load(&model.pp("layers").pp(layer), config, slots));
        Ok(Self {
            words,
            layers: layers.collect::<Result<_>>()?,
            norm: norm(config, &model.pp("norm"))?,
            head,
            rotary: Rotary::new(config, vb.dtype(), vb.device())?,
            device: vb.device().clone(),
            slots,
            longest: config.max_position_embeddings,
        })
    }

    pub(crate) const fn layers(&self) -> usize {
        self.layers.len()
    }

    pub(crate) const fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the most tokens of a sequence.
    pub(crate) const fn longest(&self) -> usize {
        self.longest
    }

    /// Computes a prompt, or a continuation after `before` tokens in the caches. Returns the logits
    /// of the last token, (1, words).
    pub(crate) fn prompt(
        &self,
        tokens: &[u32],
        mut before: usize,
        caches: &mut Caches,
    ) -> Result<Tensor> {
        let mut last = None;
        for piece in tokens.chunks(PIECE) {
            let positions: Vec<u32> = (before..before + piece.len()).map(|at| at as u32).collect();
            let hidden = self.forward(piece, &positions, Rows::Prompt(caches, before))?;
            last = Some(hidden.narrow(0, piece.len() - 1, 1)?);
            before += piece.len();
        }
        match last {
            Some(last) => self.logits(&last),
            None => candle_core::bail!("a prompt has at least one token"),
        }
    }

    /// Computes one token of each sequence. Returns the logits of each, (slots, words); rows after
    /// the last sequence are unspecified.
    pub(crate) fn step(&self, next: &mut [Next<'_>]) -> Result<Tensor> {
        if next.len() > self.slots {
            candle_core::bail!("{} sequences for {} slots", next.len(), self.slots);
        }
        let (mut tokens, mut positions) = (vec![0; self.slots], vec![0; self.slots]);
        for ((token, position), next) in tokens.iter_mut().zip(&mut positions).zip(next.iter()) {
            (*token, *position) = (next.token, next.position as u32);
        }
        let hidden = self.forward(&tokens, &positions, Rows::Step(next))?;
        self.logits(&hidden)
    }

    fn forward(&self, tokens: &[u32], positions: &[u32], mut rows: Rows<'_, '_>) -> Result<Tensor> {
        let rotary = self.rotary.at(&Tensor::new(positions, &self.device)?)?;
        let mut hidden = self.words.forward(&Tensor::new(tokens, &self.device)?)?;
        for (index, layer) in self.layers.iter().enumerate() {
            hidden = layer.forward(&hidden, &rotary, index, &mut rows)?;
        }
        Ok(hidden)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = self.head.forward(&self.norm.forward(hidden)?)?;
        logits.to_dtype(DType::F32)
    }
}

impl Layer {
    fn load(vb: &VarBuilder<'_>, config: &Config, slots: usize) -> Result<Self> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let mlp = vb.pp("mlp");
        Ok(Self {
            before_attention: norm(config, &vb.pp("input_layernorm"))?,
            attention: Attention::load(&vb.pp("self_attn"), config, slots)?,
            before_mlp: norm(config, &vb.pp("post_attention_layernorm"))?,
            gate: candle_nn::linear_no_bias(hidden, intermediate, mlp.pp("gate_proj"))?,
            up: candle_nn::linear_no_bias(hidden, intermediate, mlp.pp("up_proj"))?,
            down: candle_nn::linear_no_bias(intermediate, hidden, mlp.pp("down_proj"))?,
        })
    }

    fn forward(
        &self,
        hidden: &Tensor,
        rotary: &Rotary,
        index: usize,
        rows: &mut Rows<'_, '_>,
    ) -> Result<Tensor> {
        let normed = self.before_attention.forward(hidden)?;
        let attended = self.attention.forward(&normed, rotary, index, rows)?;
        let hidden = (attended + hidden)?;
        let normed = self.before_mlp.forward(&hidden)?;
        let gated =
            (candle_nn::ops::silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?;
        self.down.forward(&gated)? + hidden
    }
}

fn norm(config: &Config, vb: &VarBuilder<'_>) -> Result<RmsNorm> {
    candle_nn::rms_norm(config.hidden_size, config.rms_norm_eps, vb.clone())
}

pub(crate) fn bits(logits: &Tensor) -> Result<Vec<u32>> {
    let all = logits.flatten_all()?.to_vec1::<f32>()?;
    Ok(all.into_iter().map(f32::to_bits).collect())
}
