//! The members' threads, one of which runs at a time, the time, and the conditions checked after
//! each step.
//!
//! The threads are coroutines on the test's thread, because a switch of system threads takes longer
//! than the work between two switches.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::mem::offset_of;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use generator::{Generator, Gn};

use super::ghost::Ghost;
use super::schedule::{Choice, End, Faults, Schedule, Sight};
use crate::ledger::layout::{Agreed, Export, Header, Layout, SIZE, SLOTS, Slot};
use crate::ledger::probe::{self, Probe};
use crate::ledger::proc::Life;

const FIRST_PID: u32 = 100_000_000;

const NAMESPACE: u64 = 1;

/// How long a stopped process stays stopped, unless it is resumed before.
const STOPPED: Duration = Duration::from_millis(300);

/// The shortest stop that other processes notice.
const LEAST_STOP: Duration = Duration::from_millis(5);

/// How long after its kill a process ends that ends late.
const LATE: Duration = Duration::from_millis(40);

const MOST_STEPS: usize = 100_000;

/// In words.
const STACK: usize = 1 << 16;

const WORDS: usize = SIZE as usize / 8;

/// The value with which a killed process's thread unwinds.
pub(super) struct Killed;

/// The threads that have used and written each word, over all runs. A thread can be interrupted
/// before each use of a word that another thread uses too and one of them writes.
pub(super) struct Uses {
    words: Vec<AtomicU32>,
    /// Set when a word turned out to be shared.
    pub(super) has_grown: AtomicBool,
    /// `true` if the words of the first few slots count as shared from the start.
    fixed: bool,
}

impl Uses {
    pub(super) fn new(fixed: bool) -> Arc<Self> {
        Arc::new(Self {
            words: (0..WORDS).map(|_| AtomicU32::new(0)).collect(),
            has_grown: AtomicBool::new(false),
            fixed,
        })
    }

    /// Notes a use; returns `true` if the thread can be interrupted before it.
    fn is_shared(&self, thread: usize, word: usize, writes: bool) -> bool {
        let bit = 1 << thread;
        let bits = if writes { bit << 16 | bit } else { bit };
        let before = self.words[word].fetch_or(bits, Ordering::SeqCst);
        let now = before | bits;
        if self.fixed {
            return is_near(word);
        }
        if before != now && (now & 0xffff).count_ones() > 1 && now >> 16 != 0 {
            self.has_grown.store(true, Ordering::SeqCst);
        }
        // A read is affected by other threads' writes only, and a write by any of their uses.
        let others = if writes { now & 0xffff } else { now >> 16 };
        others & !bit != 0
    }
}

/// Returns `true` for the counts of bells, which say nothing about the state.
fn is_bell(word: usize) -> bool {
    let bells = [offset_of!(Header, wanted), offset_of!(Header, given)];
    bells.contains(&(8 * word))
}

/// Returns `true` for words of the header, the first slots and the first exports.
fn is_near(word: usize) -> bool {
    let (word, near) = (8 * word, 5);
    let within = |from: usize, each: usize| (from..from + near * each).contains(&word);
    word < size_of::<Header>()
        || within(offset_of!(Layout, charges), 8)
        || within(offset_of!(Layout, tickets), 8)
        || within(offset_of!(Layout, slots), size_of::<Slot>())
        || within(offset_of!(Layout, exports), size_of::<Export>())
}

pub(super) struct World {
    inner: Mutex<Inner>,
    uses: Arc<Uses>,
}

pub(super) struct Inner {
    pub(super) schedule: Schedule,
    pub(super) ghost: Ghost,
    pub(super) failure: Option<String>,
    /// Locks that forked children of killed processes keep.
    pub(super) kept: Vec<File>,
    /// `true` while threads are not interrupted: before and after the operations in question.
    quiet: bool,
    ended: bool,
    /// The running thread; the test's own if out of range.
    running: usize,
    threads: Vec<Thread>,
    now: Duration,
    contents: Vec<u64>,
    hash: u64,
    faults: Faults,
    steps: usize,
    trace: Vec<String>,
}

struct Thread {
    state: State,
    history: u64,
    stopped: Option<Stop>,
    killed: Option<End>,
    ended: Option<Duration>,
    awaits: bool,
    cancelled: bool,
    quiet: bool,
    /// `true` if the last step changed something. A kill after a step without a change equals a
    /// kill before it.
    acted: bool,
}

