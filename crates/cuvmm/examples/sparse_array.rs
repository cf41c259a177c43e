//! A voxel grid of 1 TiB, in which only the tiles near a surface have memory.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::sparse::Holes;
use cuvmm::{Device, SparseArray, Stream};

/// Voxels along the longer edges of the grid: 8192 x 8192 x 4096 elements of four bytes.
const EDGE: usize = 8192;

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let mut grid = SparseArray::<f32>::builder(&device, &stream, EDGE * EDGE * EDGE / 2)
        .tile_bytes(4 << 20)
        .reserve()?;
    println!(
        "{} GiB of addresses, no memory",
        grid.stats().reserved >> 30
    );

    // Commit the tiles near the surface. Elements are addressed by their index, without a table.
    let surface = EDGE * EDGE * 17..EDGE * EDGE * 17 + (8 << 20);
    let tiles = grid.commit(surface.clone())?;
    grid.write(surface.start + 5, &[1.5, 2.5], Holes::Refuse)?;
    println!(
        "{tiles} tiles committed, {} MiB held",
        grid.stats().held >> 20
    );

    // Elements without memory read as zeros or are an error, as the reader chooses.
    let mut seen = [9.0; 4];
    grid.read(surface.start - 2, &mut seen, Holes::AsZero)?;
    assert_eq!(seen, [0.0; 4]);
    let refused = grid.read(surface.start - 2, &mut seen, Holes::Refuse);
    println!(
        "without memory: {}",
        refused.err().ok_or("the range has memory")?
    );

    // A kernel that reads a little too far finds zeros. A kernel that writes there faults.
    grid.back_with_zeros(surface.start - (64 << 20)..surface.end + (64 << 20))?;
    let stats = grid.stats();
    println!(
        "{} MiB of holes read as zeros, with {} of at most {} mappings",
        stats.zero_backed >> 20,
        stats.mappings - stats.committed_tiles as u64,
        stats.mapping_limit,
    );

    let kept = grid.tiles().next().ok_or("no tile is committed")?;
    println!(
        "the first tile holds elements {:?} at {}",
        kept.elements, kept.address
    );
    grid.decommit(kept.elements.end..grid.len())?;
    assert_eq!(grid.stats().committed_tiles, 1);
    grid.read(surface.start + 5, &mut seen[..2], Holes::Refuse)?;
    assert_eq!(seen[..2], [1.5, 2.5]);
    Ok(())
}
