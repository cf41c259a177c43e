//! Paths of containers with few or many elements: a tile among others, and a cache's figures per
//! range.

use anyhow::Result;
use cuvmm::kv::{Layout, Shape};
use cuvmm::{KvCache, SparseArray};

use crate::crowd::{Crowd, GRANULE, Size};
use crate::marks::Marks;

/// The ranges of the larger cache, and of all calls for a smaller cache together.
const RANGES: usize = 1024;

/// The ranges of a sequence.
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
