//! A grid of 512 x 512 x 512 voxels, stored in bricks. Only the bricks near the surface of a sphere
//! have memory.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::sparse::{BrickShape, Holes};
use cuvmm::{Device, SparseGrid, Stream};

/// Voxels along each edge of the grid.
const EDGE: usize = 512;

/// Voxels along each edge of a brick. A brick is 128 KiB of `f32`; a granule of 2 MiB holds
/// sixteen.
const BRICK: usize = 32;

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let bricks = BrickShape::new([EDGE; 3], [BRICK; 3])?;
    let mut grid = SparseGrid::<f32, 3>::new(&device, &stream, bricks)?;
    println!(
        "{:?} bricks, {} MiB of addresses, no memory",
        bricks.counts(),
        grid.stats().reserved >> 20
    );

    // Commit the bricks near the surface.
    let all = (0..(EDGE / BRICK).pow(3)).filter_map(|number| bricks.at(number));
    let surface: Vec<[usize; 3]> = all.filter(|&brick| is_near(brick)).collect();
    for &brick in &surface {
        grid.commit_brick(brick)?;
    }
    let stats = grid.stats();
    println!(
        "{} bricks committed: {} MiB in {} tiles",
        grid.committed_count(),
        stats.committed >> 20,
        stats.committed_tiles
    );

    // Bricks are copied as a whole; the elements of a brick are contiguous.
    let brick = surface[surface.len() / 2];
    let values: Vec<f32> = (0..bricks.brick_len()).map(|it| it as f32).collect();
    grid.write_brick(brick, &values)?;
    let mut seen = vec![0.0; bricks.brick_len()];
    grid.read_brick(brick, &mut seen, Holes::Refuse)?;
    assert_eq!(seen, values);

    // A kernel receives the address and the parameters by value, and computes the index of a voxel
    // with the formula in the documentation of the parameters.
    let voxel = brick.map(|at| at * BRICK + 3);
    let params = bricks.params();
    let view = grid.view_mut();
    println!(
        "voxel {voxel:?} is at index {} from {}, in brick {} of {:?}",
        bricks.index_of(voxel)?,
        view.address(),
        bricks.number_of(brick)?,
        params.counts,
    );

    // A brick without memory is an error or reads as zeros, as the reader chooses.
    let empty = [EDGE / BRICK / 2; 3];
    let refused = grid.read_brick(empty, &mut seen, Holes::Refuse);
    println!(
        "without memory: {}",
        refused.err().ok_or("the brick has memory")?
    );
    grid.read_brick(empty, &mut seen, Holes::AsZero)?;
    assert!(seen.iter().all(|&it| it == 0.0));

    // Decommit the lower half. A tile is released when its last brick is decommitted.
    let before = grid.held();
    let lower = surface.iter().filter(|brick| brick[0] < EDGE / BRICK / 2);
    for &brick in lower.rev() {
        grid.decommit_brick(brick)?;
    }
    println!("{} of {} MiB remain", grid.held() >> 20, before >> 20);
    for brick in grid.committed_bricks().collect::<Vec<_>>() {
        grid.decommit_brick(brick)?;
    }
    stream.synchronize()?;
    grid.purge()?;
    assert_eq!(grid.held(), 0);
    Ok(())
}

/// Returns `true` if a brick is near the surface of a sphere that touches the sides of the grid.
fn is_near(brick: [usize; 3]) -> bool {
    let radius = (EDGE / 2) as f64;
    let from_middle = |at: usize| ((at * BRICK + BRICK / 2) as f64 - radius).powi(2);
    let distance = brick.into_iter().map(from_middle).sum::<f64>().sqrt();
    (distance - (radius - BRICK as f64)).abs() < BRICK as f64
}
