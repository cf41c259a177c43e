//! Code of users that is run when no pool of the device is locked.
//!
//! What a user gives (hooks, what keeps a stream alive, reports of drops) may call this library
//! again, and its drop may too. So none of it is called or dropped inside a locked section: it is
//! put off, and the thread that leaves the section runs it. Outside of all sections it is run at
//! once.
//!
//! The standard library's lock and atomics, also under shuttle: no thread is interrupted in here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

type Call = Box<dyn FnOnce() + Send>;

/// Whether a thread is inside a locked section, of one lock.
#[derive(Debug, Default)]
pub(crate) struct Section(AtomicBool);

/// A thread's stay in a locked section: ends before the lock is let go.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Section);

impl Section {
    /// Notes that the calling thread, which has the section's lock, is inside.
    pub(crate) fn enter(&self) -> Inside<'_> {
        self.0.store(true, Ordering::Relaxed);
        Inside(self)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}

/// What was put off, for one device.
#[derive(Default)]
pub(crate) struct Deferred {
    stocked: AtomicBool,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    calls: Vec<Call>,
    sections: Vec<Weak<Section>>,
}

impl Deferred {
    /// A section in which calls are put off.
    pub(crate) fn section(&self) -> Arc<Section> {
        let section = Arc::default();
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.sections.retain(|known| known.strong_count() > 0);
        list.sections.push(Arc::downgrade(&section));
        section
    }

    /// Runs `call` now if no thread is inside a section; else the thread that leaves it will.
    pub(crate) fn add(&self, call: Call) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.calls.push(call);
        self.stocked.store(true, Ordering::SeqCst);
        let inside = |section: &Weak<Section>| {
            let section = section.upgrade();
            section.is_some_and(|section| section.0.load(Ordering::SeqCst))
        };
        let waits = list.sections.iter().any(inside);
        drop(list);
        // A section that ended this moment may have been seen as open, and not have seen the call:
        // then the next one runs it.
        if !waits {
            self.run();
        }
    }

    /// Whether something was put off.
    #[inline]
    pub(crate) fn is_stocked(&self) -> bool {
        self.stocked.load(Ordering::Acquire)
    }

    /// Runs what was put off. The calling thread holds no lock.
    #[cold]
    pub(crate) fn run(&self) {
        loop {
            let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            let calls = std::mem::take(&mut list.calls);
            if calls.is_empty() {
                self.stocked.store(false, Ordering::SeqCst);
                return;
            }
            drop(list);
            for call in calls {
                call();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn count(deferred: &Deferred, calls: &Arc<AtomicU64>) {
        let calls = Arc::clone(calls);
        deferred.add(Box::new(move || {
            calls.fetch_add(1, Ordering::SeqCst);
        }));
    }

    #[test]
    fn a_call_outside_of_all_sections_is_run_at_once() {
        let (deferred, calls) = (Deferred::default(), Arc::default());
        let section = deferred.section();
        count(&deferred, &calls);
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        drop(section.enter());
        count(&deferred, &calls);
        assert_eq!(calls.load(Ordering::SeqCst), 2);
        assert!(!deferred.is_stocked());
    }

    #[test]
    fn a_call_inside_a_section_waits_for_its_end() {
        let (deferred, calls) = (Deferred::default(), Arc::default());
        let (section, other) = (deferred.section(), deferred.section());
        let inside = section.enter();
        drop(other.enter());
        count(&deferred, &calls);
        assert_eq!(calls.load(Ordering::SeqCst), 0);
        assert!(deferred.is_stocked());
        drop(inside);
        deferred.run();
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_call_may_put_off_another() {
        let (deferred, calls) = (Arc::new(Deferred::default()), Arc::default());
        let section = deferred.section();
        let inside = section.enter();
        let (again, counted) = (Arc::clone(&deferred), Arc::clone(&calls));
        deferred.add(Box::new(move || count(&again, &counted)));
        drop(inside);
        deferred.run();
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        assert!(!deferred.is_stocked());
    }
}
