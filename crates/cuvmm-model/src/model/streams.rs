//! Streams: ordered queues of work, and how they wait for each other.
//!
//! Work runs in the call that submits it, unless its stream is held back or the work waits for
//! queued work. Then it stays queued, and the call that releases the other work runs it.
//!
//! With the option `late`, all work stays queued until a call waits for some of it, except before a
//! function of the program, for which a thread may wait without a call. A real GPU runs work at
//! some moment between the two extremes. A correct program is correct at both; a program that takes
//! memory from queued work is only seen with `late`.
//!
//! A function of the program is no work of the machine: its stream is busy until a thread of the
//! machine's owner has run the function (see `host_launch`), and work behind it waits as behind a
//! held stream.
//!
//! Queries ignore the virtual time of work; a call that waits for a stream spends it.

use super::answer::{Answer, INVALID_HANDLE, INVALID_VALUE, require};
use super::backing::Backing;
use super::clock::micros;
use super::host_calls::HostCall;
use super::state::State;
use super::stream_table::{Due, Item, Mark, Stream, StreamKey};
use super::work::Work;
use cuvmm_driver::{CUresult, EventHandle, Ordinal, StreamFlags, StreamHandle};

impl<B: Backing> State<B> {
    pub(crate) fn stream_create(
        &mut self,
        device: Ordinal,
        flags: StreamFlags,
    ) -> Answer<StreamHandle> {
        let index = self.context(device)?;
        require(StreamFlags::NON_BLOCKING.contains(flags), INVALID_VALUE)?;
        let handle = self.handles.take();
        let stream = Stream {
            handle,
            non_blocking: flags.contains(StreamFlags::NON_BLOCKING),
            held: self.devices[index].hold_new,
            ..Stream::default()
        };
        self.streams.made += 1;
        let key = StreamKey {
            device: device.0,
            number: self.streams.made,
        };
        self.streams.by_key.insert(key, stream);
        self.streams.named.insert(handle, key);
        Ok(StreamHandle(handle))
    }

    /// Destroys a stream, also in a lost context, where it returns the context's code.
    pub(crate) fn stream_destroy(&mut self, device: Ordinal, stream: StreamHandle) -> Answer {
        self.device(device)?;
        // A default stream has no handle.
        require(stream.0 > StreamHandle::PER_THREAD.0, INVALID_HANDLE)?;
        let key = self.stream(device, stream)?;
        self.leave_capture(key);
        self.streams.named.remove(&stream.0);
        self.handles.give_back(stream.0);
        if let Some(stream) = self.streams.by_key.get_mut(&key) {
            stream.ending = true;
            if stream.queue.is_empty() {
                self.streams.by_key.remove(&key);
            }
        }
        self.context(device).map(drop)
    }

    pub(crate) fn stream_query(&mut self, device: Ordinal, stream: StreamHandle) -> Answer<bool> {
        self.context(device)?;
        let key = self.stream(device, stream)?;
        self.refuse_in_capture(Some(key))?;
        Ok(self.ask_again(stream.0, |state| {
            state.streams.are_done(&state.streams.covered_by(key))
        }))
    }

