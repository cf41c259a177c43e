//! Fails every driver call of regions and containers in a tenant once.
#![allow(clippy::unit_arg)]

use crate::common::books::{balanced, books as exact};
use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::world::{Books, books};
use crate::common::{self, G, Rig, limited, model};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::MemoryError;
use cuvmm::{Block, CowBuffer, Pool, Region, RingBuffer, Stream, Tenant};

struct World {
    // Fields in drop order.
    forks: Vec<Region>,
    region: Option<Region>,
    rings: Vec<RingBuffer<u32>>,
    blocks: Vec<Block>,
    home: Stream,
    a: Tenant,
    b: Tenant,
    pool: Pool,
}

impl World {
    fn region(&mut self) -> &mut Region {
        self.region.as_mut().unwrap()
    }
}

/// A region of a tenant with two extents, beside a tenant that has used memory.
fn world(rig: &Rig<Nothing>) -> World {
    let pool = limited(rig, 16).largest_extent(G).build().unwrap();
    let [a, b] = common::tenants(&pool);
    let home = Stream::new(&rig.device).unwrap();
    let region = a.region(16 * G).largest_extent(G).home_stream(&home);
    let region = common::committed(region, 2 * G);
    drop(b.allocate(3 * G).unwrap());
    World {
        forks: vec![],
        region: Some(region),
        rings: vec![],
        blocks: vec![],
        home,
        a,
        b,
        pool,
    }
}

type Figures = (Books, Option<(u64, u64, u64)>, usize);

fn told(world: &World) -> Figures {
    let region = world.region.as_ref();
    let region = region.map(|it| (it.committed(), it.mappings(), it.quarantined()));
    (
        books(&world.pool),
        region,
        world.forks.len() + world.rings.len(),
    )
}

#[test]
fn committing_new_memory() {
    let commit = |_: &Rig<Nothing>, world: &mut World| text(world.region().commit(2 * G..5 * G));
    let calls = sweep(world, commit, told);
    assert_eq!(calls, 3 * 3);
}

#[test]
fn committing_used_memory() {
    let full = |rig: &Rig<Nothing>| {
        let mut world = world(rig);
        let block = world.b.allocate(14 * G).unwrap();
        world.blocks.push(block);
        world.blocks.clear();
        world
    };
    let commit = |_: &Rig<Nothing>, world: &mut World| text(world.region().commit(2 * G..5 * G));
    // Memory of the other tenant is reclaimed.
    let calls = sweep_partly(full, commit, |_| ());
    assert!(calls > 3 * 3, "{calls}");
}

#[test]
fn committing_again_what_was_withdrawn() {
    let withdrawn = |rig: &Rig<Nothing>| {
        let mut world = world(rig);
        world.region().decommit_after(0..2 * G, &[]).unwrap();
        world
    };
    let commit = |_: &Rig<Nothing>, world: &mut World| text(world.region().commit(0..3 * G));
    assert_eq!(sweep(withdrawn, commit, told), 3);
}

#[test]
fn purging_and_closing() {
    let purge = |_: &Rig<Nothing>, world: &mut World| {
        let home = world.home.clone();
        let region = world.region();
        if region.committed() > 0 {
            region.decommit_after(0..2 * G, &[home]).unwrap();
        }
        text(region.purge().map(drop))?;
        match region.held() {
            0 => Ok(()),
            held => Err(format!("{held} held")),
        }
    };
    assert!(sweep_partly(world, purge, |_| ()) >= 2);
    let close = |_: &Rig<Nothing>, world: &mut World| match world.region.take() {
        Some(region) => region.close().map_err(|failed| {
            world.region = Some(failed.owner);
            failed.reason.to_string()
        }),
        None => Ok(()),
    };
    assert!(sweep_partly(world, close, |_| ()) >= 2);
}

#[test]
fn reserving_and_dropping() {
    let reserve = |_: &Rig<Nothing>, world: &mut World| {
        let region = text(world.a.region(4 * G).reserve())?;
        Ok(world.forks.push(region))
    };
    assert_eq!(sweep(world, reserve, told), 1);
    let drops = |_: &Rig<Nothing>, world: &mut World| Ok(world.region = None);
    sweep_partly(world, drops, |_| ());
}

