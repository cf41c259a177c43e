//! Blocks that a compaction moves or cuts, and the bytes in them.

use cuvmm::driver::Call;
use cuvmm::driver::model::Backing;
use cuvmm::pool::PoolBuilder;
use cuvmm::{Block, Growth};

use super::{G, Rig, limited};

/// The calls that a compaction makes, except freeing addresses, whose failure the drop reports.
pub const CALLS: &[Call] = &[
    Call::MemAddressReserve,
    Call::MemCreate,
    Call::MemRelease,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::MemcpyDtoDAsync,
    Call::StreamCreate,
    Call::StreamSynchronize,
    Call::StreamIsCapturing,
    Call::StreamQuery,
    Call::ThreadExchangeStreamCaptureMode,
];

/// Returns a builder for a pool of `granules` granules whose blocks have nothing ahead, and begin with
/// extents of at most eight granules.
pub fn exact(rig: &Rig<impl Backing>, granules: u64) -> PoolBuilder<'_> {
    let pool = limited(rig, granules).growth(Growth::Exact);
    pool.largest_extent(8 * G)
}

pub fn stamp(granule: u64) -> [u8; 8] {
    (granule + 1)
        .wrapping_mul(0x0102_0304_0506_0709)
        .to_le_bytes()
}

/// Stamps both ends of each granule with its number.
pub fn stamp_all(block: &Block) {
    for granule in 0..block.size() / G {
        block.write(granule * G, &stamp(granule)).unwrap();
        block.write((granule + 1) * G - 8, &stamp(granule)).unwrap();
    }
}

pub fn assert_stamped(rig: &Rig<impl Backing>, block: &Block) {
    if rig.keeps_bytes() {
        for granule in 0..block.size() / G {
            let mut bytes = [[0; 8]; 2];
            block.read(granule * G, &mut bytes[0]).unwrap();
            block.read((granule + 1) * G - 8, &mut bytes[1]).unwrap();
            assert_eq!(bytes, [stamp(granule); 2], "granule {granule}");
        }
    }
}

/// Returns the sizes of a block's extents, in granules.
pub fn sizes(block: &Block) -> Vec<u64> {
    let extents = block.extents();
    extents.iter().map(|extent| extent.size / G).collect()
}
