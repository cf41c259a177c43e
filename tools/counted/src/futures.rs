//! Futures that wait and are granted memory, on the mapper's thread.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use anyhow::{Result, bail, ensure};
use cuvmm::pool::futures::AllocateFuture;
use cuvmm::{Block, Limit, Mapper, Pool};

use crate::crowd::{Crowd, GRANULE};
use crate::marks::Marks;

/// The course of a round, which the wakers follow on the mapper's thread.
#[derive(Default)]
struct Course {
    woken: usize,
    /// Set when all memory is free that the counted futures wait for.
    freed: bool,
}

/// Wakes each of a round's futures: the first grant waits until memory for all others is free, and the
/// stretch from its end to the last grant is counted.
struct Granted {
    marks: Marks,
    count: usize,
    course: Mutex<Course>,
    changed: Condvar,
}

impl Wake for Granted {
    fn wake(self: Arc<Self>) {
        let mut course = self.course.lock().unwrap_or_else(PoisonError::into_inner);
        course.woken += 1;
        let woken = course.woken;
        // Not in between: the other thread would wake in the counted stretch, and contend for the lock.
        if woken == 1 || woken == self.count + 1 {
            self.changed.notify_all();
        }
        if woken == 1 {
            while !course.freed {
                let waited = self.changed.wait(course);
                course = waited.unwrap_or_else(PoisonError::into_inner);
            }
        }
        drop(course);
        if woken == 1 {
            self.marks.set_on_this_thread();
        } else if woken == self.count + 1 {
            self.marks.set();
        }
    }
}

impl Granted {
    fn until(&self, reached: impl Fn(&Course) -> bool) {
        let mut course = self.course.lock().unwrap_or_else(PoisonError::into_inner);
        while !reached(&course) {
            let waited = self.changed.wait(course);
            course = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Grants `batch` futures of one tenant a block each that another has freed, on the mapper's thread.
pub(crate) fn granted(marks: &Marks, crowd: &mut Crowd, batch: usize) -> Result<()> {
    let mapper = Mapper::start(&crowd.device)?;
    let bytes = (batch as u64 + 1) * GRANULE;
    let pool = Pool::builder(&crowd.device).limit(Limit::Bytes(bytes));
    let pool = pool.mapper(&mapper).build()?;
    let tenant = pool.tenant("tenant").register()?;
    let stream = &crowd.stream;
    let held = (0..=batch).map(|_| tenant.block(GRANULE).home_stream(stream).try_allocate());
    let mut held: Vec<Block> = held.collect::<Result<_, _>>()?;
    let granted = Arc::new(Granted {
        marks: *marks,
        count: batch,
        course: Mutex::default(),
        changed: Condvar::new(),
    });
    let waker = Waker::from(Arc::clone(&granted));
    let poll =
        |future: &mut AllocateFuture| Pin::new(future).poll(&mut Context::from_waker(&waker));
    let mut futures: Vec<AllocateFuture> = Vec::new();
    for _ in 0..=batch {
        let mut future = tenant.block(GRANULE).home_stream(stream).allocate_async();
        ensure!(poll(&mut future).is_pending(), "a future need not wait");
        futures.push(future);
    }
    drop(held.pop());
    granted.until(|course| course.woken == 1);
    held.clear();
    let mut course = granted
        .course
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    course.freed = true;
    drop(course);
    granted.changed.notify_all();
    granted.until(|course| course.woken == batch + 1);
    for mut future in futures {
        let Poll::Ready(block) = poll(&mut future) else {
            bail!("a future was not granted its block");
        };
        drop(block?);
    }
    drop((tenant, pool));
    mapper.stop();
    Ok(())
}
