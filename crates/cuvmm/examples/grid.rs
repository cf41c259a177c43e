//! A grid of 512 x 512 x 512 voxels, stored brick by brick, of which only the bricks near a sphere's
//! surface have memory.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::sparse::{Bricks, Holes};
use cuvmm::{Device, SparseGrid, Stream};

/// Voxels along each edge of the grid.
const EDGE: usize = 512;

/// Voxels along each edge of a brick: 128 KiB of `f32`, of which a granule of 2 MiB holds sixteen.
const BRICK: usize = 32;

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let bricks = Bricks::new([EDGE; 3], [BRICK; 3])?;
    let mut grid = SparseGrid::<f32, 3>::new(&device, &stream, bricks)?;
    println!(
        "{:?} bricks, {} MiB of addresses, no memory",
        bricks.counts(),
        grid.stats().reserved >> 20
    );

    // Memory where the surface is.
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

    // A brick is copied in and out whole; its numbers lie side by side.
    let brick = surface[surface.len() / 2];
    let values: Vec<f32> = (0..bricks.brick_len()).map(|it| it as f32).collect();
    grid.write_brick(brick, &values)?;
    let mut seen = vec![0.0; bricks.brick_len()];
    grid.read_brick(brick, &mut seen, Holes::Refuse)?;
    assert_eq!(seen, values);

    // A kernel gets an address and the parameters by value, and finds the rest by the formula that
    // their documentation shows.
    let voxel = brick.map(|at| at * BRICK + 3);
    let params = bricks.params();
    let view = grid.view_mut();
    println!(
        "voxel {voxel:?} has index {} behind {}; brick {} of {:?}",
        bricks.index_of(voxel)?,
        view.address(),
        bricks.number_of(brick)?,
        params.counts,
    );

    // What has no memory is an error or reads as zero: the reader chooses.
    let empty = [EDGE / BRICK / 2; 3];
    let refused = grid.read_brick(empty, &mut seen, Holes::Refuse);
    println!("without memory: {}", refused.err().ok_or("it has memory")?);
    grid.read_brick(empty, &mut seen, Holes::AsZero)?;
    assert!(seen.iter().all(|&it| it == 0.0));

    // The bricks of the lower half go, in any order; the tiles go with the last brick in each.
    let before = grid.held();
    let lower = surface.iter().filter(|brick| brick[0] < EDGE / BRICK / 2);
    for &brick in lower.rev() {
        grid.decommit_brick(brick)?;
    }
    println!("{} of {} MiB are left", grid.held() >> 20, before >> 20);
    for brick in grid.committed_bricks().collect::<Vec<_>>() {
        grid.decommit_brick(brick)?;
    }
    stream.synchronize()?;
    grid.purge()?;
    assert_eq!(grid.held(), 0);
    Ok(())
}

/// Whether a brick is near the surface of a sphere that touches the sides of the grid.
fn is_near(brick: [usize; 3]) -> bool {
    let radius = (EDGE / 2) as f64;
    let from_middle = |at: usize| ((at * BRICK + BRICK / 2) as f64 - radius).powi(2);
    let distance = brick.into_iter().map(from_middle).sum::<f64>().sqrt();
    (distance - (radius - BRICK as f64)).abs() < BRICK as f64
}
