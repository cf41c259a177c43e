//! The history of allocations, as PyTorch's recorder has it: the last events, and the stacks of what
//! is live.
//!
//! While nothing is recorded, an operation reads one flag, and asks PyTorch's profiler whether it is
//! active if there is one. Else it takes its thread's stack before any lock (I-115), and notes its event under the lock of the history alone: an allocation before its
//! address is known to other threads, and an end before the memory can be used again. So events
//! at one address have the order of its uses.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::heaps::{self, DeviceHeap};
use crate::{fork, interpreter, profiler};

/// Events are recorded.
const RECORDS: u8 = 1;
/// Allocations have stacks.
const STACKS: u8 = 2;
/// Ends have stacks too.
const STACKS_OF_ENDS: u8 = 4;
/// PyTorch's profiler may be active.
const PROFILES: u8 = 8;

/// The flags that are set: 0 if nothing is done with operations.
static ON: AtomicU8 = AtomicU8::new(0);

static HISTORY: Mutex<Option<History>> = Mutex::new(None);

/// The number of different stacks at which those that nothing uses are looked for.
const MANY: usize = 1024;

/// The operations that stacks are taken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stacks {
    Nothing,
    Allocations,
    All,
}

#[derive(Default)]
struct History {
    /// The largest number of events.
    most: usize,
    events: VecDeque<Event>,
    /// The stacks of live allocations, by address.
    live: HashMap<usize, Arc<str>>,
    /// Different stacks.
    stacks: HashSet<Arc<str>>,
    /// The number of stacks at which unused ones are dropped.
    full: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Alloc,
    Free,
    /// The end of an allocation that slept.
    FreeAsleep,
    Sleep,
    Wake,
    Oom,
}

#[derive(Clone, Debug)]
struct Event {
    kind: Kind,
    device: i32,
    /// For a shortage, the bytes that are free on the device.
    address: usize,
    size: u64,
    stream: u64,
    /// The bytes that the device's pools hold.
    held: u64,
    /// Microseconds since 1970.
    time: u64,
    stack: Option<Arc<str>>,
}

/// An operation that is recorded or reported, with what was found before it took a lock.
#[derive(Debug)]
pub(crate) struct Seen {
    stack: Option<Arc<str>>,
    is_recorded: bool,
    is_profiled: bool,
}

/// Looks at an allocation before it takes a lock. If `may_wait`, no lock of this library or of
/// PyTorch is held, and Python's may be waited for.
#[inline]
pub(crate) fn begin(may_wait: bool) -> Option<Seen> {
    match ON.load(Ordering::Relaxed) {
        0 => None,
        on => look(on, on & STACKS != 0, may_wait),
    }
}

/// Looks at the end of an allocation, as [`begin`] at an allocation.
#[inline]
pub(crate) fn begin_end(may_wait: bool) -> Option<Seen> {
    match ON.load(Ordering::Relaxed) {
        0 => None,
        on => look(on, on & STACKS_OF_ENDS != 0, may_wait),
    }
}

#[cold]
fn look(on: u8, has_stack: bool, may_wait: bool) -> Option<Seen> {
    if fork::is_child() {
        return None;
    }
    let is_recorded = on & RECORDS != 0;
    let is_profiled = on & PROFILES != 0 && profiler::is_active();
    let stack = match has_stack {
        true => interpreter::stack(may_wait).map(Arc::from),
        false => None,
    };
    (is_recorded || is_profiled).then_some(Seen {
        stack,
        is_recorded,
        is_profiled,
    })
}

impl Seen {
    /// Notes an allocation, whose address no other thread knows yet.
    #[cold]
    pub(crate) fn made(&self, of: &DeviceHeap, address: usize, size: u64, stream: u64) {
        self.note(Kind::Alloc, of, address, rounded(size), stream);
    }

    /// Notes the end of an allocation, awake or asleep, whose memory cannot be used again yet.
    #[cold]
    pub(crate) fn ended(
        &self,
        of: &DeviceHeap,
        (address, size): (usize, u64),
        stream: u64,
        is_asleep: bool,
    ) {
        let kind = match is_asleep {
            true => Kind::FreeAsleep,
            false => Kind::Free,
        };
        self.note(kind, of, address, rounded(size), stream);
    }

    /// Notes that a request found too little memory.
    #[cold]
    pub(crate) fn failed(&self, device: i32, size: u64, stream: u64) {
        if let Some(of) = heaps::known(device) {
            let free = of.device.memory_info().map_or(0, |info| info.free);
            let free = usize::try_from(free).unwrap_or(usize::MAX);
            self.note(Kind::Oom, of, free, size, stream);
        }
    }

    /// Reports an allocation to PyTorch's profiler. Called with no lock held.
    #[cold]
    pub(crate) fn report(&self, of: &DeviceHeap, address: usize, size: u64) {
        if self.is_profiled {
            let bytes = i64::try_from(rounded(size)).unwrap_or(i64::MAX);
            profiler::report(of, address, bytes);
        }
    }

    /// Reports the end of an allocation to PyTorch's profiler. Called with no lock held.
    #[cold]
    pub(crate) fn report_end(&self, of: &DeviceHeap, address: usize, size: u64) {
        if self.is_profiled {
            let bytes = i64::try_from(rounded(size)).unwrap_or(i64::MAX);
            profiler::report(of, address, -bytes);
        }
    }

    fn note(&self, kind: Kind, of: &DeviceHeap, address: usize, size: u64, stream: u64) {
        if self.is_recorded {
            push(kind, of, address, size, stream, self.stack.clone());
        }
    }
}

