//! Making, answering and withdrawing requests of [futures](super::futures).
//!
//! Requests are made and answered under the pool's lock, answered by the mapper's thread, which
//! [serves](super::serve) the queue. So a dropped future either withdraws its request before it is
//! granted, or finds the answer and gives back the memory.
//!
//! A waker is user code: it is called and dropped when the thread has left the locked section.

use std::task::{Poll, Waker};

use super::Line;
use super::queue::{Answer, Request, Want};
use crate::deferred::{call_hook, defer, wake};
use crate::error::{ArgumentError, BlockError};
use crate::extents::Urgency;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::Needs;
use crate::pool::blocks::slots::BYTES;
use crate::pool::core::Core;
use crate::pool::memory::Memory;
use crate::sync::atomic::Ordering;

impl Core {
    pub(in crate::pool) fn answer(&self, line: &mut Line, number: u64, answer: Answer) -> bool {
        let Some(request) = self.end_request(line, number) else {
            return false;
        };
        line.queue.answers.insert(number, answer);
        if let Some(waker) = request.waker {
            defer(move || call_hook(|| wake(waker)));
        }
        true
    }

    /// Takes a request out of the queue. Other processes see at once that it lacks nothing any more: the
    /// mapper's thread may be in a hook, or call one next, and shows nothing until that returns.
    fn end_request(&self, line: &mut Line, number: u64) -> Option<Request> {
        let request = line.queue.take(number)?;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if line.queue.shows_too_much() {
            self.queue_in_ledger(line.queue.show());
        }
        Some(request)
    }

    pub(super) fn enqueue(
        &self,
        tenant: TenantId,
        want: Want,
        waker: Waker,
    ) -> Result<u64, BlockError> {
        self.join_queue(tenant, Some(waker), |memory, _| match &want {
            Want::Block(wish) => {
                Needs::of(memory, tenant, &wish.wanted())?;
                Ok(want)
            }
            Want::Growth(place, to, from) => {
                ArgumentError::at_most(BYTES, *to, place.capacity)?;
                ArgumentError::at_least(BYTES, *to, *from)?;
                Ok(want)
            }
            Want::Holder(_) => {
                memory.check_usable(tenant)?;
                Ok(want)
            }
            Want::Notification(..) => Ok(want),
        })
    }

    /// Queues a request to be notified when memory becomes free from now on.
    pub(super) fn listen(&self) -> Result<u64, BlockError> {
        self.join_queue(TenantId::NONE, None, |memory, blocks| {
            memory.device.usable()?;
            // Blocks freed from here on are announced instead of going to a stream cache.
            blocks.sweep_each();
            Ok(Want::Notification(
                memory.line.freed_count(),
                blocks.idle_figures().waiting + memory.holders.pending(),
            ))
        })
    }

    fn join_queue(
        &self,
        tenant: TenantId,
        mut waker: Option<Waker>,
        want: impl FnOnce(&Memory, &mut Blocks) -> Result<Want, BlockError>,
    ) -> Result<u64, BlockError> {
        self.device.own_process()?;
        let number = self.look(|state| {
            // Checked under the lock: a mapper that ends is marked as ended first, and then answers
            // the queue.
            if !self.has_mapper() {
                return Err(BlockError::NoMapper);
            }
            // Counted first: blocks freed from here on go to no stream cache.
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let granule = self.device.granule();
            // A waker that is not queued is dropped without the lock.
            let (memory, blocks) = state.halves();
            let joined = want(memory, blocks);
            let place = || self.ledger.get().map(|joined| joined.member.line_up());
            let joined = joined.map(|want| {
                let queue = &mut memory.line.queue;
                queue.push(tenant, want, waker.take(), place(), granule)
            });
            if joined.is_err() {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
            }
            joined
        })?;
        self.call_mapper();
        Ok(number)
    }

    /// Polls for the answer to a request. The waker is called when there is an answer.
    pub(super) fn poll_request(&self, number: u64, waker: &Waker) -> Poll<Answer> {
        if let Err(forked) = self.device.own_process() {
            return Poll::Ready(Err(forked.into()));
        }
        // A waker that is not kept is dropped without the lock.
        let mut waker = Some(waker.clone());
        self.look(|state| {
            if let Some(answer) = state.memory.line.queue.answers.remove(&number) {
                return Poll::Ready(answer);
            }
            if let Some(request) = state.memory.line.queue.get_mut(number) {
                std::mem::swap(&mut request.waker, &mut waker);
            }
            Poll::Pending
        })
    }

    pub(in crate::pool) fn withdraw_request(&self, number: u64) -> Option<Answer> {
        if self.device.is_forked() {
            return None;
        }
        self.look(|state| {
            let line = &mut state.memory.line;
            if let Some(request) = self.end_request(line, number) {
                defer(move || drop(request));
            }
            line.queue.answers.remove(&number)
        })
    }

    pub(in crate::pool) fn call_mapper(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake(Urgency::Now);
        }
    }

    /// Answers all requests with an error because the mapper has ended.
    pub(in crate::pool) fn fail_queue(&self) {
        let mut state = self.lock();
        while let Some(number) = state.memory.line.queue.first() {
            self.answer(&mut state.memory.line, number, Err(BlockError::NoMapper));
        }
        self.queue_in_ledger(None);
    }
}
