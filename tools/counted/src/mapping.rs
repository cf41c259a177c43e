//! Paths that map and unmap, counted with the model's own work.

use anyhow::{Context as _, Result, ensure};
use cuvmm::driver::Call;
use cuvmm::{Contents, Heap};

use crate::crowd::{Crowd, GRANULE};
use crate::marks::Marks;

/// Runs the work between marks, and checks that it made a driver call at least as often as wanted.
fn calling<T>(
    marks: &Marks,
    crowd: &mut Crowd,
    (call, least): (Call, usize),
    work: impl FnOnce(&mut Crowd) -> Result<T>,
) -> Result<T> {
    let before = crowd.device.calls();
    let outcome = marks.around(|| work(crowd))?;
    let made = crowd.device.calls().since(&before).count(call);
    ensure!(made >= least as u64, "{call} was called {made} times");
    Ok(outcome)
}

/// Allocates blocks whose memory other tenants give up, an extent each.
pub(crate) fn reclaim(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let taker = match crowd.pool.find_tenant("taker") {
        Some(taker) => taker,
        None => crowd.pool.tenant("taker").register()?,
    };
    crowd.kept.reserve(batch);
    calling(marks, crowd, (Call::MemUnmap, batch), |crowd| {
        for _ in 0..batch {
            let block = taker.block(GRANULE).home_stream(&crowd.stream);
            crowd.kept.push(block.try_allocate()?);
        }
        Ok(())
    })
}

pub(crate) fn cold(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    crowd.kept.reserve(batch);
    calling(marks, crowd, (Call::MemCreate, batch), |crowd| {
        for _ in 0..batch {
            let block = crowd.allocate(GRANULE, GRANULE)?;
            crowd.kept.push(block);
        }
        Ok(())
    })
}

/// Allocates from a heap that has nothing free.
pub(crate) fn heap_miss(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let (heap, mut live) = match crowd.heap.take() {
        Some(heap) => heap,
        None => {
            let tenant = crowd.tenants.first().context("there is a tenant")?;
            (Heap::builder(tenant).build()?, Vec::new())
        }
    };
    live.reserve(batch);
    calling(marks, crowd, (Call::MemCreate, batch), |crowd| {
        for _ in 0..batch {
            live.push(heap.allocate(4 * GRANULE, 1, &crowd.stream)?);
        }
        Ok(())
    })?;
    crowd.heap = Some((heap, live));
    Ok(())
}

/// Puts the blocks of a tenant to sleep without their contents, per block.
pub(crate) fn sleep(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    while crowd.kept.len() < batch {
        let block = crowd.allocate(GRANULE, GRANULE)?;
        crowd.kept.push(block);
    }
    let tenant = crowd.tenants.first().cloned();
    let tenant = tenant.context("there is a tenant")?;
    calling(marks, crowd, (Call::MemUnmap, batch), |_| {
        Ok(tenant.blocks().sleep(Contents::Discard)?)
    })?;
    tenant.blocks().wake()?;
    Ok(())
}
