//! Sparse arrays: arrays with far more indices than memory. Some tiles of them have memory, the
//! rest are holes.
//!
//! A tile is the unit of committing and decommitting, and is one extent if its size is a power of
//! two. A [`SparseGrid`] of one to three dimensions is committed brick by brick instead. Kernels
//! index the whole array from its base address and access only committed tiles, or read holes that
//! are [backed with zeros](SparseArray::back_with_zeros).

mod bricks;
mod grid;
mod tiles;

use std::marker::PhantomData;
use std::ops::Range;
use std::time::Duration;

use bytemuck::Pod;

use crate::device::Device;
use crate::elements::{Elements, is_container, run};
use crate::error::{ContainerError, MemoryError};
use crate::own::{Place, Stream};
use crate::pool::Tenant;
use crate::region::{DEFAULT_MAPPING_LIMIT, Layout, Region};
use crate::size::Tiling;
use crate::view::{View, ViewMut};

pub use bricks::{BrickParams, BrickShape};
pub use grid::SparseGrid;
pub use tiles::Tile;

/// The default size of a tile: 32 MiB. A gigabyte is then 32 mappings; in tiles of 2 MiB it would
/// be 512, at sixteen times the cost.
pub const DEFAULT_TILE: u64 = 32 << 20;

/// The treatment of elements without memory in a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    /// They are an error, and nothing is copied.
    Refuse,
    /// They read as zero, and writes to them are discarded.
    AsZero,
}

/// Statistics of a sparse array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct SparseStats {
    /// Tiles that have addresses.
    pub tiles: usize,
    /// Tiles that are committed.
    pub committed_tiles: usize,
    /// Bytes of one tile.
    pub tile_bytes: u64,
    /// Bytes of addresses.
    pub reserved: u64,
    /// Committed bytes.
    pub committed: u64,
    /// Bytes that were decommitted and are waiting for the work that may use them.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// Bytes of addresses of holes that are backed with zeros.
    pub zero_backed: u64,
    /// Bytes of memory held: committed, pending free, and behind zeros.
    pub held: u64,
    /// Mappings in use: extents and aliases of zeros.
    pub mappings: u64,
    /// The limit on mappings.
    pub mapping_limit: u64,
}

/// A huge array in which selected tiles have memory. Its address is fixed for life.
///
/// A newly committed tile reads as zero, even if it had memory before. Copies in and out are
/// ordered behind the work queued on the home stream and complete when they return. Work of other
/// streams is recorded with [`record_use`](Self::record_use): memory that the array gives up waits
/// for it. Dropping an array waits for those streams.
///
/// ```
/// use std::sync::Arc;
/// use cuvmm::driver::host::{HostDriver, HostOptions};
/// use cuvmm::sparse::Holes;
/// use cuvmm::{Device, SparseArray, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0)?;
/// let stream = Stream::new(&device)?;
/// let mut array = SparseArray::<f32>::new(&device, &stream, 1 << 38)?;
/// array.commit(1 << 30..(1 << 30) + 1000)?;
/// array.write(1 << 30, &[1.5, 2.5], Holes::Refuse)?;
/// assert_eq!((array.len(), array.stats().committed_tiles), (1 << 38, 1));
/// assert!(array.read(0, &mut [0.0], Holes::Refuse).is_err());
/// # Ok(())
/// # }
/// ```
pub struct SparseArray<T: Pod> {
    elements: Elements<T>,
    tiling: Tiling,
    mapping_limit: u64,
}

is_container!(SparseArray [T: Pod] [T] elements);

/// Options of a sparse array, whose shape `S` is its length, or of a sparse grid, whose shape is
/// [`BrickShape`].
#[derive(Debug)]
pub struct SparseBuilder<'a, T, S = usize> {
    device: &'a Device,
    home: &'a Stream,
    shape: S,
    tile: u64,
    places: Vec<Place>,
    mapping_limit: u64,
    zero_extent: Option<u64>,
    tenant: Option<&'a Tenant>,
    timeout: Option<Duration>,
    elements: PhantomData<T>,
}

impl<'a, T: Pod, S> SparseBuilder<'a, T, S> {
    /// Sets the bytes of a tile, rounded up to whole granules and whole elements; by default 32 MiB
    /// in an array, and the bytes of a brick in a grid.
    #[must_use]
    pub const fn tile_bytes(mut self, bytes: u64) -> Self {
        self.tile = bytes;
        self
    }

