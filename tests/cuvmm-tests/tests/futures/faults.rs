//! Fails every driver call made for a future once. The future returns the error or continues to
//! wait, memory in use is unchanged, nothing is leaked, and a second attempt succeeds.
#![allow(clippy::unit_arg)]

use crate::common::executor::block_on;
use crate::common::sweep::{sweep_partly, text};
use crate::common::{self, G, Rig};
use cuvmm::driver::model::Nothing;
use cuvmm::{Block, Contents, HostStore, Mapper, Pool, Stream, Tenant};

struct World {
    block: Block,
    store: HostStore,
    stream: Stream,
    tenant: Tenant,
    pool: Pool,
    _mapper: Mapper,
}

fn world(rig: &Rig<Nothing>) -> World {
    let (mapper, pool, tenant) = common::mapped(rig, 16);
    let stream = Stream::new(&rig.device).unwrap();
    let block = tenant.block(2 * G).capacity(16 * G);
    World {
        block: block.try_allocate().unwrap(),
        store: HostStore::builder(&rig.device)
            .pinned(16 * G)
            .build()
            .unwrap(),
        stream,
        tenant,
        pool,
        _mapper: mapper,
    }
}

fn in_use(world: &World) -> (u64, u64) {
    let stats = world.pool.stats();
    (stats.in_use, stats.tenants.iter().map(|it| it.blocks).sum())
}

#[test]
fn allocations() {
    let calls = sweep_partly(
        world,
        |_, world| {
            let before = in_use(world);
            let allocated = world
                .tenant
                .block(6 * G)
                .home_stream(&world.stream)
                .allocate_async();
            let allocated = text(block_on(allocated));
            let more = u64::from(allocated.is_ok());
            assert_eq!(in_use(world), (before.0 + more * 6 * G, before.1 + more));
            allocated.map(drop)
        },
        in_use,
    );
    assert!(calls >= 4, "{calls}");
}

#[test]
fn growth() {
    let calls = sweep_partly(
        world,
        |_, world| {
            let (size, before) = (world.block.size(), in_use(world));
            let grown = text(block_on(world.block.grow_to_async(9 * G)));
            let to = if grown.is_ok() { 9 * G } else { size };
            assert_eq!(world.block.size(), to);
            assert_eq!(in_use(world), (before.0 + to - size, before.1));
            grown
        },
        in_use,
    );
    assert!(calls >= 3, "{calls}");
}

#[test]
fn sleeping_and_waking() {
    let calls = sweep_partly(
        world,
        |_, world| {
            let blocks = || world.tenant.blocks();
            text(block_on(blocks().sleep_async(Contents::Keep(&world.store))))?;
            assert_eq!(in_use(world).0, 0);
            text(block_on(blocks().wake_async()))?;
            assert_eq!(in_use(world).0, 2 * G);
            assert_eq!(world.store.free(), world.store.capacity());
            Ok(())
        },
        in_use,
    );
    assert!(calls >= 6, "{calls}");
}
