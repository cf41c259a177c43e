//! Requests for blocks that wait in line while their caller goes on: futures of caches, by numbers.
//!
//! A request is polled by the calls that name it. Whether it has ended is a flag, which the mapper's
//! thread sets: the question takes no lock of a pool or a cache.

use std::collections::BTreeMap;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use cuvmm::error::PagedKvError;
use cuvmm::paged::BackFuture;

use super::caches::{Cache, find};
use crate::error::Error;
use crate::{collecting, fork};

/// A request. It does not keep its cache.
struct Request {
    cache: Weak<Cache>,
    /// `None` once it was ended.
    stage: Mutex<Option<Stage>>,
    signal: Arc<Signal>,
}

enum Stage {
    /// It waits, or was answered. What it was granted is its own.
    Made(Pin<Box<BackFuture>>),
    /// Its blocks are in use, or it was refused.
    Taken(Result<(), PagedKvError>),
}

/// Tells threads that a request was answered or ended.
#[derive(Default)]
struct Signal {
    is_set: AtomicBool,
    lock: Mutex<()>,
    told: Condvar,
}

impl Signal {
    fn set(&self) {
        // Under the lock, so that a thread that has just looked is told.
        let locked = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_set.store(true, Ordering::SeqCst);
        drop(locked);
        self.told.notify_all();
    }

    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Waits until the signal is set, at most until `deadline`; `None` is no limit.
    fn wait(&self, deadline: Option<Instant>) {
        let mut locked = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_set() {
            let left = deadline.map(|it| it.saturating_duration_since(Instant::now()));
            locked = match left {
                Some(Duration::ZERO) => return,
                Some(left) => {
                    let waited = self.told.wait_timeout(locked, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self
                    .told
                    .wait(locked)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.set();
    }
}

struct State {
    open: BTreeMap<u64, Arc<Request>>,
    count: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    open: BTreeMap::new(),
    count: 0,
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn request_of(number: u64) -> Result<Arc<Request>, Error> {
    fork::check()?;
    let request = lock().open.get(&number).cloned();
    request.ok_or(Error::NoPagedRequest(number))
}

/// Makes a request, with a first attempt. Returns its number.
pub(super) fn begin(token: u64, numbers: &[u32]) -> Result<u64, Error> {
    let cache = find(token)?;
    let signal = Arc::new(Signal::default());
    let mut future = Box::pin(cache.kv().back_async(numbers));
    let waker = Waker::from(Arc::clone(&signal));
    let polled = future
        .as_mut()
        .poll_answered(&mut Context::from_waker(&waker));
    if polled.is_ready() {
        signal.set();
    }
    let request = Arc::new(Request {
        cache: Arc::downgrade(&cache),
        stage: Mutex::new(Some(Stage::Made(future))),
        signal,
    });
    let mut state = lock();
    state.count += 1;
    let number = state.count;
    state.open.insert(number, request);
    Ok(number)
}

/// Returns `true` if a request was answered.
pub(super) fn is_done(number: u64) -> Result<bool, Error> {
    Ok(request_of(number)?.signal.is_set())
}

/// Waits until a request is answered. Returns `false` if it still waits.
pub(super) fn wait(number: u64, timeout: Duration) -> Result<bool, Error> {
    let request = request_of(number)?;
    // `None` for a time that no clock reaches.
    let deadline = Instant::now().checked_add(timeout);
    // The request may be waiting for the function that this thread is in.
    if !timeout.is_zero() && !request.signal.is_set() && collecting::is_within() {
        return Err(Error::WaitsWithin);
    }
    request.signal.wait(deadline);
    Ok(request.signal.is_set())
}

/// Takes the blocks of a request. Returns `false` if it still waits. The outcome stays until it is ended.
pub(super) fn take(number: u64) -> Result<bool, Error> {
    let request = request_of(number)?;
    match request.outcome(number)? {
        None => Ok(false),
        Some(Ok(())) => Ok(true),
        Some(Err(error)) => Err(request.explained(error)),
    }
}

/// Ends a request: it is withdrawn, or gives back what it was granted. Threads that wait for it return.
/// Returns `true` if its blocks were taken, and stay in use.
pub(super) fn end(number: u64) -> bool {
    if fork::is_child() {
        return false;
    }
    let ended = lock().open.remove(&number);
    let Some(ended) = ended else {
        return false;
    };
    let stage = ended.stage().take();
    let is_taken = matches!(stage, Some(Stage::Taken(Ok(()))));
    // Without the lock of the stage, since it may take that of the cache.
    drop(stage);
    ended.signal.set();
    is_taken
}

impl Request {
    fn stage(&self) -> MutexGuard<'_, Option<Stage>> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the blocks, and returns the outcome if there is one.
    fn outcome(&self, number: u64) -> Result<Option<Result<(), PagedKvError>>, Error> {
        let mut stage = self.stage();
        let taken = match stage.as_mut() {
            None => return Err(Error::NoPagedRequest(number)),
            Some(Stage::Taken(outcome)) => return Ok(Some(outcome.clone())),
            Some(Stage::Made(future)) => {
                let waker = Waker::from(Arc::clone(&self.signal));
                future.as_mut().poll(&mut Context::from_waker(&waker))
            }
        };
        let Poll::Ready(outcome) = taken else {
            return Ok(None);
        };
        *stage = Some(Stage::Taken(outcome.clone()));
        Ok(Some(outcome))
    }

    fn explained(&self, error: PagedKvError) -> Error {
        match self.cache.upgrade() {
            Some(cache) => cache.explained(error.into()),
            None => error.into(),
        }
    }
}
