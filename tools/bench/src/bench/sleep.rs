//! Sleep and wake of a block, compared with the same driver calls by hand and with plain copies.

use std::time::{Duration, Instant};

use anyhow::ensure;
use cuvmm::driver::Call;
use cuvmm::{Block, Contents, HostStore, Limit, Pool, Stream, Tenant};

use super::commit::{GIB, MIB};
use super::pinned::Pinned;
use super::queue::{FILLED, Memory, waited};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::{Stage, skip};
use super::wanted::Wanted;

const SIZE: u64 = 8 * GIB;

/// Time asleep in the rows that wake later.
const ASLEEP: Duration = Duration::from_secs(1);

/// A way to discard contents: the extent size, and whether memory is released to the driver or kept
/// in the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Discarded {
    extent: u64,
    label: &'static str,
    release: bool,
}

pub(super) const DISCARDED: [Discarded; 4] = [
    Discarded::new(GIB, "1GiB", false),
    Discarded::new(32 * MIB, "32MiB", false),
    Discarded::new(GIB, "1GiB", true),
    Discarded::new(32 * MIB, "32MiB", true),
];

impl Discarded {
    const fn new(extent: u64, label: &'static str, release: bool) -> Self {
        Self {
            extent,
            label,
            release,
        }
    }

    /// Returns the row names of sleeping, waking immediately and waking later.
    pub(super) fn names(self) -> [String; 3] {
        let to = if self.release { "driver" } else { "pool" };
        ["sleep_discard", "wake_at_once", "wake_later"]
            .map(|what| format!("{what}_8GiB_in_{}_{to}", self.label))
    }

    const fn baselines(self) -> [&'static str; 2] {
        match self.release {
            false => [
                "one unmap by hand",
                "as many maps and one set_access by hand",
            ],
            true => [
                "one unmap and as many releases by hand",
                "as many creates and maps and one set_access by hand",
            ],
        }
    }
}

/// A tenant with one block that holds all of its pool's memory.
struct Model {
    pool: Pool,
    tenant: Tenant,
    block: Block,
}

impl Model {
    fn new(stage: &Stage, stream: &Stream, size: u64, extent: u64) -> anyhow::Result<Self> {
        let device = stage.device.with_own_counters();
        let pool = Pool::builder(&device)
            .limit(Limit::Bytes(size))
            .largest_extent(extent)
            .build()?;
        let tenant = pool.tenant("model").register()?;
        let block = tenant.allocate_on(stream, size)?;
        Ok(Self {
            pool,
            tenant,
            block,
        })
    }

    fn sleep(&self, release: bool, contents: Contents<'_>) -> anyhow::Result<()> {
        let slept = self.tenant.blocks().release(release).sleep(contents)?;
        ensure!(slept.given == self.block.size(), "{slept:?}");
        Ok(())
    }

    fn wake(&self) -> anyhow::Result<()> {
        let woken = self.tenant.blocks().wake()?;
        ensure!(woken.mapped == self.block.size(), "{woken:?}");
        Ok(())
    }
}

/// Measures sleeping and waking, alternately with unmapping and mapping a range by hand.
pub(super) fn discard(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    of: Discarded,
) -> anyhow::Result<()> {
    stage.room(2 * SIZE)?;
    let stream = Stream::new(&stage.device)?;
    let model = Model::new(stage, &stream, SIZE, of.extent)?;
    let extents = vec![of.extent; usize::try_from(SIZE / of.extent)?];
    let mut range = stage.hand.commit(&extents)?;
    let mut sides: [(Samples, Samples); 3] = Default::default();
    let (at_once, later) = (stage.times(20, 2), stage.times(4, 1));
    let before = model.pool.calls();
    for turn in 0..=at_once + later {
        let waits = turn > at_once;
        if waits && !wanted.has(&of.names()[2]) {
            break;
        }
        let pause = || {
            if waits {
                stage.watch.wait(ASLEEP);
            }
        };
        let slept = stage.time(|| model.sleep(of.release, Contents::Discard))?;
        pause();
        let woken = stage.time(|| model.wake())?;
        let unmapped = stage.time(|| {
            range.unmap()?;
            if of.release { range.release() } else { Ok(()) }
        })?;
        pause();
        let mapped = stage.time(|| {
            if of.release {
                extents.iter().try_for_each(|&size| range.hold(size))?;
            }
            range.map()
        })?;
        let [falls, wakes, late] = &mut sides;
        if turn > 0 && !waits {
            falls.0.add(slept);
            falls.1.add(unmapped);
        }
        if turn > 0 {
            let side = if waits { late } else { wakes };
            side.0.add(woken);
            side.1.add(mapped);
        }
    }
    let calls = model.pool.calls().since(&before);
    range.give_back()?;
    let turns = (calls.count(Call::MemUnmap) as f64 / extents.len() as f64).max(1.0);
    let [down, up] = of.baselines();
    let rows = of.names().into_iter().zip([down, up, up]).zip(&sides);
    for ((name, baseline), (ours, baselines)) in rows.filter(|((name, _), _)| wanted.has(name)) {
        let row = Row::new(name, ours, baseline, baselines)
            .count("extents", extents.len() as f64)
            .count("creates", calls.count(Call::MemCreate) as f64 / turns);
        report.add(row.note(stage.watch.note()));
    }
    Ok(())
}