    /// Sets the places of tiles, used in turn; by default all tiles are on the device.
    #[must_use]
    pub fn places(mut self, places: impl IntoIterator<Item = Place>) -> Self {
        self.places = places.into_iter().collect();
        self
    }

    /// Limits the mappings of the array, tiles and aliases of zeros together; 65,536 by default.
    #[must_use]
    pub const fn mapping_limit(mut self, mappings: u64) -> Self {
        self.mapping_limit = mappings;
        self
    }

    /// Sets the size of the largest alias of zeros under holes, in bytes, a power of two granules;
    /// 64 MiB by default.
    #[must_use]
    pub const fn zero_extent(mut self, bytes: u64) -> Self {
        self.zero_extent = Some(bytes);
        self
    }

    /// Gets the memory from a tenant of a pool: see [Regions in a
    /// tenant](crate::region#regions-in-a-tenant). Holes cannot be
    /// [backed with zeros](SparseArray::back_with_zeros) then.
    #[must_use]
    pub const fn in_tenant(mut self, tenant: &'a Tenant) -> Self {
        self.tenant = Some(tenant);
        self
    }

    /// Sets how long a commit in a tenant waits for memory in use to become free. By default it
    /// does not wait.
    #[doc(alias = "wait")]
    #[must_use]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.timeout = Some(wait);
        self
    }

    /// Reserves an array of `len` elements with these options.
    fn array(self, len: usize) -> Result<SparseArray<T>, ContainerError> {
        let bytes = Elements::<T>::check(self.device, self.home, len)?;
        let element = size_of::<T>();
        let granule = self.device.granule();
        let odd = ContainerError::TileSize {
            tile: self.tile,
            element,
        };
        let tiling = Tiling::new(granule, self.tile, element as u64);
        // A tile many times larger than requested would defeat its purpose.
        let most = self.tile.max(granule.bytes()).saturating_mul(64);
        let Some(tiling) = tiling.filter(|tiling| self.tile > 0 && tiling.bytes() <= most) else {
            return Err(odd);
        };
        let whole = tiling.above(bytes);
        let bytes = whole.ok_or(Elements::<T>::wrong_size(len))?;
        let mut builder = Region::builder(self.device, bytes)
            .layout(Layout::round_robin(self.places, tiling.bytes()))
            .largest_extent(granule.extent_within(tiling.bytes(), u64::MAX))
            .mapping_limit(self.mapping_limit);
        if let Some(bytes) = self.zero_extent {
            builder = builder.zero_extent(bytes);
        }
        if let Some(tenant) = self.tenant {
            builder = builder.in_tenant(tenant).home_stream(self.home);
        }
        if let Some(wait) = self.timeout {
            builder = builder.timeout(wait);
        }
        Ok(SparseArray {
            elements: Elements::new(builder.reserve()?, self.home, len),
            tiling,
            mapping_limit: self.mapping_limit,
        })
    }
}

impl<T: Pod> SparseBuilder<'_, T> {
    /// Reserves the addresses (`cuMemAddressReserve`) and allocates no memory.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero, length or tile are zero or too large,
    /// the stream belongs to another device, or the driver refuses.
    pub fn reserve(self) -> Result<SparseArray<T>, ContainerError> {
        let len = self.shape;
        self.array(len)
    }
}

impl<T: Pod> SparseArray<T> {
    /// Reserves an array with addresses for `len` elements and no memory.
    ///
    /// # Errors
    /// Those of [`SparseBuilder::reserve`].
    pub fn new(device: &Device, home: &Stream, len: usize) -> Result<Self, ContainerError> {
        Self::builder(device, home, len).reserve()
    }

    /// Returns a builder for an array of `len` elements.
    #[must_use]
    pub fn builder<'a>(device: &'a Device, home: &'a Stream, len: usize) -> SparseBuilder<'a, T> {
        SparseBuilder {
            device,
            home,
            shape: len,
            tile: DEFAULT_TILE.max(device.granularity()),
            places: vec![device.into()],
            mapping_limit: DEFAULT_MAPPING_LIMIT,
            zero_extent: None,
            tenant: None,
            timeout: None,
            elements: PhantomData,
        }
    }

