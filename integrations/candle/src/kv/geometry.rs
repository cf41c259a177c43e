//! The places of a cache's tokens: rows, each of which is a block that grows in place. This module
//! computes shapes and sizes, and uses no memory.

use candle_core::{DType, Shape};

use crate::error::{CacheError, TensorError};

/// The elements that are adjacent in a row. Each row is a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// The tokens of one head of one sequence, for shapes (batch, heads, tokens, size): a row for
    /// every index before the dimension of tokens. The tensors have the strides of candle's own
    /// cache, and work in the same operations. A row takes at least a granule (2 MiB on today's
    /// GPUs), so short sequences with many heads take much more than their tokens.
    #[default]
    Heads,
    /// All heads of all sequences of a token, then the next token: a single row, which takes the
    /// least memory. The tensors are permuted, which flash attention and `contiguous` accept, and a
    /// product of matrices does not.
    Tokens,
}

/// The layout of appended tensors in rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    dim: usize,
    order: Order,
    /// The shape of an appended tensor. Its number of tokens is not used.
    dims: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    token: usize,
}

/// The most elements that a cache may span.
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

    /// Returns the number of stored dimensions before the dimension of tokens.
    fn lead(dim: usize, order: Order) -> usize {
        match order {
            Order::Heads => dim,
            Order::Tokens => 0,
        }
    }

    pub(super) fn row(&self, tokens: usize) -> Result<u64, CacheError> {
        let bytes = (tokens as u64).checked_mul(self.token_bytes());
        bytes.ok_or(CacheError::TooWide { elements: u64::MAX })
    }

    pub(super) fn token_bytes(&self) -> u64 {
        (self.token * self.dtype.size_in_bytes()) as u64
    }

    pub(super) fn stored(&self, tokens: usize) -> Shape {
        let of = |&index: &usize| match self.dims.get(index) {
            Some(&size) if index != self.dim => size,
            _ => tokens,
        };
        Shape::from(self.permutation().iter().map(of).collect::<Vec<_>>())
    }

    pub(super) fn stored_dim(&self) -> usize {
        Self::lead(self.dim, self.order)
    }

    /// Returns, for each stored dimension, the dimension of the appended tensor.
    pub(super) fn permutation(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.dims.len()).collect();
        let dim = order.remove(self.dim);
        order.insert(self.stored_dim(), dim);
        order
    }

    /// Returns, for each dimension of the returned tensor, the stored dimension.
    pub(super) fn inverse(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.dims.len()).collect();
        let dim = order.remove(self.stored_dim());
        order.insert(self.dim, dim);
        order
    }

    pub(super) fn is_straight(&self) -> bool {
        self.stored_dim() == self.dim
    }

    /// Checks that candle's kernels can count the elements of rows that are `stride` bytes apart.
    pub(super) fn check_stride(&self, stride: u64) -> Result<(), CacheError> {
        let element = self.dtype.size_in_bytes() as u64;
        let elements = stride.checked_div(element).unwrap_or(0);
        let elements = elements.saturating_mul(self.rows as u64);
        match elements > COUNTABLE {
            true => Err(CacheError::TooWide { elements }),
            false => Ok(()),
        }
    }

    /// Returns the number of tokens between the starts of two rows, `stride` bytes apart. `stride`
    /// is a multiple of a token's bytes.
    pub(super) fn tokens_between(&self, stride: u64) -> Result<usize, CacheError> {
        self.check_stride(stride)?;
        Ok((stride / self.token_bytes()) as usize)
    }

    /// Checks that a tensor of this shape and type can be appended, and returns its number of
    /// tokens.
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

