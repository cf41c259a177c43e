//! Copies between device memory and a store, on all of its streams at once.
//!
//! Each lane of the store has a thread for the time being: it takes the next few parts, queues their
//! copies, and waits for them, while the others' are under way. Where the parts are ordinary memory
//! they go through the lane's part of the pinned arena, and the processors of all lanes copy at
//! once. Who asked adds work and hears of what is done, in between mapping and unmapping.

use std::collections::VecDeque;
use std::io;
use std::iter::zip;
use std::sync::{PoisonError, mpsc};
use std::thread;

use super::saved::Unfinished;
use super::{HostStore, Lane, Saved, Shared};
use crate::error::{CallError, MemoryError};
use crate::own::{CopyFailed, HostPart, Span, Stream};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Parts that a lane copies in one go, 16 MiB.
const PARTS: usize = 8;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the device.
    Out,
    /// To the device.
    In,
}

/// Parts of one block to be copied.
pub(crate) struct Job<'a> {
    /// Which block.
    index: usize,
    span: Span<'a>,
    /// Bytes of the block in all.
    bytes: u64,
    /// Where in the block each part's bytes are.
    parts: Vec<(u64, &'a mut HostPart)>,
    unfinished: &'a Unfinished,
}

/// What was done of a block.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) index: usize,
    /// Bytes copied, if they were.
    pub(crate) copied: Result<u64, MemoryError>,
}

impl<'a> Job<'a> {
    /// All jobs for a block's contents, in order.
    pub(crate) fn all(
        index: usize,
        span: Span<'a>,
        saved: &'a mut Saved,
    ) -> impl Iterator<Item = Self> {
        let bytes = saved.bytes();
        let (parts, unfinished) = saved.split();
        let mut parts = parts.peekable();
        std::iter::from_fn(move || {
            parts.peek()?;
            Some(Self {
                index,
                span,
                bytes,
                parts: parts.by_ref().take(PARTS).collect(),
                unfinished,
            })
        })
    }

    /// One past the last byte that it copies.
    pub(crate) fn end(&self) -> u64 {
        let last = self.parts.last();
        let end = last.map_or(0, |(offset, part)| offset + part.size() as u64);
        end.min(self.bytes)
    }

    fn carry_out(&mut self, direction: Direction, lane: &mut Lane) -> Result<u64, MemoryError> {
        lane.unfinished = lane.is_running();
        self.copy(direction, lane).map_err(|failed| {
            if !failed.ended {
                lane.unfinished = true;
                self.unfinished.add(&lane.stream);
            }
            failed.error
        })
    }

    fn copy(&mut self, direction: Direction, lane: &mut Lane) -> Result<u64, CopyFailed> {
        let Lane {
            stream,
            staging,
            unfinished,
        } = lane;
        let bytes = self.bytes;
        let pinned = self.parts.iter().all(|(_, part)| part.is_pinned());
        // A lane without an arena leaves it to the driver's own.
        let step = match pinned || staging.is_empty() || *unfinished {
            true => return copy_parts(direction, &self.span, stream, &mut self.parts, bytes),
            false => staging.len(),
        };
        let mut copied = 0;
        for parts in self.parts.chunks_mut(step) {
            let offsets = parts.iter().map(|(offset, _)| *offset);
            let mut through: Vec<(u64, &mut HostPart)> = zip(offsets, staging.iter_mut()).collect();
            if direction == Direction::In {
                for ((_, to), (_, from)) in zip(&mut through, parts.iter()) {
                    to.bytes_mut().copy_from_slice(from.bytes());
                }
            }
            copied += copy_parts(direction, &self.span, stream, &mut through, bytes)?;
            if direction == Direction::Out {
                for ((_, to), (_, from)) in zip(parts, &through) {
                    to.bytes_mut().copy_from_slice(from.bytes());
                }
            }
        }
        Ok(copied)
    }
}

/// Copies parts of a block with `bytes` in all; returns how many.
fn copy_parts(
    direction: Direction,
    span: &Span<'_>,
    stream: &Stream,
    parts: &mut [(u64, &mut HostPart)],
    bytes: u64,
) -> Result<u64, CopyFailed> {
    let within = |offset: u64, part: &HostPart| {
        let left = usize::try_from(bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        left.min(part.size())
    };
    let copied = parts
        .iter()
        .map(|(offset, part)| within(*offset, part) as u64);
    let copied = copied.sum();
    match direction {
        Direction::Out => span.read_all(
            stream,
            parts.iter_mut().map(|(offset, part)| {
                let size = within(*offset, part);
                (
                    *offset,
                    part.bytes_mut().get_mut(..size).unwrap_or_default(),
                )
            }),
        )?,
        Direction::In => span.write_all(
            stream,
            parts.iter().map(|(offset, part)| {
                let size = within(*offset, part);
                (*offset, part.bytes().get(..size).unwrap_or_default())
            }),
        )?,
    }
    Ok(copied)
}

/// What is to be copied, as the lanes see it.
struct Open<'a> {
    jobs: VecDeque<Job<'a>>,
    /// Nothing more comes.
    closed: bool,
}

/// Copies that are under way.
pub(crate) struct Copies<'q, 'a> {
    store: &'q Shared,
    work: &'q Work<'a>,
    done: mpsc::Receiver<Done>,
    /// Jobs that have not been heard of.
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

    /// The next job, when there is one; nothing when there will be none.
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
    /// Has a lane copy it.
    pub(crate) fn add(&mut self, job: Job<'a>) {
        self.work.lock().jobs.push_back(job);
        self.work.changed.notify_one();
        self.open += 1;
    }

    /// Runs the user's code, which may copy with the same store.
    pub(crate) fn aside<T>(&self, run: impl FnOnce() -> T) -> T {
        self.store.aside(run)
    }

    /// Waits until something more is done; nothing if all that was added is.
    pub(crate) fn next_done(&mut self) -> Option<Done> {
        self.open = self.open.checked_sub(1)?;
        self.done.recv().ok()
    }
}

/// Copies on all lanes of a store what `drive` adds and waits for. When this returns, all copies have
/// ended but those that [`Saved::unfinished`] names; those that had not begun when `drive` ended were
/// not made.
///
/// # Errors
/// What `drive` returns, or that no thread or stream could be had.
pub(crate) fn copy<'a, T, E: From<io::Error> + From<CallError>>(
    store: &HostStore,
    direction: Direction,
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
                    let copied = job.carry_out(direction, lane);
                    let index = job.index;
                    // Who does not listen any more has failed.
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
        // Also where `drive` panics.
        let _closes = Closes(work);
        drive(&mut copies)
    })
}

/// Lets the lanes go when it is dropped: what they have not begun is not made any more.
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