    /// Returns the statistics of the array.
    #[must_use]
    pub fn stats(&self) -> SparseStats {
        let region = &self.elements.region;
        SparseStats {
            tiles: self.tile_count(),
            committed_tiles: self.tiles_in(&(0..region.committed())).len(),
            tile_bytes: self.tiling.bytes(),
            reserved: region.size(),
            committed: region.committed(),
            pending_free: region.pending_free(),
            zero_backed: region.zero_backed(),
            held: region.held(),
            mappings: region.mappings(),
            mapping_limit: self.mapping_limit,
        }
    }

    /// Commits the tiles that a range of elements touches, even in part. Committed tiles keep their
    /// memory and contents. Returns the number of new tiles, which read as zero.
    ///
    /// Makes `cuMemCreate`, `cuMemMap` and `cuMemSetAccess` for each tile. If tiles of the range
    /// are pending free, or zeros under them must be unmapped, waits for the work queued on the
    /// home stream and the recorded streams, unless it is complete.
    ///
    /// # Errors
    /// [`ContainerError`]; nothing has changed.
    pub fn commit(&mut self, range: Range<usize>) -> Result<usize, ContainerError> {
        let bytes = self.touched(&range)?;
        let new = self.tiles_in(&bytes).len() - self.committed_tiles_in(&bytes);
        if new == 0 {
            return Ok(0);
        }
        let fence = self.elements.fence();
        self.once_complete(|region| {
            // Without the purge, pending frees would be revived with their old contents.
            region.purge_in(&bytes)?;
            region.commit_behind(bytes.clone(), fence.clone())
        })?;
        Ok(new)
    }

    /// Commits one tile. A committed tile keeps its memory and contents. Returns `true` if the tile
    /// is new. Makes the driver calls of [`commit`](Self::commit).
    ///
    /// # Errors
    /// [`ContainerError`] when the tile does not exist, and those of [`commit`](Self::commit);
    /// nothing has changed.
    pub fn commit_tile(&mut self, index: usize) -> Result<bool, ContainerError> {
        let tile = self.tile(index)?;
        Ok(self.commit(tile.elements)? > 0)
    }

    /// Decommits one tile, behind the work of the home stream and the recorded streams. Returns
    /// `true` if the tile had memory; never waits.
    ///
    /// # Errors
    /// [`ContainerError`] when the tile does not exist, and those of [`decommit`](Self::decommit).
    pub fn decommit_tile(&mut self, index: usize) -> Result<bool, ContainerError> {
        let tile = self.tile(index)?;
        Ok(self.decommit(tile.elements)? > 0)
    }

    /// Decommits the tiles that are wholly in a range of elements, not those that it only touches
    /// ([`SparseGrid`] counts the bricks that share a tile), behind the work of the home stream and
    /// the recorded streams. Tiles whose fence is complete are released at once, the rest by the
    /// next call or by [`purge`](Self::purge). Returns the number of tiles; never waits. Tiles
    /// without memory are skipped.
    ///
    /// # Errors
    /// [`ContainerError`]; the tiles are unchanged, or decommitted if the driver refused to release
    /// them.
    pub fn decommit(&mut self, range: Range<usize>) -> Result<usize, ContainerError> {
        let bytes = self.contained(&range)?;
        let tiles = self.committed_tiles_in(&bytes);
        for part in self.elements.region.committed_in(bytes).collect::<Vec<_>>() {
            self.elements.withdraw(part)?;
        }
        self.purge()?;
        Ok(tiles)
    }

    /// Releases decommitted tiles whose fence is complete. Returns their bytes; never waits.
    ///
    /// # Errors
    /// [`ContainerError`] from the driver.
    #[doc(alias = "reclaim")]
    pub fn purge(&mut self) -> Result<u64, ContainerError> {
        Ok(self.elements.region.give_back_pending()?)
    }

    /// Backs the holes among the tiles that a range touches with zeros. Kernels may read them; a
    /// kernel that writes to them still loses the context. Each alias is a mapping and counts
    /// against the [limit](SparseBuilder::mapping_limit).
    ///
    /// Waits for the work queued on the home stream and the recorded streams if tiles of the range
    /// are pending free. Makes `cuMemMap` and `cuMemSetAccess` for each alias.
    ///
    /// # Errors
    /// [`ContainerError`]; nothing has changed.
    pub fn back_with_zeros(&mut self, range: Range<usize>) -> Result<(), ContainerError> {
        let bytes = self.touched(&range)?;
        self.once_complete(|region| region.back_with_zeros(bytes.clone()))
    }