/// Notes that an allocation has fallen asleep, or has woken. May be called under locks.
pub(crate) fn moved(of: &DeviceHeap, address: usize, size: u64, stream: u64, is_asleep: bool) {
    if ON.load(Ordering::Relaxed) & RECORDS != 0 {
        let kind = if is_asleep { Kind::Sleep } else { Kind::Wake };
        push(kind, of, address, rounded(size), stream, None);
    }
}

const fn rounded(size: u64) -> u64 {
    size.next_multiple_of(cuvmm::heap::ALIGNMENT)
}

fn push(
    kind: Kind,
    of: &DeviceHeap,
    address: usize,
    size: u64,
    stream: u64,
    stack: Option<Arc<str>>,
) {
    // Asked before the lock, which comes last.
    let held = of.held();
    let mut history = HISTORY.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(history) = history.as_mut() else {
        return;
    };
    let stack = stack.map(|stack| history.known(stack));
    history.note(Event {
        kind,
        device: of.device.ordinal().0,
        address,
        size,
        stream,
        held,
        time: now(),
        stack,
    });
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |it| u64::try_from(it.as_micros()).unwrap_or(u64::MAX))
}

impl History {
    /// Returns the one copy of a stack.
    fn known(&mut self, stack: Arc<str>) -> Arc<str> {
        if let Some(known) = self.stacks.get(&stack) {
            return Arc::clone(known);
        }
        if self.stacks.len() >= self.full.max(MANY) {
            self.stacks.retain(|it| Arc::strong_count(it) > 1);
            self.full = self.stacks.len() * 2;
        }
        self.stacks.insert(Arc::clone(&stack));
        stack
    }

    fn note(&mut self, event: Event) {
        match (event.kind, &event.stack) {
            (Kind::Alloc, Some(stack)) => {
                self.live.insert(event.address, Arc::clone(stack));
            }
            (Kind::Alloc | Kind::Free | Kind::FreeAsleep, _) => {
                self.live.remove(&event.address);
            }
            (Kind::Sleep | Kind::Wake | Kind::Oom, _) => {}
        }
        if self.most == 0 {
            return;
        }
        if self.events.len() >= self.most {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

/// Begins to record, or changes what is recorded. Earlier events stay, up to `most`, unless `clears`.
pub(crate) fn start(most: usize, stacks: Stacks, clears: bool) {
    let mut history = HISTORY.lock().unwrap_or_else(PoisonError::into_inner);
    let history = history.get_or_insert_default();
    history.most = most;
    let kept = if clears { 0 } else { most };
    let gone = history.events.len().saturating_sub(kept);
    history.events.drain(..gone);
    let of = match stacks {
        Stacks::Nothing => 0,
        Stacks::Allocations => STACKS,
        Stacks::All => STACKS | STACKS_OF_ENDS,
    };
    // Under the lock, so that of two threads the same one wins in both.
    let profiles = ON.load(Ordering::Relaxed) & PROFILES;
    ON.store(RECORDS | of | profiles, Ordering::Relaxed);
}

/// Stops recording and forgets all events.
pub(crate) fn stop() {
    let mut history = HISTORY.lock().unwrap_or_else(PoisonError::into_inner);
    ON.fetch_and(PROFILES, Ordering::Relaxed);
    let ended = history.take();
    drop(history);
    drop(ended);
}

/// Reports all operations from now on to PyTorch's profiler, if one is active. Returns `false` if
/// this process has no such profiler.
pub(crate) fn profile() -> bool {
    let found = profiler::find();
    if found {
        let _history = HISTORY.lock().unwrap_or_else(PoisonError::into_inner);
        ON.fetch_or(PROFILES, Ordering::Relaxed);
    }
    found
}

/// The history of a device. The keys are a stable interface; further keys may be added.
#[derive(Serialize)]
struct Dump<'a> {
    version: u32,
    /// Kind; address, bytes, stream, held bytes, microseconds since 1970; place in `stacks`.
    events: Vec<(Kind, [u64; 5], Option<usize>)>,
    /// Addresses of live allocations of all devices, with places in `stacks`.
    live: Vec<(usize, usize)>,
    stacks: Vec<&'a str>,
}

/// Returns the history of a device as JSON, or `None` while nothing is recorded.
pub(crate) fn json(device: i32) -> Option<Vec<u8>> {
    if fork::is_child() {
        return None;
    }
    let history = HISTORY.lock().unwrap_or_else(PoisonError::into_inner);
    let found = history.as_ref()?;
    let events = found.events.iter().filter(|it| it.device == device);
    let events: Vec<Event> = events.cloned().collect();
    let live = found.live.iter();
    let live: Vec<_> = live.map(|(&at, it)| (at, Arc::clone(it))).collect();
    drop(history);
    let (mut stacks, mut places) = (Vec::new(), HashMap::new());
    let mut place = |stack: &'_ Arc<str>| {
        *places.entry(Arc::as_ptr(stack)).or_insert_with(|| {
            stacks.push(Arc::clone(stack));
            stacks.len() - 1
        })
    };
    let events = events.iter().map(|it| {
        let stack = it.stack.as_ref().map(&mut place);
        let Event {
            kind,
            address,
            size,
            stream,
            held,
            time,
            ..
        } = *it;
        let numbers = [address as u64, size, stream, held, time];
        (kind, numbers, stack)
    });
    let events = events.collect();
    let mut live: Vec<_> = live.iter().map(|(at, it)| (*at, place(it))).collect();
    live.sort_unstable();
    serde_json::to_vec(&Dump {
        version: 1,
        events,
        live,
        stacks: stacks.iter().map(|it| &**it).collect(),
    })
    .ok()
}
