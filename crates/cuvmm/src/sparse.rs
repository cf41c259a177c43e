//! An array with far more indices than memory: tiles of it have memory, the rest are holes.
//!
//! A tile is what is committed and decommitted, and one extent where its size is a power of two.
//! Kernels index the whole array from its base address and keep to tiles that are committed, or to
//! holes that are [backed with zeros](SparseArray::back_with_zeros) when they only read.

mod tiles;

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use crate::device::Device;
use crate::error::{CommitError, SparseError};
use crate::own::{Place, Stream};
use crate::region::{DEFAULT_MAPPING_LIMIT, Layout, Region};
use crate::size::Tiling;
use crate::users::Users;
use crate::view::{View, ViewMut, bytes_of};

pub use tiles::Tile;

/// The size of a tile by default: 32 MiB. A gigabyte is then 32 mappings; in tiles of 2 MiB it would
/// be 512, and cost sixteen times as much.
pub const DEFAULT_TILE: u64 = 32 << 20;

/// What a copy does about elements that have no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    /// They are an error, and nothing is copied.
    Refuse,
    /// They read as zero, and what is written to them is discarded.
    AsZero,
}

/// Figures of a sparse array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SparseStats {
    /// Tiles there are addresses for.
    pub tiles: usize,
    /// Tiles that are committed.
    pub committed_tiles: usize,
    /// Bytes of one tile.
    pub tile_bytes: u64,
    /// Bytes of addresses.
    pub reserved: u64,
    /// Bytes that are committed.
    pub committed: u64,
    /// Bytes that were decommitted and wait for the work that may use them.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// Bytes of addresses whose holes read as zero.
    pub zero_backed: u64,
    /// Bytes of memory held: committed, pending free, and behind the zeros.
    pub held: u64,
    /// Mappings in use: extents and aliases of zeros.
    pub mappings: u64,
    /// Mappings there may be.
    pub mapping_limit: u64,
}

/// A huge array of which chosen tiles have memory. Its address is fixed for life.
///
/// A tile that is committed reads as zero, also one that was there before. Copies in and out are
/// ordered behind what the home stream has queued and have ended when they return. Work of other
/// streams is named with [`record_use`](Self::record_use): memory that the array gives up waits for
/// it. Dropping an array waits for those streams.
pub struct SparseArray<T: Pod> {
    region: Region,
    users: Users,
    len: usize,
    tiling: Tiling,
    mapping_limit: u64,
    elements: PhantomData<T>,
}

/// Options of a sparse array.
#[derive(Debug)]
pub struct SparseBuilder<'a, T> {
    device: &'a Device,
    home: &'a Stream,
    len: usize,
    tile: u64,
    places: Vec<Place>,
    mapping_limit: u64,
    zero_extent: Option<u64>,
    elements: PhantomData<T>,
}

