//! Code of users that runs when its thread has no pool locked.
//!
//! What a user gives (hooks, what keeps a stream alive, reports of drops) may call this library
//! again, and its drop may too. So none of it is called or dropped inside a locked section: it is
//! put off until the thread has left the section, whichever pool or device that is of. Outside of
//! all sections it is called at once.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

use crate::sync::thread_local;

type Call = Box<dyn FnOnce()>;

/// What a thread is in, and what it has put off.
struct Here {
    /// Sections, one inside another.
    depth: Cell<u32>,
    /// How many of them have let their lock go for now.
    unlocked: Cell<u32>,
    /// Whether it is in a hook.
    in_hook: Cell<bool>,
    /// Without a destructor, so that it is there for what other thread-locals drop at a thread's
    /// end. Outside of sections it is empty.
    calls: RefCell<ManuallyDrop<Vec<Call>>>,
}

thread_local! {
    static HERE: Here = const {
        Here {
            depth: Cell::new(0),
            unlocked: Cell::new(0),
            in_hook: Cell::new(false),
            calls: RefCell::new(ManuallyDrop::new(Vec::new())),
        }
    };
}

/// A thread's stay in a locked section. It is dropped on that thread, after the lock was let go.
#[derive(Debug)]
pub(crate) struct Section(());

impl Section {
    /// Notes that the calling thread has locked something.
    #[inline]
    pub(crate) fn enter() -> Self {
        HERE.with(|here| here.depth.set(here.depth.get() + 1));
        Self(())
    }

    /// Notes that the section's lock is let go while the value that is returned lives. What was put
    /// off stays so: the section's work is half done.
    pub(crate) fn unlocked(&self) -> Unlocked {
        HERE.with(|here| here.unlocked.set(here.unlocked.get() + 1));
        Unlocked(())
    }
}

/// A part of a section in which its lock is let go. It is dropped on the section's thread, after the
/// lock was taken again.
#[derive(Debug)]
pub(crate) struct Unlocked(());

impl Drop for Unlocked {
    fn drop(&mut self) {
        HERE.with(|here| here.unlocked.set(here.unlocked.get() - 1));
    }
}

/// Whether the calling thread has locked something.
pub(crate) fn is_locked() -> bool {
    HERE.with(|here| here.depth.get() > here.unlocked.get())
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        let stocked = HERE.with(|here| {
            let depth = here.depth.get() - 1;
            here.depth.set(depth);
            depth == 0 && !here.calls.borrow().is_empty()
        });
        if stocked {
            run();
        }
    }
}

/// Calls what belongs to a user once the thread is in no section: now, or when it leaves the last.
/// To drop a value, move it into `call`.
pub(crate) fn defer(call: impl FnOnce() + 'static) {
    if HERE.with(|here| here.depth.get()) == 0 {
        call();
    } else {
        let call: Call = Box::new(call);
        HERE.with(|here| here.calls.borrow_mut().push(call));
    }
}

/// Calls a hook, and drops it. The thread is in no section.
pub(crate) fn call_hook(hook: impl FnOnce()) {
    /// The thread is in no hook any more, also if it panicked.
    struct Ended(bool);

    impl Drop for Ended {
        fn drop(&mut self) {
            HERE.with(|here| here.in_hook.set(self.0));
        }
    }

    let _ended = Ended(HERE.with(|here| here.in_hook.replace(true)));
    hook();
}

/// Wakes a task. A waker that panics ends no thread of this library.
pub(crate) fn wake(waker: Waker) {
    if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
        tracing::error!("a waker panicked");
    }
}

/// Whether the calling thread is in a hook, in which nothing waits and no other hook is called.
pub(crate) fn is_in_hook() -> bool {
    HERE.with(|here| here.in_hook.get())
}

/// Whether something was put off that would be called if the thread left its section now.
#[inline]
pub(crate) fn is_stocked() -> bool {
    HERE.with(|here| here.depth.get() == 1 && !here.calls.borrow().is_empty())
}

#[cold]
fn run() {
    let calls = HERE.with(|here| here.calls.replace(ManuallyDrop::new(Vec::new())));
    for call in ManuallyDrop::into_inner(calls) {
        call();
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
        assert!(!is_stocked());
        let inner = Section::enter();
        count(&calls);
        assert!(!is_stocked(), "leaving the inner one would not run it");
        drop(inner);
        assert_eq!(calls.get(), 0);
        assert!(is_stocked());
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