    /// Unmaps the zeros under the holes among the tiles that a range touches. Waits for the work
    /// queued on the home stream and the recorded streams. Returns the bytes of addresses that have
    /// no memory any more.
    ///
    /// # Errors
    /// [`ContainerError`]; nothing has changed.
    pub fn remove_zeros(&mut self, range: Range<usize>) -> Result<u64, ContainerError> {
        let bytes = self.touched(&range)?;
        let fence = self.elements.fence();
        self.once_complete(|region| region.remove_zeros_behind(&bytes, fence.clone()))
    }

    /// Returns `true` if all elements of a range have memory. An empty range does.
    #[must_use]
    pub fn is_committed(&self, range: Range<usize>) -> bool {
        range.is_empty()
            || self
                .elements
                .bytes(&range)
                .is_ok_and(|bytes| self.elements.region.is_committed(bytes))
    }

    /// Returns elements for a kernel to read.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the array or has holes.
    pub fn view(&self, range: Range<usize>) -> Result<View<'_, T>, ContainerError> {
        self.parts(&range, Holes::Refuse)?;
        Ok(self.elements.view(range.start, range.len()))
    }

    /// Returns elements for a kernel to write.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the array or has holes.
    pub fn view_mut(&mut self, range: Range<usize>) -> Result<ViewMut<'_, T>, ContainerError> {
        self.parts(&range, Holes::Refuse)?;
        Ok(self.elements.view_mut(range.start, range.len()))
    }

    /// Reads as many elements as `into` holds, from `first` on.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the array, has holes that are refused, or a copy
    /// fails.
    pub fn read(&self, first: usize, into: &mut [T], holes: Holes) -> Result<(), ContainerError> {
        let parts = self.parts(&run(first, into.len()), holes)?;
        if holes == Holes::AsZero {
            into.fill(T::zeroed());
        }
        for part in parts {
            if let Some(into) = into.get_mut(within(&part, first)) {
                self.elements.read_at(part.start, into)?;
            }
        }
        Ok(())
    }

    /// Writes elements from `first` on. Returns the number of them that have memory.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the array, has holes that are refused, or a copy
    /// fails.
    pub fn write(
        &mut self,
        first: usize,
        elements: &[T],
        holes: Holes,
    ) -> Result<usize, ContainerError> {
        let parts = self.parts(&run(first, elements.len()), holes)?;
        let mut written = 0;
        for part in parts {
            if let Some(from) = elements.get(within(&part, first)) {
                self.elements.write_at(part.start, from)?;
                written += from.len();
            }
        }
        Ok(written)
    }

    /// Runs an operation on the region, and runs it again after waiting for the users if memory was
    /// pending free.
    fn once_complete<R>(
        &mut self,
        mut act: impl FnMut(&mut Region) -> Result<R, MemoryError>,
    ) -> Result<R, ContainerError> {
        match act(&mut self.elements.region) {
            Err(MemoryError::PendingFree { .. }) => {
                self.elements.wait()?;
                Ok(act(&mut self.elements.region)?)
            }
            done => Ok(done?),
        }
    }

    /// The parts of a range of elements that have memory.
    fn parts(
        &self,
        range: &Range<usize>,
        holes: Holes,
    ) -> Result<Vec<Range<usize>>, ContainerError> {
        let bytes = self.elements.bytes(range)?;
        let count = Elements::<T>::count;
        let parts = self.elements.region.committed_in(bytes);
        let parts: Vec<_> = parts.map(|it| count(it.start)..count(it.end)).collect();
        if holes == Holes::Refuse {
            let first = match parts.first() {
                Some(part) if part.start == range.start => part.end,
                _ => range.start,
            };
            if first < range.end {
                return Err(ContainerError::Uncommitted {
                    range: range.clone(),
                    first,
                });
            }
        }
        Ok(parts)
    }
}

/// The indices of part of the array in a slice that begins with the array's element `first`.
const fn within(part: &Range<usize>, first: usize) -> Range<usize> {
    part.start.saturating_sub(first)..part.end.saturating_sub(first)
}