impl<T: Pod> SparseBuilder<'_, T> {
    /// Bytes of a tile, rounded up to whole granules and whole elements; 32 MiB by default.
    #[must_use]
    pub const fn tile_bytes(mut self, bytes: u64) -> Self {
        self.tile = bytes;
        self
    }

    /// Where tiles lie, in turn; by default all on the device.
    #[must_use]
    pub fn places(mut self, places: impl IntoIterator<Item = Place>) -> Self {
        self.places = places.into_iter().collect();
        self
    }

    /// How many mappings the array may have, tiles and aliases of zeros; 65,536 by default.
    #[must_use]
    pub const fn mapping_limit(mut self, mappings: u64) -> Self {
        self.mapping_limit = mappings;
        self
    }

    /// The largest alias of zeros under holes, in bytes, a power of two granules; 64 MiB by default.
    #[must_use]
    pub const fn zero_extent(mut self, bytes: u64) -> Self {
        self.zero_extent = Some(bytes);
        self
    }

    /// Reserves the addresses (`cuMemAddressReserve`) and takes no memory.
    ///
    /// # Errors
    /// [`SparseError`] when the elements have no size, length or tile are zero or too large, the
    /// stream is another device's, or the driver refuses.
    pub fn reserve(self) -> Result<SparseArray<T>, SparseError> {
        let element = size_of::<T>();
        if element == 0 {
            return Err(SparseError::ZeroSizedElements);
        }
        if !self.home.device().is_same(self.device) {
            return Err(SparseError::WrongDevice);
        }
        let granule = self.device.granule();
        let odd = SparseError::OddTile {
            tile: self.tile,
            element,
        };
        let tiling = Tiling::new(granule, self.tile, element as u64);
        // A tile many times the one that was asked for would be no tile any more.
        let most = self.tile.max(granule.bytes()).saturating_mul(64);
        let Some(tiling) = tiling.filter(|tiling| self.tile > 0 && tiling.bytes() <= most) else {
            return Err(odd);
        };
        let bytes = bytes_of::<T>(self.len)
            .and_then(|bytes| tiling.above(bytes))
            .ok_or(SparseError::TooLarge { elements: self.len })?;
        let mut builder = Region::builder(self.device, bytes)
            .layout(Layout::round_robin(self.places, tiling.bytes()))
            .largest_extent(granule.extent_within(tiling.bytes(), u64::MAX))
            .mapping_limit(self.mapping_limit);
        if let Some(bytes) = self.zero_extent {
            builder = builder.zero_extent(bytes);
        }
        Ok(SparseArray {
            region: builder.reserve()?,
            users: Users::at(self.home),
            len: self.len,
            tiling,
            mapping_limit: self.mapping_limit,
            elements: PhantomData,
        })
    }
}

impl<T: Pod> SparseArray<T> {
    /// An array with addresses for `len` elements and memory for none.
    ///
    /// # Errors
    /// As [`SparseBuilder::reserve`].
    pub fn new(device: &Device, home: &Stream, len: usize) -> Result<Self, SparseError> {
        Self::builder(device, home, len).reserve()
    }

    /// Sets out to reserve addresses for `len` elements.
    #[must_use]
    pub fn builder<'a>(device: &'a Device, home: &'a Stream, len: usize) -> SparseBuilder<'a, T> {
        SparseBuilder {
            device,
            home,
            len,
            tile: DEFAULT_TILE.max(device.granularity()),
            places: vec![device.into()],
            mapping_limit: DEFAULT_MAPPING_LIMIT,
            zero_extent: None,
            elements: PhantomData,
        }
    }

