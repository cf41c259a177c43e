//! The time of the mapper's thread for waking futures that wait for memory: one at a time, and many
//! whose memory becomes free together.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use cuvmm::pool::futures::AllocateFuture;
use cuvmm::{Block, Stream, Tenant};

use super::Wanted;
use super::ledger::processor_time;
use super::mapper::Mapped;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;

pub(super) const ONE: &str = "wake_one_of_1000_futures";
pub(super) const TOGETHER: &str = "wake_50_of_1000_futures";

/// The futures that wait throughout.
const WAITING: usize = 1000;

/// Wakings per sample. The thread's clock is too coarse for a single one.
const WAKINGS: usize = 50;

/// The pause between two wakings. The woken thread sleeps again meanwhile, as in a program that
/// frees memory now and then.
const PAUSE: Duration = Duration::from_micros(30);

const BASELINE: &str = "a thread that sleeps, is woken as often and does nothing";

/// Looks at the mapper's thread, 20 ms apart, until it has little to do.
const ROUNDS: usize = 25;

const PATIENCE: Duration = Duration::from_secs(10);

/// The name of the mapper's thread, and of the thread it is compared with.
const MAPPER: &str = "cuvmm-mapper";
const BARE: &str = "bare";

/// Measures the processor time of the mapper's thread for each future that is granted a block freed
/// by another owner.
///
/// # Errors
/// The system does not report a thread's processor time, or a future is not woken.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    let page = stage.device.granularity();
    let all = WAKINGS as u64 * page;
    stage.room(2 * all)?;
    let samples = stage.times(40, 2);
    let bare = bare_wakings(samples)?;
    for (name, blocks) in [(ONE, 1), (TOGETHER, WAKINGS)] {
        if !wanted.has(name) {
            continue;
        }
        let mapped = Mapped::start(&stage.device, blocks as u64 * page)?;
        let tenant = mapped.pool.tenant("A").register()?;
        let stream = Stream::new(mapped.pool.device())?;
        let woken = (samples + 1) * WAKINGS;
        let queue = Queue::fill((&tenant, &stream), page, blocks, woken)?;
        let ours = queue.wakings(samples)?;
        drop((tenant, stream));
        mapped.stop();
        let note = "processor time of the mapper's thread, fifty wakings together";
        let row = Row::new(name, &ours, BASELINE, &bare).count("waiting", WAITING as f64);
        report.add(row.note(note));
    }
    Ok(())
}

/// Futures that wait, in the order in which they are granted memory.
struct Queue {
    blocks: Vec<Block>,
    futures: VecDeque<AllocateFuture>,
    bell: Arc<Bell>,
}

impl Queue {
    /// Takes all memory in `blocks` blocks, and makes [`WAITING`] and `woken` futures wait.
    fn fill(
        (tenant, stream): (&Tenant, &Stream),
        page: u64,
        blocks: usize,
        woken: usize,
    ) -> anyhow::Result<Self> {
        let held = (0..blocks).map(|_| tenant.block(page).home_stream(stream).try_allocate());
        let held = held.collect::<Result<_, _>>()?;
        let mut queue = Self {
            blocks: held,
            futures: VecDeque::new(),
            bell: Arc::default(),
        };
        for _ in 0..WAITING + woken {
            let mut future = tenant.block(page).home_stream(stream).allocate_async();
            let pending = poll(&mut future, &queue.bell).is_pending();
            ensure!(pending, "a future need not wait");
            queue.futures.push_back(future);
        }
        Ok(queue)
    }

    /// Returns the processor time of the mapper's thread for each waking.
    fn wakings(mut self, samples: usize) -> anyhow::Result<Samples> {
        self.next()?;
        // Waits until each future has had its first turn. The mapper looks now and then from then
        // on.
        let mut before = 0.0;
        for _ in 0..ROUNDS {
            let used = processor_time(Some(MAPPER))?;
            if used - before < 1e6 {
                break;
            }
            before = used;
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut times = Samples::default();
        let turns = WAKINGS / self.blocks.len();
        for _ in 0..samples {
            let before = processor_time(Some(MAPPER))?;
            for _ in 0..turns {
                self.next()?;
            }
            times.add((processor_time(Some(MAPPER))? - before) / WAKINGS as f64);
        }
        // The waiting futures are dropped first, so that none of them is granted the memory.
        self.futures.clear();
        Ok(times)
    }

    /// Frees the blocks and waits until the first futures of the queue have been granted them.
    fn next(&mut self) -> anyhow::Result<()> {
        let count = self.blocks.len();
        self.bell.0.store(0, Ordering::SeqCst);
        self.blocks.clear();
        let begun = Instant::now();
        while self.bell.0.load(Ordering::SeqCst) < count {
            ensure!(begun.elapsed() < PATIENCE, "no future was woken");
            std::hint::spin_loop();
        }
        pause();
        for _ in 0..count {
            let mut first = self.futures.pop_front().context("no future waits")?;
            match poll(&mut first, &self.bell) {
                Poll::Ready(block) => self.blocks.push(block?),
                Poll::Pending => anyhow::bail!("another future than the first was woken"),
            }
        }
        Ok(())
    }
}

/// A waker that counts without a system call, so that the mapper's time includes no executor's
/// work.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll(future: &mut AllocateFuture, bell: &Arc<Bell>) -> Poll<<AllocateFuture as Future>::Output> {
    let waker = Waker::from(Arc::clone(bell));
    Pin::new(future).poll(&mut Context::from_waker(&waker))
}

/// Waits for [`PAUSE`] without a system call.
fn pause() {
    let begun = Instant::now();
    while begun.elapsed() < PAUSE {
        std::hint::spin_loop();
    }
}

/// Returns the processor time for each waking of a thread that waits for a condition and does
/// nothing.
fn bare_wakings(samples: usize) -> anyhow::Result<Samples> {
    let (called, woken) = (Mutex::new(0), Condvar::new());
    let (seen, ends) = (AtomicUsize::new(0), AtomicBool::new(false));
    let look = || called.lock().unwrap_or_else(PoisonError::into_inner);
    let wait = || {
        let mut calls = look();
        while !ends.load(Ordering::SeqCst) {
            seen.store(*calls, Ordering::SeqCst);
            // The mapper waits like this while it is woken now and then.
            let waited = woken.wait_timeout(calls, Duration::from_millis(1));
            calls = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    };
    let wake = || -> anyhow::Result<()> {
        let call = {
            let mut calls = look();
            *calls += 1;
            *calls
        };
        woken.notify_one();
        let begun = Instant::now();
        while seen.load(Ordering::SeqCst) < call {
            ensure!(begun.elapsed() < PATIENCE, "the thread was not woken");
            std::hint::spin_loop();
        }
        pause();
        Ok(())
    };
    let measured = || -> anyhow::Result<Samples> {
        wake()?;
        let mut times = Samples::default();
        for _ in 0..samples {
            let before = processor_time(Some(BARE))?;
            for _ in 0..WAKINGS {
                wake()?;
            }
            times.add((processor_time(Some(BARE))? - before) / WAKINGS as f64);
        }
        Ok(times)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(BARE.into());
        let thread = thread.spawn_scoped(scope, wait)?;
        let times = measured();
        ends.store(true, Ordering::SeqCst);
        woken.notify_one();
        ensure!(thread.join().is_ok(), "the thread panicked");
        times
    })
}
