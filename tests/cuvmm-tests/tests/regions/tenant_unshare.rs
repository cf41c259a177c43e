//! Unsharing in a tenant: the memory for copies, where the pool has it in other pieces.

use crate::common::books::{balanced, books};
use crate::common::sweep::{sweep_partly, text};
use crate::common::world;
use crate::common::{self, D0, G, Rig, host, limited};
use cuvmm::driver::model::{Backing, Nothing};
use cuvmm::error::{BlockError, MemoryError, Shortage};
use cuvmm::{Pool, Region, Stream, Tenant};

struct World {
    // Fields in drop order.
    fork: Region,
    region: Region,
    home: Stream,
    a: Tenant,
    b: Tenant,
    pool: Pool,
}

impl World {
    fn unshare(&mut self) -> Result<u64, MemoryError> {
        self.region.unshare(0..4 * G, &self.home, &[])
    }

    /// The refusal of an unsharing.
    fn shortage(&mut self) -> Shortage {
        let refused = self.unshare().unwrap_err();
        refused.shortage().unwrap().clone()
    }
}

/// A region of four granules in extents of `largest` granules, and its fork, in a pool of `limit`
/// granules. Another tenant has used memory in pieces of some granules, and has it no more.
fn world_of(rig: &Rig<impl Backing>, (limit, largest): (u64, u64), pieces: &[u64]) -> World {
    let pool = limited(rig, limit).build().unwrap();
    let (a, b) = (
        pool.tenant("a").register().unwrap(),
        pool.tenant("b").register().unwrap(),
    );
    let home = Stream::new(&rig.device).unwrap();
    let region = a.region(4 * G).largest_extent(largest * G);
    let mut region = common::committed(region.home_stream(&home), 4 * G);
    let fork = region.fork(&[]).unwrap();
    let part = |granules: &u64| common::committed(b.region(granules * G), granules * G);
    let parts: Vec<Region> = pieces.iter().map(part).collect();
    drop(parts);
    World {
        fork,
        region,
        home,
        a,
        b,
        pool,
    }
}

#[test]
fn memory_for_a_copy_may_lie_in_smaller_pieces() {
    for pieces in [&[2, 2][..], &[1, 1, 2], &[1, 1, 1, 1], &[2, 1], &[2], &[]] {
        let rig = host();
        let mut world = world_of(&rig, (8, 4), pieces);
        assert_eq!(world.unshare().unwrap(), 4 * G, "{pieces:?}");
        assert_eq!((world.region.extents().len(), world.fork.shared()), (1, 0));
        let stats = books(&rig, &world.pool);
        assert_eq!((stats.committed, stats.free), (8 * G, 0));
        world.region.write(&world.home, 0, b"own").unwrap();
        let mut bytes = [1; 3];
        world.fork.read(&world.home, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 3]);
    }
}

#[test]
fn a_refusal_tells_what_can_be_had() {
    let rig = host();
    let mut world = world_of(&rig, (8, 4), &[1, 1, 1]);
    let block = world.b.allocate(G).unwrap();
    let before = world::books(&world.pool);
    let refused = world.shortage();
    assert_eq!((refused.wanted, refused.available), (4 * G, 3 * G));
    assert_eq!(world::books(&world.pool), before);
    drop(world.a.try_allocate(3 * G).unwrap());
    drop(block);
    world.unshare().unwrap();
}

#[test]
fn pieces_that_do_not_suffice_stay_the_pools() {
    let rig = host();
    let mut world = world_of(&rig, (16, 4), &[1, 2]);
    let total = rig.device.total_memory();
    rig.machine.set_used_elsewhere(D0, total - 7 * G);
    let before = world::books(&world.pool);
    let refused = world.unshare().unwrap_err();
    let MemoryError::Pool(cause) = &refused else {
        panic!("{refused}");
    };
    assert!(matches!(**cause, BlockError::DriverOutOfMemory { .. }));
    let refused = refused.shortage().unwrap();
    assert_eq!((refused.wanted, refused.available), (4 * G, 3 * G));
    assert_eq!(world::books(&world.pool), before);
    drop(world.a.try_allocate(3 * G).unwrap());
    // With one granule of the driver's they suffice.
    rig.machine.set_used_elsewhere(D0, total - 8 * G);
    world.unshare().unwrap();
    books(&rig, &world.pool);
}

#[test]
fn every_driver_call_fails_once() {
    let unshare = |rig: &Rig<Nothing>, world: &mut World| {
        let unshared = text(world.unshare().map(drop));
        let stats = balanced(rig, &world.pool);
        let granules = if unshared.is_ok() { 8 } else { 4 };
        assert_eq!(stats.tenants[0].committed, granules * G, "{unshared:?}");
        assert_eq!(world.region.is_read_only(0..4 * G), unshared.is_err());
        unshared
    };
    for (largest, pieces) in [(4, &[2, 2][..]), (2, &[1; 4])] {
        let world = |rig: &Rig<Nothing>| world_of(rig, (8, largest), pieces);
        let calls = sweep_partly(world, unshare, |_| ());
        assert!(calls >= 2 * 2 + 1 + 6, "{calls}");
    }
}
