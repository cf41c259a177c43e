//! Copies between device memory and a store, on all of its streams at once.
//!
//! Each lane of the store gets a thread during the copy: it takes the next few parts, queues their
//! copies, and waits for them while the copies of other lanes run. Parts of pageable memory are
//! copied through the lane's share of the staging area, so the processors of all lanes copy at
//! once. The calling thread adds jobs and receives their results, and maps or unmaps memory in
//! between.

use std::collections::VecDeque;
use std::io;
use std::iter::{Peekable, zip};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{PoisonError, mpsc};
use std::thread;

use super::saved::{Part, Unfinished};
use super::{HostStore, Lane, Saved, Shared, parts};
use crate::error::{CallError, MemoryError};
use crate::own::{CopyFailed, HostPart, Span, Stream};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The number of parts that a lane copies at once: 16 MiB.
pub(crate) const PARTS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the device.
    Out,
    /// To the device.
    In,
}

/// Parts of one block that are to be copied.
pub(crate) struct Job<'a> {
    index: usize,
    direction: Direction,
    span: Span<'a>,
    parts: Vec<Part<'a>>,
    /// Added to an offset in the block for the offset in the span, modulo 2^64.
    shift: u64,
    /// A range of the span to be cleared after the copies.
    clears: Range<u64>,
    unfinished: &'a Unfinished,
    then: Option<Next<'a>>,
}

/// A job that begins when the one before it has ended, on the same memory.
struct Next<'a> {
    job: Box<Job<'a>>,
    stage: &'a Stage,
}

/// How far two jobs on the same memory are.
#[derive(Debug, Default)]
pub(crate) struct Stage(AtomicU8);

impl Stage {
    const SAVED: u8 = 1;
    const OVERWRITTEN: u8 = 2;

    fn set(&self, stage: u8) {
        self.0.store(stage, Ordering::Release);
    }

    /// Returns `true` if the contents of the memory are in the store.
    pub(crate) fn is_saved(&self) -> bool {
        self.0.load(Ordering::Acquire) >= Self::SAVED
    }

    /// Returns `true` if the memory may have other contents, wholly or in part.
    pub(crate) fn is_overwritten(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OVERWRITTEN
    }

    /// Notes that the memory has its contents from the store again.
    pub(crate) fn restored(&self) {
        self.set(Self::SAVED);
    }
}

/// The contents of one block from its first byte on, to be copied in any order.
pub(crate) struct Contents<'a> {
    parts: Vec<Option<Part<'a>>>,
    unfinished: &'a Unfinished,
}

impl<'a> Contents<'a> {
    pub(crate) fn of(saved: &'a mut Saved) -> Self {
        let (parts, unfinished) = saved.split();
        Self {
            parts: parts.map(Some).collect(),
            unfinished,
        }
    }

    /// Returns a job for a range of the block, in whole parts that no other job has. Its memory is
    /// in a span at the offsets with `shift` added, modulo 2^64.
    pub(crate) fn job(
        &mut self,
        (index, direction): (usize, Direction),
        (span, shift): (Span<'a>, u64),
        range: Range<u64>,
    ) -> Job<'a> {
        let count = |offset: u64| usize::try_from(parts(offset)).unwrap_or(usize::MAX);
        let first = count(range.start).min(self.parts.len());
        let end = count(range.end).clamp(first, self.parts.len());
        let here = self.parts.get_mut(first..end).unwrap_or_default();
        Job {
            index,
            direction,
            span,
            parts: here.iter_mut().filter_map(Option::take).collect(),
            shift,
            clears: 0..0,
            unfinished: self.unfinished,
            then: None,
        }
    }
}

/// The result of one job.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) index: usize,
    pub(crate) copied: Result<u64, MemoryError>,
}

impl<'a> Job<'a> {
    /// Returns all jobs for a block's contents, in order.
    pub(crate) fn all(
        (index, direction): (usize, Direction),
        span: Span<'a>,
        saved: &'a mut Saved,
    ) -> impl Iterator<Item = Self> {
        let (parts, unfinished) = saved.split();
        let mut parts = parts.peekable();
        std::iter::from_fn(move || {
            parts.peek()?;
            Some(Self {
                index,
                direction,
                span,
                parts: parts.by_ref().take(PARTS).collect(),
                shift: 0,
                clears: 0..0,
                unfinished,
                then: None,
            })
        })
    }

    /// Sets a range of the span to be cleared after the copies (`cuMemsetD8Async`).
    pub(crate) fn clearing(mut self, range: Range<u64>) -> Self {
        self.clears = range;
        self
    }

