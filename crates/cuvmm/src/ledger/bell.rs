//! A word that threads of several processes can wait for.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

/// A counter that wakes waiting threads when it advances: a futex shared between processes.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Bell {
    count: AtomicU32,
    /// How many threads wait. A process that is killed while it waits stays counted, which costs a
    /// needless system call.
    sleepers: AtomicU32,
}

impl Bell {
    pub(crate) fn count(&self) -> u32 {
        super::word::reached(&self.count, false);
        self.count.load(Ordering::SeqCst)
    }

    pub(crate) fn ring(&self) {
        if !super::word::reached(&self.count, true) {
            return;
        }
        let before = self.count.fetch_add(1, Ordering::SeqCst);
        super::word::wrote(&self.count, before.wrapping_add(1).into());
        // A thread counts itself before the kernel compares the count: a thread not seen here sees
        // the new count.
        if self.sleepers.load(Ordering::SeqCst) == 0 {
            return;
        }
        if let Err(errno) = futex::wake(&self.count, futex::Flags::empty(), i32::MAX as u32) {
            log!(debug, %errno, "waiting processes could not be woken: they look by themselves");
        }
    }

    /// Waits while the count is `seen`, at most for `longest`. May return sooner.
    pub(crate) fn wait(&self, seen: u32, longest: Duration) {
        #[cfg(test)]
        if super::probe::ask(|probe| {
            let count = std::ptr::from_ref(&self.count).addr();
            probe.wait(count, seen, longest);
        })
        .is_some()
        {
            return;
        }
        let longest = futex::Timespec {
            tv_sec: i64::try_from(longest.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(longest.subsec_nanos()),
        };
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // A changed count, a signal, and the timeout end the wait.
        let _ = futex::wait(&self.count, futex::Flags::empty(), seen, Some(&longest));
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
