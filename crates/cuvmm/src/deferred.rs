//! Deferral of user code until its thread has no pool locked.
//!
//! User code (hooks, objects that keep a stream alive, reports of drops) may call this library
//! again, and so may its drop. So none of it is called or dropped in a locked section: it is
//! deferred until the thread has left the section, whichever pool or device the section belongs to.
//! Outside of all sections it is called at once.
//!
//! Keeps I-42.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{PoisonError, TryLockError};
use std::task::Waker;

use crate::sync::{Mutex, MutexGuard, thread_local};

type Call = Box<dyn FnOnce()>;

/// The state of a thread: its sections and the deferred calls.
struct Here {
    depth: Cell<u32>,
    /// The number of sections that have released their lock temporarily.
    unlocked: Cell<u32>,
    /// Set while the thread is in a hook.
    in_hook: Cell<bool>,
    /// The pool of the attempt that the thread makes, by address, and the flights that it has ended.
    attempt: Cell<(usize, u64)>,
    /// The deferred calls, without a destructor, so that it is usable by destructors of other
    /// thread-locals at the end of a thread. It is empty outside of sections.
    calls: RefCell<ManuallyDrop<Vec<Call>>>,
}

thread_local! {
    static HERE: Here = const {
        Here {
            depth: Cell::new(0),
            unlocked: Cell::new(0),
            in_hook: Cell::new(false),
            attempt: Cell::new((0, 0)),
            calls: RefCell::new(ManuallyDrop::new(Vec::new())),
        }
    };
}

/// An attempt of a request that waits for a pool's memory, on this thread. It announces nothing: it
/// gives back what it took, and would wake its own request, and others that wait, at once. They
/// look again by themselves.
pub(crate) struct Quiet {
    before: (usize, u64),
}

impl Quiet {
    pub(crate) fn begin<T>(pool: &T) -> Self {
        let attempt = (ptr::from_ref(pool).addr(), 0);
        HERE.with(|here| Self {
            before: here.attempt.replace(attempt),
        })
    }

    /// Returns the number of flights that the attempt has ended.
    pub(crate) fn ended(&self) -> u64 {
        HERE.with(|here| here.attempt.get().1)
    }

    /// Returns `true` if the thread makes an attempt of a request for a pool's memory.
    pub(crate) fn is_here<T>(pool: &T) -> bool {
        HERE.with(|here| here.attempt.get().0) == ptr::from_ref(pool).addr()
    }

    /// Counts a flight that has ended, if the thread makes an attempt.
    pub(crate) fn note_ended<T>(pool: &T) {
        if Self::is_here(pool) {
            let count = |(of, ended)| (of, ended + 1);
            HERE.with(|here| here.attempt.set(count(here.attempt.get())));
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        HERE.with(|here| here.attempt.set(self.before));
    }
}

/// The presence of a thread in a locked section. It is dropped on that thread, after the lock was
/// released.
#[derive(Debug)]
pub(crate) struct Section(());

impl Section {
    /// Notes that the calling thread has taken a lock.
    #[inline]
    pub(crate) fn enter() -> Self {
        HERE.with(|here| here.depth.set(here.depth.get() + 1));
        Self(())
    }

    /// Notes that the section's lock is released while the returned value lives. Deferred calls
    /// stay deferred, since the section's work is incomplete.
    pub(crate) fn unlocked(&self) -> Unlocked {
        HERE.with(|here| here.unlocked.set(here.unlocked.get() + 1));
        Unlocked(())
    }
}

/// A part of a section in which its lock is released. It is dropped on the section's thread, after
/// the lock was taken again.
#[derive(Debug)]
pub(crate) struct Unlocked(());

impl Drop for Unlocked {
    fn drop(&mut self) {
        HERE.with(|here| here.unlocked.set(here.unlocked.get() - 1));
    }
}

/// A value that is checked when its [lock](Locked) is released.
pub(crate) trait Checked {
    #[cfg(debug_assertions)]
    fn check(&mut self) {}
}

impl Checked for () {}

/// A lock in a section of its own, on a value that no panic breaks.
pub(crate) struct Locked<'a, T: Checked> {
    // In the order in which they are dropped.
    value: MutexGuard<'a, T>,
    _unlocked: Option<Unlocked>,
    _section: Section,
}

impl<'a, T: Checked> Locked<'a, T> {
    #[inline]
    pub(crate) fn of(mutex: &'a Mutex<T>) -> Self {
        let section = Section::enter();
        Self {
            value: mutex.lock().unwrap_or_else(PoisonError::into_inner),
            _unlocked: None,
            _section: section,
        }
    }

    /// Takes a lock under which driver calls are made, and locks of pools are taken.
    pub(crate) fn for_calls(mutex: &'a Mutex<T>) -> Self {
        let section = Section::enter();
        let unlocked = section.unlocked();
        Self {
            value: mutex.lock().unwrap_or_else(PoisonError::into_inner),
            _unlocked: Some(unlocked),
            _section: section,
        }
    }

    /// Takes a lock as [`for_calls`](Self::for_calls) does. Returns `None` if it is taken.
    pub(crate) fn try_for_calls(mutex: &'a Mutex<T>) -> Option<Self> {
        let section = Section::enter();
        let unlocked = section.unlocked();
        let value = match mutex.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Self {
            value,
            _unlocked: Some(unlocked),
            _section: section,
        })
    }
}

