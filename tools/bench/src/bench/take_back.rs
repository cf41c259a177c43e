//! Reclaim of cached memory from one tenant for another.

use std::time::Duration;

use anyhow::ensure;
use cuvmm::driver::Call;
use cuvmm::{Scrub, Stream};

use super::commit::GIB;
use super::pairs::alternate;
use super::queue::waited;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

const SIZE: u64 = 16 * GIB;

pub(super) const PLAIN: &str = "take_back_16GiB";
pub(super) const SCRUBBED: &str = "take_back_16GiB_scrub";

const MOVED: &str = "the same extents by hand: unmap, map each, one set_access";
const MOVED_AND_ZEROED: &str =
    "the same extents by hand: unmap, map each, one set_access, memset, synchronise";

/// Timeout that covers the wait for the previous tenant's fence.
const PATIENCE: Duration = Duration::from_secs(1);

/// Measures reclaim with or without a scrub: two tenants pass the pool's memory back and forth.
///
/// # Errors
/// cuvmm's side created new memory.
pub(super) fn measure(stage: &Stage, report: &mut Report, scrub: Scrub) -> anyhow::Result<()> {
    let scrubbed = scrub != Scrub::Never;
    stage.room(2 * SIZE)?;
    if scrubbed {
        stage.room_to_write(2 * SIZE)?;
    }
    let pool = stage.pool(SIZE, scrub)?;
    let mut turn = [0, 1].into_iter().cycle();
    let tenants = [pool.tenant("A").register()?, pool.tenant("B").register()?];
    let streams = [Stream::new(&stage.device)?, Stream::new(&stage.device)?];
    let wanted = |which: usize| {
        let block = tenants[which].block(SIZE).home_stream(&streams[which]);
        block.timeout(PATIENCE)
    };
    let first = wanted(1).allocate()?;
    let extents: Vec<u64> = first.extents().iter().map(|extent| extent.size).collect();
    drop(first);
    streams[1].synchronize()?;
    let before = pool.calls();
    let ours = || {
        let which = turn.next().unwrap_or_default();
        let (took, block) = stage.watch.time(|| {
            let block = wanted(which).allocate()?;
            if scrubbed {
                streams[which].synchronize()?;
            }
            anyhow::Ok(block)
        })?;
        drop(block);
        streams[which].synchronize()?;
        Ok(took)
    };
    let mut from = stage.hand.commit(&extents)?;
    let mut to = stage.hand.reserve(SIZE, extents.len())?;
    let stream = Stream::new(&stage.device)?;
    let by_hand = || {
        let took = stage.time(|| {
            from.move_into(&mut to)?;
            match scrubbed {
                true => waited(&stage.hand, &stream, |queue| queue.clear((&to).into())),
                false => Ok(()),
            }
        })?;
        std::mem::swap(&mut from, &mut to);
        Ok(took)
    };
    let times = stage.times(30, 2);
    let (ours, baselines) = alternate(times, ours, by_hand)?;
    from.give_back()?;
    to.give_back()?;
    let calls = pool.calls().since(&before);
    let created = calls.count(Call::MemCreate);
    ensure!(
        created == 0,
        "{created} extents were new and not taken back"
    );
    let each = |call| calls.count(call) as f64 / (times + 1) as f64;
    let (name, baseline) = if scrubbed {
        (SCRUBBED, MOVED_AND_ZEROED)
    } else {
        (PLAIN, MOVED)
    };
    let row = Row::new(name, &ours, baseline, &baselines)
        .count("extents", extents.len() as f64)
        .count("unmaps", each(Call::MemUnmap))
        .count("maps", each(Call::MemMap))
        .count("set_access", each(Call::MemSetAccess));
    report.add(row.note(stage.watch.note()));
    Ok(())
}