    pub(crate) fn stream_wait_event(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Answer {
        self.context(device)?;
        let key = self.stream(device, stream)?;
        let event = self.events.get(&event.0).ok_or(INVALID_HANDLE)?;
        let capturing = self.streams.get(key).and_then(|stream| stream.capture);
        if let Some(capture) = event.capture {
            let nodes = event.nodes.clone();
            return self.join_capture(key, capture, nodes);
        }
        if event.recorded && capturing.is_some() {
            self.break_captures(|id, _| Some(id) == capturing);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        }
        let ready = event.ready;
        let after: Vec<_> = event
            .covers
            .iter()
            .copied()
            .filter(|&mark| !self.streams.is_done(mark))
            .collect();
        if !after.is_empty() {
            self.submit_after(device, stream, after, Work::Marker)?;
        }
        self.streams.delay(key, ready);
        Ok(())
    }

    /// Advances the virtual clock until a stream's work is done. Does nothing if the handle was
    /// destroyed meanwhile.
    pub(crate) fn wait_for(&mut self, device: Ordinal, stream: StreamHandle) -> Answer {
        if let Ok(key) = self.stream(device, stream) {
            let ready = self.streams.ready(key);
            self.clock.reach(ready);
        }
        Ok(())
    }

    pub(crate) fn wait_for_all(&mut self, device: Ordinal) -> Answer {
        let ready = self.streams.all_ready(device.0);
        self.clock.reach(ready);
        Ok(())
    }

    pub(crate) fn submit(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
        work: Work,
    ) -> Answer<Option<Mark>> {
        self.submit_after(device, stream, Vec::new(), work)
    }

    /// Queues work on a stream and runs it if nothing delays it. Returns no mark if the work was
    /// captured.
    pub(crate) fn submit_after(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
        mut after: Vec<Mark>,
        work: Work,
    ) -> Answer<Option<Mark>> {
        let key = self.stream(device, stream)?;
        if self.captured(key, &work)? {
            return Ok(None);
        }
        after.extend(self.streams.implicit(key));
        let Some(stream) = self.streams.by_key.get_mut(&key) else {
            return Err(INVALID_HANDLE);
        };
        stream.submitted += 1;
        let number = stream.submitted;
        if work.has_function() {
            self.streams.with_functions.insert(key);
        }
        stream.queue.push_back(Item {
            number,
            after,
            work,
        });
        self.streams.backlog.insert(key);
        if !self.is_late() {
            self.run_stream(key);
        }
        let stream = self.streams.by_key.get_mut(&key);
        let last = stream.and_then(|stream| stream.queue.back_mut());
        if let Some(item) = last.filter(|item| item.number == number) {
            item.work.keep_source();
        }
        Ok(Some(Mark {
            stream: key,
            number,
        }))
    }

    /// Runs the runnable work of one stream, and returns `true` if there was any.
    fn run_stream(&mut self, key: StreamKey) -> bool {
        let mut any = false;
        while let Some(item) = self.streams.next(key, false) {
            self.run_item(key, item);
            any = true;
        }
        any
    }

    /// Runs a piece of work up to its first function of the program. The rest stays queued until
    /// the function has returned.
    fn run_item(&mut self, key: StreamKey, item: Item) {
        let (work, function) = item.work.split();
        let outcome = self.execute(key.device, &work);
        let takes = micros(work.takes(&self.rules.costs));
        let begins = self.clock.now().max(self.streams.ready(key));
        self.streams.delay(key, begins.saturating_add(takes));
        match function {
            None => self.streams.finish(key, item.number),
            Some((call, rest)) => {
                self.streams.put_back(key, item.number, rest);
                self.begin_host_call(key, call);
            }
        }
        self.progress = true;
        if let Err(code) = outcome {
            self.lose(key.device, code);
        }
    }

    fn begin_host_call(&mut self, stream: StreamKey, call: HostCall) {
        self.host_calls += 1;
        let number = self.host_calls;
        self.streams.occupy(stream, number);
        self.due.push_back(Due {
            stream,
            number,
            call,
        });
        self.progress = true;
    }

    /// Lets a stream go on behind a function, unless the stream's work was discarded meanwhile.
    pub(crate) fn end_host_call(&mut self, stream: StreamKey, number: u64) {
        if self.streams.vacate(stream, number) {
            self.progress = true;
        }
    }

    fn is_late(&self) -> bool {
        self.rules.late && !self.hurried
    }

    /// Runs all work that no held stream delays, because a call waits for some of it.
    pub(crate) fn hurry(&mut self) {
        self.hurried = true;
        self.run_all();
        self.hurried = false;
        self.asked.clear();
    }

    /// Answers a query about the work of a stream or an event. Late work runs at the second query,
    /// so that a polling program comes to an end.
    pub(crate) fn ask_again(&mut self, handle: u64, done: impl Fn(&Self) -> bool) -> bool {
        if done(self) {
            return true;
        }
        if self.rules.late && !self.asked.insert(handle) {
            self.hurry();
            return done(self);
        }
        false
    }

    /// Runs all runnable work on all devices. Of late work, runs only the work that functions of
    /// the program wait for.
    pub(crate) fn run_all(&mut self) {
        loop {
            let keys: Vec<_> = match self.is_late() {
                false => self.streams.backlog.iter().copied().collect(),
                true => self.streams.before_functions().into_iter().collect(),
            };
            let mut any = false;
            for key in keys {
                any |= self.run_stream(key);
            }
            if !any {
                return;
            }
        }
    }

    /// Runs the next piece of work of a stream, held or not. Returns `false` if there is none, or
    /// if the work waits for other work.
    pub(crate) fn step(&mut self, key: StreamKey) -> bool {
        let Some(item) = self.streams.next(key, true) else {
            return false;
        };
        self.run_item(key, item);
        self.run_all();
        true
    }
}
