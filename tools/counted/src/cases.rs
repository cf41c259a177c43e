//! The paths that are counted. A round begins and ends with the same number of idle blocks.

use anyhow::{Context as _, Result, bail};

use crate::containers::{self, admission, stats, tile};
use crate::crowd::{Crowd, GRANULE, Idle};
use crate::marks::Marks;
use crate::{futures, mapping};

/// A counted path.
pub(crate) struct Case {
    pub(crate) idle: Idle,
    /// `true` if all blocks of a batch live at once.
    pub(crate) together: bool,
    /// The other blocks in the pool.
    pub(crate) among: Among,
    /// `true` if the pool's memory is granted by a ledger.
    pub(crate) in_ledger: bool,
    /// Runs the path once, with a number of operations between marks.
    pub(crate) round: Round,
}

/// The other blocks in the pool while a path is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Among {
    /// No other block.
    Alone,
    /// Few or many, depending on the size given.
    Crowd,
    /// 200 blocks of 100 tenants, and 200 freed blocks.
    Hundred,
    /// 10,000 freed blocks of 100 tenants, which are all that the pool may have.
    Full,
}

/// The end of the name of a case whose pool is in a ledger.
const IN_LEDGER: &str = "-in-ledger";

type Round = fn(&Marks, &mut Crowd, usize) -> Result<()>;

pub(crate) fn named(name: &str) -> Result<Case> {
    let (plain, in_ledger) = match name.strip_suffix(IN_LEDGER) {
        Some(plain) => (plain, true),
        None => (name, false),
    };
    let (idle, together, among, round): (_, _, _, Round) = match plain {
        "warm" => (Idle::StreamCache, false, Among::Crowd, warm),
        "warm-batch" => (Idle::StreamCache, true, Among::Crowd, warm_batch),
        "other-size" => (Idle::StreamCache, false, Among::Crowd, other_size),
        "allocate-locked" => (Idle::Pool, true, Among::Crowd, allocate_locked),
        "free-locked" => (Idle::Pool, true, Among::Crowd, free_locked),
        "grow" => (Idle::Pool, false, Among::Crowd, grow),
        "tile" => (Idle::Pool, false, Among::Alone, tile),
        "kv-stats" => (Idle::Pool, false, Among::Alone, stats),
        "kv-admission" => (Idle::Pool, false, Among::Alone, admission),
        "paged-back" => (Idle::Pool, false, Among::Alone, containers::paged_back),
        "paged-backed" => (Idle::Pool, false, Among::Alone, containers::paged_backed),
        "headroom" => (Idle::Pool, true, Among::Hundred, headroom),
        "charge" => (Idle::Pool, false, Among::Crowd, charge),
        "pool-stats" => (Idle::Pool, true, Among::Hundred, pool_stats),
        "reclaim" => (Idle::Pool, false, Among::Full, mapping::reclaim),
        "cold" => (Idle::Pool, false, Among::Alone, mapping::cold),
        "heap-miss" => (Idle::Pool, false, Among::Alone, mapping::heap_miss),
        "sleep" => (Idle::Pool, false, Among::Alone, mapping::sleep),
        "commit" => (Idle::Pool, false, Among::Alone, containers::commit),
        "decommit" => (Idle::Pool, false, Among::Alone, containers::decommit),
        "extend" => (Idle::Pool, false, Among::Alone, containers::extend),
        "future" => (Idle::Pool, false, Among::Alone, futures::granted),
        _ => bail!("there is no case {name}"),
    };
    Ok(Case {
        idle,
        together,
        among,
        in_ledger,
        round,
    })
}

/// Allocates and frees blocks of one shape, each before the next.
fn warm(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    crowd.between(marks, |crowd| {
        for _ in 0..batch {
            drop(crowd.allocate(GRANULE, GRANULE)?);
        }
        Ok(())
    })
}

/// Allocates blocks of one shape, all before the first is freed.
fn warm_batch(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let mut blocks = Vec::with_capacity(batch);
    crowd.between(marks, |crowd| {
        for _ in 0..batch {
            blocks.push(crowd.allocate(GRANULE, GRANULE)?);
        }
        blocks.clear();
        Ok(())
    })
}

/// Allocates blocks of one class, each of another size: they miss the stream cache and take the
/// pool's lock.
fn other_size(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    crowd.between(marks, |crowd| {
        for _ in 0..batch {
            crowd.made += 1;
            let size = GRANULE - crowd.made % (GRANULE / 2);
            drop(crowd.allocate(size, size)?);
        }
        Ok(())
    })
}

/// Allocates blocks from the pool's lists.
fn allocate_locked(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let mut blocks = Vec::with_capacity(batch);
    crowd.between(marks, |crowd| {
        for _ in 0..batch {
            blocks.push(crowd.allocate(GRANULE, GRANULE)?);
        }
        Ok(())
    })?;
    crowd.keep_off_stream_caches(&blocks)
}

/// Frees blocks to the pool's lists.
fn free_locked(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let mut blocks = Vec::with_capacity(batch);
    for _ in 0..batch {
        blocks.push(crowd.allocate(GRANULE, GRANULE)?);
    }
    crowd.keep_off_stream_caches(&blocks)?;
    crowd.between(marks, |_| {
        blocks.clear();
        Ok(())
    })
}

/// Grows a block by a granule into precommitted memory.
fn grow(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    /// One step of precommitted memory is 64 granules: a longer batch would call the driver, and
    /// fail.
    const BEGIN: u64 = 1 << 30;
    let mut block = match crowd.growing.take() {
        Some(block) => block,
        None => crowd.allocate(BEGIN, 8 * BEGIN)?,
    };
    // Grow to the end of a step and then by one granule: a full step of precommitted memory is
    // ahead.
    loop {
        let end = block
            .extents()
            .last()
            .map_or(0, |last| last.offset + last.size);
        let grown = block.size() + GRANULE;
        let step = grown > end;
        block.try_grow_to(grown)?;
        if step {
            break;
        }
    }
    crowd.between(marks, |_| {
        for _ in 0..batch {
            block.try_grow_to(block.size() + GRANULE)?;
        }
        Ok(())
    })?;
    crowd.growing = Some(block);
    Ok(())
}

/// Computes a tenant's headroom, per slot examined. A request that cannot be met examines the slots
/// in the same way.
fn headroom(marks: &Marks, crowd: &mut Crowd, _: usize) -> Result<()> {
    let tenant = crowd.tenants.first().cloned();
    let tenant = tenant.context("there are tenants")?;
    // The first call polls the fences.
    tenant.headroom()?;
    crowd.between(marks, |_| {
        std::hint::black_box(tenant.headroom()?);
        Ok(())
    })
}

/// Computes the pool's statistics, per slot.
fn pool_stats(marks: &Marks, crowd: &mut Crowd, _: usize) -> Result<()> {
    crowd.between(marks, |crowd| {
        std::hint::black_box(crowd.pool.stats());
        Ok(())
    })
}

/// Charges a ledger for a granule more than the pool has, and refunds it.
fn charge(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let ledger = crowd.ledger.clone().context("the pool is in a ledger")?;
    let beyond = crowd.pool.stats().committed + 64 * GRANULE;
    crowd.between(marks, |_| {
        for _ in 0..batch {
            ledger.set_guarantee(beyond)?;
            ledger.set_guarantee(0)?;
        }
        Ok(())
    })
}
