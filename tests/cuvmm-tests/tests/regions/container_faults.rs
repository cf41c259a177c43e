//! Fails every driver call of containers and of regions over several places once. A failure changes
//! nothing and leaks nothing, and a second attempt succeeds.
#![allow(clippy::unit_arg)]

use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::{self, G, Rig};
use cuvmm::driver::Location;
use cuvmm::driver::model::Nothing;
use cuvmm::sparse::BrickShape;
use cuvmm::{
    Access, CowBuffer, Device, DeviceVec, Layout, Place, Region, RingBuffer, SparseArray,
    SparseGrid, Stream,
};

/// Elements per granule.
const PER_GRANULE: usize = G as usize / 4;

/// A region in extents of a granule, and its users.
struct World {
    region: Region,
    stream: Stream,
    second: Device,
}

fn world(rig: &Rig<Nothing>) -> World {
    let region = common::committed(
        Region::builder(&rig.device, 32 * G)
            .largest_extent(G)
            .zero_extent(4 * G),
        3 * G,
    );
    World {
        region,
        stream: Stream::new(&rig.device).unwrap(),
        second: rig.second(),
    }
}

/// Returns the figures of a region.
fn told(world: &World) -> (u64, u64, u64, u64, Access, Vec<(u64, Location)>) {
    let region = &world.region;
    let one = |extent: &cuvmm::Extent| (extent.offset, extent.location);
    (
        region.committed(),
        region.mappings(),
        region.zero_backed(),
        region.quarantined(),
        region.access_of(&world.second),
        region.extents().iter().map(one).collect(),
    )
}

#[test]
fn committing_in_stripes() {
    let striped = |rig: &Rig<Nothing>| {
        let second = rig.second();
        let places = [Place::from(&rig.device), Place::from(&second)];
        let region = Region::builder(&rig.device, 8 * G)
            .layout(Layout::round_robin(places, G))
            .open_to(&second, Access::Read)
            .reserve()
            .unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        World {
            region,
            stream,
            second,
        }
    };
    let commit = |_: &Rig<Nothing>, world: &mut World| text(world.region.commit(0..4 * G));
    assert_eq!(sweep(striped, commit, told), 4 * 3);
}

#[test]
fn granting_and_revoking() {
    let grant = |_: &Rig<Nothing>, world: &mut World| {
        text(world.region.grant(&world.second, Access::ReadWrite))
    };
    assert_eq!(
        sweep(world, grant, told),
        1 + 3,
        "one query for peer access, one call per extent"
    );
    let granted = |rig: &Rig<Nothing>| {
        let mut world = world(rig);
        world.region.grant(&world.second, Access::Read).unwrap();
        world
    };
    let revoke =
        |_: &Rig<Nothing>, world: &mut World| text(world.region.revoke_blocking(&world.second));
    let waits = 1 + 2;
    assert_eq!(sweep(granted, revoke, told), waits + 3, "in relaxed mode");
}

#[test]
fn backing_with_zeros_and_committing_over_them() {
    let back = |_: &Rig<Nothing>, world: &mut World| text(world.region.back_with_zeros(0..32 * G));
    // Memory created for aliases that then failed stays until the region is dropped.
    let without_memory = |world: &World| (told(world), ());
    let calls = sweep_partly(world, back, without_memory);
    assert!(calls >= 2 * 8, "{calls}");
    let backed = |rig: &Rig<Nothing>| {
        let mut world = world(rig);
        world.region.back_with_zeros(0..32 * G).unwrap();
        world
    };
    let commit = |_: &Rig<Nothing>, world: &mut World| {
        let streams = [world.stream.clone()];
        text(world.region.commit_after(6 * G..9 * G, &streams))
    };
    let calls = sweep_partly(backed, commit, without_memory);
    assert!(calls >= 3 * 3 + 2, "{calls}");
}

#[test]
fn showing_memory_twice() {
    let alias = |_: &Rig<Nothing>, world: &mut World| text(world.region.alias(0..3 * G, 8 * G));
    assert_eq!(sweep(world, alias, told), 3 * 2);
    let calls = sweep(
        |rig| (Stream::new(&rig.device).unwrap(), Vec::new()),
        |rig, (stream, rings)| {
            let ring = text(RingBuffer::<u32>::new(&rig.device, stream, 3 * PER_GRANULE))?;
            Ok(rings.push(ring))
        },
        |(_, rings)| rings.len(),
    );
    assert_eq!(
        calls,
        1 + 2 * 3 + 2 * 2,
        "a reservation, two extents, two aliases"
    );
}

