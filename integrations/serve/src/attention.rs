//! Attention over caches: of a prompt's tokens to all earlier tokens, and of one token each of
//! several sequences to their own past.
//!
//! A cache returns (1, tokens, heads, size). A step reads it in place: candle's product needs
//! matrices with contiguous rows, which the keys of all heads together are and the keys of one head
//! are not. So a query is widened with zeros for the other heads, and only its own part of the
//! result is kept. For a prompt that would multiply the work, so the heads are separated first.

use candle_core::{Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use candle_nn::{Linear, Module as _, VarBuilder};
use candle_transformers::models::llama::Config;

use super::batch::{Next, PIECE, Rows};
use super::cache::Caches;
use super::rotary::Rotary;

pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: usize,
    /// The queries for each of these heads.
    queries: usize,
    size: usize,
    scale: f64,
    slots: usize,
    /// 1 where both heads are the same, and 0 elsewhere: (1, heads, 1, heads, 1).
    own: Tensor,
    /// 0 where a token of a piece may attend, and -inf elsewhere: (piece, piece).
    hidden: Tensor,
}

impl Attention {
    pub(super) fn load(vb: &VarBuilder<'_>, config: &Config, slots: usize) -> Result<Self> {
        let width = config.hidden_size;
        let size = width / config.num_attention_heads;
        let heads = config.num_key_value_heads;
        let linear = |out, name: &str| candle_nn::linear_no_bias(width, out, vb.pp(name));
        let (dtype, device) = (vb.dtype(), vb.device());
        let square = |side: usize, of: fn(usize, usize) -> f32| {
            let all = (0..side * side).map(|at| of(at / side, at % side));
            Tensor::from_vec(all.collect(), (side, side), device)?.to_dtype(dtype)
        };
        let own = square(heads, |row, column| f32::from(row == column))?;
        let hidden = square(
            PIECE,
            |row, column| if column <= row { 0. } else { f32::NEG_INFINITY },
        )?;
        Ok(Self {
            q: linear(width, "q_proj")?,
            k: linear(heads * size, "k_proj")?,
            v: linear(heads * size, "v_proj")?,
            o: linear(width, "o_proj")?,
            heads,
            queries: config.num_attention_heads / heads,
            size,
            scale: 1. / (size as f64).sqrt(),
            slots,
            own: own.reshape((1, heads, 1, heads, 1))?,
            hidden,
        })
    }

    pub(super) fn forward(
        &self,
        hidden: &Tensor,
        rotary: &Rotary,
        layer: usize,
        rows: &mut Rows<'_, '_>,
    ) -> Result<Tensor> {
        let count = hidden.dim(0)?;
        let shape = |heads: usize| (1, count, heads, self.size);
        let q = self
            .q
            .forward(hidden)?
            .reshape(shape(self.heads * self.queries))?;
        let k = self.k.forward(hidden)?.reshape(shape(self.heads))?;
        let v = self.v.forward(hidden)?.reshape(shape(self.heads))?;
        let (q, k) = (rotary.turn(&q)?, rotary.turn(&k)?);
        let q = (q * self.scale)?;
        let attended = match rows {
            Rows::Prompt(caches, before) => self.piece(&q, &k, &v, layer, caches, *before)?,
            Rows::Step(next) => self.step(&q, &k, &v, layer, next)?,
        };
        self.o.forward(&attended)
    }

    fn piece(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        layer: usize,
        caches: &mut Caches,
        before: usize,
    ) -> Result<Tensor> {
        let (count, all) = (q.dim(1)?, before + q.dim(1)?);
        let Self {
            heads,
            queries,
            size,
            ..
        } = *self;
        let (keys, values) = append(caches, layer, k, v)?;
        let apart = |all: Tensor| all.squeeze(0)?.transpose(0, 1)?.contiguous();
        let (keys, values) = (apart(keys)?, apart(values)?);
        let q = q
            .reshape((count, heads, queries, size))?
            .permute((1, 2, 0, 3))?
            .reshape((heads, queries * count, size))?;
        let scores = q
            .matmul(&keys.t()?)?
            .reshape((heads * queries, count, all))?;
        let hidden = self.hidden.narrow(0, 0, count)?.narrow(1, 0, count)?;
        let hidden = hidden.pad_with_zeros(1, before, 0)?;
        let weights = softmax_last_dim(&scores.broadcast_add(&hidden)?)?;
        weights
            .reshape((heads, queries * count, all))?
            .matmul(&values)?
            .reshape((heads, queries, count, size))?
            .permute((2, 0, 1, 3))?
            .reshape((count, heads * queries * size))
    }

    /// Computes attention for one token each of several sequences.
    fn step(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        layer: usize,
        next: &mut [Next<'_>],
    ) -> Result<Tensor> {
        let Self {
            heads,
            queries,
            size,
            slots,
            ..
        } = *self;
        let spread = q
            .reshape((slots, heads, queries, 1, size))?
            .broadcast_mul(&self.own)?
            .reshape((slots, heads * queries, heads * size))?;
        let mut attended = Vec::with_capacity(slots);
        for (row, next) in next.iter_mut().enumerate() {
            let (k, v) = (k.narrow(1, row, 1)?, v.narrow(1, row, 1)?);
            let (keys, values) = append(next.caches, layer, &k, &v)?;
            let matrix = |all: Tensor| all.reshape((all.dim(1)?, heads * size));
            let scores = spread.get(row)?.matmul(&matrix(keys)?.t()?)?;
            attended.push(softmax_last_dim(&scores)?.matmul(&matrix(values)?)?);
        }
        let free = slots - attended.len();
        if free > 0 {
            let shape = (free * heads * queries, heads * size);
            attended.push(Tensor::zeros(shape, q.dtype(), q.device())?);
        }
        Tensor::cat(&attended, 0)?
            .reshape((slots, heads, queries, heads, size))?
            .broadcast_mul(&self.own)?
            .sum(3)?
            .reshape((slots, heads * queries * size))
    }
}

fn append(caches: &mut Caches, layer: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
    match caches.get_mut(layer) {
        Some(cache) => cache.append(k, v),
        None => candle_core::bail!("layer {layer} has no cache"),
    }
}
