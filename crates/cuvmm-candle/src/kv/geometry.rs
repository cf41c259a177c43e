//! Where the tokens of a cache lie: rows, each of which is a block and grows in place.
//!
//! Only shapes and figures are here, and no memory.

use candle_core::{DType, Shape};

use crate::error::{CacheError, TensorError};

/// What lies side by side in a row, of which each is a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// The tokens of one head of one sequence, where the shape is (batch, heads, tokens, size): a row for
    /// everything before the dimension of tokens. What is handed out has the strides of candle's own
    /// cache, and every operation takes it as it takes that. A row takes at least a granule (2 MiB on
    /// today's GPUs), so short sequences of many heads take much more than their tokens.
    #[default]
    Heads,
    /// All heads of all sequences of a token, and then the next token: one row. Takes the least memory.
    /// What is handed out is permuted, which flash attention and `contiguous` take, and a product of
    /// matrices does not.
    Tokens,
}

/// The shape of what is appended, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    dim: usize,
    order: Order,
    /// As appended; what it says of tokens is of no interest.
    dims: Vec<usize>,
    pub(super) dtype: DType,
    /// How many rows there are.
    pub(super) rows: usize,
    /// Elements of one token in a row.
    token: usize,
}

/// The most elements between a cache's first and its last.
const COUNTABLE: u64 = u32::MAX as u64;

impl Geometry {
    pub(super) fn new(
        dims: &[usize],
        dtype: DType,
        dim: usize,
        order: Order,
    ) -> Result<Self, CacheError> {
        let no_tokens = || CacheError::NoTokens {
            got: dims.to_vec(),
            dim,
        };
        if dim >= dims.len() {
            return Err(no_tokens());
        }
        if dtype.size_in_bytes() == 0 {
            return Err(TensorError::UnsupportedType { dtype }.into());
        }
        let rows: usize = dims.iter().take(Self::lead(dim, order)).product();
        let all = dims.iter().enumerate().filter(|&(index, _)| index != dim);
        let all: usize = all.map(|(_, &size)| size).product();
        let token = all
            .checked_div(rows)
            .filter(|&token| token > 0)
            .ok_or_else(no_tokens)?;
        Ok(Self {
            dim,
            order,
            dims: dims.to_vec(),
            dtype,
            rows,
            token,
        })
    }

    /// How many of the dimensions as stored stand before that of tokens.
    fn lead(dim: usize, order: Order) -> usize {
        match order {
            Order::Heads => dim,
            Order::Tokens => 0,
        }
    }

    /// Bytes of so many tokens in a row.
    pub(super) fn row(&self, tokens: usize) -> Result<u64, CacheError> {
        let bytes = (tokens as u64).checked_mul(self.token_bytes());
        bytes.ok_or(CacheError::TooWide { elements: u64::MAX })
    }

    /// Bytes of one token in a row.
    pub(super) fn token_bytes(&self) -> u64 {
        (self.token * self.dtype.size_in_bytes()) as u64
    }

    /// The shape as stored, with so many tokens.
    pub(super) fn stored(&self, tokens: usize) -> Shape {
        let of = |&index: &usize| match self.dims.get(index) {
            Some(&size) if index != self.dim => size,
            _ => tokens,
        };
        Shape::from(self.permutation().iter().map(of).collect::<Vec<_>>())
    }

    /// The dimension of tokens as stored.
    pub(super) fn stored_dim(&self) -> usize {
        Self::lead(self.dim, self.order)
    }

    /// From which dimension of what is appended each of the stored ones comes.
    pub(super) fn permutation(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.dims.len()).collect();
        let dim = order.remove(self.dim);
        order.insert(self.stored_dim(), dim);
        order
    }

    /// From which dimension of what is stored each of those handed out comes.
    pub(super) fn inverse(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.dims.len()).collect();
        let dim = order.remove(self.stored_dim());
        order.insert(self.dim, dim);
        order
    }

    /// Whether stored and handed out are the same.
    pub(super) fn is_straight(&self) -> bool {
        self.stored_dim() == self.dim
    }

    /// Whether candle's kernels can count the elements of rows that lie so many bytes apart.
    pub(super) fn check_stride(&self, stride: u64) -> Result<(), CacheError> {
        let element = self.dtype.size_in_bytes() as u64;
        let elements = stride.checked_div(element).unwrap_or(0);
        let elements = elements.saturating_mul(self.rows as u64);
        match elements > COUNTABLE {
            true => Err(CacheError::TooWide { elements }),
            false => Ok(()),
        }
    }

    /// How many tokens fit between the beginnings of two rows that lie so many bytes apart, which is a
    /// multiple of a token's.
    pub(super) fn tokens_between(&self, stride: u64) -> Result<usize, CacheError> {
        self.check_stride(stride)?;
        Ok((stride / self.token_bytes()) as usize)
    }

    /// Whether a tensor of this shape and type can be appended; with its tokens.
    pub(super) fn check(&self, dims: &[usize], dtype: DType) -> Result<usize, CacheError> {
        let same = |(index, (&ours, &theirs)): (usize, (&usize, &usize))| {
            index == self.dim || ours == theirs
        };
        let fits = dims.len() == self.dims.len()
            && dtype == self.dtype
            && self.dims.iter().zip(dims).enumerate().all(same);
        match dims.get(self.dim) {
            Some(&tokens) if fits => Ok(tokens),
            _ => Err(CacheError::Differs {
                got: dims.to_vec(),
                got_type: dtype,
                has: self.dims.clone(),
                has_type: self.dtype,
                dim: self.dim,
            }),
        }
    }
}