#[test]
fn forking_and_unsharing() {
    let fork = |_: &Rig<Nothing>, world: &mut World| {
        let home = world.home.clone();
        let fork = text(world.region().fork(&[home]))?;
        Ok(world.forks.push(fork))
    };
    let calls = sweep(world, fork, told);
    assert!(calls > 3 * 2, "a reservation too: {calls}");
    let forked = |rig: &Rig<Nothing>| {
        let mut world = world(rig);
        fork(rig, &mut world).unwrap();
        world
    };
    let unshare = |_: &Rig<Nothing>, world: &mut World| {
        let home = world.home.clone();
        text(world.region().unshare(0..2 * G, &home, &[]).map(drop))
    };
    let calls = sweep_partly(forked, unshare, told);
    assert!(calls >= 2 * 6, "{calls}");
}

#[test]
fn showing_memory_twice() {
    let alias = |_: &Rig<Nothing>, world: &mut World| text(world.region().alias(0..2 * G, 8 * G));
    assert_eq!(sweep(world, alias, told), 2 * 2);
    let ring = |_: &Rig<Nothing>, world: &mut World| {
        let region = text(world.a.region(4 * G).reserve())?;
        let ring = text(RingBuffer::from_region(region, &world.home))?;
        Ok(world.rings.push(ring))
    };
    sweep_partly(world, ring, |world| world.rings.len());
}

#[test]
fn snapshots() {
    let buffers = |rig: &Rig<Nothing>| {
        let world = world(rig);
        let region = world.a.region(4 * G).reserve().unwrap();
        let elements = G as usize;
        let buffer = CowBuffer::<u32>::from_region(region, &world.home, elements).unwrap();
        (vec![buffer], world)
    };
    let write = |_: &Rig<Nothing>, (buffers, _): &mut (Vec<CowBuffer<u32>>, World)| {
        let then = text(buffers[0].snapshot())?;
        buffers.push(then);
        text(buffers[0].write(0, &[1]))
    };
    sweep_partly(buffers, write, |_| ());
}

#[test]
fn what_a_commit_cannot_undo_is_quarantined_until_the_region_is_closed() {
    let rig = common::clean(model());
    let mut world = world(&rig);
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    // The second extent is mapped and cannot be opened, and neither can be unmapped.
    rig.faults.arm(Fault::nth(2, code).of(Call::MemSetAccess));
    rig.faults.arm(Fault::from(1, code).of(Call::MemUnmap));
    world.region().commit(2 * G..4 * G).unwrap_err();
    rig.faults.disarm();
    let region = world.region();
    assert_eq!((region.committed(), region.quarantined()), (2 * G, 2 * G));
    let again = region.commit(2 * G..3 * G).unwrap_err();
    assert!(matches!(again, MemoryError::Quarantined { .. }), "{again}");
    region.commit(4 * G..5 * G).unwrap();
    let stats = balanced(&rig, &world.pool);
    assert_eq!((stats.quarantined, stats.tenants[0].in_use), (2 * G, 3 * G));
    world.region.take().unwrap().close().unwrap();
    world.pool.trim(0).unwrap();
    assert_eq!(exact(&rig, &world.pool).quarantined, 0);
    // A dropped region leaves what is stuck to the pool.
    let mut region = world.a.region(4 * G).largest_extent(G).reserve().unwrap();
    rig.faults.arm(Fault::nth(1, code).of(Call::MemSetAccess));
    rig.faults.arm(Fault::from(1, code).of(Call::MemUnmap));
    region.commit(0..2 * G).unwrap_err();
    rig.faults.disarm();
    drop(region);
    let stats = balanced(&rig, &world.pool);
    assert_eq!((stats.quarantined, stats.tenants[0].committed), (G, 0));
    let World {
        a, b, pool, home, ..
    } = world;
    drop((a, b, home));
    pool.close().unwrap();
}

#[test]
fn what_unsharing_left_stuck_is_charged_until_it_is_unmapped() {
    let rig = model();
    let pool = limited(&rig, 8).build().unwrap();
    let (a, b) = (
        pool.tenant("a").register().unwrap(),
        pool.tenant("b").register().unwrap(),
    );
    let home = Stream::new(&rig.device).unwrap();
    let mut region = common::committed(a.region(4 * G).largest_extent(G), 2 * G);
    let fork = region.fork(&[]).unwrap();
    rig.faults
        .arm(Fault::from(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
    region.unshare(0..2 * G, &home, &[]).unwrap_err();
    rig.faults.disarm();
    balanced(&rig, &pool);
    drop(fork);
    region.close().unwrap();
    pool.trim(0).unwrap();
    assert_eq!(exact(&rig, &pool).committed, 0);
    drop(b.try_allocate(8 * G).unwrap());
    drop((a, b, home));
    pool.close().unwrap();
}