pub(super) const KEPT: [&str; 2] = ["sleep_keep_8GiB", "wake_kept_8GiB"];
pub(super) const STAGED: [&str; 2] = ["sleep_keep_8GiB_staged", "wake_kept_8GiB_staged"];

const DOWN: &str = "cuMemcpyDtoHAsync of as much to pinned memory, 1 GiB again and again";
const UP: &str = "cuMemcpyHtoDAsync of as much from pinned memory, 1 GiB again and again";

/// Measures sleeping and waking with the contents kept, alternately with copies by hand. If
/// `staged`, the contents are in pageable memory and copied through a pinned arena of an eighth of
/// their size.
///
/// # Errors
/// Bytes were changed. The row is skipped on the model driver.
pub(super) fn keep(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    staged: bool,
) -> anyhow::Result<()> {
    if !stage.keeps_bytes() {
        return Err(skip(
            "the model's copies are of real memory, and there is not so much",
        ));
    }
    let size = stage.written(SIZE);
    let part = size.min(GIB);
    stage.room(2 * size)?;
    stage.room_to_write(3 * size)?;
    let stream = Stream::new(&stage.device)?;
    let model = Model::new(stage, &stream, size, GIB)?;
    let hand = &stage.hand;
    let there = hand.commit(&[part])?;
    let mut pinned = Pinned::new(hand, usize::try_from(part)?)?;
    let store = HostStore::builder(&stage.device);
    let begun = Instant::now();
    let store = match staged {
        true => store.ordinary(size).staging(size / 8).build()?,
        false => store.pinned(size).build()?,
    };
    let prepared = begun.elapsed();
    for at in (0..size).step_by(usize::try_from(64 * MIB)?) {
        let bytes = vec![FILLED; usize::try_from((size - at).min(64 * MIB))?];
        model.block.write(at, &bytes)?;
    }
    let memory = Memory::from(&there);
    let mut sides: [(Samples, Samples); 2] = Default::default();
    let mut first = None;
    for turn in 0..=stage.times(10, 1) {
        let down = stage.time(|| model.sleep(false, Contents::Keep(&store)))?;
        let up = stage.time(|| model.wake())?;
        let download = stage.time(|| {
            (0..size / part).try_for_each(|_| {
                waited(hand, &stream, |queue| {
                    queue.download(pinned.bytes_mut(), memory)
                })
            })
        })?;
        let upload = stage.time(|| {
            (0..size / part).try_for_each(|_| {
                waited(hand, &stream, |queue| queue.upload(memory, pinned.bytes()))
            })
        })?;
        first.get_or_insert((down, up));
        if turn > 0 {
            for ((ours, baselines), took) in sides.iter_mut().zip([(down, download), (up, upload)])
            {
                ours.add(took.0);
                baselines.add(took.1);
            }
        }
    }
    for at in (0..size).step_by(usize::try_from(64 * MIB)?) {
        let mut seen = [0; 4096];
        model.block.read(at, &mut seen)?;
        ensure!(seen == [FILLED; 4096], "bytes were lost on the way");
    }
    let first = first.unwrap_or_default();
    let names = if staged { STAGED } else { KEPT };
    let rows = names.into_iter().zip([DOWN, UP]).zip([first.0, first.1]);
    for (((name, baseline), first), (ours, baselines)) in rows.zip(&sides) {
        if wanted.has(name) {
            let row = Row::new(name, ours, baseline, baselines)
                .turned_over()
                .count("first_ms", first / 1e6)
                .count("prepared_ms", prepared.as_secs_f64() * 1e3);
            report.add(stage.moved(row, size));
        }
    }
    Ok(())
}
