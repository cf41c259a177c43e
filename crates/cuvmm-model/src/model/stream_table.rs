//! The tables of streams and their queued work, and the types of events and captures.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::thread::{self, ThreadId};
use std::time::Duration;

use super::host_calls::HostCall;
use super::work::Work;
use cuvmm_driver::{CaptureMode, StreamHandle};

/// The key of one stream of one device. The number is never reused, unlike a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StreamKey {
    pub(crate) device: i32,
    pub(crate) number: u64,
}

impl StreamKey {
    pub(crate) fn legacy(device: i32) -> Self {
        Self { device, number: 0 }
    }

    pub(crate) fn is_legacy(self) -> bool {
        self.number == 0
    }
}

/// A point in a stream's work: all work up to and including this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) stream: StreamKey,
    pub(crate) number: u64,
}

#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) number: u64,
    pub(crate) after: Vec<Mark>,
    pub(crate) work: Work,
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) handle: u64,
    pub(crate) non_blocking: bool,
    pub(crate) submitted: u64,
    pub(crate) done: u64,
    pub(crate) queue: VecDeque<Item>,
    pub(crate) held: bool,
    /// The number of the function of the program that the stream waits for.
    pub(crate) busy: Option<u64>,
    /// Destroyed, and kept until its work is done.
    pub(crate) ending: bool,
    pub(crate) capture: Option<u64>,
    pub(crate) ready: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) by_key: BTreeMap<StreamKey, Stream>,
    pub(crate) named: BTreeMap<u64, StreamKey>,
    /// Streams created so far; the number of the last one.
    pub(crate) made: u64,
    threads: BTreeMap<i32, HashMap<ThreadId, StreamKey>>,
    pub(crate) backlog: BTreeSet<StreamKey>,
    /// Streams whose queued work may contain functions of the program.
    pub(crate) with_functions: BTreeSet<StreamKey>,
}

impl Streams {
    pub(crate) fn new(devices: i32) -> Self {
        let legacy = |device| (StreamKey::legacy(device), Stream::default());
        Self {
            by_key: (0..devices).map(legacy).collect(),
            ..Self::default()
        }
    }

    /// Returns the calling thread's default stream on a device, made at its first use. This stream
    /// and the legacy default stream wait for each other. It ends with the context.
    pub(crate) fn of_thread(&mut self, device: i32, held: bool) -> StreamKey {
        let threads = self.threads.entry(device).or_default();
        let made = &mut self.made;
        let by_key = &mut self.by_key;
        *threads.entry(thread::current().id()).or_insert_with(|| {
            *made += 1;
            let key = StreamKey {
                device,
                number: *made,
            };
            let stream = Stream {
                held,
                ..Stream::default()
            };
            by_key.insert(key, stream);
            key
        })
    }

    pub(crate) fn get(&self, key: StreamKey) -> Option<&Stream> {
        self.by_key.get(&key)
    }

    pub(crate) fn get_mut(&mut self, key: StreamKey) -> Option<&mut Stream> {
        self.by_key.get_mut(&key)
    }

    /// Includes destroyed streams with unfinished work.
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

    /// Returns a mark at the last unfinished work of each stream of a device.
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

