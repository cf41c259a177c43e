//! The shape of a grid that is stored brick by brick: the positions of elements and bricks.
//!
//! Pure arithmetic: no memory, no driver.
//!
//! `unsafe` is used because kernels take the parameters as bytes, and bytemuck's marker of plain
//! data is an unsafe trait.
#![allow(unsafe_code)]

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::error::{ArgumentError, ContainerError};

/// The units of the axes, for errors.
const ELEMENTS: [&str; 3] = [
    "elements along axis 0",
    "elements along axis 1",
    "elements along axis 2",
];
const BRICKS: [&str; 3] = [
    "bricks along axis 0",
    "bricks along axis 1",
    "bricks along axis 2",
];

/// The shape of a grid of one to three axes, and of the bricks that it is divided into.
///
/// Bricks are numbered from 0, along the last axis first. An element has the index
/// `number of its brick * elements of a brick + index inside the brick`, where elements inside a
/// brick are also counted along the last axis first. Bricks at the end of an axis are whole even if
/// the shape ends within them.
///
/// ```
/// use cuvmm::sparse::BrickShape;
///
/// # fn main() -> Result<(), cuvmm::error::ContainerError> {
/// let bricks = BrickShape::new([512, 512, 512], [32, 32, 32])?;
/// assert_eq!((bricks.counts(), bricks.brick_len()), ([16, 16, 16], 32 * 32 * 32));
/// assert_eq!(bricks.brick_of([100, 40, 0])?, [3, 1, 0]);
/// let number = 3 * 16 * 16 + 16;
/// assert_eq!(bricks.number_of([3, 1, 0])?, number);
/// let inside = 4 * 32 * 32 + 8 * 32;
/// assert_eq!(bricks.index_of([100, 40, 0])?, number * 32 * 32 * 32 + inside);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "Bricks")]
pub struct BrickShape<const D: usize> {
    shape: [usize; D],
    brick: [usize; D],
    /// Bricks along each axis.
    counts: [usize; D],
    brick_len: usize,
    len: usize,
}

/// The shape of a grid as a kernel takes it, by value: three axes, in elements and in bricks. A
/// grid of fewer axes has 1 along the missing ones, which come first.
///
/// A kernel finds element `[x, y, z]` of an array `base`, whose address is that of a
/// [view](super::SparseGrid::view), as follows:
///
/// ```c
/// uint64_t number = (x / brick[0] * counts[1] + y / brick[1]) * counts[2] + z / brick[2];
/// uint64_t inside = (x % brick[0] * brick[1] + y % brick[1]) * brick[2] + z % brick[2];
/// float value = base[number * brick_len + inside];
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct BrickParams {
    /// Elements along each axis.
    pub shape: [u64; 3],
    /// Elements of a brick along each axis.
    pub brick: [u64; 3],
    /// Bricks along each axis.
    pub counts: [u64; 3],
    /// Elements of a brick.
    pub brick_len: u64,
}

// SAFETY: the type is ten numbers of 64 bits, which may all be zero.
unsafe impl Zeroable for BrickParams {}
// SAFETY: the type is ten numbers of 64 bits in C's layout: any bytes are valid, and there is no
// padding.
unsafe impl Pod for BrickParams {}

impl<const D: usize> BrickShape<D> {
    /// Divides a grid of `shape` elements into bricks of `brick` elements.
    ///
    /// # Errors
    /// [`ContainerError::Shape`] when there are no axes or more than three, the shape or the brick
    /// is zero along one, or the number of elements of all bricks overflows.
    pub fn new(shape: [usize; D], brick: [usize; D]) -> Result<Self, ContainerError> {
        let refused = || ContainerError::Shape {
            shape: shape.to_vec(),
            brick: brick.to_vec(),
        };
        if !(1..=3).contains(&D) || shape.contains(&0) || brick.contains(&0) {
            return Err(refused());
        }
        let mut counts = shape;
        for (count, brick) in counts.iter_mut().zip(brick) {
            *count = count.div_ceil(brick);
        }
        let product = |of: &[usize; D]| of.iter().try_fold(1usize, |all, &it| all.checked_mul(it));
        let brick_len = product(&brick).ok_or_else(refused)?;
        let len = product(&counts).and_then(|count| count.checked_mul(brick_len));
        Ok(Self {
            shape,
            brick,
            counts,
            brick_len,
            len: len.ok_or_else(refused)?,
        })
    }

