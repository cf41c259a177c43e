//! Sparse grids: grids in which selected bricks have memory.
//!
//! Memory is committed in tiles, which many small bricks may share. So the grid records which bytes
//! belong to committed bricks: a tile has memory while one of its bricks is committed, and a brick
//! committed again in a tile that kept its memory is filled with zeros first.

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use super::bricks::BrickShape;
use super::{Holes, SparseArray, SparseBuilder, SparseStats};
use crate::device::Device;
use crate::elements::is_container;
use crate::error::{ArgumentError, ContainerError};
use crate::own::Stream;
use crate::region::{Committed, DEFAULT_MAPPING_LIMIT};
use crate::view::{View, ViewMut};

/// A grid of one to three axes in a [sparse array](SparseArray), stored brick by brick, in which
/// selected bricks have memory. Its address is fixed for life.
///
/// A newly committed brick reads as zero. A decommitted brick has no elements any more, and its
/// memory is released when all bricks that share a tile with it are decommitted. Tiles are as small
/// as possible: one granule, or as many as a brick has, unless the [builder](Self::builder) sets
/// another size.
///
/// A kernel must access only committed bricks. Elsewhere it faults, or accesses bytes of a tile
/// that other bricks use.
///
/// ```
/// use std::sync::Arc;
/// use cuvmm::driver::host::{HostDriver, HostOptions};
/// use cuvmm::sparse::{BrickShape, Holes, SparseGrid};
/// use cuvmm::{Device, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0)?;
/// let stream = Stream::new(&device)?;
/// let bricks = BrickShape::new([512, 512, 512], [32, 32, 32])?;
/// let mut grid = SparseGrid::<f32, 3>::new(&device, &stream, bricks)?;
/// let brick = bricks.brick_of([100, 40, 7])?;
/// grid.commit_brick(brick)?;
/// grid.write_brick(brick, &vec![1.5; bricks.brick_len()])?;
/// // Launch kernels on `stream` with `grid.view_mut().address()` and `bricks.params()`.
/// grid.decommit_brick(brick)?;
/// assert_eq!(grid.held(), 0);
/// # Ok(())
/// # }
/// ```
pub struct SparseGrid<T: Pod, const D: usize> {
    array: SparseArray<T>,
    bricks: BrickShape<D>,
    /// The bytes of committed bricks.
    present: Committed,
    /// The bytes of decommitted bricks in tiles that have memory.
    stale: Committed,
}

is_container!(SparseGrid [T: Pod, const D: usize] [T, D] array.elements);

impl<T: Pod, const D: usize> SparseBuilder<'_, T, BrickShape<D>> {
    /// Reserves the addresses (`cuMemAddressReserve`) and allocates no memory.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero, the grid or its tiles are too large,
    /// the stream belongs to another device, or the driver refuses.
    pub fn reserve(self) -> Result<SparseGrid<T, D>, ContainerError> {
        let bricks = self.shape;
        Ok(SparseGrid {
            array: self.array(bricks.array_len())?,
            bricks,
            present: Committed::default(),
            stale: Committed::default(),
        })
    }
}

impl<T: Pod, const D: usize> SparseGrid<T, D> {
    /// Reserves addresses for all bricks and allocates no memory.
    ///
    /// # Errors
    /// Those of [`SparseBuilder::reserve`].
    pub fn new(
        device: &Device,
        home: &Stream,
        bricks: BrickShape<D>,
    ) -> Result<Self, ContainerError> {
        Self::builder(device, home, bricks).reserve()
    }