/// Returns the distance in bytes between rows at these addresses, or `None` for fewer than two
/// rows. Fails if the distances differ.
pub(super) fn distance_of(rows: &[u64]) -> Result<Option<u64>, CacheError> {
    let mut first = None;
    for (before, pair) in rows.windows(2).enumerate() {
        let [one, two] = pair else { continue };
        let distance = two.saturating_sub(*one);
        let first = *first.get_or_insert(distance);
        if distance == 0 || distance != first {
            return Err(CacheError::NotSideBySide {
                row: before + 1,
                distance,
                first,
            });
        }
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

    const ORDERS: [Order; 2] = [Order::Heads, Order::Tokens];

    fn geometry(dims: &[usize], dim: usize, order: Order) -> Result<Geometry, CacheError> {
        Geometry::new(dims, DType::F32, dim, order)
    }

    /// The stored form consists of rows of whole tokens, and the returned form equals the appended
    /// one.
    #[test]
    fn what_is_stored_comes_back() {
        for (dims, dim) in [
            (&[2, 3, 5, 4][..], 2),
            (&[2, 5, 3, 4], 1),
            (&[5, 4], 0),
            (&[3, 5], 1),
            (&[2, 1, 3, 5, 4], 3),
            (&[2, 3, 4, 5], 3),
        ] {
            let count: usize = dims.iter().product();
            let all = Tensor::arange(0, count as u32, &Device::Cpu).unwrap();
            let all = all.reshape(dims).unwrap();
            for order in ORDERS {
                let geometry = geometry(dims, dim, order).unwrap();
                let stored = all.permute(geometry.permutation()).unwrap();
                assert_eq!(stored.shape(), &geometry.stored(5), "{dims:?} {dim}");
                // Each row begins with the first token, and the elements of the next one follow.
                let rows = (geometry.rows, 5, geometry.token);
                let rows = stored.contiguous().unwrap().reshape(rows).unwrap();
                let first = stored.narrow(geometry.stored_dim(), 0, 1).unwrap();
                let flat = |tensor: &Tensor| {
                    let flat = tensor.flatten_all().unwrap();
                    flat.to_vec1::<u32>().unwrap()
                };
                assert_eq!(flat(&rows.narrow(1, 0, 1).unwrap()), flat(&first));
                let back = stored.permute(geometry.inverse()).unwrap();
                assert_eq!((back.dims(), flat(&back)), (dims, flat(&all)));
                let straight = stored.dims() == all.dims() && flat(&stored) == flat(&all);
                assert_eq!(geometry.is_straight(), straight, "{dims:?} {dim} {order:?}");
            }
        }
    }

    #[test]
    fn rows_are_as_many_and_as_large_as_their_order_says() {
        let heads = geometry(&[2, 8, 7, 64], 2, Order::Heads).unwrap();
        assert_eq!((heads.rows, heads.token_bytes()), (16, 256));
        let tokens = geometry(&[2, 8, 7, 64], 2, Order::Tokens).unwrap();
        assert_eq!((tokens.rows, tokens.token_bytes()), (1, 4096));
        assert_eq!((heads.row(3).unwrap(), tokens.row(0).unwrap()), (768, 0));
        // The most elements that 32 bits count, in all rows together.
        let most = u64::from(u32::MAX) / 16 * 4;
        assert!(heads.check_stride(most).is_ok() && heads.check_stride(most + 4).is_err());
        assert_eq!(heads.tokens_between(1 << 20).unwrap(), 4096);
        for refused in [
            tokens.row(usize::MAX),
            heads.tokens_between(1 << 40).map(|_| 0),
        ] {
            assert!(matches!(refused, Err(CacheError::TooWide { .. })));
        }
    }

    #[test]
    fn only_more_of_the_same_can_be_appended() {
        let heads = geometry(&[2, 8, 7, 64], 2, Order::Heads).unwrap();
        for tokens in [0, 1, 9] {
            let more = heads.check(&[2, 8, tokens, 64], DType::F32);
            assert_eq!(more.unwrap(), tokens);
        }
        for (dims, dtype) in [
            (&[1, 8, 7, 64][..], DType::F32),
            (&[2, 8, 7, 32], DType::F32),
            (&[2, 8, 7], DType::F32),
            (&[2, 8, 7, 64, 1], DType::F32),
            (&[2, 8, 7, 64], DType::BF16),
        ] {
            let refused = heads.check(dims, dtype);
            assert!(
                matches!(refused, Err(CacheError::Differs { .. })),
                "{dims:?}"
            );
        }
        for (dims, dim) in [(&[2, 8][..], 2), (&[0, 8, 7, 64], 2), (&[2, 8, 7, 0], 2)] {
            for order in ORDERS {
                let refused = geometry(dims, dim, order);
                assert!(
                    matches!(refused, Err(CacheError::NoTokens { .. })),
                    "{dims:?}"
                );
            }
        }
        let odd = Geometry::new(&[2, 4], DType::F4, 0, Order::Heads);
        assert!(matches!(odd, Err(CacheError::Tensor(_))));
    }

    #[test]
    fn rows_lie_at_equal_distances_or_are_none() {
        assert_eq!(distance_of(&[]).unwrap(), None);
        assert_eq!(distance_of(&[7]).unwrap(), None);
        assert_eq!(distance_of(&[7, 10, 13, 16]).unwrap(), Some(3));
        for (rows, figures) in [
            (&[7, 10, 30][..], (2, 20, 3)),
            (&[7, 10, 5], (2, 0, 3)),
            (&[7, 7], (1, 0, 0)),
        ] {
            let refused = distance_of(rows);
            assert!(
                matches!(
                    refused,
                    Err(CacheError::NotSideBySide { row, distance, first })
                        if (row, distance, first) == figures
                ),
                "{refused:?}"
            );
        }
    }
}