impl<T: Checked> Deref for Locked<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Checked> DerefMut for Locked<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(debug_assertions)]
impl<T: Checked> Drop for Locked<'_, T> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.value.check();
        }
    }
}

/// Runs `work`, and the code of users that it defers after it. For work that user code might wait
/// for, without a lock.
pub(crate) fn before_user_code<T>(work: impl FnOnce() -> T) -> T {
    let section = Section::enter();
    let _unlocked = section.unlocked();
    work()
}

/// Returns `true` if the calling thread holds the lock of a section.
pub(crate) fn is_locked() -> bool {
    HERE.with(|here| here.depth.get() > here.unlocked.get())
}

/// Returns `true` if a panic is leaving a locked section of the calling thread. No driver call is
/// made there: what is dropped then is not ended, and stays with the process.
pub(crate) fn is_broken_off() -> bool {
    std::thread::panicking() && is_locked()
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        let has_blocks = HERE.with(|here| {
            let depth = here.depth.get() - 1;
            here.depth.set(depth);
            depth == 0 && !here.calls.borrow().is_empty()
        });
        if has_blocks {
            run();
        }
    }
}

/// Calls user code once the thread is in no section: now, or when it leaves the last. To drop a
/// value, move it into `call`.
pub(crate) fn defer(call: impl FnOnce() + 'static) {
    if HERE.with(|here| here.depth.get()) == 0 {
        call();
    } else {
        let call: Call = Box::new(call);
        HERE.with(|here| here.calls.borrow_mut().push(call));
    }
}

/// Calls a hook and drops it. The thread must be in no section.
pub(crate) fn call_hook(hook: impl FnOnce()) {
    /// Marks the end of the hook, even if it panics.
    struct Ended(bool);

    impl Drop for Ended {
        fn drop(&mut self) {
            HERE.with(|here| here.in_hook.set(self.0));
        }
    }

    let _ended = Ended(HERE.with(|here| here.in_hook.replace(true)));
    hook();
}

/// Wakes a task. A waker that panics does not end a thread of this library.
pub(crate) fn wake(waker: Waker) {
    if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
        log!(error, "a waker panicked");
    }
}

/// Returns `true` if the calling thread is in a hook, in which nothing waits and no other hook is
/// called.
pub(crate) fn is_in_hook() -> bool {
    HERE.with(|here| here.in_hook.get())
}

/// Returns `true` if calls are deferred that would run if the thread left its section now.
#[inline]
pub(crate) fn has_deferred_work() -> bool {
    HERE.with(|here| here.depth.get() == 1 && !here.calls.borrow().is_empty())
}

#[cold]
fn run() {
    let calls = HERE.with(|here| here.calls.replace(ManuallyDrop::new(Vec::new())));
    for call in ManuallyDrop::into_inner(calls) {
        // The operation whose section has ended is complete, and its result would be lost.
        if catch_unwind(AssertUnwindSafe(call)).is_err() {
            log!(
                error,
                "an object of the program panicked when it was dropped"
            );
        }
    }
}

#[cfg(all(test, not(cuvmm_shuttle)))]
mod tests {
    use std::rc::Rc;

    use super::*;

    fn count(calls: &Rc<Cell<u32>>) {
        let calls = Rc::clone(calls);
        defer(move || calls.set(calls.get() + 1));
    }

    #[test]
    fn a_call_outside_of_all_sections_is_run_at_once() {
        let calls = Rc::default();
        count(&calls);
        assert_eq!(calls.get(), 1);
        drop(Section::enter());
        count(&calls);
        assert_eq!(calls.get(), 2);
    }

    #[test]
    fn a_call_inside_a_section_waits_for_the_end_of_the_outermost() {
        let calls = Rc::default();
        let outer = Section::enter();
        assert!(!has_deferred_work());
        let inner = Section::enter();
        count(&calls);
        assert!(
            !has_deferred_work(),
            "leaving the inner one would not run it"
        );
        drop(inner);
        assert_eq!(calls.get(), 0);
        assert!(has_deferred_work());
        drop(outer);
        assert_eq!(calls.get(), 1);
    }

    #[test]
    fn a_call_may_put_off_another_and_enter_sections() {
        let calls: Rc<Cell<u32>> = Rc::default();
        let section = Section::enter();
        let again = Rc::clone(&calls);
        defer(move || {
            let section = Section::enter();
            count(&again);
            assert_eq!(again.get(), 0);
            drop(section);
            assert_eq!(again.get(), 1);
        });
        drop(section);
        assert_eq!(calls.get(), 1);
    }

    #[test]
    fn a_section_that_lets_its_lock_go_puts_calls_off_all_the_same() {
        let calls = Rc::default();
        let section = Section::enter();
        assert!(is_locked());
        let unlocked = section.unlocked();
        assert!(!is_locked());
        count(&calls);
        assert_eq!(calls.get(), 0);
        let inner = Section::enter();
        assert!(is_locked());
        drop(inner);
        drop(unlocked);
        assert!(is_locked() && calls.get() == 0);
        drop(section);
        assert!(!is_locked() && calls.get() == 1);
    }

    #[test]
    fn a_thread_in_a_section_holds_up_no_other() {
        let _section = Section::enter();
        let other = std::thread::spawn(|| {
            let calls = Rc::default();
            count(&calls);
            calls.get()
        });
        assert_eq!(other.join().ok(), Some(1));
    }
}