    /// Sets a job that overwrites the memory whose contents this job saves. It begins when this one
    /// has ended.
    pub(crate) fn then(mut self, job: Self, stage: &'a Stage) -> Self {
        let job = Box::new(job);
        self.then = Some(Next { job, stage });
        self
    }

    /// Returns `true` if all its parts have bytes.
    pub(crate) fn is_ready(&self) -> bool {
        self.parts.iter().all(|part| part.host.is_ready())
    }

    /// Returns the offset after the last byte that it copies.
    pub(crate) fn end(&self) -> u64 {
        let last = self.parts.last().and_then(|part| part.ranges.last());
        last.map_or(0, |range| range.end)
    }

    fn carry_out(&mut self, lane: &mut Lane) -> Result<u64, MemoryError> {
        lane.unfinished = lane.is_running();
        self.copy(lane).map_err(|failed| {
            if !failed.ended {
                self.may_run_on(lane);
            }
            failed.error
        })
    }

    /// Carries the job out, and then the next one on its memory. After a panic of the driver it is
    /// not known what was queued.
    fn try_carry_out(&mut self, lane: &mut Lane) -> Result<u64, MemoryError> {
        let carried_out = catch_unwind(AssertUnwindSafe(|| self.carry_out(lane)));
        let copied = carried_out.unwrap_or_else(|_| {
            self.may_run_on(lane);
            Err(MemoryError::CopyPanicked)
        })?;
        let Some(Next { job, stage }) = &mut self.then else {
            return Ok(copied);
        };
        stage.set(Stage::SAVED);
        if job.is_empty() {
            return Ok(copied);
        }
        // Before the first byte is: an error leaves it unknown how many were.
        stage.set(Stage::OVERWRITTEN);
        Ok(copied + job.try_carry_out(lane)?)
    }

    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.clears.is_empty()
    }

    /// Records that a copy of the job may still be running on a lane.
    fn may_run_on(&self, lane: &mut Lane) {
        lane.unfinished = true;
        self.unfinished.add(&lane.stream);
    }

    fn copy(&mut self, lane: &mut Lane) -> Result<u64, CopyFailed> {
        if self.is_empty() {
            return Ok(0);
        }
        let copied = match self.parts.is_empty() {
            true => 0,
            false => self.copy_all(lane)?,
        };
        let Range { start, end } = self.clears;
        if start < end {
            self.span.clear(&lane.stream, start, end - start)?;
        }
        Ok(copied)
    }

    fn copy_all(&mut self, lane: &mut Lane) -> Result<u64, CopyFailed> {
        let Lane {
            stream,
            staging,
            unfinished,
        } = lane;
        let place = (&self.span, self.shift);
        let direction = self.direction;
        let pinned = self.parts.iter().all(|part| part.host.is_pinned());
        // A lane without a staging area uses the driver's own staging.
        let step = match pinned || staging.is_empty() || *unfinished {
            true => {
                let parts = self.parts.iter_mut();
                let parts = parts.map(|part| (&*part.ranges, &mut *part.host));
                return copy_parts(direction, place, stream, parts);
            }
            false => staging.len(),
        };
        let mut copied = 0;
        for parts in self.parts.chunks_mut(step) {
            if direction == Direction::In {
                for (to, from) in zip(&mut *staging, &*parts) {
                    to.bytes_mut().copy_from_slice(from.host.bytes());
                }
            }
            let ranges = parts.iter().map(|part| &*part.ranges);
            let through = zip(ranges, &mut *staging);
            copied += copy_parts(direction, place, stream, through)?;
            if direction == Direction::Out {
                for (to, from) in zip(parts, &*staging) {
                    to.host.bytes_mut().copy_from_slice(from.bytes());
                }
            }
        }
        Ok(copied)
    }
}

/// Copies ranges of a block between host memory that has them one behind the other and a span, at
/// their offsets in the block with `shift` added, modulo 2^64. Returns the bytes copied.
fn copy_parts<'a>(
    direction: Direction,
    (span, shift): (&Span<'_>, u64),
    stream: &Stream,
    parts: impl Iterator<Item = (&'a [Range<u64>], &'a mut HostPart)>,
) -> Result<u64, CopyFailed> {
    let mut pieces = Vec::new();
    for (ranges, host) in parts {
        let mut bytes = host.bytes_mut();
        for range in ranges {
            let size = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let (piece, rest) = bytes.split_at_mut(size.min(bytes.len()));
            pieces.push((range.start.wrapping_add(shift), piece));
            bytes = rest;
        }
    }
    let copied = pieces.iter().map(|(_, piece)| piece.len() as u64).sum();
    match direction {
        Direction::Out => span.read_all(stream, pieces)?,
        Direction::In => span.write_all(
            stream,
            pieces.iter().map(|(offset, piece)| (*offset, &**piece)),
        )?,
    }
    Ok(copied)
}