    /// Returns a builder for a grid. By default a tile has the bytes of a brick, rounded up to
    /// whole granules and whole elements.
    #[must_use]
    pub fn builder<'a>(
        device: &'a Device,
        home: &'a Stream,
        bricks: BrickShape<D>,
    ) -> SparseBuilder<'a, T, BrickShape<D>> {
        let brick = bricks.brick_len().saturating_mul(size_of::<T>());
        SparseBuilder {
            device,
            home,
            shape: bricks,
            tile: u64::try_from(brick).unwrap_or(u64::MAX),
            places: vec![device.into()],
            mapping_limit: DEFAULT_MAPPING_LIMIT,
            zero_extent: None,
            tenant: None,
            timeout: None,
            elements: PhantomData,
        }
    }

    /// Returns the shape of the grid and of its bricks.
    #[must_use]
    pub const fn bricks(&self) -> BrickShape<D> {
        self.bricks
    }

    /// Returns the statistics of the grid's array: tiles, bytes, mappings.
    #[must_use]
    pub fn stats(&self) -> SparseStats {
        self.array.stats()
    }

    /// Returns the committed bricks, in the order of their numbers.
    pub fn committed_bricks(&self) -> impl Iterator<Item = [usize; D]> + '_ {
        let brick = self.brick_bytes();
        let whole = 0..self.array.elements.region.size();
        let numbers = self.present.parts(whole).flat_map(move |run| {
            let number = move |byte: u64| byte.checked_div(brick).unwrap_or_default();
            number(run.start)..number(run.end)
        });
        numbers.filter_map(|number| self.bricks.at(usize::try_from(number).ok()?))
    }

    /// Returns the number of committed bricks.
    #[must_use]
    pub fn committed_count(&self) -> usize {
        let count = self.present.bytes().checked_div(self.brick_bytes());
        usize::try_from(count.unwrap_or_default()).unwrap_or(usize::MAX)
    }

    /// Returns `true` if a brick is committed; `false` if the brick does not exist.
    #[must_use]
    pub fn is_committed(&self, brick: [usize; D]) -> bool {
        let elements = self.bricks.elements_of(brick).ok();
        let bytes = elements.and_then(|elements| self.array.elements.bytes(&elements).ok());
        bytes.is_some_and(|bytes| self.present.covers(&bytes))
    }

    /// Commits one brick, which then reads as zero. A committed brick is left unchanged. Returns
    /// `true` if the brick is new.
    ///
    /// Makes driver calls for tiles without memory (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess`),
    /// and for bytes of a tile that other bricks kept committed (`cuMemsetD8Async`). For these, and
    /// for tiles that are pending free, it waits for the work queued on the home stream and the
    /// recorded streams.
    ///
    /// # Errors
    /// [`ContainerError`] when the brick does not exist, or with the [brick](ContainerError::Brick)
    /// when the driver refuses; the brick is not committed then, and no tile was committed or
    /// decommitted.
    pub fn commit_brick(&mut self, brick: [usize; D]) -> Result<bool, ContainerError> {
        let elements = self.bricks.elements_of(brick)?;
        let bytes = self.array.elements.bytes(&elements)?;
        if self.present.covers(&bytes) {
            return Ok(false);
        }
        self.commit_bytes(elements, &bytes)
            .map_err(in_brick(brick))?;
        self.present.insert(bytes);
        Ok(true)
    }

    /// Commits the tiles of an absent brick, and zeroes what it left behind in them.
    fn commit_bytes(
        &mut self,
        elements: Range<usize>,
        bytes: &Range<u64>,
    ) -> Result<(), ContainerError> {
        let held = &self.array.elements;
        if self.stale.overlaps(bytes) {
            // Work that used the brick before may still write to it.
            held.wait()?;
            let mut parts = self.stale.parts(bytes.clone());
            let queued = parts.try_for_each(|part| held.region.fill(held.home(), part, 0));
            held.home().settle()?;
            queued?;
        }
        self.array.commit(elements)?;
        self.stale.remove(bytes.clone());
        Ok(())
    }

    /// Decommits one brick. Tiles without a committed brick are withdrawn, behind the work of the
    /// home stream and the recorded streams. Tiles whose fence is complete are released at once
    /// (`cuMemUnmap`, `cuMemRelease`), the rest by the next call or by [`purge`](Self::purge).
    /// Never waits. Returns `true` if the brick was committed.
    ///
    /// # Errors
    /// [`ContainerError`] when the brick does not exist, and nothing has changed; or with the
    /// [brick](ContainerError::Brick) when the driver refuses to release memory, and the brick is
    /// decommitted.
    pub fn decommit_brick(&mut self, brick: [usize; D]) -> Result<bool, ContainerError> {
        let elements = self.bricks.elements_of(brick)?;
        let bytes = self.array.elements.bytes(&elements)?;
        let touched = self.array.touched(&elements)?;
        if !self.present.covers(&bytes) {
            return Ok(false);
        }
        self.present.remove(bytes.clone());
        self.stale.insert(bytes);
        self.withdraw_unused(&touched).map_err(in_brick(brick))?;
        Ok(true)
    }

    /// Withdraws the tiles in a range of bytes that have no committed brick.
    fn withdraw_unused(&mut self, bytes: &Range<u64>) -> Result<(), ContainerError> {
        for tile in self.array.tiles_in(bytes) {
            let tile = self.array.tile_bytes(tile);
            if !self.present.overlaps(&tile) {
                self.array.elements.withdraw(tile.clone())?;
                self.stale.remove(tile);
            }
        }
        self.purge().map(drop)
    }

    /// Releases tiles of decommitted bricks whose fence is complete. Returns their bytes; never
    /// waits.
    ///
    /// # Errors
    /// [`ContainerError`] from the driver.
    pub fn purge(&mut self) -> Result<u64, ContainerError> {
        self.array.purge()
    }

    /// Returns all elements for a kernel to read, of bricks with and without memory. The kernel
    /// must access only committed bricks.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        self.array.elements.view(0, self.len())
    }

    /// Returns all elements for a kernel to write, of bricks with and without memory. The kernel
    /// must access only committed bricks.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        let len = self.len();
        self.array.elements.view_mut(0, len)
    }

    /// Copies a brick's elements to host memory (`cuMemcpyDtoHAsync`, waited for). `into` must have
    /// as many elements as a brick.
    ///
    /// # Errors
    /// [`ContainerError`] when the brick does not exist or `into` has another length, or with the
    /// [brick](ContainerError::Brick) when it is not committed and holes are refused, or the copy
    /// fails.
    pub fn read_brick(
        &self,
        brick: [usize; D],
        into: &mut [T],
        holes: Holes,
    ) -> Result<(), ContainerError> {
        let range = self.elements_of(brick, into.len())?;
        let done = match self.committed(&range) {
            Err(_) if holes == Holes::AsZero => {
                into.fill(T::zeroed());
                Ok(())
            }
            Err(absent) => Err(absent),
            Ok(()) => self.array.elements.read_at(range.start, into),
        };
        done.map_err(in_brick(brick))
    }

    /// Copies elements from host memory to a committed brick (`cuMemcpyHtoDAsync`, waited for).
    /// `elements` must be as many as a brick has.
    ///
    /// # Errors
    /// [`ContainerError`] when the brick does not exist or the number of `elements` differs, or with
    /// the [brick](ContainerError::Brick) when it is not committed or the copy fails.
    pub fn write_brick(&mut self, brick: [usize; D], elements: &[T]) -> Result<(), ContainerError> {
        let range = self.elements_of(brick, elements.len())?;
        let done = self.committed(&range);
        done.and_then(|()| self.array.elements.write_at(range.start, elements))
            .map_err(in_brick(brick))
    }

    /// The elements of a brick, for a copy of `slice` elements.
    fn elements_of(&self, brick: [usize; D], slice: usize) -> Result<Range<usize>, ContainerError> {
        let range = self.bricks.elements_of(brick)?;
        let (what, brick) = ("elements of a slice for a brick", range.len() as u64);
        ArgumentError::at_least(what, slice as u64, brick)?;
        ArgumentError::at_most(what, slice as u64, brick)?;
        Ok(range)
    }

    fn committed(&self, range: &Range<usize>) -> Result<(), ContainerError> {
        match self.present.covers(&self.array.elements.bytes(range)?) {
            true => Ok(()),
            false => Err(ContainerError::Uncommitted {
                range: range.clone(),
                first: range.start,
            }),
        }
    }

    const fn brick_bytes(&self) -> u64 {
        self.bricks.brick_len() as u64 * size_of::<T>() as u64
    }
}

/// Puts a brick in an error, unless an argument is at fault.
fn in_brick<const D: usize>(brick: [usize; D]) -> impl FnOnce(ContainerError) -> ContainerError {
    move |cause| match cause {
        ContainerError::Argument(_) => cause,
        cause => ContainerError::Brick {
            brick: brick.to_vec(),
            cause: Box::new(cause),
        },
    }
}
