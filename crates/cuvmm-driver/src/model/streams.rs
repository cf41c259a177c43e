//! Streams: queues of work in order, and how they wait for each other.
//!
//! Work runs in the call that submits it, unless its stream is held back or it waits for work
//! that has not run. Then it stays queued until whoever lets the other go runs it.
//!
//! The virtual time that work takes is kept beside that: queries do not look at it, and who waits
//! for a stream spends it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::answer::{Answer, INVALID_HANDLE, INVALID_VALUE, require};
use super::backing::Backing;
use super::clock::micros;
use super::state::State;
use super::work::Work;
use crate::{EventHandle, Ordinal, StreamFlags, StreamHandle};

/// One stream of one device. A stream's number is not its handle: a handle may name another
/// stream later, while a number is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StreamKey {
    pub(crate) device: i32,
    number: u64,
}

impl StreamKey {
    /// The legacy default stream of a device.
    fn legacy(device: i32) -> Self {
        Self { device, number: 0 }
    }

    pub(crate) fn is_legacy(self) -> bool {
        self.number == 0
    }
}

/// A point in a stream's work: all of it up to and with this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    stream: StreamKey,
    number: u64,
}

#[derive(Debug)]
struct Item {
    number: u64,
    after: Vec<Mark>,
    work: Work,
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// What named it when it was made.
    handle: u64,
    non_blocking: bool,
    /// Number of the last work submitted, and of the last done.
    submitted: u64,
    done: u64,
    queue: VecDeque<Item>,
    held: bool,
    /// Destroyed, kept until its work is done.
    ending: bool,
    /// The capture that it records for.
    pub(crate) capture: Option<u64>,
    /// The virtual time at which what has run on it is done.
    ready: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Streams {
    by_key: BTreeMap<StreamKey, Stream>,
    /// What the handles of streams name, until the streams are destroyed.
    named: BTreeMap<u64, StreamKey>,
    /// Streams made so far: the number of the last one.
    made: u64,
    /// Streams with queued work.
    backlog: BTreeSet<StreamKey>,
}

impl Streams {
    pub(crate) fn new(devices: i32) -> Self {
        let legacy = |device| (StreamKey::legacy(device), Stream::default());
        Self {
            by_key: (0..devices).map(legacy).collect(),
            ..Self::default()
        }
    }

    pub(crate) fn get(&self, key: StreamKey) -> Option<&Stream> {
        self.by_key.get(&key)
    }

    pub(crate) fn get_mut(&mut self, key: StreamKey) -> Option<&mut Stream> {
        self.by_key.get_mut(&key)
    }

    /// The streams of a device, those that are ending too.
    fn of_device(&self, device: i32) -> impl Iterator<Item = (StreamKey, &Stream)> {
        let last = StreamKey {
            device,
            number: u64::MAX,
        };
        let all = StreamKey::legacy(device)..=last;
        self.by_key.range(all).map(|(&key, stream)| (key, stream))
    }

    pub(crate) fn is_done(&self, mark: Mark) -> bool {
        self.by_key
            .get(&mark.stream)
            .is_none_or(|stream| stream.done >= mark.number)
    }

    pub(crate) fn are_done(&self, marks: &[Mark]) -> bool {
        marks.iter().all(|&mark| self.is_done(mark))
    }

    /// The last work of each stream of a device that is not done.
    pub(crate) fn unfinished(&self, device: i32, blocking_only: bool) -> Vec<Mark> {
        let counts = |stream: &Stream| !(blocking_only && stream.non_blocking);
        self.of_device(device)
            .filter(|(_, stream)| stream.done < stream.submitted && counts(stream))
            .map(|(stream, state)| Mark {
                stream,
                number: state.submitted,
            })
            .collect()
    }

    /// What a stream's next work waits for by the legacy default stream's implicit ordering.
    fn implicit(&self, key: StreamKey) -> Vec<Mark> {
        let legacy = StreamKey::legacy(key.device);
        let mut marks = match self.by_key.get(&key) {
            Some(stream) if stream.non_blocking => return Vec::new(),
            _ if key == legacy => self.unfinished(key.device, true),
            _ => self.unfinished_of(legacy),
        };
        marks.retain(|mark| mark.stream != key);
        marks
    }