    /// Returns the elements of the grid along each axis.
    #[must_use]
    pub const fn shape(&self) -> [usize; D] {
        self.shape
    }

    /// Returns the elements of a brick along each axis.
    #[must_use]
    pub const fn brick(&self) -> [usize; D] {
        self.brick
    }

    /// Returns the number of bricks along each axis.
    #[must_use]
    pub const fn counts(&self) -> [usize; D] {
        self.counts
    }

    /// Returns the number of elements of a brick.
    #[must_use]
    pub const fn brick_len(&self) -> usize {
        self.brick_len
    }

    /// Returns the number of elements of all bricks, including those beyond the shape.
    #[must_use]
    pub const fn array_len(&self) -> usize {
        self.len
    }

    /// Returns the brick that contains an element, counted in bricks along each axis.
    ///
    /// # Errors
    /// [`ArgumentError::OutOfRange`] when the element is outside the shape.
    pub fn brick_of(&self, element: [usize; D]) -> Result<[usize; D], ContainerError> {
        within(element, self.shape, &ELEMENTS)?;
        let mut brick = element;
        for (at, size) in brick.iter_mut().zip(self.brick) {
            *at = at.checked_div(size).unwrap_or_default();
        }
        Ok(brick)
    }

    /// Returns the number of a brick.
    ///
    /// # Errors
    /// [`ArgumentError::OutOfRange`] when the brick does not exist.
    pub fn number_of(&self, brick: [usize; D]) -> Result<usize, ContainerError> {
        within(brick, self.counts, &BRICKS)?;
        Ok(folded(brick, self.counts))
    }

    /// Returns the brick with a number; `None` if there are not as many bricks.
    #[must_use]
    pub fn at(&self, number: usize) -> Option<[usize; D]> {
        let (mut rest, mut brick) = (number, self.counts);
        for at in brick.iter_mut().rev() {
            let count = *at;
            *at = rest.checked_rem(count)?;
            rest = rest.checked_div(count)?;
        }
        (rest == 0).then_some(brick)
    }

    /// Returns the index of an element in the array of all bricks.
    ///
    /// # Errors
    /// [`ArgumentError::OutOfRange`] when the element is outside the shape.
    pub fn index_of(&self, element: [usize; D]) -> Result<usize, ContainerError> {
        let brick = self.brick_of(element)?;
        let mut inside = element;
        for (at, size) in inside.iter_mut().zip(self.brick) {
            *at = at.checked_rem(size).unwrap_or_default();
        }
        let number = folded(brick, self.counts);
        Ok(number * self.brick_len + folded(inside, self.brick))
    }

    /// Returns the indices of a brick's elements in the array of all bricks.
    ///
    /// # Errors
    /// [`ArgumentError::OutOfRange`] when the brick does not exist.
    pub fn elements_of(&self, brick: [usize; D]) -> Result<Range<usize>, ContainerError> {
        let first = self.number_of(brick)? * self.brick_len;
        Ok(first..first + self.brick_len)
    }

    /// Returns the shape in the form that kernels take.
    #[must_use]
    pub fn params(&self) -> BrickParams {
        let three = |axes: [usize; D]| {
            let mut all = [1; 3];
            for (to, from) in all.iter_mut().rev().zip(axes.iter().rev()) {
                *to = *from as u64;
            }
            all
        };
        BrickParams {
            shape: three(self.shape),
            brick: three(self.brick),
            counts: three(self.counts),
            brick_len: self.brick_len as u64,
        }
    }
}