    /// Returns the marks that a stream's next work waits for by the implicit ordering with the
    /// legacy default stream.
    pub(crate) fn implicit(&self, key: StreamKey) -> Vec<Mark> {
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

    /// Returns the marks that a wait for a stream waits for. For the default stream, these include
    /// the blocking streams.
    pub(crate) fn covered_by(&self, key: StreamKey) -> Vec<Mark> {
        if key.is_legacy() {
            self.unfinished(key.device, true)
        } else {
            self.unfinished_of(key)
        }
    }

    pub(crate) fn awaited_by(&self, key: StreamKey) -> Vec<Mark> {
        let queue = self.by_key.get(&key).map(|stream| &stream.queue);
        let items = queue.into_iter().flatten();
        items.flat_map(|item| item.after.iter().copied()).collect()
    }

    /// Returns the streams with queued functions of the program, and the streams that these wait
    /// for.
    pub(crate) fn before_functions(&mut self) -> BTreeSet<StreamKey> {
        let by_key = &self.by_key;
        self.with_functions.retain(|key| {
            let queue = by_key.get(key).map(|stream| &stream.queue);
            let mut items = queue.into_iter().flatten();
            items.any(|item| item.work.has_function())
        });
        let mut found = self.with_functions.clone();
        let mut new: Vec<_> = found.iter().copied().collect();
        while let Some(key) = new.pop() {
            let awaited = self.awaited_by(key).into_iter().map(|mark| mark.stream);
            new.extend(awaited.filter(|&stream| found.insert(stream)));
        }
        found
    }

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

    pub(crate) fn all_ready(&self, device: i32) -> Duration {
        let streams = self.of_device(device);
        streams
            .map(|(_, stream)| stream.ready)
            .max()
            .unwrap_or_default()
    }

    pub(crate) fn delay(&mut self, key: StreamKey, until: Duration) {
        if let Some(stream) = self.by_key.get_mut(&key) {
            stream.ready = stream.ready.max(until);
        }
    }

    /// Discards the queued work of a device's streams. It counts as done.
    pub(crate) fn give_up(&mut self, device: i32) -> Vec<Work> {
        let mut dropped = Vec::new();
        let keys: Vec<_> = self.of_device(device).map(|(key, _)| key).collect();
        for key in keys {
            let Some(stream) = self.by_key.get_mut(&key) else {
                continue;
            };
            stream.done = stream.submitted;
            stream.busy = None;
            dropped.extend(stream.queue.drain(..).map(|item| item.work));
            if stream.ending {
                self.by_key.remove(&key);
            }
            self.backlog.remove(&key);
        }
        dropped
    }

    /// Ends the streams of a device, whose work is done or discarded, and returns their handles.
    /// Resets the device's legacy default stream.
    pub(crate) fn end_all(&mut self, device: i32) -> Vec<u64> {
        self.by_key.retain(|key, _| key.device != device);
        self.threads.remove(&device);
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

    /// Counts the live streams without the default streams, which have no handle.
    pub(crate) fn live(&self) -> usize {
        self.by_key
            .values()
            .filter(|stream| stream.handle != 0 && !stream.ending)
            .count()
    }

    pub(crate) fn queued(&self) -> usize {
        self.by_key.values().map(|stream| stream.queue.len()).sum()
    }

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

    pub(crate) fn occupy(&mut self, key: StreamKey, function: u64) {
        if let Some(stream) = self.by_key.get_mut(&key) {
            stream.busy = Some(function);
        }
    }

    /// Ends the wait of a stream for a function; returns `false` if the stream does not wait for
    /// it. A function with nothing behind it in its piece of work ends that piece, also on a held
    /// stream.
    pub(crate) fn vacate(&mut self, key: StreamKey, function: u64) -> bool {
        let Some(stream) = self.by_key.get_mut(&key) else {
            return false;
        };
        if stream.busy != Some(function) {
            return false;
        }
        stream.busy = None;
        let rest = stream.queue.front().map(|item| &item.work);
        if matches!(rest, Some(Work::Marker))
            && let Some(item) = stream.queue.pop_front()
        {
            self.finish(key, item.number);
        }
        true
    }

    pub(crate) fn is_busy(&self, device: i32) -> bool {
        self.of_device(device)
            .any(|(_, stream)| stream.busy.is_some())
    }

    pub(crate) fn put_back(&mut self, key: StreamKey, number: u64, work: Work) {
        if let Some(stream) = self.by_key.get_mut(&key) {
            stream.queue.push_front(Item {
                number,
                after: Vec::new(),
                work,
            });
        }
    }

    /// Takes the next work of a stream, unless the stream is held back or waits for other work or
    /// for a function of the program.
    pub(crate) fn next(&mut self, key: StreamKey, although_held: bool) -> Option<Item> {
        let stream = self.by_key.get(&key)?;
        let head = stream.queue.front()?;
        let waits = stream.busy.is_some() || (stream.held && !although_held);
        if waits || !self.are_done(&head.after) {
            return None;
        }
        self.by_key.get_mut(&key)?.queue.pop_front()
    }

    pub(crate) fn finish(&mut self, key: StreamKey, number: u64) {
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

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: i32,
    pub(crate) recorded: bool,
    /// The work queued when the event was last recorded; empty before the first record.
    pub(crate) covers: Vec<Mark>,
    pub(crate) capture: Option<u64>,
    /// The nodes of that capture that a stream depends on once it waits for the event.
    pub(crate) nodes: BTreeSet<u64>,
    pub(crate) ready: Duration,
}

#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) origin: StreamKey,
    pub(crate) mode: CaptureMode,
    pub(crate) thread: ThreadId,
    pub(crate) nodes: Vec<Work>,
    /// The nodes that each stream's next node depends on.
    pub(crate) last: BTreeMap<StreamKey, BTreeSet<u64>>,
    /// The handle of the graph, once the program has asked for it.
    pub(crate) graph: Option<u64>,
    pub(crate) broken: bool,
}

/// A function of the program that its stream has reached. The stream runs nothing else until the
/// function has returned.
#[derive(Debug)]
pub(crate) struct Due {
    pub(crate) stream: StreamKey,
    /// A number that is unique among the reached functions. The stream may end meanwhile.
    pub(crate) number: u64,
    pub(crate) call: HostCall,
}