    fn unfinished_of(&self, key: StreamKey) -> Vec<Mark> {
        let stream = self
            .by_key
            .get(&key)
            .filter(|stream| stream.done < stream.submitted);
        stream
            .map(|stream| Mark {
                stream: key,
                number: stream.submitted,
            })
            .into_iter()
            .collect()
    }

    /// All that waiting for a stream means: for the default stream, the blocking ones too.
    pub(crate) fn covered_by(&self, key: StreamKey) -> Vec<Mark> {
        if key.is_legacy() {
            self.unfinished(key.device, true)
        } else {
            self.unfinished_of(key)
        }
    }

    /// When a stream's work is done in virtual time.
    pub(crate) fn ready(&self, key: StreamKey) -> Duration {
        let of = |stream: &Stream| stream.ready;
        if !key.is_legacy() {
            return self.by_key.get(&key).map(of).unwrap_or_default();
        }
        let blocking = self.of_device(key.device);
        let blocking = blocking.filter(|(_, stream)| !stream.non_blocking);
        blocking
            .map(|(_, stream)| of(stream))
            .max()
            .unwrap_or_default()
    }

    /// When all work of a device is.
    pub(crate) fn all_ready(&self, device: i32) -> Duration {
        let streams = self.of_device(device);
        streams
            .map(|(_, stream)| stream.ready)
            .max()
            .unwrap_or_default()
    }

    /// Has what comes next on a stream begin no sooner than this.
    pub(crate) fn delay(&mut self, key: StreamKey, until: Duration) {
        if let Some(stream) = self.by_key.get_mut(&key) {
            stream.ready = stream.ready.max(until);
        }
    }

    /// Queued work in streams of a device is dropped and counts as done.
    pub(crate) fn give_up(&mut self, device: i32) -> Vec<Work> {
        let mut dropped = Vec::new();
        let keys: Vec<_> = self.of_device(device).map(|(key, _)| key).collect();
        for key in keys {
            let Some(stream) = self.by_key.get_mut(&key) else {
                continue;
            };
            stream.done = stream.submitted;
            dropped.extend(stream.queue.drain(..).map(|item| item.work));
            if stream.ending {
                self.by_key.remove(&key);
            }
            self.backlog.remove(&key);
        }
        dropped
    }

    /// Ends the streams of a device, whose work is done or given up, and names their handles. Its
    /// legacy default stream is as new.
    pub(crate) fn end_all(&mut self, device: i32) -> Vec<u64> {
        self.by_key.retain(|key, _| key.device != device);
        let legacy = StreamKey::legacy(device);
        self.by_key.insert(legacy, Stream::default());
        let mut gone = Vec::new();
        self.named.retain(|&handle, key| {
            let stays = key.device != device;
            gone.extend((!stays).then_some(handle));
            stays
        });
        gone
    }

    /// Streams that were made and not destroyed; the default streams are not counted.
    pub(crate) fn live(&self) -> usize {
        self.by_key
            .iter()
            .filter(|(key, stream)| !key.is_legacy() && !stream.ending)
            .count()
    }

    /// Pieces of work that are queued.
    pub(crate) fn queued(&self) -> usize {
        self.by_key.values().map(|stream| stream.queue.len()).sum()
    }

    /// Shows each piece of work that is queued, with its device and its stream's handle.
    pub(crate) fn each_queued(&self, mut see: impl FnMut(i32, StreamHandle, &Work)) {
        for key in &self.backlog {
            let Some(stream) = self.by_key.get(key) else {
                continue;
            };
            for item in &stream.queue {
                see(key.device, StreamHandle(stream.handle), &item.work);
            }
        }
    }

    /// Whether any work is queued.
    pub(crate) fn is_idle(&self) -> bool {
        self.backlog.is_empty()
    }

    pub(crate) fn hold(&mut self, key: StreamKey, held: bool) {
        if let Some(stream) = self.by_key.get_mut(&key) {
            stream.held = held;
        }
    }

    pub(crate) fn hold_all(&mut self, device: i32, held: bool) {
        for (key, stream) in &mut self.by_key {
            if key.device == device {
                stream.held = held;
            }
        }
    }

    /// The captures that streams of a device record for.
    pub(crate) fn capturing(&self, device: i32, blocking_only: bool) -> Vec<u64> {
        self.of_device(device)
            .filter(|(_, stream)| !(blocking_only && stream.non_blocking))
            .filter_map(|(_, stream)| stream.capture)
            .collect()
    }

