//! Futures of sleep and wake. The operation runs on a thread of its own, since it waits for copies;
//! the future waits for that thread.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use super::{Blocks, Contents, Progress, Slept, Watch, Woken};
use crate::deferred::wake;
use crate::device::Device;
use crate::error::SleepError;
use crate::store::HostStore;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, thread};

/// The future of [`Blocks::sleep_async`] and [`Blocks::wake_async`].
#[must_use = "futures do nothing unless they are polled"]
pub struct SleepFuture<'a, T> {
    operation: Option<Operation<T>>,
    running: Arc<Running<T>>,
    device: Device,
    watch: Option<Watch<'a>>,
}

/// The operation that the thread runs. Its argument shows if it was cancelled.
type Operation<T> = Box<dyn FnOnce(&Running<T>) -> Result<T, SleepError> + Send>;

/// The state that a future shares with its thread.
struct Running<T> {
    state: Mutex<State<T>>,
    /// The future was dropped, or its function returned `false`.
    cancelled: AtomicBool,
    /// The future has a function that observes the progress.
    watched: bool,
}

struct State<T> {
    progress: Option<Progress>,
    waker: Option<Waker>,
    /// The outcome, or the payload of a panic.
    outcome: Option<Result<Result<T, SleepError>, Box<dyn Any + Send>>>,
}

impl<T> Running<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn goes_on(&self) -> bool {
        !self.cancelled.load(Ordering::SeqCst)
    }

    /// Changes the state that the future reads, and wakes it.
    fn tell(&self, change: impl FnOnce(&mut State<T>)) {
        let mut state = self.lock();
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    fn report(&self, progress: &Progress) -> bool {
        if self.watched && self.goes_on() {
            self.tell(|state| state.progress = Some(*progress));
        }
        self.goes_on()
    }
}

impl<'a, T: Send + 'static> SleepFuture<'a, T> {
    fn of(
        blocks: Blocks<'a>,
        run: impl FnOnce(&Blocks<'_>) -> Result<T, SleepError> + Send + 'static,
    ) -> Self {
        let Blocks {
            tenant,
            tags,
            holders,
            wait,
            release,
            watch,
            ..
        } = blocks;
        let (tenant, device) = (tenant.clone(), tenant.device().clone());
        let operation = move |running: &Running<T>| {
            run(&Blocks {
                tenant: &tenant,
                tags,
                holders,
                wait,
                release,
                watch: Some(&|progress| running.report(progress)),
                cancelled: Some(&running.cancelled),
            })
        };
        Self {
            operation: Some(Box::new(operation)),
            running: Arc::new(Running {
                state: Mutex::new(State {
                    progress: None,
                    waker: None,
                    outcome: None,
                }),
                cancelled: AtomicBool::new(false),
                watched: watch.is_some(),
            }),
            device,
            watch,
        }
    }

    fn start(&self, operation: Operation<T>) -> Result<(), SleepError> {
        let running = Arc::clone(&self.running);
        let body = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| operation(&running)));
            running.tell(|state| state.outcome = Some(outcome));
        };
        let builder = thread::Builder::new().name("cuvmm-sleep".into());
        builder.spawn(body)?;
        Ok(())
    }
}

impl<T: Send + 'static> Future for SleepFuture<'_, T> {
    type Output = Result<T, SleepError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        // The operation's thread does not exist in a forked child, and may have held the lock.
        if let Err(forked) = this.device.own_process() {
            return Poll::Ready(Err(forked.into()));
        }
        let waker = context.waker().clone();
        let mut state = this.running.lock();
        let before = state.waker.replace(waker);
        let (progress, outcome) = (state.progress.take(), state.outcome.take());
        drop(state);
        drop(before);
        match outcome {
            Some(Ok(outcome)) => return Poll::Ready(outcome),
            Some(Err(panic)) => resume_unwind(panic),
            None => {}
        }
        if let (Some(watch), Some(progress)) = (this.watch, progress)
            && !watch(&progress)
        {
            this.running.cancelled.store(true, Ordering::SeqCst);
        }
        match this.operation.take().map(|operation| this.start(operation)) {
            Some(Err(error)) => Poll::Ready(Err(error)),
            Some(Ok(())) | None => Poll::Pending,
        }
    }
}

impl<T> Drop for SleepFuture<'_, T> {
    fn drop(&mut self) {
        self.running.cancelled.store(true, Ordering::SeqCst);
    }
}

impl<T> std::fmt::Debug for SleepFuture<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SleepFuture").finish_non_exhaustive()
    }
}

impl<'a> Blocks<'a> {
    /// [Puts the blocks to sleep](Self::sleep) on a thread of its own, which starts with the first
    /// poll. Needs no mapper. The function given to [`on_progress`](Self::on_progress) is called in polls.
    ///
    /// Dropping the future cancels the operation as that function does by returning `false`: soon
    /// after, the thread restores everything, unless it was already finished. Until then it keeps
    /// the tenant registered and prevents the pool from being closed.
    ///
    /// # Errors
    /// The errors of [`sleep`](Self::sleep).
    pub fn sleep_async(self, contents: Contents<'_>) -> SleepFuture<'a, Slept> {
        let (store, marked): (Option<HostStore>, bool) = match contents {
            Contents::Discard => (None, false),
            Contents::Keep(store) => (Some(store.clone()), false),
            Contents::KeepMarked(store) => (Some(store.clone()), true),
        };
        SleepFuture::of(self, move |blocks| {
            blocks.sleep(match &store {
                None => Contents::Discard,
                Some(store) if marked => Contents::KeepMarked(store),
                Some(store) => Contents::Keep(store),
            })
        })
    }

    /// [Wakes the blocks](Self::wake) on a thread of its own, with the same rules as
    /// [`sleep_async`](Self::sleep_async). Pressure hooks are called on that thread.
    ///
    /// # Errors
    /// The errors of [`wake`](Self::wake).
    pub fn wake_async(self) -> SleepFuture<'a, Woken> {
        SleepFuture::of(self, |blocks| blocks.wake())
    }
}
