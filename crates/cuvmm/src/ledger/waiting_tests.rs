//! Tests of a request that waits for refunds. Its sleeps are played by a script on its own thread,
//! so each is counted.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::keeper::Keeper;
use super::probe::{self, Probe};
use super::seen::TICKET_AGE;
use super::tests::{G, members, stop_time};
use super::turns::Unmet;
use super::waiting::ROUND;
use crate::wanted::Purpose;

const LONG: Duration = Duration::from_secs(60);

type Step = Box<dyn FnOnce()>;

/// The events in the sleeps of the thread, one in each. Behind the last event a sleep lasts to its end.
struct Script {
    now: Cell<Instant>,
    steps: RefCell<VecDeque<Step>>,
    sleeps: Cell<u32>,
}

impl Script {
    fn play(steps: impl IntoIterator<Item = Step>) -> Rc<Self> {
        let script = Rc::new(Self {
            now: Cell::new(Instant::now()),
            steps: RefCell::new(steps.into_iter().collect()),
            sleeps: Cell::new(0),
        });
        probe::set(Some(script.clone()));
        script
    }

    /// Returns the number of sleeps.
    fn end(&self) -> u32 {
        probe::set(None);
        self.sleeps.get()
    }
}

impl Probe for Script {
    fn reached(&self, _: usize, _: bool) -> bool {
        true
    }

    fn locks(&self) -> bool {
        true
    }

    fn found(&self, _: u64) {}

    fn wrote(&self, _: usize, _: u64) {}

    fn mapped(&self, _: usize) {}

    fn now(&self) -> Instant {
        self.now.get()
    }

    fn sleep(&self, duration: Duration) {
        self.now.set(self.now.get() + duration);
    }

    fn wait(&self, _: usize, _: u32, longest: Duration) {
        self.sleeps.set(self.sleeps.get() + 1);
        let step = self.steps.borrow_mut().pop_front();
        match step {
            Some(step) => step(),
            None => self.sleep(longest),
        }
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }
}

#[test]
fn a_refund_that_is_enough_ends_the_wait_and_others_do_not() {
    let (_dir, [one, other]) = members(100 * G);
    one.grant(100 * G, 0, Purpose::New, None).unwrap();
    let waiting = other.wait(other.line_up(), 10 * G, None);
    let seen = other.wake_ups();
    let gives = [3, 6, 1].map(|granules| {
        let one = one.clone();
        Box::new(move || one.give(granules * G)) as Step
    });
    let script = Script::play(gives);
    assert!(waiting.await_refund(seen, LONG, || false));
    assert_eq!(script.end(), 3);
    drop(waiting);
    one.give(90 * G);
}

#[test]
fn a_refund_during_the_attempt_is_not_missed() {
    let (_dir, [one, other]) = members(100 * G);
    one.grant(100 * G, 0, Purpose::New, None).unwrap();
    let seen = other.wake_ups();
    let waiting = other.wait(other.line_up(), 10 * G, None);
    one.give(10 * G);
    let script = Script::play([]);
    assert!(waiting.await_refund(seen, LONG, || false));
    assert_eq!(script.end(), 0);
    // The attempt failed nevertheless: what came before it does not count again.
    let seen = other.wake_ups();
    let script = Script::play([]);
    assert!(!waiting.await_refund(seen, LONG, || false));
    assert_eq!(script.end(), 1);
    drop(waiting);
    one.give(90 * G);
}

#[test]
fn what_the_request_gave_back_itself_does_not_end_its_wait() {
    let (_dir, [one, other]) = members(100 * G);
    one.grant(95 * G, 0, Purpose::New, None).unwrap();
    let waiting = other.wait(other.line_up(), 10 * G, None);
    let seen = other.wake_ups();
    other
        .grant(5 * G, 0, Purpose::New, Some(waiting.place()))
        .unwrap();
    other.give(5 * G);
    assert_ne!(other.wake_ups(), seen);
    let script = Script::play([]);
    assert!(!waiting.await_refund(seen, LONG, || false));
    assert_eq!(script.end(), 1);
    drop(waiting);
    one.give(95 * G);
}

#[test]
fn the_pools_own_idle_memory_ends_the_wait() {
    let (_dir, [one, other]) = members(100 * G);
    one.grant(100 * G, 0, Purpose::New, None).unwrap();
    let waiting = other.wait(other.line_up(), 10 * G, None);
    let seen = other.wake_ups();
    let told = Rc::new(Cell::new(false));
    let (tells, wakes) = (told.clone(), other.clone());
    let another = other.clone();
    let script = Script::play([
        Box::new(move || another.wake_waiting()) as Step,
        Box::new(move || {
            tells.set(true);
            wakes.wake_waiting();
        }),
    ]);
    assert!(waiting.await_refund(seen, LONG, || told.get()));
    assert_eq!(script.end(), 2);
    drop(waiting);
    one.give(100 * G);
}

#[test]
fn the_limit_of_the_process_counts_too() {
    let (_dir, [one, other]) = members(100 * G);
    one.grant(100 * G, 0, Purpose::New, None).unwrap();
    other.slot().limit.store(5);
    let waiting = other.wait(other.line_up(), 10 * G, None);
    let seen = other.wake_ups();
    let gives = one.clone();
    let script = Script::play([Box::new(move || gives.give(100 * G)) as Step]);
    assert!(!waiting.await_refund(seen, LONG, || false));
    assert_eq!(script.end(), 2);
}

// I-143
#[test]
fn a_request_whose_thread_is_kept_counts_until_its_deadline_and_not_in_a_stopped_process() {
    let (_dir, [one, other]) = members(100 * G);
    one.grant(100 * G, 0, Purpose::New, None).unwrap();
    let time = stop_time();
    let deadline = time.now() + 10 * Duration::from_secs(1);
    let mut waiting = other.wait(other.line_up(), 10 * G, Some(deadline));
    let mut keeper = Keeper::quiet(&other);
    let counts = || Unmet::of(&one).oldest.is_some();
    assert!(counts());
    for _ in 0..200 {
        time.sleep(ROUND);
        keeper.pass(&other);
        assert!(counts());
    }
    assert_eq!(
        other.slot().round.load(),
        200,
        "other processes have their turns"
    );
    // The whole process is stopped.
    time.sleep(TICKET_AGE);
    assert!(!counts());
    keeper.pass(&other);
    assert!(counts(), "it goes on");
    let woken = other.wake_ups();
    time.sleep(10 * Duration::from_secs(1));
    keeper.pass(&other);
    assert_eq!((counts(), other.oldest_ticket()), (false, None));
    assert_eq!(other.wake_ups(), woken + 1, "requests behind it go on");
    // Its thread returns late.
    waiting.renew(10 * G);
    assert!(!counts());
    drop(waiting);
    probe::set(None);
    one.give(100 * G);
}

#[test]
fn the_requests_of_a_process_have_their_rounds_together() {
    let (_dir, [one, other]) = members(100 * G);
    one.grant(100 * G, 0, Purpose::New, None).unwrap();
    let time = stop_time();
    let mut waiting = [(); 3].map(|()| other.wait(other.line_up(), 10 * G, None));
    for _ in 0..10 {
        time.sleep(ROUND);
        waiting.iter_mut().for_each(|it| it.renew(10 * G));
    }
    assert_eq!(other.slot().round.load(), 10);
    drop(waiting);
    probe::set(None);
    one.give(100 * G);
}