    pub(crate) fn forget_capture(&mut self, id: u64) {
        for stream in self.by_key.values_mut() {
            if stream.capture == Some(id) {
                stream.capture = None;
            }
        }
    }

    /// Takes the next work of a stream if nothing keeps it.
    fn next(&mut self, key: StreamKey, although_held: bool) -> Option<Item> {
        let stream = self.by_key.get(&key)?;
        let head = stream.queue.front()?;
        if (stream.held && !although_held) || !self.are_done(&head.after) {
            return None;
        }
        self.by_key.get_mut(&key)?.queue.pop_front()
    }

    fn finish(&mut self, key: StreamKey, number: u64) {
        let Some(stream) = self.by_key.get_mut(&key) else {
            return;
        };
        stream.done = stream.done.max(number);
        if stream.queue.is_empty() {
            self.backlog.remove(&key);
            if stream.ending {
                self.by_key.remove(&key);
            }
        }
    }
}

impl<B: Backing> State<B> {
    /// A stream that was made on this device and not destroyed, or its legacy default stream.
    pub(crate) fn stream(&self, device: Ordinal, stream: StreamHandle) -> Answer<StreamKey> {
        let key = match stream {
            StreamHandle::NULL | StreamHandle::LEGACY => StreamKey::legacy(device.0),
            StreamHandle(handle) => *self.streams.named.get(&handle).ok_or(INVALID_HANDLE)?,
        };
        let here = key.device == device.0 && self.streams.get(key).is_some();
        require(here, INVALID_HANDLE)?;
        Ok(key)
    }

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

    /// On a lost context the stream goes all the same, and the code says that it is lost.
    pub(crate) fn stream_destroy(&mut self, device: Ordinal, stream: StreamHandle) -> Answer {
        self.device(device)?;
        let key = self.stream(device, stream)?;
        require(!key.is_legacy(), INVALID_HANDLE)?;
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
        Ok(self.streams.are_done(&self.streams.covered_by(key)))
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
        if let Some(capture) = event.capture {
            return self.join_capture(key, capture);
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

    /// Spends the virtual time until a stream's work is done. The handle may have gone meanwhile.
    pub(crate) fn wait_for(&mut self, device: Ordinal, stream: StreamHandle) -> Answer {
        if let Ok(key) = self.stream(device, stream) {
            let ready = self.streams.ready(key);
            self.clock.reach(ready);
        }
        Ok(())
    }

    /// Spends the virtual time until all work of a device is done.
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

    /// Puts work on a stream and runs it if nothing keeps it. No mark when it was captured.
    fn submit_after(
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
        stream.queue.push_back(Item {
            number,
            after,
            work,
        });
        self.streams.backlog.insert(key);
        self.run_stream(key);
        Ok(Some(Mark {
            stream: key,
            number,
        }))
    }

    /// Runs what can run of one stream, and says whether anything did.
    fn run_stream(&mut self, key: StreamKey) -> bool {
        let mut any = false;
        while let Some(item) = self.streams.next(key, false) {
            self.run_item(key, &item);
            any = true;
        }
        any
    }

    fn run_item(&mut self, key: StreamKey, item: &Item) {
        let outcome = self.execute(key.device, &item.work);
        let takes = micros(item.work.takes(&self.rules.costs));
        let begins = self.clock.now().max(self.streams.ready(key));
        self.streams.delay(key, begins.saturating_add(takes));
        self.streams.finish(key, item.number);
        self.progress = true;
        if let Err(code) = outcome {
            self.lose(key.device, code);
        }
    }

    /// Runs whatever can run, on all devices, until nothing can.
    pub(crate) fn run_all(&mut self) {
        loop {
            let keys: Vec<_> = self.streams.backlog.iter().copied().collect();
            let mut any = false;
            for key in keys {
                any |= self.run_stream(key);
            }
            if !any {
                return;
            }
        }
    }

    /// Runs the one next piece of work of a stream, held or not. Nothing when there is none, or
    /// it waits for other work.
    pub(crate) fn step(&mut self, key: StreamKey) -> bool {
        let Some(item) = self.streams.next(key, true) else {
            return false;
        };
        self.run_item(key, &item);
        self.run_all();
        true
    }
}
