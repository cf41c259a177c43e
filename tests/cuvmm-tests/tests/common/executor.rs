//! A minimal executor: a future is polled when it was woken, or explicitly.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// Counts how often a task was woken.
#[derive(Default)]
pub struct Wakings {
    count: AtomicUsize,
    pending: Mutex<bool>,
    woken: Condvar,
}

impl Wake for Wakings {
    fn wake(self: Arc<Self>) {
        self.count.fetch_add(1, Ordering::SeqCst);
        *self.pending.lock().unwrap() = true;
        self.woken.notify_all();
    }
}

/// A future with a waker of its own.
pub struct Task<F> {
    future: Pin<Box<F>>,
    wakings: Arc<Wakings>,
}

impl<F: Future> Task<F> {
    pub fn new(future: F) -> Self {
        Self {
            future: Box::pin(future),
            wakings: Arc::default(),
        }
    }

    /// Creates a task that is pending after its first poll.
    pub fn waiting(future: F) -> Self {
        let mut task = Self::new(future);
        assert!(task.poll().is_pending(), "the future did not have to wait");
        task
    }

    pub fn poll(&mut self) -> Poll<F::Output> {
        let waker = Waker::from(Arc::clone(&self.wakings));
        self.poll_with(&waker)
    }

    pub fn poll_with(&mut self, waker: &Waker) -> Poll<F::Output> {
        self.future.as_mut().poll(&mut Context::from_waker(waker))
    }

    pub fn wakings(&self) -> usize {
        self.wakings.count.load(Ordering::SeqCst)
    }

    /// Returns `true` if the task is woken within the given time.
    pub fn is_woken(&self, within: Duration) -> bool {
        let pending = self.wakings.pending.lock().unwrap();
        let wait = self
            .wakings
            .woken
            .wait_timeout_while(pending, within, |pending| !*pending);
        let mut pending = wait.unwrap().0;
        std::mem::take(&mut *pending)
    }

    /// Polls the task whenever it is woken, until it is done.
    pub fn finish(mut self) -> F::Output {
        loop {
            if let Poll::Ready(output) = self.poll() {
                return output;
            }
            assert!(self.is_woken(Duration::from_secs(120)), "never woken");
        }
    }
}

pub fn block_on<F: Future>(future: F) -> F::Output {
    Task::new(future).finish()
}