/// Refuses a position beyond the end of an axis.
fn within<const D: usize>(
    at: [usize; D],
    counts: [usize; D],
    what: &[&'static str],
) -> Result<(), ArgumentError> {
    for ((at, len), what) in at.into_iter().zip(counts).zip(what) {
        if at >= len {
            let range = at..at.saturating_add(1);
            return Err(ArgumentError::outside(what, &range, len));
        }
    }
    Ok(())
}

/// The number of a position, counted along the last axis first. It cannot overflow, since the
/// position is within the axes.
fn folded<const D: usize>(at: [usize; D], counts: [usize; D]) -> usize {
    let axes = at.into_iter().zip(counts);
    axes.fold(0, |number, (at, count)| number * count + at)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_element_has_an_index_of_its_own() {
        let bricks = BrickShape::new([7, 5, 9], [2, 3, 4]).unwrap();
        assert_eq!((bricks.counts(), bricks.array_len()), ([4, 2, 3], 24 * 24));
        let mut seen = vec![false; bricks.array_len()];
        let params = bricks.params();
        for (x, y, z) in (0..7 * 5 * 9).map(|at| (at / 45, at / 9 % 5, at % 9)) {
            let index = bricks.index_of([x, y, z]).unwrap();
            assert!(!std::mem::replace(&mut seen[index], true));
            let brick = bricks.brick_of([x, y, z]).unwrap();
            assert!(bricks.elements_of(brick).unwrap().contains(&index));
            assert_eq!(bricks.at(bricks.number_of(brick).unwrap()), Some(brick));
            // The formula that the documentation gives to kernels.
            let (at, BrickParams { brick, counts, .. }) = ([x, y, z].map(|it| it as u64), params);
            let number =
                (at[0] / brick[0] * counts[1] + at[1] / brick[1]) * counts[2] + at[2] / brick[2];
            let inside =
                (at[0] % brick[0] * brick[1] + at[1] % brick[1]) * brick[2] + at[2] % brick[2];
            assert_eq!(number * params.brick_len + inside, index as u64);
        }
        assert_eq!(bricks.at(24), None);
    }

    #[test]
    fn a_grid_of_two_axes_has_one_layer() {
        let bricks = BrickShape::new([10, 20], [4, 8]).unwrap();
        let params = bricks.params();
        assert_eq!((params.shape, params.brick), ([1, 10, 20], [1, 4, 8]));
        assert_eq!((params.counts, params.brick_len), ([1, 3, 3], 32));
        assert_eq!(bytemuck::bytes_of(&params).len(), 80);
        assert_eq!(bricks.index_of([5, 9]).unwrap(), 4 * 32 + 9);
    }

    #[test]
    fn what_is_no_shape_and_no_place_is_refused() {
        for (shape, brick) in [
            ([0, 1], [1, 1]),
            ([1, 1], [1, 0]),
            ([usize::MAX, 2], [1, 1]),
            ([1, 1], [usize::MAX, 2]),
            ([usize::MAX, 1], [1 << 32, 1 << 31]),
        ] {
            let refused = BrickShape::new(shape, brick);
            assert!(
                matches!(refused, Err(ContainerError::Shape { .. })),
                "{shape:?}"
            );
        }
        assert!(BrickShape::new([], []).is_err());
        assert!(BrickShape::new([1; 4], [1; 4]).is_err());
        let bricks = BrickShape::new([6, 6], [4, 4]).unwrap();
        let refused = bricks.index_of([5, 6]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "elements along axis 1 6..7: there are 6"
        );
        let refused = bricks.number_of([2, 0]).unwrap_err();
        assert_eq!(refused.to_string(), "bricks along axis 0 2..3: there are 2");
        assert!(bricks.elements_of([0, usize::MAX]).is_err());
    }
}
