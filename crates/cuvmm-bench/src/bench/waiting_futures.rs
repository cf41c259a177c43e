//! The cost for the mapper's thread of waking one of many futures that wait for memory.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use cuvmm::Block;
use cuvmm::Stream;
use cuvmm::pool::futures::AllocateFuture;

use super::mapper::Mapped;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;

pub(super) const NAME: &str = "wake_one_of_1000_futures";

const WAITING: usize = 1000;

const BASELINE: &str = "the same while one more waits";

/// Wake-ups per sample. The thread's clock is too coarse for a single one.
const TOGETHER: usize = 50;

const PATIENCE: Duration = Duration::from_secs(10);

/// Measures the processor time that the mapper's thread spends on each future that is granted a
/// block freed by another owner.
///
/// # Errors
/// When an operation fails, the system does not report a thread's processor time, or a future is
/// not woken.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let page = stage.device.granularity();
    stage.room(2 * page)?;
    let samples = stage.times(40, 2);
    let mapped = Mapped::start(&stage.device, page)?;
    let tenant = mapped.pool.tenant("A").register()?;
    let stream = Stream::new(mapped.pool.device())?;
    let wakes = |waiting: usize| -> anyhow::Result<Samples> {
        let block = tenant.block(page).home_stream(&stream).try_allocate()?;
        // The futures that are woken are added to the `waiting` ones that remain pending
        // throughout.
        let futures = 0..waiting + (samples + 1) * TOGETHER;
        let futures = futures.map(|_| tenant.allocate_on_async(&stream, page));
        let mut queue: VecDeque<AllocateFuture> = futures.collect();
        let bell = Arc::new(Bell::default());
        for future in &mut queue {
            ensure!(poll(future, &bell).is_pending(), "a future need not wait");
        }
        let mut block = next(&mut queue, block, &bell)?;
        let mut times = Samples::default();
        for _ in 0..samples {
            let before = mapper_time()?;
            for _ in 0..TOGETHER {
                block = next(&mut queue, block, &bell)?;
            }
            let took = mapper_time()?.saturating_sub(before);
            times.add(took.as_nanos() as f64 / TOGETHER as f64);
        }
        // Drop the waiting futures first, so that none of them is granted the block's memory.
        drop(queue);
        drop(block);
        Ok(times)
    };
    let (ours, baselines) = (wakes(WAITING)?, wakes(1)?);
    drop((tenant, stream));
    mapped.stop();
    let note = "processor time of the mapper's thread, fifty wakings together";
    let row = Row::new(NAME, &ours, BASELINE, &baselines).count("waiting", WAITING as f64);
    report.add(row.note(note));
    Ok(())
}

/// A waker that makes no system call, so that the mapper's time includes no executor's work.
#[derive(Default)]
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn poll(future: &mut AllocateFuture, bell: &Arc<Bell>) -> Poll<<AllocateFuture as Future>::Output> {
    let waker = Waker::from(Arc::clone(bell));
    Pin::new(future).poll(&mut Context::from_waker(&waker))
}

/// Frees the block and waits until the first future of the queue has been granted it.
fn next(
    queue: &mut VecDeque<AllocateFuture>,
    block: Block,
    bell: &Arc<Bell>,
) -> anyhow::Result<Block> {
    let mut first = queue.pop_front().context("no future waits")?;
    drop(block);
    let begun = Instant::now();
    while !bell.0.swap(false, Ordering::SeqCst) {
        ensure!(begun.elapsed() < PATIENCE, "no future was woken");
        std::hint::spin_loop();
    }
    match poll(&mut first, bell) {
        Poll::Ready(block) => Ok(block?),
        Poll::Pending => anyhow::bail!("another future than the first was woken"),
    }
}

/// Returns the processor time used by the mapper's thread so far.
fn mapper_time() -> anyhow::Result<Duration> {
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        if std::fs::read_to_string(path.join("comm"))?.trim() == "cuvmm-mapper" {
            let told = std::fs::read_to_string(path.join("schedstat"))?;
            let nanos = told
                .split_whitespace()
                .next()
                .context("no time in schedstat")?;
            return Ok(Duration::from_nanos(nanos.parse()?));
        }
    }
    anyhow::bail!("there is no thread of the mapper")
}
