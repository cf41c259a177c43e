//! The tables of streams and of their queued work, with what events and captures know of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::thread::ThreadId;
use std::time::Duration;

use super::work::Work;
use crate::{CaptureMode, StreamHandle};

/// One stream of one device. A stream's number is not its handle: a handle may name another
/// stream later, while a number is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StreamKey {
    pub(crate) device: i32,
    pub(crate) number: u64,
}

impl StreamKey {
    /// The legacy default stream of a device.
    pub(crate) fn legacy(device: i32) -> Self {
        Self { device, number: 0 }
    }

    pub(crate) fn is_legacy(self) -> bool {
        self.number == 0
    }
}

/// A point in a stream's work: all of it up to and with this number.
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
    /// What named it when it was made.
    pub(crate) handle: u64,
    pub(crate) non_blocking: bool,
    /// Number of the last work submitted, and of the last done.
    pub(crate) submitted: u64,
    pub(crate) done: u64,
    pub(crate) queue: VecDeque<Item>,
    pub(crate) held: bool,
    /// Destroyed, kept until its work is done.
    pub(crate) ending: bool,
    /// The capture that it records for.
    pub(crate) capture: Option<u64>,
    /// The virtual time at which what has run on it is done.
    pub(crate) ready: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) by_key: BTreeMap<StreamKey, Stream>,
    /// What the handles of streams name, until the streams are destroyed.
    pub(crate) named: BTreeMap<u64, StreamKey>,
    /// Streams made so far: the number of the last one.
    pub(crate) made: u64,
    /// Streams with queued work.
    pub(crate) backlog: BTreeSet<StreamKey>,
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
    pub(crate) fn next(&mut self, key: StreamKey, although_held: bool) -> Option<Item> {
        let stream = self.by_key.get(&key)?;
        let head = stream.queue.front()?;
        if (stream.held && !although_held) || !self.are_done(&head.after) {
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
    /// What was queued when it was last recorded; nothing before the first record.
    pub(crate) covers: Vec<Mark>,
    /// The capture that it was recorded in, if it was.
    pub(crate) capture: Option<u64>,
    /// The virtual time at which what it covers is done.
    pub(crate) ready: Duration,
}

#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) origin: StreamKey,
    pub(crate) mode: CaptureMode,
    pub(crate) thread: ThreadId,
    pub(crate) nodes: Vec<Work>,
    pub(crate) broken: bool,
}
