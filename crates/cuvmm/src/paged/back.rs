//! The future that backs blocks: it makes a request, and takes what that was granted.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use super::core::Core;
use super::refused;
use crate::deferred::is_in_hook;
use crate::error::{BlockError, PagedKvError};
use crate::ledger::InLine;
use crate::pool::{HolderRequest, HolderWant, Needs, QueuedAttempt};

/// The attempts of a request. They do not keep its cache.
struct Attempts {
    core: Weak<Core>,
    request: u64,
    numbers: Arc<[u32]>,
    needs: Needs,
}

impl QueuedAttempt for Attempts {
    fn attempt(&self, place: Option<InLine>) -> Option<Result<(), BlockError>> {
        let Some(core) = self.core.upgrade() else {
            // The future reports the end of its cache.
            return Some(Err(BlockError::Unregistered(String::new())));
        };
        let mut state = core.try_lock()?;
        let granted = state.grant(self.request, place);
        Some(granted.inspect_err(|_| self.needs.note(state.needs(&self.numbers))))
    }

    fn needs(&self) -> &Needs {
        &self.needs
    }
}

/// A future that backs blocks; returned by [`PagedKv::back_async`](super::PagedKv::back_async).
#[must_use = "futures do nothing unless they are polled"]
pub struct BackFuture {
    core: Weak<Core>,
    numbers: Arc<[u32]>,
    /// Its number among the cache's requests.
    number: Option<u64>,
    request: HolderRequest,
    /// The answer, until it is taken.
    answer: Option<Result<(), BlockError>>,
}

impl BackFuture {
    pub(super) fn new(core: &Arc<Core>, numbers: &[u32]) -> Self {
        Self {
            core: Arc::downgrade(core),
            numbers: numbers.into(),
            number: None,
            request: HolderRequest::new(&core.tenant),
            answer: None,
        }
    }

    /// Polls the request, and does not take what it is granted: returns `Ready` once it was granted or
    /// refused, and the next poll of the future has the outcome. Until then the memory is the future's,
    /// which may be dropped. A completed future stays `Pending`.
    ///
    /// It is for a scheduler that asks for the answer in one step, and takes the blocks, or withdraws the
    /// request, in another.
    ///
    /// ```
    /// # use cuvmm::driver::host::{HostDriver, HostOptions};
    /// # use cuvmm::paged::LayerGroup;
    /// # use cuvmm::{Device, Limit, Mapper, PagedKv, Pool, Stream};
    /// # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
    /// # let device = Device::open(driver, 0)?;
    /// # let mapper = Mapper::start(&device)?;
    /// # let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).mapper(&mapper).build()?;
    /// # let (tenant, home) = (pool.tenant("model").register()?, Stream::new(&device)?);
    /// # let group = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
    /// # let kv = PagedKv::builder(&tenant, &home, 64).group(group).build()?;
    /// use std::task::{Context, Waker};
    ///
    /// let mut request = Box::pin(kv.back_async(&[8, 9]));
    /// let mut context = Context::from_waker(Waker::noop());
    /// assert!(request.as_mut().poll_answered(&mut context).is_ready());
    /// assert!(!kv.is_backed(8)?);
    /// assert!(request.as_mut().poll(&mut context).is_ready());
    /// assert!(kv.is_backed(8)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn poll_answered(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.has_completed() {
            return Poll::Pending;
        }
        match this.core.upgrade() {
            Some(core) => this.poll_request(&core, context),
            None => Poll::Ready(()),
        }
    }

    const fn has_completed(&self) -> bool {
        self.answer.is_none() && self.request.has_ended()
    }

    /// Gets memory for the blocks if that needs no waiting, and none of others that wait. Else returns
    /// what the request needs.
    fn begin(&mut self, core: &Arc<Core>) -> Result<Option<HolderWant>, BlockError> {
        if !is_in_hook() && !self.request.has_mapper() {
            core.tenant.device().own_process()?;
            return Err(BlockError::NoMapper);
        }
        let mut state = core.lock()?;
        state.check_numbers(&self.numbers)?;
        state.check_awake()?;
        let needs = Needs::default();
        needs.note(state.needs(&self.numbers));
        let requests = &mut state.requests;
        let add = || requests.add(Arc::clone(&self.numbers));
        let request = *self.number.get_or_insert_with(add);
        if is_in_hook() || needs.more() == 0 || !core.tenant.is_awaited() {
            match state.grant(request, None) {
                Err(error) if error.is_shortage() && !is_in_hook() => {}
                done => return done.map(|()| None),
            }
        }
        let attempts = Attempts {
            core: Weak::clone(&self.core),
            request,
            numbers: Arc::clone(&self.numbers),
            needs,
        };
        Ok(Some(HolderWant {
            home: core.home.clone(),
            attempt: Arc::new(attempts),
        }))
    }

    fn poll_request(&mut self, core: &Arc<Core>, context: &Context<'_>) -> Poll<()> {
        if self.answer.is_some() {
            return Poll::Ready(());
        }
        let polled = match self.request.is_new() {
            true => match self.begin(core) {
                Ok(Some(want)) => self.request.queue(context, want),
                Ok(None) => Poll::Ready(Ok(())),
                Err(refused) => Poll::Ready(Err(refused)),
            },
            false => self.request.poll(context),
        };
        polled.map(|answer| self.answer = Some(answer))
    }

    fn poll_cache(
        &mut self,
        core: &Arc<Core>,
        context: &Context<'_>,
    ) -> Poll<Result<(), BlockError>> {
        let _ = self.poll_request(core, context);
        let Some(answer) = self.answer.take() else {
            return Poll::Pending;
        };
        let Some(number) = self.number.take() else {
            return Poll::Ready(answer);
        };
        let mut state = core.lock()?;
        match answer {
            Ok(()) => Poll::Ready(state.take(number, &core.home)),
            Err(refused) => {
                state.end_request(number, &core.home);
                Poll::Ready(Err(refused))
            }
        }
    }
}

