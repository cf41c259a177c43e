//! Paths of containers: a tile among few or many others, a cache's figures per range, blocks of a paged
//! cache, a vector and a region.

use anyhow::Result;
use cuvmm::kv::{Layout, Shape};
use cuvmm::paged::LayerGroup;
use cuvmm::{DeviceVec, KvCache, PagedKv, Region, SparseArray};

use crate::crowd::{Crowd, GRANULE, Size};
use crate::marks::Marks;

/// The ranges of the larger cache, and of all calls for a smaller cache together.
const RANGES: usize = 1024;

const RANGES_EACH: usize = 16;

/// Commits and decommits a tile beside 1,024 or 16,384 others, including the model's own work.
pub(crate) fn tile(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let per_tile = usize::try_from(GRANULE)?;
    let count = match crowd.size {
        Size::Few => 1024,
        Size::Many => 16_384,
    };
    let mut array = match crowd.tiles.take() {
        Some(array) => array,
        None => {
            let all = (count + 1) * per_tile;
            let builder = SparseArray::<u8>::builder(&crowd.device, &crowd.stream, all);
            let mut array = builder.tile_bytes(GRANULE).reserve()?;
            array.commit(0..all)?;
            array.decommit(count / 2 * per_tile..(count / 2 + 1) * per_tile)?;
            array
        }
    };
    let at = count / 2 * per_tile..(count / 2 + 1) * per_tile;
    marks.around(|| -> Result<()> {
        for _ in 0..batch {
            array.commit(at.clone())?;
            array.decommit(at.clone())?;
        }
        Ok(())
    })?;
    crowd.tiles = Some(array);
    Ok(())
}

/// Computes the statistics of a cache, per range.
pub(crate) fn stats(marks: &Marks, crowd: &mut Crowd, _: usize) -> Result<()> {
    looked_at(marks, crowd, |cache| {
        std::hint::black_box(cache.stats());
        Ok(())
    })
}

/// Computes what fits into a cache, per range.
pub(crate) fn admission(marks: &Marks, crowd: &mut Crowd, _: usize) -> Result<()> {
    looked_at(marks, crowd, |cache| {
        cache.admission()?;
        Ok(())
    })
}

/// Calls `look` on a cache as often as needed to examine the same number of ranges for both sizes:
/// 8 sequences or 64.
fn looked_at(
    marks: &Marks,
    crowd: &mut Crowd,
    look: impl Fn(&KvCache) -> Result<()>,
) -> Result<()> {
    let sequences = match crowd.size {
        Size::Few => RANGES / RANGES_EACH / 8,
        Size::Many => RANGES / RANGES_EACH,
    };
    let cache = match crowd.cache.take() {
        Some(cache) => cache,
        None => full_cache(crowd, sequences)?,
    };
    let times = RANGES / (sequences * RANGES_EACH);
    crowd.between(marks, |_| (0..times).try_for_each(|_| look(&cache)))?;
    crowd.cache = Some(cache);
    Ok(())
}

fn full_cache(crowd: &Crowd, sequences: usize) -> Result<KvCache> {
    let shape = Shape {
        layers: u32::try_from(RANGES_EACH)? / 2,
        kv_heads: 8,
        head_size: 128,
        element_bytes: 2,
        max_tokens: 8192,
        max_sequences: 256,
    };
    let tenant = &crowd.tenants[0];
    let builder = KvCache::builder(tenant, &crowd.stream, shape).layout(Layout::LayerMajor);
    let mut cache = builder.tag("kv").build()?;
    for _ in 0..sequences {
        cache.create(1500)?;
    }
    Ok(cache)
}

/// Backs blocks of a paged cache and releases them, beside others that touch the same extents.
pub(crate) fn paged_back(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let (kv, numbers) = paged(crowd, batch)?;
    crowd.between(marks, |_| {
        kv.back(&numbers)?;
        Ok(kv.release(&numbers)?)
    })?;
    crowd.paged = Some(kv);
    Ok(())
}

/// Backs blocks like [`paged_back`], and releases them outside of the marks.
pub(crate) fn paged_backed(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let (kv, numbers) = paged(crowd, batch)?;
    crowd.between(marks, |_| Ok(kv.back(&numbers)?))?;
    kv.release(&numbers)?;
    crowd.paged = Some(kv);
    Ok(())
}

/// Returns a cache, and the numbers of unused blocks in extents that other blocks touch.
fn paged(crowd: &mut Crowd, batch: usize) -> Result<(PagedKv, Vec<u32>)> {
    let kv = match crowd.paged.take() {
        Some(kv) => kv,
        None => {
            // Eight blocks of a granule in an extent, one of which stays in use.
            let group = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
            let kv = PagedKv::builder(&crowd.tenants[0], &crowd.stream, 4096).group(group);
            let kv = kv.extent(8 * GRANULE).build()?;
            let kept: Vec<u32> = (0..4096).step_by(8).collect();
            kv.back(&kept)?;
            kv
        }
    };
    let free = (0..4096).filter(|number| number % 8 > 0);
    let numbers = free.take(batch).collect();
    Ok((kv, numbers))
}

/// Appends 1,024 elements to a vector that has memory for them, with the copy that the model makes.
pub(crate) fn extend(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let elements = [7_u32; 1024];
    let all = batch * elements.len();
    let mut vector = match crowd.vector.take() {
        Some(vector) => vector,
        None => DeviceVec::new(&crowd.device, &crowd.stream, all)?,
    };
    vector.clear();
    vector.reserve(all)?;
    marks.around(|| (0..batch).try_for_each(|_| vector.extend_from_slice(&elements)))?;
    crowd.vector = Some(vector);
    Ok(())
}

/// The granules of the region, of which every other one has memory.
const GRANULES: u64 = 1024;

/// Commits single granules of a region, each between two that have memory, with the model's own work.
pub(crate) fn commit(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let mut region = every_other(crowd)?;
    marks.around(|| holes(batch).try_for_each(|hole| region.commit(hole)))?;
    holes(batch).try_for_each(|hole| region.decommit(hole))?;
    // What is pending free would be revived.
    region.purge()?;
    crowd.region = Some(region);
    Ok(())
}

/// Withdraws single granules of a region, which makes no driver call.
pub(crate) fn decommit(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let mut region = every_other(crowd)?;
    holes(batch).try_for_each(|hole| region.commit(hole))?;
    crowd.between(marks, |_| {
        holes(batch).try_for_each(|hole| Ok(region.decommit(hole)?))
    })?;
    region.purge()?;
    crowd.region = Some(region);
    Ok(())
}

fn every_other(crowd: &mut Crowd) -> Result<Region> {
    if let Some(region) = crowd.region.take() {
        return Ok(region);
    }
    let mut region = Region::reserve(&crowd.device, GRANULES * GRANULE)?;
    for at in (0..GRANULES).step_by(2) {
        region.commit(at * GRANULE..(at + 1) * GRANULE)?;
    }
    Ok(region)
}

/// Returns granules without memory in the middle of the region.
fn holes(count: usize) -> impl Iterator<Item = std::ops::Range<u64>> {
    let first = GRANULES / 2 + 1;
    let holes = (first..GRANULES).step_by(2).take(count);
    holes.map(|at| at * GRANULE..(at + 1) * GRANULE)
}