#[derive(Clone, Copy)]
struct Stop {
    /// When the thread goes on, if it is not resumed before.
    until: Duration,
    since: Duration,
    /// `true` once another thread has changed a word that this thread writes, because this thread
    /// was still for so long.
    touched: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    Sleeping {
        until: Duration,
        /// A word, and the value at which the thread goes on sleeping.
        bell: Option<(usize, u64)>,
    },
    Done,
}

fn mix(hash: u64, value: u64) -> u64 {
    let mixed = (hash ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29))
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
        .rotate_left(31)
}

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

impl World {
    pub(super) fn new(
        threads: usize,
        faults: &Faults,
        schedule: Schedule,
        uses: Arc<Uses>,
    ) -> Arc<Self> {
        let faults = faults.clone();
        let thread = |_| Thread {
            state: State::Ready,
            history: 0,
            stopped: None,
            killed: None,
            ended: None,
            awaits: false,
            cancelled: false,
            quiet: false,
            acted: true,
        };
        Arc::new(Self {
            inner: Mutex::new(Inner {
                schedule,
                ghost: Ghost::new(threads),
                failure: None,
                kept: Vec::new(),
                quiet: true,
                ended: false,
                running: usize::MAX,
                // The last thread is the test's own.
                threads: (0..=threads).map(thread).collect(),
                now: Duration::ZERO,
                contents: vec![0; WORDS],
                hash: 0,
                faults,
                steps: 0,
                trace: Vec::new(),
            }),
            uses,
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a thread its turn; returns when the turn is the test's own again.
    pub(super) fn turn_to(&self, players: &mut [Player<'_>], thread: usize) {
        self.lock().running = thread;
        self.go(players);
    }

    /// Lets threads be interrupted; returns when all have ended.
    pub(super) fn begin(&self, players: &mut [Player<'_>]) {
        let mut inner = self.lock();
        inner.quiet = false;
        let own = inner.threads.len() - 1;
        inner.threads[own].state = State::Done;
        inner.choose();
        drop(inner);
        self.go(players);
        self.lock().quiet = true;
    }

    /// Runs the threads in turn until the test's own thread is next.
    fn go(&self, players: &mut [Player<'_>]) {
        loop {
            let running = self.lock().running;
            let Some(player) = players.get_mut(running) else {
                return;
            };
            player.resume();
        }
    }

    /// Hands the turn back after a thread's preparations. Returns `false` if its process was
    /// killed.
    pub(super) fn prepared(&self, me: usize) -> bool {
        self.lock().running = usize::MAX;
        rest();
        self.lock().threads[me].killed.is_none()
    }

    pub(super) fn done(&self, me: usize) {
        let mut inner = self.lock();
        inner.threads[me].state = State::Done;
        match inner.quiet {
            true => inner.running = usize::MAX,
            false => inner.choose(),
        }
    }

    /// Lets another thread go on. Returns `false` if this thread's process was killed meanwhile.
    fn point(&self, me: usize, history: u64, state: State) -> bool {
        let mut inner = self.lock();
        if inner.quiet || inner.threads[me].quiet {
            if let State::Sleeping { until, .. } = state {
                inner.now = inner.now.max(until);
            }
            return true;
        }
        inner.threads[me].history = history;
        inner.threads[me].state = state;
        inner.choose();
        if inner.running != me {
            drop(inner);
            rest();
            inner = self.lock();
        }
        inner.threads[me].state = State::Ready;
        inner.threads[me].killed.is_none()
    }
}

pub(super) type Player<'a> = Generator<'a, (), ()>;

/// Makes a thread, which begins at its first turn.
pub(super) fn player<'a>(play: impl FnOnce() + Send + 'a) -> Player<'a> {
    Gn::<()>::new_opt(STACK, play)
}

/// Continues what has resumed this thread; returns when the thread is resumed again.
fn rest() {
    let own = probe::set(None);
    #[allow(
        deprecated,
        reason = "the new way passes a value through all that may rest"
    )]
    generator::yield_with(());
    probe::set(own);
}

impl Inner {
    /// Makes choices up to the next one that is a thread's turn.
    fn choose(&mut self) {
        loop {
            self.check();
            let choices = self.choices();
            self.steps += 1;
            if self.steps > MOST_STEPS {
                self.failure
                    .get_or_insert("a run goes on without end".into());
            }
            if self.ended || self.failure.is_some() {
                return self.end();
            }
            let chosen = match choices[..] {
                [] => {
                    let key = self.schedule.needs_key().then(|| self.key());
                    self.ended = key.is_some_and(|key| !self.schedule.is_new(key));
                    self.running = usize::MAX;
                    return;
                }
                [only] => {
                    let key = self.schedule.needs_key().then(|| self.key());
                    if key.is_some_and(|key| !self.schedule.is_new(key)) {
                        return self.end();
                    }
                    only
                }
                _ => {
                    let key = self.schedule.needs_key().then(|| self.key());
                    match self.schedule.pick(&choices, key) {
                        Ok(Some(chosen)) => chosen,
                        Ok(None) => return self.end(),
                        Err(failure) => {
                            self.failure = Some(failure);
                            return self.end();
                        }
                    }
                }
            };
            let could_go_on = choices.contains(&Choice::Run(self.running));
            if could_go_on && matches!(chosen, Choice::Run(next) if next != self.running) {
                self.faults.interruptions = self.faults.interruptions.map(|left| left - 1);
            }
            if self.apply(chosen) {
                return;
            }
        }
    }

    fn end(&mut self) {
        self.ended = true;
        let next = self.threads.iter().position(|it| it.state != State::Done);
        self.running = next.unwrap_or(usize::MAX);
        if let Some(next) = next {
            self.threads[next].killed.get_or_insert(End::AtOnce);
        }
    }

    /// Returns the possible choices, in an order that depends on the state only.
    fn choices(&self) -> Vec<Choice> {
        let threads = || self.threads.iter().enumerate();
        let is_stopped = |it: &Thread| it.stopped.is_some_and(|it| it.until > self.now);
        let wakes = |it: &Thread| match it.state {
            State::Done => None,
            _ if is_stopped(it) => it.stopped.map(|it| it.until),
            State::Ready => Some(self.now),
            State::Sleeping {
                bell: Some((word, seen)),
                ..
            } if self.contents[word] != seen => Some(self.now),
            State::Sleeping { until, .. } => Some(until.max(self.now)),
        };
        let Some(next) = threads().filter_map(|(_, it)| wakes(it)).min() else {
            return Vec::new();
        };
        let first = threads().filter(|(_, it)| wakes(it) == Some(next));
        let mut choices: Vec<Choice> = first.map(|(index, _)| Choice::Run(index)).collect();
        let on = Choice::Run(self.running);
        if self.faults.interruptions == Some(0) && choices.contains(&on) {
            choices = vec![on];
        }
        for (index, it) in threads().filter(|(_, it)| it.state != State::Done) {
            if is_stopped(it) && it.stopped.is_some_and(|it| it.touched) {
                choices.push(Choice::Resume(index));
            }
            if self.faults.most == 0 {
                continue;
            }
            let ends = if it.acted { self.faults.ends } else { &[] };
            choices.extend(ends.iter().map(|&end| Choice::Kill(index, end)));
            if self.faults.stops && !is_stopped(it) {
                choices.push(Choice::Stop(index));
            }
            if it.awaits && !it.cancelled && it.state != State::Ready {
                choices.push(Choice::Cancel(index));
            }
        }
        choices
    }

    /// Returns `true` if the choice is a thread's turn.
    fn apply(&mut self, choice: Choice) -> bool {
        if !matches!(choice, Choice::Run(_)) {
            self.trace.push(format!("{choice:?} at {:?}", self.now));
        }
        self.faults.most -= usize::from(choice.is_fault());
        match choice {
            Choice::Run(index) => {
                let thread = &self.threads[index];
                if let Some(stop) = thread.stopped {
                    self.now = self.now.max(stop.until);
                }
                if let State::Sleeping { until, bell } = thread.state {
                    let rung = bell.is_some_and(|(word, seen)| self.contents[word] != seen);
                    self.now = if rung { self.now } else { self.now.max(until) };
                }
                self.running = index;
                self.threads[index].acted = false;
                return true;
            }
            Choice::Kill(index, end) => {
                let at = self.now
                    + if end == End::Late {
                        LATE
                    } else {
                        Duration::ZERO
                    };
                self.threads[index].killed = Some(end);
                self.threads[index].ended = Some(at);
                self.ghost.killed(index, at);
                self.running = index;
                return true;
            }
            Choice::Stop(index) => {
                self.threads[index].stopped = Some(Stop {
                    since: self.now,
                    until: self.now + STOPPED,
                    touched: false,
                });
            }
            Choice::Resume(index) => self.threads[index].stopped = None,
            Choice::Cancel(index) => self.threads[index].cancelled = true,
        }
        false
    }

    /// Returns a number for the state: the file's content, and what each thread has seen.
    fn key(&self) -> u64 {
        let mut key = mix(self.hash, self.now.as_nanos() as u64);
        key = mix(key, self.faults.most as u64);
        key = mix(key, self.ghost.key());
        if let Some(left) = self.faults.interruptions {
            key = mix(mix(key, left as u64), self.running as u64);
        }
        for thread in &self.threads {
            let (kind, until, bell) = match thread.state {
                State::Ready => (1, 0, 0),
                State::Done => (2, 0, 0),
                State::Sleeping { until, bell } => {
                    let bell = bell.map_or(0, |(_, seen)| seen + 1);
                    (3, until.as_nanos() as u64, bell)
                }
            };
            let stopped = thread.stopped.map_or(0, |it| {
                2 * it.until.as_nanos() as u64 + u64::from(it.touched)
            });
            let ended = thread.ended.map_or(u64::MAX, |at| at.as_nanos() as u64);
            let killed = thread.killed.map_or(0, |end| end as u64 + 1);
            let cancelled = u64::from(thread.cancelled);
            // The history of an ended thread has no effect.
            let history = if kind == 2 { 0 } else { thread.history };
            for value in [
                u64::from(thread.acted && self.faults.most > 0),
                history,
                kind,
                until,
                bell,
                stopped,
                ended,
                killed,
                cancelled,
            ] {
                key = mix(key, value);
            }
        }
        key
    }

    fn check(&mut self) {
        let at = offset_of!(Layout, charges) / 8;
        let charges = &self.contents[at..at + SLOTS];
        let limit = Agreed::of(self.contents[offset_of!(Layout, header.agreed) / 8]).limit();
        if let Some(fault) = self.ghost.fault(charges, limit, self.now) {
            self.failure.get_or_insert(fault);
        }
    }

    pub(super) fn report(&self) -> Option<String> {
        let failure = self.failure.as_ref()?;
        let from = self.trace.len().saturating_sub(120);
        Some(format!("{failure}\n{}", self.trace[from..].join("\n")))
    }

    pub(super) fn memory(&mut self, thread: usize) -> &mut Ghost {
        self.threads[thread].acted = true;
        &mut self.ghost
    }

    pub(super) fn note(&mut self, text: String) {
        self.trace.push(text);
    }

    pub(super) fn fail(&mut self, text: String) {
        if !self.ended {
            self.failure.get_or_insert(text);
        }
    }

    pub(super) fn is_here(&self, thread: usize) -> bool {
        self.threads[thread].killed.is_none()
    }

    pub(super) const fn is_over(&self) -> bool {
        self.ended
    }

    pub(super) fn end_of(&self, thread: usize) -> Option<End> {
        self.threads[thread].killed
    }

    /// Notes that a thread waits for memory, so that its request can be canceled.
    pub(super) fn awaits(&mut self, thread: usize, yes: bool) {
        self.threads[thread].awaits = yes;
        if !yes {
            self.threads[thread].cancelled = false;
        }
    }

    pub(super) fn is_cancelled(&self, thread: usize) -> bool {
        self.threads[thread].cancelled
    }

    /// Keeps a thread from being interrupted.
    pub(super) fn hush(&mut self, thread: usize) {
        self.threads[thread].quiet = true;
    }
}

pub(super) struct Handle {
    pub(super) world: Arc<World>,
    pub(super) me: usize,
    dead: Cell<bool>,
    history: Cell<u64>,
    mapped: RefCell<Vec<usize>>,
}

impl Handle {
    pub(super) fn new(world: &Arc<World>, me: usize) -> Self {
        Self {
            world: Arc::clone(world),
            me,
            dead: Cell::new(false),
            history: Cell::new(0),
            mapped: RefCell::default(),
        }
    }

    /// Makes the thread that of a killed process, which writes nothing more.
    pub(super) fn die(&self) {
        self.dead.set(true);
    }

    pub(super) fn rest(&self) {
        self.point(u64::MAX - 3, State::Ready);
    }

    /// Kills the process here.
    pub(super) fn be_killed(&self) {
        let mut inner = self.world.lock();
        let at = inner.now;
        inner.threads[self.me].killed = Some(End::AtOnce);
        inner.threads[self.me].ended = Some(at);
        inner.ghost.killed(self.me, at);
        drop(inner);
        self.dead.set(true);
        resume_unwind(Box::new(Killed));
    }

    fn point(&self, what: u64, state: State) -> bool {
        self.history.set(mix(self.history.get(), what));
        if self.dead.get() {
            return false;
        }
        // Another member that ran meanwhile would be taken for one that panics.
        if std::thread::panicking() {
            return true;
        }
        if self.world.point(self.me, self.history.get(), state) {
            return true;
        }
        self.dead.set(true);
        let payload: Box<dyn Any + Send> = Box::new(Killed);
        resume_unwind(payload);
    }

    fn word(&self, address: usize) -> usize {
        let mapped = self.mapped.borrow();
        let base = mapped
            .iter()
            .rev()
            .find(|&&base| (base..base + SIZE as usize).contains(&address));
        (address - base.copied().unwrap_or(address)) / 8
    }

    fn since_start(&self) -> Duration {
        self.world.lock().now
    }
}

impl Probe for Handle {
    fn reached(&self, address: usize, writes: bool) -> bool {
        if self.dead.get() {
            return false;
        }
        let word = self.word(address);
        match self.world.uses.is_shared(self.me, word, writes) {
            true => self.point(word as u64, State::Ready),
            false => true,
        }
    }

    fn locks(&self) -> bool {
        let lives = self.point(u64::MAX, State::Ready);
        self.world.lock().threads[self.me].acted = true;
        lives
    }

    fn found(&self, value: u64) {
        self.history.set(mix(self.history.get(), value));
    }

    fn wrote(&self, address: usize, value: u64) {
        let word = self.word(address);
        let mut inner = self.world.lock();
        let of = |value: u64| match value {
            0 => 0,
            _ => mix(mix(0, word as u64 + 1), value),
        };
        let is_change = inner.contents[word] != value && !is_bell(word);
        let now = inner.now;
        let writers = self.world.uses.words[word].load(Ordering::SeqCst) >> 16;
        for (index, thread) in inner.threads.iter_mut().enumerate() {
            let is_its = index != self.me && writers >> index & 1 == 1;
            if let Some(stop) = thread.stopped.as_mut().filter(|_| is_its && is_change) {
                stop.touched |= now >= stop.since + LEAST_STOP;
            }
        }
        inner.hash ^= of(inner.contents[word]) ^ of(value);
        inner.contents[word] = value;
        inner.threads[self.me].acted = true;
        // A thread that is not interrupted has no later point.
        if !inner.ended
            && (offset_of!(Layout, charges)..offset_of!(Layout, tickets)).contains(&(8 * word))
        {
            inner.check();
        }
        if !inner.quiet {
            let line = format!("{} writes {value:#x} to {}", self.me, place(word));
            inner.trace.push(line);
        }
    }

    fn mapped(&self, address: usize) {
        self.mapped.borrow_mut().push(address);
    }

    fn now(&self) -> Instant {
        let now = self.since_start();
        self.found(now.as_nanos() as u64);
        start() + now
    }

    fn sleep(&self, duration: Duration) {
        let until = self.since_start() + duration;
        self.point(u64::MAX - 1, State::Sleeping { until, bell: None });
    }

    fn wait(&self, address: usize, seen: u32, longest: Duration) {
        let until = self.since_start() + longest;
        let bell = Some((self.word(address), u64::from(seen)));
        self.point(u64::MAX - 2, State::Sleeping { until, bell });
    }

    fn pid(&self) -> u32 {
        FIRST_PID + self.me as u32
    }

    fn namespace(&self) -> Option<u64> {
        Some(NAMESPACE)
    }

    fn look(&self, pid: u32) -> Option<Life> {
        let inner = self.world.lock();
        let thread = inner.threads.get(pid.wrapping_sub(FIRST_PID) as usize);
        let ended = thread.and_then(|it| it.ended);
        let life = match inner.faults.sight {
            Sight::Nothing => Life::Unknown,
            _ if ended.is_some_and(|at| at <= inner.now) => Life::Ended,
            _ => Life::Runs,
        };
        drop(inner);
        self.found(life as u64);
        Some(life)
    }

    fn holds(&self) -> bool {
        self.world.lock().faults.sight == Sight::Pidfds
    }
}

fn place(word: usize) -> String {
    let at = 8 * word;
    let within = |from: usize, each: usize| ((at - from) / each, (at - from) % each / 8);
    if at < offset_of!(Layout, charges) {
        format!("header word {word}")
    } else if at < offset_of!(Layout, tickets) {
        format!("charge {}", within(offset_of!(Layout, charges), 8).0)
    } else if at < offset_of!(Layout, slots) {
        format!("ticket {}", within(offset_of!(Layout, tickets), 8).0)
    } else if at < offset_of!(Layout, exports) {
        let (slot, word) = within(offset_of!(Layout, slots), size_of::<Slot>());
        format!("slot {slot} word {word}")
    } else {
        let (export, word) = within(offset_of!(Layout, exports), size_of::<Export>());
        format!("export {export} word {word}")
    }
}
