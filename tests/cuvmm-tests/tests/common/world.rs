//! A pool with two tenants for fault sweeps, and the figures that a failure must not change.

use cuvmm::driver::model::Nothing;
use cuvmm::pool::PoolBuilder;
use cuvmm::{Block, Limit, Pool, Stream, Tenant};

use super::books::figures;
use super::{G, Rig};

/// The figures of a pool that a failed operation must not change.
#[derive(Debug, PartialEq)]
pub struct Books {
    pub committed: u64,
    pub in_use: u64,
    pub idle: u64,
    pub precommitted: u64,
    pub free: u64,
    pub quarantined: u64,
    pub mappings: u64,
    pub addresses: u64,
    pub tenants: Vec<(u64, u64, u64, u64)>,
}

pub fn books(pool: &Pool) -> Books {
    let stats = figures(pool);
    Books {
        committed: stats.committed,
        in_use: stats.in_use,
        idle: stats.cached + stats.pending_free,
        precommitted: stats.precommitted,
        free: stats.free,
        quarantined: stats.quarantined,
        mappings: stats.mappings,
        addresses: stats.addresses,
        tenants: stats
            .tenants
            .iter()
            .map(|tenant| {
                (
                    tenant.committed,
                    tenant.in_use,
                    tenant.blocks,
                    tenant.mappings,
                )
            })
            .collect(),
    }
}

pub struct World {
    // Fields in drop order.
    pub blocks: Vec<Block>,
    pub tenants: Vec<Tenant>,
    pub streams: Vec<Stream>,
    pub pool: Pool,
}

/// Creates two tenants and two streams in a pool of 16 granules. The first tenant has a block of 2.
pub fn world(rig: &Rig<Nothing>) -> World {
    world_of(rig, Pool::builder(&rig.device))
}

pub fn world_of(rig: &Rig<Nothing>, builder: PoolBuilder<'_>) -> World {
    let pool = builder.limit(Limit::Bytes(16 * G)).build().unwrap();
    let tenants: Vec<Tenant> = ["a", "b"]
        .iter()
        .map(|name| pool.tenant(*name).register().unwrap())
        .collect();
    let streams = vec![
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    ];
    let block = tenants[0]
        .block(2 * G)
        .capacity(12 * G)
        .home_stream(&streams[0]);
    World {
        blocks: vec![block.try_allocate().unwrap()],
        tenants,
        streams,
        pool,
    }
}

pub fn of_pool(world: &World) -> Books {
    books(&world.pool)
}
