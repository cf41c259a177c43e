//! Checks of a pool's figures: they add up, and match the driver's.

use cuvmm::driver::model::Backing;
use cuvmm::{Pool, PoolStats, TenantStats};

use super::Rig;

/// Returns a pool's figures, after checking that they add up, also for each tenant.
pub fn figures(pool: &Pool) -> PoolStats {
    let stats = pool.stats();
    let idle = stats.cached + stats.pending_free + stats.leased;
    let parts = stats.in_use + stats.padding + stats.precommitted + idle + stats.shared;
    assert_eq!(stats.committed, parts, "{stats:#?}");
    for one in &stats.tenants {
        let idle = one.cached + one.pending_free + one.leased;
        let parts = one.in_use + one.padding + one.precommitted + idle + one.shared;
        assert_eq!(one.committed, parts, "{one:#?}");
    }
    let sum = |of: fn(&TenantStats) -> u64| stats.tenants.iter().map(of).sum::<u64>();
    assert_eq!(stats.exported, sum(|tenant| tenant.exported), "{stats:#?}");
    assert_eq!(stats.asleep, sum(|tenant| tenant.asleep), "{stats:#?}");
    stats
}

/// Returns the figures of a driver's only pool, after checking memory and mappings against the
/// driver.
pub fn balanced(rig: &Rig<impl Backing>, pool: &Pool) -> PoolStats {
    balanced_beside(rig, pool, 0)
}

/// Returns the figures, after also checking that the driver's reserved addresses are all the
/// pool's.
pub fn books(rig: &Rig<impl Backing>, pool: &Pool) -> PoolStats {
    books_beside(rig, pool, 0)
}

/// Returns the figures like [`books`], when `lingering` bytes were exported and released but are
/// still held by a peer.
pub fn books_beside(rig: &Rig<impl Backing>, pool: &Pool, lingering: u64) -> PoolStats {
    let stats = balanced_beside(rig, pool, lingering);
    let reserved = rig.machine.live().reserved_bytes;
    assert_eq!(stats.addresses, reserved, "{stats:#?}");
    stats
}

fn balanced_beside(rig: &Rig<impl Backing>, pool: &Pool, lingering: u64) -> PoolStats {
    let stats = figures(pool);
    are_the_drivers(rig, &stats, lingering);
    stats
}

/// Checks the figures of memory and mappings against the driver, whether or not they add up.
pub fn are_the_drivers(rig: &Rig<impl Backing>, stats: &PoolStats, lingering: u64) {
    let live = rig.machine.live();
    let held = stats.committed + stats.free + stats.quarantined;
    assert_eq!(held + lingering, live.physical_bytes, "{stats:#?}");
    assert_eq!(stats.mappings, live.mappings as u64, "{stats:#?}");
}