impl Future for BackFuture {
    type Output = Result<(), PagedKvError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if this.has_completed() {
            return Poll::Pending;
        }
        let polled = match this.core.upgrade() {
            Some(core) => this
                .poll_cache(&core, context)
                .map_err(|cause| refused(this.numbers.len(), cause)),
            None => Poll::Ready(Err(PagedKvError::Ended)),
        };
        if polled.is_ready() {
            this.request.end();
            this.answer = None;
        }
        polled
    }
}

impl Drop for BackFuture {
    fn drop(&mut self) {
        let Some(number) = self.number.take() else {
            return;
        };
        self.request.end();
        if let Some(core) = self.core.upgrade()
            && let Ok(mut state) = core.lock()
        {
            state.end_request(number, &core.home);
        }
    }
}

impl fmt::Debug for BackFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackFuture")
            .field("numbers", &self.numbers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use super::*;
    use crate::extents::rig::G;
    use crate::paged::rig::world;

    // I-122
    #[test]
    fn an_attempt_grants_nothing_to_a_withdrawn_request_and_does_not_wait_for_the_lock() {
        let world = world();
        let (home, kv) = (&world.home, world.cache(16, G).build().unwrap());
        let committed = || kv.stats().unwrap().committed / G;
        let request = |numbers: &[u32]| {
            let request = kv.core.lock().unwrap().requests.add(numbers.into());
            Attempts {
                core: Arc::downgrade(&kv.core),
                request,
                numbers: numbers.into(),
                needs: Needs::default(),
            }
        };
        let end = |one: &Attempts| {
            let mut state = kv.core.lock().unwrap();
            state.end_request(one.request, home);
        };

        let first = request(&[1, 2, 2]);
        let locked = kv.core.lock().unwrap();
        let attempted = thread::scope(|scope| scope.spawn(|| first.attempt(None)).join());
        assert!(attempted.unwrap().is_none());
        drop(locked);
        assert_eq!(first.attempt(None), Some(Ok(())));
        assert_eq!((first.attempt(None), committed()), (Some(Ok(())), 2));
        end(&first);
        assert_eq!(committed(), 0);
        assert_eq!((first.attempt(None), committed()), (Some(Ok(())), 0));

        // All or none.
        let large = request(&[0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let refused = large.attempt(None).unwrap().unwrap_err();
        assert!(refused.is_shortage(), "{refused}");
        assert_eq!((committed(), large.needs.more()), (0, 9 * G));
        kv.back(&[0, 1]).unwrap();
        assert!(large.attempt(None).unwrap().is_err());
        assert_eq!(large.needs.more(), 7 * G);
        kv.release(&[0, 1]).unwrap();

        let taken = request(&[3, 4]);
        assert_eq!(taken.attempt(None), Some(Ok(())));
        let mut state = kv.core.lock().unwrap();
        state.take(taken.request, home).unwrap();
        drop(state);
        assert_eq!((kv.stats().unwrap().in_use, committed()), (2, 2));
        drop(kv);
        assert!(matches!(large.attempt(None), Some(Err(_))));
    }
}