#[test]
fn snapshots_and_writing() {
    let buffer = |rig: &Rig<Nothing>| {
        let stream = Stream::new(&rig.device).unwrap();
        let buffer =
            CowBuffer::<u32>::with_extents(&rig.device, &stream, 3 * PER_GRANULE, G).unwrap();
        (buffer, Vec::new())
    };
    let calls = sweep(
        buffer,
        |_, (buffer, snapshots)| Ok(snapshots.push(text(buffer.snapshot())?)),
        |(buffer, snapshots)| (buffer.shared(), buffer.held(), snapshots.len()),
    );
    assert!(calls > 3 * 3, "{calls}");
    let shown = |rig: &Rig<Nothing>| {
        let (mut buffer, mut snapshots) = buffer(rig);
        snapshots.push(buffer.snapshot().unwrap());
        (buffer, snapshots)
    };
    let calls = sweep_partly(
        shown,
        |_, (buffer, _)| {
            text(
                buffer
                    .make_mut(PER_GRANULE - 1..PER_GRANULE + 1)
                    .map(|_| ()),
            )
        },
        |(buffer, snapshots)| (buffer.shared(), snapshots[0].shared()),
        // A late failure may have unshared an extent, with the same bytes.
    );
    assert!(calls > 2 * 5, "{calls}");
}

#[test]
fn sparse_arrays_and_vectors() {
    let array = |rig: &Rig<Nothing>| {
        let stream = Stream::new(&rig.device).unwrap();
        let mut array = SparseArray::<u32>::builder(&rig.device, &stream, 64 * PER_GRANULE)
            .tile_bytes(G)
            .reserve()
            .unwrap();
        array.commit(PER_GRANULE..2 * PER_GRANULE).unwrap();
        array
    };
    let calls = sweep(
        array,
        |_, array| text(array.commit(0..4 * PER_GRANULE).map(|_| ())),
        SparseArray::stats,
    );
    assert_eq!(calls, 3 * 3);
    let calls = sweep(
        array,
        |_, array| text(array.commit_tile(9).map(|_| ())),
        SparseArray::stats,
    );
    assert_eq!(calls, 3);
    // A tile that the driver refuses to unmap is given up all the same.
    let calls = sweep_partly(
        array,
        |_, array| text(array.decommit_tile(1).map(|_| ())),
        |array| array.stats().tiles,
    );
    assert!(calls >= 2, "{calls}");
    let vec = |rig: &Rig<Nothing>| {
        let stream = Stream::new(&rig.device).unwrap();
        DeviceVec::<u32>::new(&rig.device, &stream, 64 * PER_GRANULE).unwrap()
    };
    let calls = sweep_partly(
        vec,
        |_, vec| text(vec.resize(5 * PER_GRANULE, 0x0102_0304)),
        DeviceVec::len,
        // The vector may have more capacity then.
    );
    assert!(calls > 10, "{calls}");
}

#[test]
fn bricks() {
    // Two bricks of three quarters of a granule, the second across two tiles.
    let grid = |rig: &Rig<Nothing>| {
        let stream = Stream::new(&rig.device).unwrap();
        let bricks = BrickShape::new([3 * PER_GRANULE], [3 * PER_GRANULE / 4]).unwrap();
        let builder = SparseGrid::<u32, 1>::builder(&rig.device, &stream, bricks);
        let mut grid = builder.tile_bytes(G).reserve().unwrap();
        grid.commit_brick([0]).unwrap();
        grid
    };
    let told = |grid: &SparseGrid<u32, 1>| {
        let bricks: Vec<[usize; 1]> = grid.committed_bricks().collect();
        (grid.stats(), bricks)
    };
    let commit =
        |_: &Rig<Nothing>, grid: &mut SparseGrid<u32, 1>| text(grid.commit_brick([1]).map(|_| ()));
    assert_eq!(sweep(grid, commit, told), 3, "one tile is new");
    let back = |rig: &Rig<Nothing>| {
        let mut grid = grid(rig);
        grid.commit_brick([1]).unwrap();
        grid.decommit_brick([1]).unwrap();
        grid
    };
    let calls = sweep(back, commit, told);
    assert!(
        calls >= 2 + 1 + 3,
        "waits for the zeros, and one tile: {calls}"
    );
    let decommit = |_: &Rig<Nothing>, grid: &mut SparseGrid<u32, 1>| {
        text(grid.decommit_brick([0]).map(|_| ()))
    };
    // A tile that the driver refuses to unmap is given up all the same.
    let calls = sweep_partly(grid, decommit, |grid| grid.stats().tiles);
    assert!(calls >= 2, "{calls}");
}

#[test]
fn moving_memory() {
    let calls = sweep_partly(
        world,
        |_, world| {
            let host = Place::HostNuma(0);
            text(
                world
                    .region
                    .relocate(0..3 * G, &host, &world.stream)
                    .map(|_| ()),
            )
        },
        |world| told(world).5,
        // A drop may fail to release the old memory. The range has moved then.
    );
    assert!(calls > 20, "{calls}");
}
