//! The paths that are counted. Each begins and ends a round with as many idle blocks as there were.

use anyhow::{Context as _, Result, bail};

use crate::containers::{admission, stats, tile};
use crate::crowd::{Crowd, GRANULE, Idle};
use crate::marks::Marks;

/// A path.
pub(crate) struct Case {
    pub(crate) idle: Idle,
    /// Whether all blocks of a batch live at once.
    pub(crate) together: bool,
    /// Who lives beside.
    pub(crate) among: Among,
    /// Runs it once, so many operations between marks.
    pub(crate) round: Round,
}

/// Who lives beside the blocks in question.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Among {
    /// No other block.
    Alone,
    /// Few or many, as is asked for.
    Crowd,
    /// 1,000 blocks of 100 tenants, and as many that were freed.
    Hundred,
}

type Round = fn(&Marks, &mut Crowd, usize) -> Result<()>;

pub(crate) fn named(name: &str) -> Result<Case> {
    let (idle, together, among, round): (_, _, _, Round) = match name {
        "warm" => (Idle::StreamCache, false, Among::Crowd, warm),
        "warm-batch" => (Idle::StreamCache, true, Among::Crowd, warm_batch),
        "other-size" => (Idle::StreamCache, false, Among::Crowd, other_size),
        "allocate-locked" => (Idle::Pool, true, Among::Crowd, allocate_locked),
        "free-locked" => (Idle::Pool, true, Among::Crowd, free_locked),
        "grow" => (Idle::Pool, false, Among::Crowd, grow),
        "tile" => (Idle::Pool, false, Among::Alone, tile),
        "kv-stats" => (Idle::Pool, false, Among::Alone, stats),
        "kv-admission" => (Idle::Pool, false, Among::Alone, admission),
        "headroom" => (Idle::Pool, true, Among::Hundred, headroom),
        "pool-stats" => (Idle::Pool, true, Among::Hundred, pool_stats),
        _ => bail!("there is no case {name}"),
    };
    Ok(Case {
        idle,
        together,
        among,
        round,
    })
}

/// Blocks of one shape, each freed before the next.
fn warm(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    crowd.between(marks, |crowd| {
        for _ in 0..batch {
            drop(crowd.allocate(GRANULE, GRANULE)?);
        }
        Ok(())
    })
}

/// Blocks of one shape, all of which live before the first is freed.
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

/// Blocks of one class, no two of one size: past the stream cache and through the pool's lock.
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

/// Out of the pool's lists.
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

/// Onto the pool's lists.
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

/// By a granule, into precommitted memory.
fn grow(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    /// A step ahead of it is 64 granules: a longer batch would call the driver, and fail.
    const BEGIN: u64 = 1 << 30;
    let mut block = match crowd.growing.take() {
        Some(block) => block,
        None => crowd.allocate(BEGIN, 8 * BEGIN)?,
    };
    // To where a step ends, and then one granule on: as much as one step of precommitted memory lies ahead.
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

/// What a tenant could have if everybody gave what is idle, for each of the slots that are looked at.
/// A request that cannot be met looks at them so as well.
fn headroom(marks: &Marks, crowd: &mut Crowd, _: usize) -> Result<()> {
    let tenant = crowd.tenants.first().cloned();
    let tenant = tenant.context("there are tenants")?;
    // The first time the fences are asked.
    tenant.headroom()?;
    crowd.between(marks, |_| {
        std::hint::black_box(tenant.headroom()?);
        Ok(())
    })
}

/// The pool's figures, for each of its slots.
fn pool_stats(marks: &Marks, crowd: &mut Crowd, _: usize) -> Result<()> {
    crowd.between(marks, |crowd| {
        std::hint::black_box(crowd.pool.stats());
        Ok(())
    })
}