    /// The first element's address; fixed for life.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.region.address()
    }

    /// The device it was made on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.region.device()
    }

    /// The stream it is used on.
    #[must_use]
    pub const fn home_stream(&self) -> &Stream {
        self.users.home()
    }

    /// How many elements there are addresses for.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are addresses for none, which never is.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its figures.
    #[must_use]
    pub fn stats(&self) -> SparseStats {
        SparseStats {
            tiles: self.tile_count(),
            committed_tiles: self.tiles_in(&(0..self.region.committed())).len(),
            tile_bytes: self.tiling.bytes(),
            reserved: self.region.size(),
            committed: self.region.committed(),
            pending_free: self.region.pending_free(),
            zero_backed: self.region.zero_backed(),
            held: self.region.held(),
            mappings: self.region.mappings(),
            mapping_limit: self.mapping_limit,
        }
    }

    /// Notes that another stream uses the elements.
    ///
    /// # Errors
    /// [`SparseError::WrongDevice`] when it is another device's.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), SparseError> {
        if self.users.record(stream) {
            Ok(())
        } else {
            Err(SparseError::WrongDevice)
        }
    }

    /// Puts memory behind the tiles that a range of elements touches; those that have it keep it and
    /// what is in it. Returns how many tiles are new; they read as zero.
    ///
    /// Per tile `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`. Where tiles of the range are pending free, or
    /// zeros under them have to make way, it waits for what the home stream and the recorded streams
    /// have queued, if that has not passed.
    ///
    /// # Errors
    /// [`SparseError`]; nothing has changed.
    pub fn commit(&mut self, range: Range<usize>) -> Result<usize, SparseError> {
        let bytes = self.touched(&range)?;
        let new = self.tiles_in(&bytes).len() - self.committed_tiles_in(&bytes);
        if new == 0 {
            return Ok(0);
        }
        let streams = self.users.all();
        self.once_complete(|region| {
            // What was given up would come back with what was in it.
            region.purge_in(&bytes)?;
            region.commit_after(bytes.clone(), &streams)
        })?;
        Ok(new)
    }

    /// Takes the memory from the tiles that lie whole in a range of elements: behind the work of the
    /// home stream and the recorded ones. What has passed is given back to the driver at once, the
    /// rest with the next call, or by [`purge`](Self::purge). Returns how many tiles it were;
    /// never waits. Tiles that have no memory are passed over.
    ///
    /// # Errors
    /// [`SparseError`]; the tiles are as before, or given up where the driver refused to take them
    /// back.
    pub fn decommit(&mut self, range: Range<usize>) -> Result<usize, SparseError> {
        let bytes = self.contained(&range)?;
        let tiles = self.committed_tiles_in(&bytes);
        let streams = self.users.all();
        for part in self.region.committed_in(bytes).collect::<Vec<_>>() {
            self.region.decommit_after(part, &streams)?;
        }
        self.region.purge()?;
        Ok(tiles)
    }

    /// Gives decommitted tiles back to the driver, as far as the work that may use them has passed.
    /// Returns their bytes; never waits.
    ///
    /// # Errors
    /// [`SparseError`] from the driver.
    #[doc(alias = "reclaim")]
    pub fn purge(&mut self) -> Result<u64, SparseError> {
        Ok(self.region.purge()?)
    }

    /// Backs the holes among the tiles that a range touches with zeros: kernels may read them, and
    /// one that writes there loses the context, as without. Each alias is a mapping and counts
    /// against the [limit](SparseBuilder::mapping_limit).
    ///
    /// Waits for what the home stream and the recorded streams have queued if tiles of the range are
    /// pending free. Per alias `cuMemMap` and `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`SparseError`]; nothing has changed.
    pub fn back_with_zeros(&mut self, range: Range<usize>) -> Result<(), SparseError> {
        let bytes = self.touched(&range)?;
        self.once_complete(|region| region.back_with_zeros(bytes.clone()))
    }

    /// Takes the zeros under the holes among the tiles that a range touches away again. Waits for
    /// what the home stream and the recorded streams have queued. Returns the bytes of addresses that
    /// have nothing behind them any more.
    ///
    /// # Errors
    /// [`SparseError`]; nothing has changed.
    pub fn remove_zeros(&mut self, range: Range<usize>) -> Result<u64, SparseError> {
        let bytes = self.touched(&range)?;
        let streams = self.users.all();
        self.once_complete(|region| region.remove_zeros_after(bytes.clone(), &streams))
    }

    /// Whether all elements of a range have memory. An empty range has.
    #[must_use]
    pub fn is_committed(&self, range: Range<usize>) -> bool {
        range.is_empty()
            || self
                .bytes(&range)
                .is_ok_and(|bytes| self.region.is_committed(bytes))
    }

    /// Elements for a kernel to read.
    ///
    /// # Errors
    /// [`SparseError`] when the range leaves the array or has holes.
    pub fn view(&self, range: Range<usize>) -> Result<View<'_, T>, SparseError> {
        let (address, len) = self.committed_run(&range)?;
        Ok(View::new(address, len, &self.users))
    }

    /// Elements for a kernel to write.
    ///
    /// # Errors
    /// [`SparseError`] when the range leaves the array or has holes.
    pub fn view_mut(&mut self, range: Range<usize>) -> Result<ViewMut<'_, T>, SparseError> {
        let (address, len) = self.committed_run(&range)?;
        Ok(ViewMut::new(address, len, &self.users))
    }

    /// Reads as many elements as `into` holds, from `first` on.
    ///
    /// # Errors
    /// [`SparseError`] when the range leaves the array, has holes that are refused, or a copy fails.
    pub fn read(&self, first: usize, into: &mut [T], holes: Holes) -> Result<(), SparseError> {
        let range = first..first.saturating_add(into.len());
        let parts = self.parts(&range, holes)?;
        if holes == Holes::AsZero {
            into.fill(T::zeroed());
        }
        let into: &mut [u8] = bytemuck::cast_slice_mut(into);
        let start = bytes_of::<T>(first).unwrap_or_default();
        for part in parts {
            if let Some(into) = within(&part, start).and_then(|at| into.get_mut(at)) {
                self.region.read(self.users.home(), part.start, into)?;
            }
        }
        Ok(())
    }

    /// Writes elements from `first` on. Returns how many of them have memory.
    ///
    /// # Errors
    /// [`SparseError`] when the range leaves the array, has holes that are refused, or a copy fails.
    pub fn write(
        &mut self,
        first: usize,
        elements: &[T],
        holes: Holes,
    ) -> Result<usize, SparseError> {
        let range = first..first.saturating_add(elements.len());
        let parts = self.parts(&range, holes)?;
        let from: &[u8] = bytemuck::cast_slice(elements);
        let start = bytes_of::<T>(first).unwrap_or_default();
        let mut written = 0;
        for part in parts {
            if let Some(from) = within(&part, start).and_then(|at| from.get(at)) {
                self.region.write(self.users.home(), part.start, from)?;
                written += from.len();
            }
        }
        Ok(written.checked_div(size_of::<T>()).unwrap_or_default())
    }

    /// Does something with the region, and waits for the work that is in its way if there is some.
    fn once_complete<R>(
        &mut self,
        mut act: impl FnMut(&mut Region) -> Result<R, CommitError>,
    ) -> Result<R, SparseError> {
        match act(&mut self.region) {
            Err(CommitError::PendingFree { .. } | CommitError::ZerosInUse { .. }) => {
                self.users.wait()?;
                Ok(act(&mut self.region)?)
            }
            done => Ok(done?),
        }
    }

    /// The parts of a range of elements that have memory, in bytes.
    fn parts(&self, range: &Range<usize>, holes: Holes) -> Result<Vec<Range<u64>>, SparseError> {
        let bytes = self.bytes(range)?;
        let parts: Vec<Range<u64>> = self.region.committed_in(bytes.clone()).collect();
        if holes == Holes::Refuse {
            let first = match parts.first() {
                Some(part) if part.start == bytes.start => part.end,
                _ => bytes.start,
            };
            if first < bytes.end {
                return Err(SparseError::Uncommitted {
                    range: range.clone(),
                    first: self.element_at(first),
                });
            }
        }
        Ok(parts)
    }

    fn committed_run(&self, range: &Range<usize>) -> Result<(DeviceAddress, usize), SparseError> {
        let bytes = self.bytes(range)?;
        self.parts(range, Holes::Refuse)?;
        let base = self.address();
        let address = base.checked_add(bytes.start).unwrap_or(base);
        Ok((address, range.end - range.start))
    }
}

/// Where a part of the array lies in host memory that begins at byte `start` of it.
fn within(part: &Range<u64>, start: u64) -> Option<Range<usize>> {
    let from = usize::try_from(part.start.checked_sub(start)?).ok()?;
    let to = usize::try_from(part.end.checked_sub(start)?).ok()?;
    Some(from..to)
}

impl<T: Pod> Drop for SparseArray<T> {
    fn drop(&mut self) {
        self.users.end(&mut self.region);
    }
}

impl<T: Pod> fmt::Debug for SparseArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseArray")
            .field("address", &self.address())
            .field("len", &self.len)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
