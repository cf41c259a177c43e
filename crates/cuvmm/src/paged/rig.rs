//! A pool for unit tests of caches.
#![allow(clippy::unwrap_used)]

use super::{LayerGroup, PagedKv, PagedKvBuilder};
use crate::extents::rig::{self, G, Rig};
use crate::own::Stream;
use crate::pool::{Limit, Pool, Tenant};

/// A pool of eight granules, a tenant, and the home stream of its caches.
pub(super) struct World {
    pub(super) tenant: Tenant,
    pub(super) home: Stream,
    pub(super) pool: Pool,
    pub(super) rig: Rig,
}

pub(super) fn world() -> World {
    let rig = rig::rig();
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
    let pool = pool.build().unwrap();
    World {
        tenant: pool.tenant("a").register().unwrap(),
        home: Stream::new(&rig.device).unwrap(),
        pool,
        rig,
    }
}

impl World {
    /// Returns a builder of a cache with blocks of some bytes, in extents of one granule.
    pub(super) fn cache(&self, blocks: u32, bytes: u64) -> PagedKvBuilder<'_> {
        let group = LayerGroup::new(1, 1).part(1, bytes as u32, 1);
        let builder = PagedKv::builder(&self.tenant, &self.home, blocks);
        builder.group(group).extent(G)
    }
}