/// The queue of jobs for the lanes.
struct Open<'a> {
    jobs: VecDeque<Job<'a>>,
    /// No more jobs will be added.
    closed: bool,
}

/// The running copies, as the calling thread sees them.
pub(crate) struct Copies<'q, 'a> {
    store: &'q Shared,
    work: &'q Work<'a>,
    done: mpsc::Receiver<Done>,
    /// The number of jobs whose result has not been received.
    open: usize,
}

struct Work<'a> {
    open: Mutex<Open<'a>>,
    changed: Condvar,
}

impl<'a> Work<'a> {
    fn lock(&self) -> MutexGuard<'_, Open<'a>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job, or returns `None` when there will be no more.
    fn next(&self) -> Option<Job<'a>> {
        let mut open = self.lock();
        loop {
            if let Some(job) = open.jobs.pop_front() {
                return Some(job);
            }
            if open.closed {
                return None;
            }
            open = self
                .changed
                .wait(open)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<'a> Copies<'_, 'a> {
    /// Adds a job, which a lane will copy.
    pub(crate) fn add(&mut self, job: Job<'a>) {
        self.work.lock().jobs.push_back(job);
        self.work.changed.notify_one();
        self.open += 1;
    }

    /// Adds jobs up to the first one whose parts have no bytes yet.
    pub(crate) fn add_ready(&mut self, jobs: &mut Peekable<impl Iterator<Item = Job<'a>>>) {
        while let Some(job) = jobs.next_if(Job::is_ready) {
            self.add(job);
        }
    }

    /// Runs user code, which may itself copy with the same store.
    pub(crate) fn aside<T>(&self, run: impl FnOnce() -> T) -> T {
        self.store.aside(run)
    }

    /// Returns the result of a job that has ended, if there is one.
    pub(crate) fn try_next_done(&mut self) -> Option<Done> {
        let done = self.done.try_recv().ok()?;
        self.open -= 1;
        Some(done)
    }

    /// Waits for the result of the next job, or returns `None` if there are no more.
    pub(crate) fn next_done(&mut self) -> Option<Done> {
        self.open = self.open.checked_sub(1)?;
        self.done.recv().ok()
    }
}

/// Copies on all lanes of a store the jobs that `drive` adds and waits for. When this returns, all
/// copies have ended except those that [`Saved::unfinished`] names; jobs that had not begun when
/// `drive` returned are discarded.
///
/// # Errors
/// The error of `drive`, or an error if no thread or stream could be created.
pub(crate) fn copy<'a, T, E: From<io::Error> + From<CallError>>(
    store: &HostStore,
    drive: impl FnOnce(&mut Copies<'_, 'a>) -> Result<T, E>,
) -> Result<T, E> {
    let mut taken = store.shared.take_lanes()?;
    let work = Work {
        open: Mutex::new(Open {
            jobs: VecDeque::new(),
            closed: false,
        }),
        changed: Condvar::new(),
    };
    let work = &work;
    thread::scope(|scope| {
        let (report, done) = mpsc::channel();
        let mut refused = None;
        let mut hands = 0;
        for lane in &mut taken.lanes {
            let report = report.clone();
            let hand = move || {
                while let Some(mut job) = work.next() {
                    let copied = job.try_carry_out(lane);
                    let index = job.index;
                    // If the receiver is gone, the operation has failed already.
                    drop(report.send(Done { index, copied }));
                }
            };
            let named = thread::Builder::new().name("cuvmm-copy".into());
            match named.spawn_scoped(scope, hand) {
                Ok(_) => hands += 1,
                Err(error) => refused = Some(error),
            }
        }
        drop(report);
        if let Some(error) = refused.filter(|_| hands == 0) {
            return Err(error.into());
        }
        let mut copies = Copies {
            store: &store.shared,
            work,
            done,
            open: 0,
        };
        // Closes the queue even if `drive` panics.
        let _closes = Closes(work);
        drive(&mut copies)
    })
}

/// Closes the queue when dropped, so that the lanes end: jobs that have not begun are discarded.
struct Closes<'q, 'a>(&'q Work<'a>);

impl Drop for Closes<'_, '_> {
    fn drop(&mut self) {
        let mut open = self.0.lock();
        open.closed = true;
        open.jobs.clear();
        drop(open);
        self.0.changed.notify_all();
    }
}
